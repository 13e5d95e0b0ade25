"""What the sm_90a backend computes. Standard library only."""

from dataclasses import fields

from rubin_moe import envs
from rubin_moe.errors import PlanError
from rubin_moe.formats.spec import MXFP4, WEIGHT_FORMATS
from rubin_moe.kernels.base import KernelPlan, MoEProblem, Target
from rubin_moe.kernels.sm90 import plan as plans
from rubin_moe.kernels.sm90.calls import fp8, plan_of
from rubin_moe.kernels.sm90.choice import KINDS
from rubin_moe.kernels.sm90.prefill_plan import PrefillPlan

DSL = "nvidia-cutlass-dsl"


def why_not(problem: MoEProblem, target: Target) -> str | None:
    """None if this backend computes ``problem`` on ``target``, else the reason."""
    if target.capability != (9, 0):
        return f"is compiled for sm_90a and nothing else; this is {target}"
    return why_not_problem(problem) or why_not_compiler(target)


def why_not_problem(problem: MoEProblem) -> str | None:
    """The part of the answer that the kernel decides, wherever it runs."""
    if problem.weight_format not in WEIGHT_FORMATS:
        return f"multiplies NVFP4 and MXFP4 weights; these are {problem.weight_format}"
    if problem.activation_format not in ("16bit", "fp8-e4m3"):
        return f"multiplies 16-bit and fp8-e4m3 activations, not {problem.activation_format}"
    if fp8(problem) and problem.weight_format != MXFP4:
        return f"multiplies fp8-e4m3 activations with mxfp4, not with {problem.weight_format}"
    if problem.dtype not in KINDS:
        return f"multiplies {' and '.join(KINDS)} activations; the model's are {problem.dtype}"
    if problem.num_experts > plans.MAX_EXPERTS or problem.top_k > plans.MAX_TOP_K:
        return f"at most {plans.MAX_EXPERTS} experts and top-{plans.MAX_TOP_K}"
    if problem.hidden % plans.ROWS:
        return f"hidden {problem.hidden}: a multiple of {plans.ROWS}"
    try:
        plan_of(problem, 1)
    except PlanError as error:
        return str(error)
    return None


def why_not_compiler(target: Target) -> str | None:
    """The compiler of the kernels, or kernels that were compiled before."""
    found = target.versions.get(DSL)
    mend = f"pip install '{DSL}[cu13]>=4.8.1,<4.9'"
    if found is None and not any((envs.cache_dir() / "kernels").glob("sm90_*.bin")):
        return f"needs {DSL} to compile its kernels, and none were compiled before: {mend}"
    if found is not None and tuple(int(p) for p in found.split(".")[:2]) < (4, 8):
        return f"needs a later {DSL} than {found} to compile its kernels: {mend}"
    return None


def plan(problem: MoEProblem, num_tokens: int) -> KernelPlan:
    """Tiles and memory of a launch; more tokens than ``pairs`` / top_k take several launches."""
    chosen = plan_of(problem, num_tokens)
    tiles = {f.name: getattr(chosen.tiles, f.name) for f in fields(chosen.tiles)}
    if isinstance(chosen, PrefillPlan):
        smem, kernel = max(chosen.smem13, chosen.smem2), "fp8" if fp8(problem) else "prefill"
        return KernelPlan("sm90", {"kernel": kernel, **tiles, "smem_bytes": smem})
    return KernelPlan(
        "sm90",
        {
            "kernel": "wide" if isinstance(chosen, plans.WidePlan) else "decode",
            **tiles,
            "blocks13": chosen.blocks13,
            "blocks2": chosen.blocks2,
            "pairs": chosen.max_pairs,
            "smem_bytes": chosen.smem_bytes,
        },
    )
