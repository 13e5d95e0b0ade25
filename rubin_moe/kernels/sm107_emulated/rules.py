"""What the emulated sm_107a backend computes: what the sm_107a kernels do, on a CPU."""

from dataclasses import replace

from rubin_moe.kernels.base import KernelPlan, MoEProblem, Target
from rubin_moe.kernels.sm107 import rules as sm107


def why_not(problem: MoEProblem, target: Target) -> str | None:
    """None if this backend computes ``problem`` on ``target``, else the reason."""
    if target.device != "cpu":
        return f"emulates on the CPU, and the layer's tensors are on {target}"
    return sm107.why_not_problem(problem) or sm107.why_not_compiler(target)


def plan(problem: MoEProblem, num_tokens: int) -> KernelPlan:
    """The sm_107a plan."""
    return replace(sm107.plan(problem, num_tokens), backend="sm107-emulated")
