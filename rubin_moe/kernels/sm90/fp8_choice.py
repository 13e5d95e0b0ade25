"""Tiles of the kernels for FP8 activations, for a problem and a number of tokens. Standard
library."""

import math
from dataclasses import replace
from functools import lru_cache

from rubin_moe.errors import PlanError
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.sm90.choice import sizes_of, tokens_an_expert
from rubin_moe.kernels.sm90.fp8_plan import Fp8Plan, Fp8Sizes, Fp8Tiles, check_fp8, fp8_sizes
from rubin_moe.kernels.sm90.prefill_plan import MAX_PASS

_LEAST_PASS = 16
_BEYOND = 1.2  # standard deviations above the average that a pass holds of an expert's tokens
_MOST_STAGES = 9
_PROMOTE = 24  # costs 9 to 21 %, so the 3072 of K of usual layers stay in the tensor core


@lru_cache(maxsize=65536)
def choose_fp8(problem: MoEProblem, num_tokens: int) -> Fp8Plan:
    """The plan of a call of ``num_tokens``: one for each power of two, so that a server compiles
    few. All promote alike: a row's result does not depend on their number.

    Raises:
        PlanError: nothing fits into shared memory.
    """
    sizes = fp8_sizes(sizes_of(problem))
    near = 2 ** round(math.log2(max(1, num_tokens)))
    each = tokens_an_expert(problem, near)
    most = each + _BEYOND * math.sqrt(each)
    size = max(_LEAST_PASS, 8 * math.ceil(most / math.ceil(most / MAX_PASS) / 8))
    return _default(sizes, size)


@lru_cache(maxsize=1024)
def _default(sizes: Fp8Sizes, pass_tokens: int) -> Fp8Plan:
    tiles = Fp8Tiles(pass_tokens, int(pass_tokens > _LEAST_PASS), promote=_PROMOTE)
    return with_stages(sizes, tiles)


def with_stages(sizes: Fp8Sizes, tiles: Fp8Tiles) -> Fp8Plan:
    """As many as fit."""
    plan = Fp8Plan(sizes, tiles)
    for stages in range(_MOST_STAGES, tiles.lag, -1):
        plan = Fp8Plan(sizes, replace(tiles, stages13=stages, stages2=stages))
        try:
            return check_fp8(plan)
        except PlanError:
            continue
    return check_fp8(plan)
