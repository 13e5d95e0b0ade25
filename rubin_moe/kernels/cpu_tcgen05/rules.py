"""What the slow CPU mode with tcgen05 numerics computes. Standard library only.

Chosen by an activation format that no other CPU backend has; nobody gets it without asking.
"""

from rubin_moe.kernels.base import KernelPlan, MoEProblem, Target

ROWS_PER_TILE = 16
"""Tokens of one matrix product, always padded to it: a row's result has nothing to do with how
many others came along."""

PAIRS = {"nvfp4-ue4m3": "nvfp4-ue4m3", "nvfp4-ue5m3": "nvfp4-ue5m3", "mxfp4": "mxfp8"}
"""Weight format -> the activation format that one tcgen05 instruction multiplies it with."""

DTYPES = ("bfloat16", "float16", "float32")


def why_not(problem: MoEProblem, target: Target) -> str | None:
    """None if this backend computes ``problem`` on ``target``, else the reason."""
    weights, activations = problem.weight_format.name, problem.activation_format
    if target.device != "cpu":
        return f"computes on the CPU, and the layer's tensors are on {target}"
    if activations not in PAIRS.values():
        return f"{activations} activations; computes {', '.join(PAIRS.values())} as tcgen05 does"
    if PAIRS.get(weights) != activations:
        mates = [w for w, a in PAIRS.items() if a == activations]
        return (
            f"{weights} weights with {activations} activations are no tcgen05 instruction; "
            f"{activations} goes with {', '.join(mates)} weights"
        )
    if problem.dtype not in DTYPES:
        return f"hidden states of {problem.dtype}; computes {', '.join(DTYPES)}"
    return None


def plan(problem: MoEProblem, num_tokens: int) -> KernelPlan:
    """One plan for every size."""
    return KernelPlan("cpu-tcgen05", {"num_tokens": num_tokens, "rows_per_tile": ROWS_PER_TILE})
