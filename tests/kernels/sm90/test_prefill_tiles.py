"""Tiles that nobody measured."""

import pytest

from rubin_moe.errors import PlanError
from rubin_moe.kernels.sm90.plan import LayerSizes
from rubin_moe.kernels.sm90.prefill_plan import MAX_PASS, PrefillPlan, PrefillTiles, check_prefill
from rubin_moe.kernels.sm90.prefill_tiles import asynchronous, tiles_for

SIZES = (
    LayerSizes(128, 8, 2048, 768, gated=True, exponent_only=False),
    LayerSizes(128, 4, 2880, 2880, gated=True, exponent_only=True),
    LayerSizes(5, 2, 288, 96, gated=False, exponent_only=False),
)


@pytest.mark.parametrize("sizes", SIZES)
def test_every_width_has_tiles(sizes):
    for width in range(8, MAX_PASS + 1, 8):
        tiles = tiles_for(sizes, width)
        plan = check_prefill(PrefillPlan(sizes, tiles))
        assert tiles.pass_tokens == width
        assert asynchronous(plan)
        assert min(tiles.stages13, tiles.stages2) > tiles.lag


def test_wide_passes_have_one_block_a_stage_and_few_widths():
    assert tiles_for(SIZES[0], 144) == PrefillTiles(144, 1, 16, stages13=6, stages2=6, lag=3)
    assert tiles_for(SIZES[0], 80).narrower == 3
    assert tiles_for(SIZES[0], 24).blocks13 == 4
    assert tiles_for(SIZES[1], 24).blocks13 == 4  # at most: 3 divide 45


@pytest.mark.parametrize("width", [0, 12, MAX_PASS + 8])
def test_no_widths(width):
    with pytest.raises(PlanError):
        tiles_for(SIZES[0], width)


def test_what_the_assembler_serialized():
    def plan(*tiles: int, blocks: int = 1) -> PrefillPlan:
        return PrefillPlan(SIZES[0], PrefillTiles(*tiles, blocks13=blocks, blocks2=blocks))

    assert asynchronous(plan(144, 1, 16))
    assert asynchronous(plan(112, 3, 8))
    assert asynchronous(plan(80, 3, 8, blocks=2))
    assert not asynchronous(plan(144, 2, 8))
    assert not asynchronous(plan(160, 1, 16))
    assert not asynchronous(plan(80, 4, 8, blocks=2))
