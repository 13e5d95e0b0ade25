"""What the slow CPU mode with the roundings of Hopper's FP8 kernels does. Standard library only.

Chosen by an activation format that no other CPU backend has; nobody gets it without asking.
"""

from rubin_moe.formats.spec import MXFP4
from rubin_moe.kernels.base import KernelPlan, MoEProblem, Target

ROWS_PER_TILE = 16
DTYPES = ("bfloat16", "float16", "float32")


def why_not(problem: MoEProblem, target: Target) -> str | None:
    """None if this backend computes ``problem`` on ``target``, else the reason."""
    if target.device != "cpu":
        return f"computes on the CPU, and the layer's tensors are on {target}"
    if problem.activation_format != "fp8-e4m3":
        return f"{problem.activation_format} activations; computes fp8-e4m3 only"
    if problem.weight_format != MXFP4:
        return f"{problem.weight_format} weights; fp8-e4m3 activations go with mxfp4"
    if problem.dtype not in DTYPES:
        return f"hidden states of {problem.dtype}; computes {', '.join(DTYPES)}"
    return None


def plan(problem: MoEProblem, num_tokens: int) -> KernelPlan:
    """One plan for every size."""
    return KernelPlan("cpu-wgmma", {"num_tokens": num_tokens, "rows_per_tile": ROWS_PER_TILE})
