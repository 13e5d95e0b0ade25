"""Tiles of the Triton kernels: round trips, padding, and where an element goes."""

import pytest
import torch

from rubin_moe.errors import LayoutError
from rubin_moe.layouts.fp4_planes import CodePlanes, ScaleTiles

SIZES = [(64, 128), (1, 32), (96, 288), (130, 32), (64, 2880), (0, 64), (64, 0)]


def random_bytes(n: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n + width)
    return torch.randint(0, 256, (n, width), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_codes_round_trip(n, k):
    codes, layout = random_bytes(n, k // 2), CodePlanes()
    before = codes.clone()
    stored = layout.pack(codes)
    assert stored.shape == layout.storage_shape((n, k // 2))
    assert stored.is_contiguous()
    assert torch.equal(layout.unpack(stored, (n, k // 2)), codes)
    assert torch.equal(codes, before)


@pytest.mark.parametrize("vec", [16, 32])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_scales_round_trip(n, k, vec):
    scales, layout = random_bytes(n, k // vec), ScaleTiles(vec)
    stored = layout.pack(scales)
    assert stored.shape == layout.storage_shape((n, k // vec))
    assert stored.shape[-1] == 128 // vec
    assert torch.equal(layout.unpack(stored, (n, k // vec)), scales)


@pytest.mark.parametrize("element", [0, 1, 63, 64, 65, 127, 128, 193, 255])
def test_where_an_element_goes(element):
    """Row 70 of two tiles by two: the low nibble is the tile's first 64 of K."""
    codes = torch.zeros(128, 128, dtype=torch.uint8)
    codes[70, element // 2] = 0xB << (4 * (element % 2))
    stored = CodePlanes().pack(codes)
    tile, inside = divmod(element, 128)
    assert stored.nonzero().tolist() == [[1, tile, 6, inside % 64]]
    assert int(stored.max()) == (0xB0 if inside >= 64 else 0x0B)


def test_where_a_scale_goes():
    scales = torch.zeros(70, 20, dtype=torch.uint8)
    scales[65, 13] = 9
    assert ScaleTiles(16).pack(scales).nonzero().tolist() == [[1, 1, 1, 5]]


def test_padding_is_zero_and_packing_into_memory_writes_it():
    codes = torch.full((3, 16), 0xFF, dtype=torch.uint8)
    stored = torch.full(CodePlanes().storage_shape((3, 16)), 0x55, dtype=torch.uint8)
    CodePlanes().pack_into(codes, stored)
    assert int(stored.count_nonzero()) == 3 * 32
    assert torch.equal(stored, CodePlanes().pack(codes))
    scales = torch.full(ScaleTiles(16).storage_shape((3, 2)), 0x55, dtype=torch.uint8)
    ScaleTiles(16).pack_into(codes[:, :2], scales)
    assert int(scales.count_nonzero()) == 3 * 2


def test_bad_shapes_are_named():
    with pytest.raises(LayoutError, match=r"a matrix expected, got shape \[2, 3, 4\]"):
        CodePlanes().storage_shape((2, 3, 4))
    with pytest.raises(LayoutError, match=r"stored \[1, 1, 64, 64\], expected \[2, 1, 64, 64\]"):
        CodePlanes().unpack(torch.zeros(1, 1, 64, 64, dtype=torch.uint8), (65, 64))
    assert CodePlanes().key != ScaleTiles(16).key != ScaleTiles(32).key
