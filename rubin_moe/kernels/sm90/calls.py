"""The plan of a call, and those of all calls that a layer can get. Standard library only."""

from functools import lru_cache

from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.sm90.choice import AnyPlan, choose, max_tokens, prefill_from
from rubin_moe.kernels.sm90.fp8_choice import choose_fp8


def fp8(problem: MoEProblem) -> bool:
    """Whether the kernels for FP8 activations compute it."""
    return problem.activation_format == "fp8-e4m3"


def plan_of(problem: MoEProblem, num_tokens: int) -> AnyPlan:
    """`choose` or `choose_fp8`, by the activations. Raises PlanError."""
    return (choose_fp8 if fp8(problem) else choose)(problem, num_tokens)


@lru_cache(maxsize=64)
def choices(problem: MoEProblem, most: int) -> tuple[AnyPlan, ...]:
    """Every plan that a call of 1 to ``most`` tokens can take, each once: what to compile ahead of
    serving. Raises PlanError."""
    if not fp8(problem) and prefill_from(problem) is None:
        most = min(most, max_tokens(problem))  # more take several launches of no more than these
    return tuple(dict.fromkeys(plan_of(problem, m) for m in range(1, most + 1)))
