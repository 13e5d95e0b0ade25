"""Tiles for a problem and a number of tokens: measured ones, else a default. Standard library."""

from dataclasses import replace
from functools import lru_cache

from rubin_moe.errors import PlanError
from rubin_moe.formats.spec import MXFP4
from rubin_moe.kernels import tuning
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.sm90.plan import MAX_PAIRS, DecodePlan, LayerSizes, Tiles, check

KINDS = {"bfloat16": "bf16", "float16": "f16"}
BUCKETS = (512, MAX_PAIRS)  # of pairs: the routing tables' sizes that kernels are built for
_DEFAULTS = tuple(
    Tiles(warps, 2, blocks, blocks, False, 8, buffers)
    for buffers in (2, 1)
    for warps, blocks in ((24, 4), (20, 4), (16, 4), (12, 4), (8, 4), (8, 2), (4, 2), (4, 1))
)


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


@lru_cache(maxsize=256)
def choose(problem: MoEProblem, num_tokens: int) -> DecodePlan:
    """The plan of a launch of ``num_tokens``, at most `max_tokens` of which count.

    Raises:
        PlanError: the layer's tokens do not fit into shared memory with any tiles.
    """
    pairs = min(num_tokens, max_tokens(problem)) * problem.top_k
    bucket = next(b for b in BUCKETS if b >= pairs)
    sizes = sizes_of(problem)
    measured = tuning.nearest("sm90", shape_key(sizes), num_tokens)
    first = () if measured is None else _narrower(Tiles(**measured))
    for tiles in (*first, *_DEFAULTS):
        try:
            return check(DecodePlan(sizes, tiles, bucket))
        except PlanError:
            continue
    raise PlanError(f"hidden {problem.hidden}: no tiles fit into shared memory")


def choices(problem: MoEProblem) -> set[DecodePlan]:
    """Every plan that some number of tokens may choose: what to compile ahead of serving."""
    return {choose(problem, m) for m in range(1, max_tokens(problem) + 1)}


def _narrower(tiles: Tiles) -> tuple[Tiles, ...]:
    """Measured tiles, then fewer warps: the tables of a larger launch take their memory."""
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
