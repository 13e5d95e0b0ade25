"""Weight blocks of the sm_107a kernels: inverse, and a golden written by hand."""

import pytest
import torch

from rubin_moe.errors import LayoutError
from rubin_moe.formats.spec import MXFP4, MXFP8, NVFP4_UE4M3
from rubin_moe.layouts.sm107_tiles import Sm107Tiles

SHAPES = [(2, 128, 256), (3, 352, 224), (1, 40, 2880), (0, 128, 256), (2, 0, 256), (1, 1, 32)]
NVFP4 = Sm107Tiles(NVFP4_UE4M3)


@pytest.mark.parametrize("fmt", [NVFP4_UE4M3, MXFP4], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpack_inverts_pack(shape, fmt):
    e, n, k = shape
    tiles = Sm107Tiles(fmt)
    g = torch.Generator().manual_seed(0)
    q = torch.randint(0, 256, (e, n, k // 2), generator=g, dtype=torch.uint8)
    sf = torch.randint(0, 256, (e, n, k // fmt.sf_vec_size), generator=g, dtype=torch.uint8)
    stored = tiles.pack(q, sf)
    assert tuple(stored.shape) == tiles.storage_shape(shape)
    for got, expected in zip(tiles.unpack(stored, shape), (q, sf), strict=True):
        assert torch.equal(got, expected)


def test_golden():
    """Row 9, byte 37 of the codes; row 70, scale 6: where the ISA's pictures put them."""
    q = torch.zeros(1, 128, 128, dtype=torch.uint8)
    sf = torch.zeros(1, 128, 16, dtype=torch.uint8)
    q[0, 9, 37], sf[0, 70, 6] = 0xAB, 0xCD
    block = NVFP4.pack(q, sf).flatten()
    assert block.numel() == 18_432
    # piece 37 // 16 = 2 of row 9 goes to piece 2 ^ 1 = 3
    assert block[9 * 128 + 3 * 16 + 37 % 16] == 0xAB
    # scale 6 is in the second chunk, at byte 2 of the word of row 70 = 2 * 32 + 6
    assert block[NVFP4.code_bytes + 512 + 16 * 6 + 4 * 2 + 2] == 0xCD
    assert int((block != 0).sum()) == 2


def test_golden_of_mxfp4():
    """Rows of 64 bytes, whose 16-byte pieces change places every second row; one chunk."""
    q = torch.zeros(1, 128, 64, dtype=torch.uint8)
    sf = torch.zeros(1, 128, 4, dtype=torch.uint8)
    q[0, 11, 37], sf[0, 70, 3] = 0xAB, 0xCD
    block = Sm107Tiles(MXFP4).pack(q, sf).flatten()
    assert block.numel() == 8_192 + 512
    # piece 37 // 16 = 2 of row 11 goes to piece 2 ^ (11 // 2 % 4) = 3
    assert block[11 * 64 + 3 * 16 + 37 % 16] == 0xAB
    assert block[8_192 + 16 * 6 + 4 * 2 + 3] == 0xCD
    assert int((block != 0).sum()) == 2


def test_padding_is_written_with_zeros():
    q = torch.full((1, 3, 8), 0xFF, dtype=torch.uint8)
    sf = torch.full((1, 3, 1), 0xFF, dtype=torch.uint8)
    assert int((NVFP4.pack(q, sf) != 0).sum()) == 3 * 8 + 3


def test_shapes_that_do_not_fit():
    with pytest.raises(LayoutError, match="K of 16s"):
        NVFP4.storage_shape((1, 128, 100))
    with pytest.raises(LayoutError, match="no format of weights"):
        Sm107Tiles(MXFP8)
    q, sf = torch.zeros(1, 4, 8, dtype=torch.uint8), torch.zeros(1, 4, 2, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="scales"):
        NVFP4.pack(q, sf)
