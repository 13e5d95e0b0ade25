"""Weight blocks of the sm_107a kernels: inverse, and a golden written by hand."""

import pytest
import torch

from rubin_moe.errors import LayoutError
from rubin_moe.layouts.sm107_tiles import BLOCK_BYTES, CODE_BYTES, Sm107Tiles

SHAPES = [(2, 128, 256), (3, 352, 208), (1, 40, 2880), (0, 128, 256), (2, 0, 256), (1, 1, 16)]


@pytest.mark.parametrize("shape", SHAPES)
def test_unpack_inverts_pack(shape):
    e, n, k = shape
    g = torch.Generator().manual_seed(0)
    q = torch.randint(0, 256, (e, n, k // 2), generator=g, dtype=torch.uint8)
    sf = torch.randint(0, 256, (e, n, k // 16), generator=g, dtype=torch.uint8)
    stored = Sm107Tiles().pack(q, sf)
    assert tuple(stored.shape) == Sm107Tiles().storage_shape(shape)
    for got, expected in zip(Sm107Tiles().unpack(stored, shape), (q, sf), strict=True):
        assert torch.equal(got, expected)


def test_golden():
    """Row 9, byte 37 of the codes; row 70, scale 6: where the ISA's pictures put them."""
    q = torch.zeros(1, 128, 128, dtype=torch.uint8)
    sf = torch.zeros(1, 128, 16, dtype=torch.uint8)
    q[0, 9, 37], sf[0, 70, 6] = 0xAB, 0xCD
    block = Sm107Tiles().pack(q, sf).flatten()
    assert block.numel() == BLOCK_BYTES
    # piece 37 // 16 = 2 of row 9 goes to piece 2 ^ 1 = 3
    assert block[9 * 128 + 3 * 16 + 37 % 16] == 0xAB
    # scale 6 is in the second chunk, at byte 2 of the word of row 70 = 2 * 32 + 6
    assert block[CODE_BYTES + 512 + 16 * 6 + 4 * 2 + 2] == 0xCD
    assert int((block != 0).sum()) == 2


def test_padding_is_written_with_zeros():
    q = torch.full((1, 3, 8), 0xFF, dtype=torch.uint8)
    sf = torch.full((1, 3, 1), 0xFF, dtype=torch.uint8)
    assert int((Sm107Tiles().pack(q, sf) != 0).sum()) == 3 * 8 + 3


def test_shapes_that_do_not_fit():
    with pytest.raises(LayoutError, match="K of 16s"):
        Sm107Tiles().storage_shape((1, 128, 100))
    q, sf = torch.zeros(1, 4, 8, dtype=torch.uint8), torch.zeros(1, 4, 2, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="scales"):
        Sm107Tiles().pack(q, sf)
