"""Tiles for a problem and a number of tokens: measured ones, else a default. Standard library."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from rubin_moe.errors import PlanError
from rubin_moe.formats.spec import MXFP4
from rubin_moe.kernels import tuning
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.sm90.plan import (
    MAX_PAIRS,
    DecodePlan,
    LayerSizes,
    Plan,
    Tiles,
    WidePlan,
    WideTiles,
    check,
)
from rubin_moe.kernels.sm90.prefill_plan import (
    MAX_PASS,
    PrefillPlan,
    PrefillTiles,
    check_prefill,
)
from rubin_moe.kernels.sm90.prefill_tiles import tiles_for

KINDS = {"bfloat16": "bf16", "float16": "f16"}
BUCKETS = (512, MAX_PAIRS)  # of pairs: the routing tables' sizes that kernels are built for
_DECODE = tuple(
    Tiles(warps, 2, blocks, blocks, False, 8, buffers)
    for buffers in (2, 1)
    for warps, blocks in ((24, 4), (20, 4), (16, 4), (12, 4), (8, 4), (8, 2), (4, 2), (4, 1))
)
_WIDE_PASSES = (16, 32, 80)
_WIDE_FROM = 12  # tokens of an expert, on average, of layers that have no prefill
_PREFILL_FROM = 8  # of shapes that were not measured; four that were cross at 2.2 to 5.1
SIGMAS = 1.2  # of an expert's number of tokens that default passes hold beyond the average
AnyPlan = Plan | PrefillPlan
AnyTiles = Tiles | WideTiles | PrefillTiles


def sizes_of(problem: MoEProblem) -> LayerSizes:
    return LayerSizes(
        problem.num_experts,
        problem.top_k,
        problem.hidden,
        problem.intermediate,
        problem.activation.gated,
        problem.weight_format == MXFP4,
        KINDS.get(problem.dtype, ""),
    )


def max_tokens(problem: MoEProblem) -> int:
    """Of one launch of the kernels for few tokens."""
    return MAX_PAIRS // problem.top_k


def held(problem: MoEProblem) -> float:
    """The part of the model's experts that this rank has, hence of its tokens' pairs, on average.
    Tiles suit that many; tables and scratch hold any routing."""
    return min(1.0, problem.num_experts / problem.global_num_experts)


def tokens_an_expert(problem: MoEProblem, num_tokens: int) -> float:
    """On average."""
    return num_tokens * problem.top_k * held(problem) / problem.num_experts


def prefill_from(problem: MoEProblem) -> int | None:
    """The number of tokens from which the prefill's kernels compute; None: never. They add in
    another order, so a layer whose rows may not depend on their number has none."""
    if problem.batch_invariant:
        return None
    many = tuning.prefill_from("sm90", shape_key(sizes_of(problem)))
    if many is None:
        many = _PREFILL_FROM * problem.num_experts // problem.top_k
    return min(max_tokens(problem) + 1, max(math.ceil(many / held(problem)), 1))


@lru_cache(maxsize=65536)
def choose(problem: MoEProblem, num_tokens: int) -> AnyPlan:
    """The plan of a call of ``num_tokens`` with 16-bit activations; of one launch at most, where
    that is not the prefill's: `max_tokens`.

    Raises:
        PlanError: nothing fits into shared memory.
    """
    least = prefill_from(problem)
    if least is not None and num_tokens >= least:
        return _choose_prefill(problem, num_tokens)
    return _choose_decode(problem, num_tokens)


def _choose_decode(problem: MoEProblem, num_tokens: int) -> Plan:
    at_once = min(num_tokens, max_tokens(problem))
    bucket = next(b for b in BUCKETS if b >= at_once * problem.top_k)
    sizes = sizes_of(problem)
    measured = _measured(problem, at_once, lambda tiles: not of_prefill(tiles))
    first = () if measured is None else _smaller(tiles_of(measured))
    for tiles in (*first, *_defaults(tokens_an_expert(problem, at_once))):
        try:
            return check(plan_of(sizes, tiles, bucket))
        except PlanError:
            continue
    raise PlanError(f"hidden {problem.hidden}: no tiles fit into shared memory")


def _choose_prefill(problem: MoEProblem, num_tokens: int) -> PrefillPlan:
    sizes, measured = sizes_of(problem), _measured(problem, num_tokens, of_prefill)
    if measured is not None:
        return check_prefill(PrefillPlan(sizes, PrefillTiles(**measured)))
    each = tokens_an_expert(problem, num_tokens)
    return _default_prefill(sizes, pass_that_holds(each, SIGMAS, 16))


@lru_cache(maxsize=1024)
def _default_prefill(sizes: LayerSizes, pass_tokens: int) -> PrefillPlan:
    return check_prefill(PrefillPlan(sizes, tiles_for(sizes, pass_tokens)))


def _measured(
    problem: MoEProblem, num_tokens: int, accept: Callable[[Mapping[str, Any]], bool]
) -> dict[str, Any] | None:
    """Files have the times of a rank with all experts: fewer tokens give as many pairs there."""
    alike = round(num_tokens * held(problem))
    return tuning.nearest("sm90", shape_key(sizes_of(problem)), alike, accept)


def pass_that_holds(each: float, sigmas: float, step: int = 8, more: int = 0) -> int:
    """Tokens of a pass such that as few of them as possible (and ``more``) hold an expert's tokens,
    ``each`` on average and ``sigmas`` standard deviations beyond."""
    most = each + sigmas * math.sqrt(each)
    number = math.ceil(most / MAX_PASS) + more
    return max(16, step * math.ceil(most / number / step))


def plan_of(sizes: LayerSizes, tiles: Tiles | WideTiles, max_pairs: int) -> Plan:
    if isinstance(tiles, WideTiles):
        return WidePlan(sizes, tiles, max_pairs)
    return DecodePlan(sizes, tiles, max_pairs)


def of_prefill(measured: Mapping[str, Any]) -> bool:
    """Whether a row's tiles are the prefill's."""
    return "panel" in measured


def tiles_of(measured: Mapping[str, Any]) -> Tiles | WideTiles:
    """From a row of a file of measured tiles, of the kernels for few tokens."""
    return WideTiles(**measured) if "groups" in measured else Tiles(**measured)


def _defaults(tokens: float) -> Iterator[Tiles | WideTiles]:
    """For ``tokens`` an expert: what holds a pass's tokens over all of K may not fit."""
    size = next((n for n in _WIDE_PASSES if n >= 1.25 * tokens), _WIDE_PASSES[-1])
    wide = tuple(WideTiles(2, size, 2, 2, stages) for stages in (6, 5, 4, 3, 2))
    if tokens >= _WIDE_FROM:
        yield from wide
    yield from _DECODE
    yield from wide


def _smaller(tiles: Tiles | WideTiles) -> tuple[Tiles | WideTiles, ...]:
    """Measured tiles, then fewer warps or stages: the tables of a larger launch take memory."""
    if isinstance(tiles, WideTiles):
        return tuple(replace(tiles, stages=n) for n in range(tiles.stages, 1, -1))
    return tuple(replace(tiles, warps=n) for n in range(tiles.warps, 3, -1))


def shape_key(sizes: LayerSizes) -> dict[str, int]:
    """What names a file of measured tiles."""
    return {
        "num_experts": sizes.num_experts,
        "top_k": sizes.top_k,
        "hidden": sizes.hidden,
        "intermediate": sizes.intermediate,
        "block_bytes": sizes.block_bytes,
    }
