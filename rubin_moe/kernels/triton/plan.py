"""Groups, launches and memory of the Triton kernels for a number of tokens. Standard library only.

What decides the order of additions (tiles of 64 x 128 of weights, in turn) is fixed in
`layouts.fp4_planes`; a plan only says how many tokens share a tile.
"""

from dataclasses import dataclass

from rubin_moe.kernels.base import MoEProblem

MAX_PAIRS = 1 << 15  # (token, choice) pairs of a launch: bounds the routing's work and the memory
MAX_EXPERTS = 4096
GROUPS = (16, 32, 64)
ROUTE_ELEMENTS = 1 << 14  # experts x pairs that a program of `route` compares at once


@dataclass(frozen=True)
class TritonPlan:
    """One launch's sizes.

    Attributes:
        group: pairs of one expert that a program takes; max_groups: at most so many exist.
        experts: a power of two above the experts; own: pairs a program of `route` places; chunk:
            pairs it reads at once.
        num_warps, num_stages: of the products; route_warps: of `route`.
    """

    group: int
    max_groups: int
    experts: int
    own: int
    chunk: int
    num_warps: int
    num_stages: int
    route_warps: int


def max_tokens(problem: MoEProblem) -> int:
    """Of one launch."""
    return max(1, MAX_PAIRS // problem.top_k)


def make_plan(problem: MoEProblem, num_tokens: int) -> TritonPlan:
    """For up to `max_tokens` tokens."""
    pairs = min(num_tokens, max_tokens(problem)) * problem.top_k
    mean = pairs / problem.num_experts
    wide = problem.dtype == "float32"  # no tensor cores: accumulators take the registers
    group = next((g for g in GROUPS if mean <= g and not wide), GROUPS[0 if wide else -1])
    experts = 1 << problem.num_experts.bit_length()
    most = min(problem.num_experts, pairs)
    return TritonPlan(
        group=group,
        max_groups=min(pairs, (pairs + most * (group - 1)) // group),
        experts=max(16, experts),
        own=max(4, min(64, ROUTE_ELEMENTS // max(16, experts))),
        chunk=64 if pairs <= 64 else 256,
        num_warps=8 if group == 64 or wide else 4,
        num_stages=2 if wide else 3,
        route_warps=4 if pairs <= 64 else 8,
    )


def workspace_bytes(problem: MoEProblem, num_tokens: int) -> int:
    """Routing, FC1's result and FC2's of one launch."""
    plan = make_plan(problem, num_tokens)
    pairs = min(num_tokens, max_tokens(problem)) * problem.top_k
    element = 4 if problem.dtype == "float32" else 2
    width = -(-problem.intermediate // 64) * 64
    routing = 4 * plan.max_groups * (plan.group + 2)
    return routing + pairs * (element * width + 4 * problem.hidden)
