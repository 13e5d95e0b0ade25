"""What the sm_107a backend computes. Standard library only."""

from rubin_moe.kernels.base import KernelPlan, MoEProblem, Target
from rubin_moe.kernels.sm107.plan import (
    OPERANDS,
    TILE_M,
    choose_cta_group,
    choose_tile_n,
    plan_gemm,
)
from rubin_moe.kernels.sm107.regimes import swap_ab_loses_from

DSL = "nvidia-cutlass-dsl"
PAIRS = {"nvfp4-ue4m3": "nvfp4-ue4m3", "nvfp4-ue5m3": "nvfp4-ue5m3", "mxfp4": "mxfp8"}
"""Weight format -> the activation format that an instruction multiplies it with."""
ACTIVATIONS = ("silu", "swigluoai")
MAX_EXPERTS, MAX_TOP_K = 1024, 16


def why_not(problem: MoEProblem, target: Target) -> str | None:
    """None if this backend computes ``problem`` on ``target``, else the reason."""
    if target.capability != (10, 7):
        return f"is compiled for sm_107a and nothing else; this is {target}"
    return why_not_problem(problem) or why_not_compiler(target)


def why_not_problem(problem: MoEProblem) -> str | None:
    """The part of the answer that the kernels decide, wherever they run."""
    weights, activations = problem.weight_format.name, problem.activation_format
    if activations not in PAIRS.values():
        return (
            f"tcgen05 has no 16-bit x FP4 instruction: name an activation format "
            f"({', '.join(PAIRS.values())}), not {activations}"
        )
    if PAIRS[weights] != activations:
        return (
            f"no instruction multiplies {weights} weights with {activations} activations; they "
            f"take {PAIRS[weights]}"
        )
    if problem.activation.kind not in ACTIVATIONS:
        return f"activation {problem.activation.kind}; computes {', '.join(ACTIVATIONS)}"
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
    fmt = problem.activation_format
    tile_n = choose_tile_n(num_tokens, problem.top_k, problem.global_num_experts)
    gemm = plan_gemm(fmt, tile_n, choose_cta_group(fmt, tile_n))
    return KernelPlan(
        "sm107",
        {
            "fc1": "gather_gemm_swiglu",
            "fc2": "gemm_finalize",
            "tile_m": TILE_M * gemm.cta_group,
            "tile_n": tile_n,
            "tile_k": OPERANDS[fmt].tile_k,
            "cta_group": gemm.cta_group,
            "weight_stages": gemm.weight_stages,
            "token_stages": gemm.token_stages,
            "smem_bytes": gemm.smem_bytes,
            "tmem_columns": gemm.tmem.allocated,
            "scale_stages": gemm.scale_stages,
            "swap_ab_loses_from": _loses_from(problem),
        },
    )


def _loses_from(problem: MoEProblem) -> int | str:
    """Tokens an expert from which on FC1 would be better off with tokens on M."""
    features = 2 * problem.intermediate
    limit = swap_ab_loses_from(problem.activation_format, features, problem.hidden)
    return limit if limit is not None else "never"
