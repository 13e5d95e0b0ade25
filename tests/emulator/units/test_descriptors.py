"""Instruction and shared-memory descriptors: fields, legality, and where tiles lie."""

from __future__ import annotations

import numpy as np
import pytest

from rubin_moe.emulator.isa.descriptors import (
    SmemDescriptor,
    decode_instruction,
    decode_tcgen05_smem,
    decode_wgmma_smem,
)
from rubin_moe.emulator.isa.elements import Element, ScaleFormat
from rubin_moe.emulator.isa.legality import IllegalOperationError

from .machine import block_scaled_idesc, plain_idesc, smem_desc


def test_block_scaled_fields() -> None:
    # M = 256, N = 192, UE5M3, SFA id 2, SFB id 1, K = 128, A negated: written bit by bit
    word = 1 << 3 | 1 << 4 | 1 << 7 | 1 << 10 | 1 << 13 | 24 << 17 | 2 << 23 | 2 << 27 | 2 << 29
    d = decode_instruction(word, "mxf4nvf4", "sm_107a", 2, 16)
    assert (d.m, d.n, d.k, d.num_scales) == (256, 192, 128, 8)
    assert (d.a, d.b, d.scale) == (Element.E2M1, Element.E2M1, ScaleFormat.UE5M3)
    assert (d.a_sf_id, d.b_sf_id, d.a_negate, d.b_negate) == (2, 1, True, False)


def test_plain_fields() -> None:
    word = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 14 | 1 << 15 | 10 << 17 | 4 << 24
    d = decode_instruction(word, "f16", "sm_100a", 1)
    assert (d.m, d.n, d.k, d.d) == (64, 80, 16, "f32")
    assert (d.a, d.b) == (Element.BF16, Element.BF16)
    assert (d.a_negate, d.b_negate, d.a_mn_major, d.b_mn_major) == (False, True, True, False)


@pytest.mark.parametrize(
    ("kind", "arch", "bits", "k"),
    [
        ("mxf4nvf4", "sm_100a", 0, 64),
        ("mxf4nvf4", "sm_103a", 1 << 31, 96),
        ("mxf4nvf4", "sm_107a", 1 << 3, 128),
        ("mxf4nvf4", "sm_107a", 0, 64),
        ("mxf8f6f4", "sm_100a", 0, 32),
        ("mxf8f6f4", "sm_107a", 1 << 31, 64),
        ("mxf8f6f4", "sm_107a", 0, 32),
    ],
)
def test_k_comes_from_the_descriptor(kind: str, arch: str, bits: int, k: int) -> None:
    scale = 1 if kind == "mxf8f6f4" else 0
    word = block_scaled_idesc(kind, 128, 64, scale=scale) | bits
    vec = 32 if kind == "mxf8f6f4" else 16
    assert decode_instruction(word, kind, arch, 1, vec).k == k


def test_format_code_of_the_wrong_kind_decodes_to_what_it_means() -> None:
    # code 1 is E2M1 under mxf4 and E5M2 under mxf8f6f4; nothing in the descriptor tells them apart
    word = block_scaled_idesc("mxf8f6f4", 128, 64, a=1, b=0, scale=1)
    assert decode_instruction(word, "mxf8f6f4", "sm_107a", 1, 32).a is Element.E5M2


ILLEGAL = [
    ("instruction descriptor: N", "mxf4nvf4", "sm_107a", 1, 16, lambda w: w & ~(63 << 17)),
    ("instruction descriptor: N", "mxf4nvf4", "sm_107a", 1, 16, lambda w: w | 33 << 17),
    (
        "instruction descriptor: N",
        "mxf4nvf4",
        "sm_107a",
        2,
        16,
        lambda w: w + (1 << 27) + (1 << 17),
    ),
    ("instruction descriptor: M", "mxf4nvf4", "sm_107a", 1, 16, lambda w: w + (1 << 27)),
    ("instruction descriptor: K size", "mxf4nvf4", "sm_100a", 1, 16, lambda w: w | 1 << 31),
    ("instruction descriptor: K size", "mxf4nvf4", "sm_107a", 1, 16, lambda w: w | 1 << 31 | 8),
    ("instruction descriptor: undefined field", "mxf4nvf4", "sm_100a", 1, 16, lambda w: w | 8),
    ("instruction descriptor: undefined field", "mxf4nvf4", "sm_107a", 1, 16, lambda w: w | 1 << 6),
    (
        "instruction descriptor: undefined field",
        "mxf4nvf4",
        "sm_107a",
        1,
        16,
        lambda w: w | 1 << 26,
    ),
    (
        "instruction descriptor: undefined field",
        "mxf4nvf4",
        "sm_103a",
        1,
        16,
        lambda w: w | 2 << 23,
    ),
    ("instruction descriptor: format code", "mxf4nvf4", "sm_107a", 1, 16, lambda w: w ^ 5 << 7),
    ("instruction descriptor: scale format", "mxf4nvf4", "sm_107a", 1, 16, lambda w: w | 3 << 23),
    ("instruction descriptor: scale format", "mxf4nvf4", "sm_100a", 1, 32, lambda w: w),
    ("instruction descriptor: sparsity", "mxf4nvf4", "sm_107a", 1, 16, lambda w: w | 4),
    ("instruction descriptor: major", "mxf4nvf4", "sm_107a", 1, 16, lambda w: w | 1 << 15),
    ("tcgen05.mma: scale vector", "mxf4", "sm_107a", 1, 16, lambda w: w | 1 << 23),
    ("tcgen05.mma: kind", "mxf5", "sm_107a", 1, 16, lambda w: w),
    ("tensor memory: architecture", "mxf4nvf4", "sm_90a", 1, 16, lambda w: w),
]


@pytest.mark.parametrize(("rule", "kind", "arch", "group", "vec", "change"), ILLEGAL)
def test_illegal_block_scaled(rule, kind, arch, group, vec, change) -> None:
    word = change(block_scaled_idesc(kind, 128, 64))
    with pytest.raises(IllegalOperationError) as error:
        decode_instruction(word, kind, arch, group, vec)
    assert error.value.rule == rule


def test_fp8_half_m_has_no_double_k_on_sm_107a() -> None:
    word = plain_idesc("f8f6f4", 64, 64) | 1 << 29
    with pytest.raises(IllegalOperationError, match=r"M = 64, K = 64") as error:
        decode_instruction(word, "f8f6f4", "sm_107a", 1)
    assert error.value.rule == "instruction descriptor: M"
    assert decode_instruction(plain_idesc("f8f6f4", 64, 64), "f8f6f4", "sm_107a", 1).k == 32
    assert (
        decode_instruction(plain_idesc("f8f6f4", 128, 64) | 1 << 29, "f8f6f4", "sm_107a", 1).k == 64
    )


def test_i8_left_after_sm_100a() -> None:
    word = plain_idesc("i8", 128, 64)
    assert decode_instruction(word, "i8", "sm_100a", 1).d == "s32"
    with pytest.raises(IllegalOperationError, match="not available on sm_103a"):
        decode_instruction(word, "i8", "sm_103a", 1)


def test_smem_descriptor_fields() -> None:
    word = smem_desc(0x4A0, 0x2000, 0x400, 128)
    assert decode_tcgen05_smem(word, "sm_107a") == SmemDescriptor(0x4A0, 0x2000, 0x400, 0, 128)
    # 15 bits of start address reach past 256 KiB on sm_107a only
    assert decode_tcgen05_smem(smem_desc(0x48000, 16, 1024, 64), "sm_107a").start == 0x48000
    for change, arch, rule in [
        (smem_desc(0x48000, 16, 1024, 64), "sm_100a", "undefined field"),
        (word | 1 << 52, "sm_100a", "undefined field"),
        (word | 1 << 54, "sm_107a", "undefined field"),
        (word ^ 1 << 46, "sm_107a", "version"),
        (word | 1 << 61, "sm_107a", "swizzle"),
    ]:
        with pytest.raises(IllegalOperationError) as error:
            decode_tcgen05_smem(change, arch)
        assert error.value.rule == f"shared-memory descriptor: {rule}"


def test_wgmma_descriptor_fields() -> None:
    word = 0x1230 >> 4 | (0x80 >> 4) << 16 | (0x400 >> 4) << 32 | 3 << 49 | 2 << 62
    assert decode_wgmma_smem(word) == SmemDescriptor(0x1230, 0x80, 0x400, 3, 64)
    with pytest.raises(IllegalOperationError):
        decode_wgmma_smem(word | 1 << 52)


# 16-byte chunk that lies at position p of row r, PTX ISA "shared memory swizzling modes"
SWIZZLE_128 = ["01234567", "10325476", "23016745", "32107654"]
SWIZZLE_128 += ["45670123", "54761032", "67452301", "76543210"]
SWIZZLE_64 = ["0123", "0123", "1032", "1032", "2301", "2301", "3210", "3210"]
SWIZZLE_32 = ["01", "01", "01", "01", "10", "10", "10", "10"]


@pytest.mark.parametrize(
    ("swizzle", "golden"), [(128, SWIZZLE_128), (64, SWIZZLE_64), (32, SWIZZLE_32)]
)
def test_k_major_swizzle_golden(swizzle: int, golden: list[str]) -> None:
    count = swizzle // 16
    base, table = SmemDescriptor(2048, 16, 8 * swizzle, 0, swizzle).chunks(16, count)
    assert base == 2048
    for r in range(16):
        for position, chunk in enumerate(golden[r % 8]):
            assert table.offsets[r, int(chunk)] == r * swizzle + 16 * position


def test_k_offset_inside_the_swizzle_atom() -> None:
    # the second half of a 128-byte row: chunks 4-7, whose places come from the same table
    _, table = SmemDescriptor(64, 16, 1024, 0, 128).chunks(8, 4)
    for r in range(8):
        for chunk in range(4):
            assert table.offsets[r, chunk] == r * 128 + 16 * SWIZZLE_128[r].index(str(chunk + 4))


def test_k_major_without_swizzle() -> None:
    # core matrices of 8 rows x 16 bytes: SBO from row group to row group, LBO along K
    _, table = SmemDescriptor(0, 4096, 128, 0, 0).chunks(16, 2)
    assert table.offsets[7, 0] == 112
    assert table.offsets[8, 0] == 128
    assert table.offsets[9, 1] == 4096 + 144


def test_mn_major_golden() -> None:
    # 128-byte swizzle: row k holds 64 16-bit elements of M; SBO along K, LBO along M
    _, table = SmemDescriptor(0, 4096, 1024, 0, 128).chunks(16, 16, mn_major=True)
    for k in range(16):
        for position, chunk in enumerate(SWIZZLE_128[k % 8]):
            at = k // 8 * 1024 + k % 8 * 128 + 16 * position
            assert table.offsets[k, int(chunk)] == at
            assert table.offsets[k, int(chunk) + 8] == 4096 + at
    # no swizzle: SBO along M, LBO along K
    _, table = SmemDescriptor(0, 2048, 128, 0, 0).chunks(16, 4, mn_major=True)
    assert table.offsets[3, 2] == 2 * 128 + 48
    assert table.offsets[9, 1] == 2048 + 128 + 16


def test_circular_descriptor_of_sm_103a() -> None:
    # 48 bytes from byte 96 of a 128-byte row: two chunks here, one at the start of the next buffer
    word = smem_desc(0x4000 + 96, 0x8000, 1024, 128, absolute=True)
    base, table = decode_tcgen05_smem(word, "sm_103a").chunks(128, 3)
    for r in (0, 5, 77):
        inside = [16 * SWIZZLE_128[r % 8].index(str(c)) for c in (6, 7)]
        beyond = 16 * SWIZZLE_128[r % 8].index("0")
        expected = [0x4000 + 128 * r + x for x in inside] + [0x8000 + 128 * r + beyond]
        assert (base + table.offsets[r]).tolist() == expected
    relative = smem_desc(0x4000 + 96, 16, 1024, 128)
    with pytest.raises(IllegalOperationError) as error:
        decode_tcgen05_smem(relative, "sm_103a").chunks(128, 3)
    assert error.value.rule == "shared-memory descriptor: K extent"


def test_ranges_are_merged_and_cover_the_tile() -> None:
    _, table = SmemDescriptor(1024, 16, 1024, 0, 128).chunks(128, 8)
    assert table.ranges.tolist() == [[0, 16384]]
    _, table = SmemDescriptor(1024 + 32, 16, 1024, 0, 128).chunks(16, 2)
    covered = {byte for low, high in table.ranges for byte in range(low, high)}
    assert covered == {int(o) + i for o in table.offsets.ravel() for i in range(16)}
    assert np.diff(table.ranges, axis=1).min() > 0
