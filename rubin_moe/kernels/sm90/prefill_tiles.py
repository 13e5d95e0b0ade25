"""Prefill tiles for a width that nobody measured, and for tuning to start from. Standard library.

What the H200 showed: copies of 1 to 2 KB a tile of weights are worth more than many stages; widths
near the real numbers of tokens are worth more than either.
"""

from __future__ import annotations

from dataclasses import replace

from rubin_moe.errors import PlanError
from rubin_moe.kernels.sm90.plan import LayerSizes
from rubin_moe.kernels.sm90.prefill_plan import MAX_PASS, PrefillPlan, PrefillTiles, check_prefill

BLOCKS = ((32, 4), (56, 3), (88, 2), (MAX_PASS, 1))  # of K a stage, up to so many tokens a pass
MOST_NARROWER, MOST_STAGES = 4, 12
REGISTERS = 224  # of a thread that multiplies, two warpgroups


def tiles_for(sizes: LayerSizes, pass_tokens: int) -> PrefillTiles:
    """Tiles that can be built and whose products run asynchronously.

    Raises:
        PlanError: ``pass_tokens`` is no width, or nothing fits into shared memory.
    """
    blocks = next((blocks for most, blocks in BLOCKS if pass_tokens <= most), 1)
    step = 8 if pass_tokens < 128 else 16
    tiles = PrefillTiles(pass_tokens, 0, step, stages13=2, stages2=2, panel=8, lag=1)
    tiles = replace(tiles, blocks13=blocks, blocks2=blocks)
    narrower = range(min(MOST_NARROWER, (pass_tokens - 8) // step), -1, -1)
    for number in narrower:
        tiles = replace(tiles, narrower=number)
        if asynchronous(PrefillPlan(sizes, tiles)):
            break
    check_prefill(PrefillPlan(sizes, tiles))
    for name in ("stages13", "stages2"):
        tiles = _with_stages(sizes, tiles, name)
    return replace(tiles, lag=min(3, tiles.stages13 - 1, tiles.stages2 - 1))


def asynchronous(plan: PrefillPlan) -> bool:
    """Whether the assembler (CUDA 13.0) leaves FC1's products asynchronous: it counts registers for
    every width apart, twice as many for A where blocks are unrolled, and waits for each product
    (its C7512) where they do not suffice. Found by reading the machine code of 25 kernels."""
    t = plan.tiles
    apart = 48 if plan.blocks13 == 1 else 80
    return t.narrower == 0 or t.pass_tokens + 16 * (t.narrower + 1) + apart <= REGISTERS


def _with_stages(sizes: LayerSizes, tiles: PrefillTiles, name: str) -> PrefillTiles:
    for stages in range(MOST_STAGES, 2, -1):
        try:
            return check_prefill(PrefillPlan(sizes, replace(tiles, **{name: stages}))).tiles
        except PlanError:
            continue
    return tiles
