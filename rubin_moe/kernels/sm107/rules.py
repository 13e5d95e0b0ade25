"""What the sm_107a backend computes. Standard library only."""

from rubin_moe.formats.spec import is_nvfp4
from rubin_moe.kernels.base import KernelPlan, MoEProblem, Target
from rubin_moe.kernels.sm107.plan import choose_tile_n, plan_gemm

DSL = "nvidia-cutlass-dsl"
SCALES = {"nvfp4-ue4m3": "ue4m3", "nvfp4-ue5m3": "ue5m3"}
MAX_EXPERTS, MAX_TOP_K = 1024, 16


def why_not(problem: MoEProblem, target: Target) -> str | None:
    """None if this backend computes ``problem`` on ``target``, else the reason."""
    if target.capability != (10, 7):
        return f"is compiled for sm_107a and nothing else; this is {target}"
    return why_not_problem(problem) or why_not_compiler(target)


def why_not_problem(problem: MoEProblem) -> str | None:
    """The part of the answer that the kernels decide, wherever they run."""
    if not is_nvfp4(problem.weight_format):
        return f"multiplies NVFP4 weights; these are {problem.weight_format}"
    if problem.activation_format not in SCALES:
        return (
            f"tcgen05 has no 16-bit x FP4 instruction: name an activation format "
            f"({', '.join(SCALES)}), not {problem.activation_format}"
        )
    if problem.weight_format.name != problem.activation_format:
        return (
            f"an instruction reads one scale type: {problem.weight_format} weights take "
            f"{problem.weight_format} activations, not {problem.activation_format}"
        )
    if problem.activation.kind != "silu" or problem.activation.limit is not None:
        return f"activation {problem.activation.kind} with limit {problem.activation.limit}: silu"
    if problem.has_bias:
        return "adds no bias"
    if problem.input_scale != "layer":
        return "quantizes a token once for all its experts, not with each expert's own input scale"
    if problem.num_experts > MAX_EXPERTS or problem.top_k > MAX_TOP_K:
        return f"at most {MAX_EXPERTS} experts and top-{MAX_TOP_K}"
    return None


def why_not_compiler(target: Target) -> str | None:
    """Rubin came with CuTe DSL 4.8."""
    found = target.versions.get(DSL)
    mend = "pip install 'nvidia-cutlass-dsl[cu13]>=4.8.1,<4.9'"
    if found is None:
        return f"needs {DSL} to compile its kernels: {mend}"
    if tuple(int(p) for p in found.split(".")[:2]) < (4, 8):
        return f"{DSL} {found} knows no sm_107a: {mend}"
    return None


def plan(problem: MoEProblem, num_tokens: int) -> KernelPlan:
    """Tile, stages and memory of both GEMMs for ``num_tokens``."""
    tile_n = choose_tile_n(num_tokens, problem.top_k, problem.num_experts)
    gemm = plan_gemm(tile_n, SCALES[problem.activation_format])
    return KernelPlan(
        "sm107",
        {
            "tile_m": 128,
            "tile_n": tile_n,
            "tile_k": 256,
            "stages": gemm.stages,
            "smem_bytes": gemm.smem_bytes,
            "tmem_columns": gemm.tmem.allocated,
        },
    )
