"""Tensor maps and TMA against element-by-element references; bulk copies and cp.async."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from rubin_moe.emulator.isa import bulk_copy
from rubin_moe.emulator.isa.legality import IllegalOperationError
from rubin_moe.emulator.isa.reductions import reduce_bytes
from rubin_moe.emulator.state.tensormap import decode_tensormap

from .machine import FakeCluster, GlobalBytes, tensor_map, xor_swizzle

AT = 0x2000


def filled(cluster: FakeCluster, value: int = 0xEE) -> None:
    for rank in range(cluster.size):
        cluster.smem(rank)[:] = value


def test_tensor_map_fields() -> None:
    raw = tensor_map(
        0x7F0000001000, 10, (100, 7, 5, 3, 2), (208, 1456, 7280, 1 << 37), (64, 3, 1, 2, 1), 128
    )
    t = decode_tensormap(raw)
    assert (t.base, t.format.name, t.swizzle, t.rank) == (0x7F0000001000, "bf16", 128, 5)
    assert t.dims == (100, 7, 5, 3, 2)
    assert t.strides == (208, 1456, 7280, 1 << 37)
    assert t.box == (64, 3, 1, 2, 1)
    assert t.nbytes == 64 * 2 * 6


def reference_box(data, coordinates, box):
    """Elements of a box (numpy order: outermost first), zero outside the tensor."""
    out = np.zeros(box[::-1], data.dtype)
    for index in itertools.product(*(range(b) for b in box[::-1])):
        at = tuple(i + c for i, c in zip(index, coordinates[::-1], strict=True))
        if all(0 <= i < d for i, d in zip(at, data.shape, strict=True)):
            out[index] = data[at]
    return out


def box_places(box: tuple[int, ...], size: int, swizzle: int) -> list[int]:
    """Shared address of every byte of a box at AT; a swizzled row takes the swizzle's width."""
    inner = box[0] * size
    rows = int(np.prod(box[1:], dtype=int))
    pitch = swizzle or inner
    return [xor_swizzle(AT + r * pitch + i, swizzle) for r in range(rows) for i in range(inner)]


SHAPES = {
    1: ((200,), (64,), [(0,), (144,), (-32,), (176,), (512,)]),
    2: ((80, 24), (32, 8), [(0, 0), (16, 3), (64, 20), (-16, -5), (48, 30)]),
    3: ((48, 6, 5), (32, 2, 3), [(0, 0, 0), (32, 5, 4), (-16, -1, -2)]),
    4: ((32, 3, 4, 3), (16, 2, 2, 2), [(0, 0, 0, 0), (16, 2, 3, 2), (16, -1, 1, -1)]),
    5: (
        (32, 2, 3, 2, 3),
        (16, 2, 2, 1, 2),
        [(0, 0, 0, 0, 0), (16, 1, 2, 1, 2), (16, -1, 0, 0, -1)],
    ),
}
CODES = {1: np.uint8, 2: np.float16, 4: np.float32}


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("size", CODES)
@pytest.mark.parametrize("rank", SHAPES)
def test_tile_loads_and_stores(rank: int, size: int, swizzle: int) -> None:
    dims, box, corners = SHAPES[rank]
    if swizzle and box[0] * size > swizzle:
        pytest.skip("the inner box is wider than the swizzle")
    rng = np.random.default_rng(rank * 100 + size)
    code = {1: 0, 2: 1, 4: 2}[size]
    data = rng.integers(1, 256, (*dims[::-1], size)).astype(np.uint8)
    data = data.view(f"u{size}")[..., 0]
    strides = tuple(int(s) for s in data.strides[::-1][1:])
    memory = GlobalBytes(data)
    raw = tensor_map(memory.base, code, dims, strides, box, swizzle)
    cluster = FakeCluster()
    for place in corners:
        filled(cluster)
        op = bulk_copy.decode_tensor_load(raw, place, AT, 8)
        op.perform(cluster, memory)
        expected = reference_box(data, place, box).reshape(-1).view(np.uint8)
        places = box_places(box, size, swizzle)
        np.testing.assert_array_equal(cluster.smem(0)[places], expected)
        assert op.signals == ((0, 8, expected.size),)
        assert (np.delete(cluster.smem(0), places) == 0xEE).all()

        if min(place) < 0:
            with pytest.raises(IllegalOperationError, match="negative store coordinate"):
                bulk_copy.decode_tensor_store(raw, place, AT)
            continue
        before = memory.bytes.copy()
        tile = rng.integers(0, 256, expected.size).astype(np.uint8)
        cluster.smem(0)[places] = tile
        store = bulk_copy.decode_tensor_store(raw, place, AT)
        store.perform(cluster, memory)
        after = before.view(f"u{size}").reshape(data.shape).copy()
        written = np.zeros(data.shape, bool)
        values = tile.view(f"u{size}").reshape(box[::-1])
        for index in itertools.product(*(range(b) for b in box[::-1])):
            at = tuple(i + c for i, c in zip(index, place[::-1], strict=True))
            if all(0 <= i < d for i, d in zip(at, data.shape, strict=True)):
                after[at], written[at] = values[index], True
        np.testing.assert_array_equal(memory.bytes, after.reshape(-1).view(np.uint8))
        covered = sum(int(stop - start) for f in store.writes() for start, stop in f.ranges)
        assert covered == written.sum() * size
        memory.bytes[:] = before


# 16-byte chunk at position p of 128-byte row r, PTX ISA "shared memory swizzling modes"
GOLDEN_128 = ["01234567", "10325476", "23016745", "32107654"]
GOLDEN_128 += ["45670123", "54761032", "67452301", "76543210"]
GOLDEN_64 = ["0123", "0123", "1032", "1032", "2301", "2301", "3210", "3210"]
GOLDEN_32 = ["01", "01", "01", "01", "10", "10", "10", "10"]


@pytest.mark.parametrize(
    ("swizzle", "golden"), [(128, GOLDEN_128), (64, GOLDEN_64), (32, GOLDEN_32)]
)
def test_swizzle_golden(swizzle: int, golden: list[str]) -> None:
    data = np.zeros((16, swizzle), np.uint8)
    for r in range(16):
        for chunk in range(swizzle // 16):
            data[r, 16 * chunk : 16 * chunk + 16] = 16 * r + chunk
    memory = GlobalBytes(data)
    raw = tensor_map(memory.base, 0, (swizzle, 16), (swizzle,), (swizzle, 16), swizzle)
    cluster = FakeCluster()
    bulk_copy.decode_tensor_load(raw, (0, 0), 0, 0x8000).perform(cluster, memory)
    box = cluster.smem(0)[: 16 * swizzle].reshape(16, swizzle // 16, 16)
    for r in range(16):
        assert [int(x) - 16 * r for x in box[r, :, 0]] == [int(c) for c in golden[r % 8]]
    # the phase comes from the address, not from the first row of the box
    bulk_copy.decode_tensor_load(raw, (0, 0), 0x4000 + 256, 0x8000).perform(cluster, memory)
    row = cluster.smem(0)[0x4000 + 256 : 0x4000 + 256 + swizzle : 16]
    phase = 256 // swizzle % 8
    assert [int(x) for x in row] == [int(c) for c in golden[phase]]


def test_packed_and_padded_sub_byte_formats() -> None:
    rng = np.random.default_rng(7)
    data = rng.integers(0, 256, (8, 192)).astype(np.uint8)
    memory, cluster = GlobalBytes(data), FakeCluster()
    # 4-bit packed: 256 elements are 128 bytes, moved as they are
    raw = tensor_map(memory.base, 11, (384, 8), (192,), (256, 8), 128)
    op = bulk_copy.decode_tensor_load(raw, (128, 0), 0, 0x8000)
    op.perform(cluster, memory)
    assert op.nbytes == 1024
    found = [cluster.smem(0)[xor_swizzle(128 * 3 + i, 128)] for i in range(128)]
    np.testing.assert_array_equal(found, data[3, 64:192])
    # 4-bit padded: 8 bytes of codes, 8 bytes of padding
    raw = tensor_map(memory.base, 12, (384, 8), (192,), (128, 8), 0)
    op = bulk_copy.decode_tensor_load(raw, (256, 1), 0, 0x8000)
    op.perform(cluster, memory)
    # the barrier counts codes, not padding
    assert (op.nbytes, op.signals) == (1024, ((0, 0x8000, 512),))
    box = cluster.smem(0)[:1024].reshape(8, 8, 16)
    np.testing.assert_array_equal(box[:7, :, :8], data[1:, 128:192].reshape(7, 8, 8))
    assert not box[:, :, 8:].any()
    assert not box[7].any()
    # 6-bit padded: 12 bytes of codes, 4 of padding
    raw = tensor_map(memory.base, 13, (256, 8), (192,), (128, 8), 0)
    bulk_copy.decode_tensor_load(raw, (128, 0), 0, 0x8000).perform(cluster, memory)
    box = cluster.smem(0)[:1024].reshape(8, 8, 16)
    np.testing.assert_array_equal(box[:, :, :12], data[:, 96:192].reshape(8, 8, 12))


def test_multicast_and_pair_signals() -> None:
    data = np.arange(64 * 8, dtype=np.uint16).reshape(8, 64)
    memory = GlobalBytes(data)
    raw = tensor_map(memory.base, 1, (64, 8), (128,), (64, 8), 128)
    cluster = FakeCluster(4)
    filled(cluster)
    op = bulk_copy.decode_tensor_load(raw, (0, 0), AT, 0x40, multicast=0b1011)
    op.perform(cluster, memory)
    assert op.signals == ((0, 0x40, 1024), (1, 0x40, 1024), (3, 0x40, 1024))
    for rank in (1, 3):
        np.testing.assert_array_equal(cluster.smem(rank), cluster.smem(0))
    assert (cluster.smem(2) == 0xEE).all()
    # cta_group::2: every copy signals the member of its pair that the operand names
    op = bulk_copy.decode_tensor_load(raw, (0, 0), AT, 0x40, multicast=0b1011, cta_group=2)
    assert op.signals == ((0, 0x40, 1024), (0, 0x40, 1024), (2, 0x40, 1024))
    op = bulk_copy.decode_tensor_load(raw, (0, 0), AT | 1 << 24, 0x40, cta_group=2)
    assert (op.ranks, op.signals) == ((1,), ((0, 0x40, 1024),))
    with pytest.raises(IllegalOperationError) as error:
        bulk_copy.decode_tensor_load(raw, (0, 0), AT | 1 << 24, 0x40)
    assert error.value.rule == "tensor copy: mbarrier"


def test_gather4_and_scatter4() -> None:
    rng = np.random.default_rng(8)
    data = rng.integers(0, 256, (20, 256)).astype(np.uint8)
    memory, cluster = GlobalBytes(data), FakeCluster()
    raw = tensor_map(memory.base, 0, (256, 20), (256,), (128, 1), 128)
    rows = (7, 19, 20, -1)
    op = bulk_copy.decode_tensor_load(raw, (128, *rows), 0, 0x8000, mode="tile::gather4")
    op.perform(cluster, memory)
    assert op.nbytes == 512
    for i, row in enumerate(rows):
        found = [cluster.smem(0)[xor_swizzle(128 * i + j, 128)] for j in range(128)]
        expected = data[row, 128:] if 0 <= row < 20 else np.zeros(128, np.uint8)
        np.testing.assert_array_equal(found, expected)
    store = bulk_copy.decode_tensor_store(raw, (0, 3, 25, 4, -1), 0, mode="tile::scatter4")
    store.perform(cluster, memory)
    after = memory.bytes.reshape(20, 256)
    np.testing.assert_array_equal(after[3, :128], data[7, 128:])
    assert not after[4, :128].any()
    untouched = np.delete(np.arange(20), [3, 4])
    np.testing.assert_array_equal(after[untouched], data[untouched])


REDUCTIONS = [
    ("add", 2, np.uint32, lambda a, b: a + b),
    ("max", 3, np.int32, np.maximum),
    ("min", 2, np.uint32, np.minimum),
    ("xor", 2, np.uint32, np.bitwise_xor),
    ("add", 10, ml_dtypes.bfloat16, lambda a, b: a + b),
    ("add", 6, np.float16, lambda a, b: a + b),
    ("add", 7, np.float32, lambda a, b: a + b),
]


@pytest.mark.parametrize(("name", "code", "dtype", "function"), REDUCTIONS)
def test_tensor_reductions(name, code, dtype, function) -> None:
    rng = np.random.default_rng(code)
    size = np.dtype(dtype).itemsize
    old, new = (rng.integers(1, 100, (8, 32)).astype(dtype) for _ in range(2))
    memory, cluster = GlobalBytes(old), FakeCluster()
    raw = tensor_map(memory.base, code, (32, 8), (32 * size,), (32, 8), 0)
    cluster.smem(0)[AT : AT + new.nbytes] = new.reshape(-1).view(np.uint8)
    op = bulk_copy.decode_tensor_store(raw, (0, 4), AT, reduction=name)
    op.perform(cluster, memory)
    expected = old.copy()
    expected[4:] = function(old[4:], new[:4])
    np.testing.assert_array_equal(memory.bytes, expected.reshape(-1).view(np.uint8))


def test_not_a_number_fill_and_canonical_results() -> None:
    memory, cluster = GlobalBytes(np.zeros((8, 64), np.uint16)), FakeCluster()
    raw = bytearray(tensor_map(memory.base, 6, (64, 8), (128,), (16, 8), 0))
    raw[9] |= 0x80  # bit 15 of the second word, as the driver sets it for the NaN fill
    assert decode_tensormap(bytes(raw)).fill_nan
    bulk_copy.decode_tensor_load(bytes(raw), (56, 4), 0, 0x8000).perform(cluster, memory)
    box = cluster.smem(0)[:256].view(np.uint16).reshape(8, 16)
    assert (box[:4, :8] == 0).all()
    assert (box[:4, 8:] == 0x7FF7).all()
    assert (box[4:] == 0x7FF7).all()
    infinite = np.array([np.inf, 1], np.float16)
    total = reduce_bytes(infinite.view(np.uint8), (-infinite).view(np.uint8), "add", "f16")
    assert total.view(np.uint16).tolist() == [0x7FFF, 0]


def test_increment_and_decrement_wrap() -> None:
    old, limit = np.array([0, 4, 5, 9], np.uint32), np.array([5, 5, 5, 5], np.uint32)
    pair = (old.view(np.uint8), limit.view(np.uint8))
    assert reduce_bytes(*pair, "inc", "u32").view(np.uint32).tolist() == [1, 5, 0, 0]
    assert reduce_bytes(*pair, "dec", "u32").view(np.uint32).tolist() == [5, 3, 4, 5]
    with pytest.raises(IllegalOperationError):
        reduce_bytes(*pair, "inc", "f32")


def test_bulk_copies() -> None:
    data = np.arange(256, dtype=np.uint8)
    memory, cluster = GlobalBytes(data), FakeCluster(2)
    load = bulk_copy.decode_bulk_copy("gmem", memory.base + 16, "smem", AT, 64, mbarrier=8)
    load.perform(cluster, memory)
    np.testing.assert_array_equal(cluster.smem(0)[AT : AT + 64], data[16:80])
    assert load.signals == ((0, 8, 64),)
    peer = bulk_copy.decode_bulk_copy("smem", AT, "smem", AT | 1 << 24, 32, mbarrier=8 | 1 << 24)
    peer.perform(cluster, memory)
    np.testing.assert_array_equal(cluster.smem(1)[AT : AT + 32], data[16:48])
    assert peer.signals == ((1, 8, 32),)
    store = bulk_copy.decode_bulk_copy("smem", AT, "gmem", memory.base + 128, 32)
    store.perform(cluster, memory)
    np.testing.assert_array_equal(memory.bytes[128:160], data[16:48])
    add = bulk_copy.decode_bulk_copy(
        "smem", AT, "gmem", memory.base + 128, 32, reduction="add", element="u32"
    )
    add.perform(cluster, memory)
    expected = 2 * data[16:48].view(np.uint32)
    np.testing.assert_array_equal(memory.bytes[128:160].view(np.uint32), expected)
    with pytest.raises(IllegalOperationError, match="not a multiple of 16"):
        bulk_copy.decode_bulk_copy("gmem", memory.base + 8, "smem", AT, 64, mbarrier=8)


@pytest.mark.parametrize(("size", "read"), [(16, 16), (16, 5), (16, 0), (8, 3), (4, 4)])
def test_async_copy_zero_fill(size: int, read: int) -> None:
    data = np.arange(1, 65, dtype=np.uint8)
    memory, cluster = GlobalBytes(data), FakeCluster()
    filled(cluster)
    op = bulk_copy.decode_async_copy(AT, memory.base + 16, size, read)
    op.perform(cluster, memory)
    expected = np.zeros(size, np.uint8)
    expected[:read] = data[16 : 16 + read]
    np.testing.assert_array_equal(cluster.smem(0)[AT : AT + size], expected)
    assert cluster.smem(0)[AT + size] == 0xEE


def test_async_copy_refusals() -> None:
    for arguments in [(AT, 0, 12), (AT + 4, 0, 16), (AT, 4, 16), (AT, 0, 8, 9)]:
        with pytest.raises(IllegalOperationError):
            bulk_copy.decode_async_copy(*arguments)
    with pytest.raises(IllegalOperationError):
        bulk_copy.decode_async_copy(AT, 0, 8, bypass_l1=True)


REFUSED = [
    ("tensor copy: rank", (0,), {}),
    ("tensor copy: coordinate", (8, 0), {}),
    ("tensor copy: mode", (0, 0), {"mode": "im2col"}),
    ("tensor copy: rows of four", (0, 0, 1, 2, 3), {"mode": "tile::gather4"}),
    ("tensor copy: multicast", (0, 0), {"multicast": 0}),
    ("shared memory: alignment", (0, 0), {"destination": 16}),
]


@pytest.mark.parametrize(("rule", "coordinates", "change"), REFUSED)
def test_refused_loads(rule: str, coordinates: tuple[int, ...], change: dict) -> None:
    raw = tensor_map(4096, 0, (256, 20), (256,), (128, 8), 128)
    destination = change.pop("destination", 0)
    with pytest.raises(IllegalOperationError) as error:
        bulk_copy.decode_tensor_load(raw, coordinates, destination, 8, **change)
    assert error.value.rule == rule


def test_refused_tensor_maps() -> None:
    good = (4096, 0, (256, 20), (256,), (128, 8), 128)
    for index, value, rule in [
        (0, 4100, "base address"),
        (1, 14, "element format"),
        (4, (120, 8), "inner box"),
        (5, 64, "swizzle"),
    ]:
        arguments = [*good]
        arguments[index] = value
        with pytest.raises(IllegalOperationError) as error:
            decode_tensormap(tensor_map(*arguments))
        assert error.value.rule == f"tensor map: {rule}"


def test_box_past_the_end_of_shared_memory() -> None:
    memory = GlobalBytes(np.zeros((8, 128), np.uint8))
    raw = tensor_map(memory.base, 0, (128, 8), (128,), (128, 8), 0)
    cluster = FakeCluster(smem_bytes=4096)
    op = bulk_copy.decode_tensor_load(raw, (0, 0), 4096 - 128, 8)
    with pytest.raises(IllegalOperationError) as error:
        op.perform(cluster, memory)
    assert error.value.rule == "shared memory: out of bounds"
