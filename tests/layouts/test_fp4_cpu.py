"""Row tiles: one permutation written by hand, round trips of every size."""

import pytest
import torch

from rubin_moe.errors import LayoutError
from rubin_moe.layouts.fp4_cpu import RowTiles

CODES, SCALES = RowTiles(unit=4, rows=16), RowTiles(unit=1, rows=16)


def test_a_permutation_by_hand():
    rows = torch.arange(12, dtype=torch.uint8).view(2, 6)  # 0..5 and 6..11
    tiles = RowTiles(unit=2, rows=4).pack(rows)
    assert tiles.view(3, 8).tolist() == [
        [0, 1, 6, 7, 0, 0, 0, 0],
        [2, 3, 8, 9, 0, 0, 0, 0],
        [4, 5, 10, 11, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize("layout", [CODES, SCALES], ids=lambda v: v.key)
@pytest.mark.parametrize(
    "shape",
    [(3, 16, 8), (2, 33, 12), (1, 1, 1), (0, 16, 8), (2, 0, 8), (2, 16, 0), (48, 9), (4, 352, 24)],
)
def test_round_trip(layout, shape):
    rows = torch.randint(0, 256, shape, dtype=torch.uint8)
    before = rows.clone()
    stored = layout.pack(rows)
    assert tuple(stored.shape) == layout.storage_shape(shape)
    assert torch.equal(layout.unpack(stored, shape), rows)
    assert torch.equal(rows, before)


def test_padding_is_zero():
    stored = CODES.pack(torch.full((17, 5), 255, dtype=torch.uint8))
    assert int(stored.long().sum()) == 17 * 5 * 255


def test_what_does_not_fit_is_named():
    with pytest.raises(LayoutError, match="row_tiles:16x4"):
        CODES.unpack(CODES.pack(torch.zeros(16, 8, dtype=torch.uint8)), (16, 16))
    with pytest.raises(LayoutError, match="rows of bytes"):
        CODES.storage_shape((8,))
