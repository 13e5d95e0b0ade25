"""What the CPU backend computes. Standard library only."""

from rubin_moe.formats.spec import WEIGHT_FORMATS
from rubin_moe.kernels.base import KernelPlan, MoEProblem, Target

DTYPES = ("bfloat16", "float16", "float32")


def why_not(problem: MoEProblem, target: Target) -> str | None:
    """None if this backend computes ``problem`` on ``target``, else the reason."""
    if target.device != "cpu":
        return f"computes on the CPU, and the layer's tensors are on {target}"
    if problem.weight_format not in WEIGHT_FORMATS:
        return f"no decoder for {problem.weight_format} weights"
    if problem.dtype not in DTYPES:
        return f"hidden states of {problem.dtype}; computes {', '.join(DTYPES)}"
    if problem.activation_format not in ("16bit", "int8"):
        return f"activation format {problem.activation_format}; computes 16bit (W4A16) and int8"
    return None


def plan(problem: MoEProblem, num_tokens: int) -> KernelPlan:
    """One plan for every size."""
    return KernelPlan("cpu", {"num_tokens": num_tokens})
