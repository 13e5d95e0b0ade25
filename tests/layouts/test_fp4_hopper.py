"""Blocks of the sm_90a kernels: round trips, and one word bit by bit."""

import pytest
import torch

from rubin_moe.errors import LayoutError
from rubin_moe.layouts.fp4_hopper import HopperBlocks


def matrix(n: int, k: int, vec: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    return codes, torch.randint(0, 256, (n, k // vec), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("vec", "products"), [(16, "16bit"), (32, "16bit"), (32, "fp8")])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (1, 32), (40, 96), (33, 320), (0, 64), (16, 0)])
def test_round_trip(n, k, vec, products):
    codes, sf = matrix(n, k, vec)
    layout = HopperBlocks(vec, products)
    stored = layout.pack(codes, sf)
    assert stored.shape == layout.storage_shape((n, k))
    assert stored.shape[-1] == layout.block_bytes
    back = layout.unpack(stored, (n, k))
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1], sf)


@pytest.mark.parametrize("element", range(64))
def test_where_a_code_goes(element):
    """Row 11 (g = 3, second half) of the block: lane, word, pair and element from K alone."""
    codes, sf = torch.zeros(16, 32, dtype=torch.uint8), torch.zeros(16, 4, dtype=torch.uint8)
    codes[11, element // 2] = 0xF << (4 * (element % 2))
    block = HopperBlocks(16).pack(codes, sf)[0, 0]
    words = block[:512].contiguous().view(torch.int32)
    lane, word = 4 * 3 + element // 16, element % 16 // 4
    assert words.nonzero().flatten().tolist() == [4 * lane + word]
    value = int(words[4 * lane + word]) & 0xFFFFFFFF
    # second rows are pairs 1 and 3: rotated right by 4, or the two shifts of the kernel
    if element % 4 < 2:
        pair = (value >> 4 | value << 28) & 0x81C081C0
    else:
        rotated = (value << 10 | value >> 22) & 0xFFFFFFFF
        pair = (value << 2) & 0x80C080C0 | rotated & 0x01000100
    assert pair == 0x81C0 << (16 * (element % 2))


@pytest.mark.parametrize("row", [3, 11])
@pytest.mark.parametrize("element", range(64))
def test_where_a_code_goes_for_fp8(element, row):
    """The selector of a byte permutation, and a sign that a shift brings over its byte."""
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    codes[row, element // 2] = 0xD << (4 * (element % 2))  # sign and 5
    block = HopperBlocks(32, "fp8").pack(codes, torch.zeros(16, 2, dtype=torch.uint8))[0, 0]
    words = block[:512].contiguous().view(torch.int32)
    lane, word = 4 * 3 + element // 16, element % 16 // 4
    assert words.nonzero().flatten().tolist() == [4 * lane + word]
    value = int(words[4 * lane + word]) & 0xFFFFFFFF
    place = element % 4
    assert (value & 0x77777777) >> (16 * (row > 8)) == 5 << (4 * place)
    assert (value << (4 * (row > 8))) & 0x80808080 == 0x80 << (8 * place)


def test_scales_lie_by_lane():
    codes, sf = torch.zeros(16, 32, dtype=torch.uint8), torch.arange(64, dtype=torch.uint8)
    block = HopperBlocks(16).pack(codes, sf.view(16, 4))[0, 0]
    lane = 4 * 5 + 2  # rows 5 and 13, elements 32 to 47
    assert block[512 + 2 * lane :][:2].tolist() == [5 * 4 + 2, 13 * 4 + 2]
    block = HopperBlocks(32).pack(codes, sf[:32].view(16, 2))[0, 0]
    assert block[512 + 16 * 1 + 2 * 5 :][:2].tolist() == [5 * 2 + 1, 13 * 2 + 1]


def test_padding_is_zero():
    codes = torch.full((3, 16), 0xFF, dtype=torch.uint8)
    block = HopperBlocks(16).pack(codes, torch.full((3, 2), 0xFF, dtype=torch.uint8))
    assert int(block.count_nonzero()) <= 3 * 16 + 3 * 2 + 2 * 16 * 3
    back, scales = HopperBlocks(16).unpack(block, (16, 64))
    assert not back[3:].any()
    assert not back[:, 16:].any()
    assert not scales[3:].any()


def test_bad_shapes_are_named():
    with pytest.raises(LayoutError, match="K of whole scales"):
        HopperBlocks(32).pack(*matrix(16, 48, 16))
    with pytest.raises(LayoutError, match="scales"):
        HopperBlocks(16).pack(matrix(16, 64, 16)[0], matrix(16, 32, 16)[1])
