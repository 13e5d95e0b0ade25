"""tcgen05.ld, st and cp: fragment maps against the PTX ISA's figures, written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rubin_moe.emulator.isa import tcgen05_data
from rubin_moe.emulator.isa.legality import IllegalOperationError
from rubin_moe.emulator.state.tmem import TensorMemory, allocation_sizes

from .machine import FakeCluster, smem_desc, xor_swizzle

# (thread, register) -> (lane, column), read off the figures "matrix fragment for shape ..."
GOLDEN = {
    ("32x32b", 4): {(0, 0): (0, 0), (31, 3): (31, 3), (17, 2): (17, 2)},
    ("16x64b", 2): {
        (0, 0): (0, 0),
        (1, 0): (8, 0),
        (2, 0): (0, 1),
        (3, 0): (8, 1),
        (4, 0): (1, 0),
        (31, 0): (15, 1),
        (0, 1): (0, 2),
        (30, 1): (7, 3),
    },
    ("16x128b", 2): {
        (0, 0): (0, 0),
        (3, 0): (0, 3),
        (4, 0): (1, 0),
        (31, 0): (7, 3),
        (0, 1): (8, 0),
        (31, 1): (15, 3),
        (0, 2): (0, 4),
        (5, 3): (9, 5),
    },
    ("16x256b", 2): {
        (0, 0): (0, 0),
        (0, 1): (0, 1),
        (1, 0): (0, 2),
        (3, 1): (0, 7),
        (4, 0): (1, 0),
        (0, 2): (8, 0),
        (31, 3): (15, 7),
        (0, 4): (0, 8),
        (2, 7): (8, 13),
    },
    ("16x32bx2", 2): {(0, 0): (0, 0), (15, 1): (15, 1), (16, 0): (0, 0), (31, 1): (15, 1)},
}


@pytest.mark.parametrize(("shape", "num"), GOLDEN)
def test_fragment_golden(shape: str, num: int) -> None:
    lane, column = tcgen05_data.fragment_map(shape, num)
    for (thread, register), place in GOLDEN[shape, num].items():
        assert (lane[register, thread], column[register, thread]) == place


@pytest.mark.parametrize("shape", tcgen05_data.SHAPES)
def test_fragments_cover_their_box_once(shape: str) -> None:
    lanes, columns, registers, largest = tcgen05_data.SHAPES[shape]
    for num in (1, 2, 4, 8, 16, 32, 64, 128):
        if num > largest:
            continue
        lane, column = tcgen05_data.fragment_map(shape, num)
        assert lane.shape == (registers * num, 32)
        split = columns * num * (np.arange(32) >= 16) if shape == "16x32bx2" else 0
        cells = set(zip(lane.ravel().tolist(), (column + split).ravel().tolist(), strict=True))
        width = columns * num * (2 if shape == "16x32bx2" else 1)
        assert cells == {(i, j) for i in range(lanes) for j in range(width)}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("shape", "num", "lane"), [("32x32b", 8, 64), ("16x64b", 4, 80), ("16x256b", 2, 64)]
)
def test_store_then_load(shape: str, num: int, lane: int, packed: bool) -> None:
    rng = np.random.default_rng(num)
    cells = np.zeros((128, 576), np.uint32)
    access = tcgen05_data.decode_access("sm_107a", shape, num, lane << 16 | 40, 6, packed)
    registers = rng.integers(0, 1 << 32, (access.registers, 32), dtype=np.uint32)
    access.store(cells, registers)
    np.testing.assert_array_equal(access.load(cells), registers)
    first, lanes, column, columns = access.box
    inside = cells[first : first + lanes, column : column + columns]
    assert np.count_nonzero(cells) == np.count_nonzero(inside)
    if packed:
        assert inside.max() < 1 << 16
        assert inside[access.lane[0, 5] - first, access.column[0, 5] - column] == (
            registers[0, 5] & 0xFFFF
        )


def test_quarter_zero_means_the_warps_own() -> None:
    for warp in (1, 6):
        own = 32 * (warp % 4)
        left_out = tcgen05_data.decode_access("sm_107a", "32x32b", 4, 8, warp)
        named = tcgen05_data.decode_access("sm_107a", "32x32b", 4, own << 16 | 8, warp)
        np.testing.assert_array_equal(left_out.lane, named.lane)
        assert left_out.box == (own, 32, 8, 4)


def test_split_of_16x32bx2() -> None:
    cells = np.arange(128 * 576, dtype=np.uint32).reshape(128, 576)
    access = tcgen05_data.decode_access("sm_107a", "16x32bx2", 4, 8, 0, False, 32)
    registers = access.load(cells)
    np.testing.assert_array_equal(registers[:, :16], cells[:16, 8:12].T)
    np.testing.assert_array_equal(registers[:, 16:], cells[:16, 40:44].T)


REFUSED = [
    ("tensor memory: lane quarter", ("sm_107a", "32x32b", 4, 64 << 16, 1)),
    ("tensor memory: lane quarter", ("sm_107a", "32x32b", 4, 16 << 16, 0)),
    ("tensor memory: lane quarter", ("sm_107a", "16x64b", 4, 8 << 16, 0)),
    ("tensor memory: column", ("sm_107a", "32x32b", 32, 560, 0)),
    ("tensor memory: column", ("sm_100a", "32x32b", 32, 500, 0)),
    ("tcgen05.ld/st: repeat", ("sm_107a", "16x256b", 64, 0, 0)),
    ("tcgen05.ld/st: repeat", ("sm_107a", "32x32b", 3, 0, 0)),
    ("tcgen05.ld/st: shape", ("sm_107a", "32x64b", 1, 0, 0)),
    ("tensor memory: architecture", ("sm_90a", "32x32b", 1, 0, 0)),
]


@pytest.mark.parametrize(("rule", "arguments"), REFUSED)
def test_refused_accesses(rule: str, arguments: tuple) -> None:
    with pytest.raises(IllegalOperationError) as error:
        tcgen05_data.decode_access(*arguments)
    assert error.value.rule == rule


def rows_of(cluster: FakeCluster, rank: int, lanes: list[int], column: int, width: int):
    cells = cluster.tmem(rank)[lanes, column : column + width]
    return np.ascontiguousarray(cells).view(np.uint8)


COPIES = [
    ("128x256b", "", lambda r: [r], 128, 32),
    ("128x128b", "", lambda r: [r], 128, 16),
    ("4x256b", "", lambda r: [32 * r], 4, 32),
    ("64x128b", "warpx2::02_13", lambda r: [r, r + 64], 64, 16),
    ("64x128b", "warpx2::01_23", lambda r: [r, r + 32] if r < 32 else [r + 32, r + 64], 64, 16),
    ("32x128b", "warpx4", lambda r: [r, r + 32, r + 64, r + 96], 32, 16),
]


@pytest.mark.parametrize("swizzle", [0, 32])
@pytest.mark.parametrize(("shape", "multicast", "lanes", "rows", "width"), COPIES)
def test_copy_shapes(shape, multicast, lanes, rows, width, swizzle) -> None:
    rng = np.random.default_rng(rows + width)
    data = rng.integers(0, 256, (rows, width)).astype(np.uint8)
    cluster = FakeCluster(2)
    for r in range(rows):
        for i in range(width):
            if swizzle:
                at = xor_swizzle(0x4000 + r * 32 + i, 32)
            else:
                at = 0x4000 + (r // 8) * 128 + (r % 8) * 16 + (i // 16) * 2048 + i % 16
            cluster.smem(1)[at] = data[r, i]
    desc = smem_desc(0x4000, 2048, 256 if swizzle else 128, swizzle)
    op = tcgen05_data.decode_copy("sm_107a", shape, multicast, 1, 1, 300, desc)
    tcgen05_data.perform(op, cluster)
    written = np.zeros((128, 576), bool)
    for r in range(rows):
        for lane in lanes(r):
            np.testing.assert_array_equal(rows_of(cluster, 1, [lane], 300, width // 4)[0], data[r])
            written[lane, 300 : 300 + width // 4] = True
    assert not cluster.tmem(1)[~written].any()
    assert not cluster.tmem(0).any()
    (footprint,) = op.writes()
    assert footprint.nbytes == 4 * written.sum()
    assert op.nbytes == rows * width


def test_pair_copies_each_ctas_own_tile() -> None:
    cluster = FakeCluster(2)
    for rank in range(2):
        cluster.smem(rank)[:512] = rank + 1
    op = tcgen05_data.decode_copy("sm_107a", "32x128b", "warpx4", 2, 1, 0, smem_desc(0, 16, 128, 0))
    assert op.ranks == (0, 1)
    tcgen05_data.perform(op, cluster)
    for rank in range(2):
        assert (cluster.tmem(rank)[:, :4] == (rank + 1) * 0x01010101).all()


@pytest.mark.parametrize(("form", "bits"), [("b8x16.b4x16_p64", 4), ("b8x16.b6x16_p32", 6)])
def test_expanding_copy(form: str, bits: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (128, 16)).astype(np.uint8)
    flat = (codes[:, :, None] >> np.arange(bits)) & 1
    packed = np.packbits(flat.reshape(128, -1), axis=1, bitorder="little")
    cluster = FakeCluster()
    for r in range(128):
        at = (r // 8) * 128 + (r % 8) * 16
        cluster.smem(0)[at : at + 2 * bits] = packed[r]
        cluster.smem(0)[at + 2 * bits : at + 16] = 0xFF
    desc = smem_desc(0, 16, 128, 0)
    op = tcgen05_data.decode_copy("sm_100a", "128x128b", "", 1, 0, 0, desc, form)
    tcgen05_data.perform(op, cluster)
    np.testing.assert_array_equal(rows_of(cluster, 0, list(range(128)), 0, 4), codes)


def test_refused_copies() -> None:
    desc = smem_desc(0, 16, 128, 0)
    for rule, arguments in [
        ("tcgen05.cp: shape", ("sm_107a", "32x128b", "", 1, 0, 0, desc)),
        ("tcgen05.cp: lane", ("sm_107a", "32x128b", "warpx4", 1, 0, 32 << 16, desc)),
        ("tensor memory: column", ("sm_107a", "32x128b", "warpx4", 1, 0, 573, desc)),
        ("tensor memory: column", ("sm_100a", "32x128b", "warpx4", 1, 0, 512, desc)),
        ("tcgen05.cp: format", ("sm_107a", "128x128b", "", 1, 0, 0, desc, "b8x16.b5")),
    ]:
        with pytest.raises(IllegalOperationError) as error:
            tcgen05_data.decode_copy(*arguments)
        assert error.value.rule == rule
    with pytest.raises(IllegalOperationError, match="not modelled"):
        tcgen05_data.refuse_shift()


def test_allocation() -> None:
    assert allocation_sizes("sm_100a") == (32, 64, 128, 256, 512)
    assert allocation_sizes("sm_107a") == (32, 64, 128, 256, 512, 544, 576)
    memory = TensorMemory("sm_107a")
    assert [memory.allocate(n) for n in (256, 128, 64)] == [0, 256, 384]
    assert memory.owns(200, 200)
    assert not memory.owns(400, 64)
    memory.free(256, 128)
    assert memory.allocate(256) is None
    assert memory.allocate(32) == 256
    assert memory.allocate(128) == 448
    assert memory.peak == 480
    for arguments in [(0, 128), (64, 64), (256, 64)]:
        with pytest.raises(IllegalOperationError) as error:
            memory.free(*arguments)
        assert error.value.rule == "tcgen05.dealloc: allocation"
    with pytest.raises(IllegalOperationError, match="exits holding"):
        memory.check_freed()
    for columns in (48, 96, 608, 0):
        with pytest.raises(IllegalOperationError):
            memory.allocate(columns)
    memory.relinquish()
    with pytest.raises(IllegalOperationError) as error:
        memory.allocate(32)
    assert error.value.rule == "tcgen05.alloc: permit"


def test_more_than_512_columns_are_exclusive() -> None:
    memory = TensorMemory("sm_107a")
    with pytest.raises(IllegalOperationError, match=r"544 columns without \.exclusive"):
        memory.allocate(544)
    assert memory.allocate(544, exclusive=True) == 0


def test_exclusive_allocation_waits_and_keeps_others_out() -> None:
    memory = TensorMemory("sm_107a")
    assert memory.allocate(64) == 0
    assert memory.allocate(576, exclusive=True) is None
    memory.free(0, 64)
    assert memory.allocate(576, exclusive=True) == 0
    assert memory.allocate(32) is None
    memory.free(0, 576)
    memory.check_freed()
    with pytest.raises(IllegalOperationError):
        TensorMemory("sm_100a").allocate(544)
