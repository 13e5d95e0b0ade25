"""Tiles for a problem and a number of tokens: measured ones, else a default. Standard library."""

from collections.abc import Iterator, Mapping
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

KINDS = {"bfloat16": "bf16", "float16": "f16"}
BUCKETS = (512, MAX_PAIRS)  # of pairs: the routing tables' sizes that kernels are built for
_DECODE = tuple(
    Tiles(warps, 2, blocks, blocks, False, 8, buffers)
    for buffers in (2, 1)
    for warps, blocks in ((24, 4), (20, 4), (16, 4), (12, 4), (8, 4), (8, 2), (4, 2), (4, 1))
)
_WIDE_PASSES = (16, 32, 80)
_WIDE_FROM = 12  # tokens of an expert, on average, of shapes that were not measured


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
    """Of one launch."""
    return MAX_PAIRS // problem.top_k


@lru_cache(maxsize=4096)
def choose(problem: MoEProblem, num_tokens: int) -> Plan:
    """The plan of a launch of ``num_tokens``, at most `max_tokens` of which count.

    Raises:
        PlanError: nothing fits into shared memory.
    """
    pairs = min(num_tokens, max_tokens(problem)) * problem.top_k
    bucket = next(b for b in BUCKETS if b >= pairs)
    sizes = sizes_of(problem)
    measured = tuning.nearest("sm90", shape_key(sizes), num_tokens)
    first = () if measured is None else _smaller(tiles_of(measured))
    for tiles in (*first, *_defaults(pairs / sizes.num_experts)):
        try:
            return check(plan_of(sizes, tiles, bucket))
        except PlanError:
            continue
    raise PlanError(f"hidden {problem.hidden}: no tiles fit into shared memory")


def plan_of(sizes: LayerSizes, tiles: Tiles | WideTiles, max_pairs: int) -> Plan:
    if isinstance(tiles, WideTiles):
        return WidePlan(sizes, tiles, max_pairs)
    return DecodePlan(sizes, tiles, max_pairs)


def tiles_of(measured: Mapping[str, Any]) -> Tiles | WideTiles:
    """From a row of a file of measured tiles."""
    return WideTiles(**measured) if "groups" in measured else Tiles(**measured)


def _defaults(tokens: float) -> Iterator[Tiles | WideTiles]:
    """For ``tokens`` an expert: what holds a pass's tokens over all of K may not fit."""
    size = next((n for n in _WIDE_PASSES if n >= 1.25 * tokens), _WIDE_PASSES[-1])
    wide = tuple(WideTiles(2, size, 2, 2, stages) for stages in (6, 5, 4, 3, 2))
    if tokens >= _WIDE_FROM:
        yield from wide
    yield from _DECODE
    yield from wide


def choices(problem: MoEProblem) -> set[Plan]:
    """Every plan that some number of tokens may choose: what to compile ahead of serving."""
    return {choose(problem, m) for m in range(1, max_tokens(problem) + 1)}


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
