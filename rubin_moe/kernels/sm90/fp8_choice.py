"""Tiles of the kernels for FP8 activations, for a problem and a number of tokens. Standard
library."""

from functools import lru_cache

from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.sm90.choice import sizes_of
from rubin_moe.kernels.sm90.fp8_plan import Fp8Plan, Fp8Tiles, check_fp8, fp8_sizes

_PASSES = (16, 32, 48, 64, 96, 128)
_STAGES = {16: 9, 32: 8, 48: 8, 64: 7, 96: 6, 128: 5}


@lru_cache(maxsize=65536)
def choose_fp8(problem: MoEProblem, num_tokens: int) -> Fp8Plan:
    """The plan of a call of ``num_tokens``. Raises PlanError."""
    sizes = fp8_sizes(sizes_of(problem))
    each = 1.1 * num_tokens * sizes.top_k / sizes.num_experts
    size = next((n for n in _PASSES if n >= each), _PASSES[-1])
    stages = _STAGES[size]
    return check_fp8(Fp8Plan(sizes, Fp8Tiles(size, stages13=stages, stages2=stages)))
