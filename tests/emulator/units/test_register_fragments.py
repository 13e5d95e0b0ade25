"""mma.sync, ldmatrix, stmatrix, movmatrix and wgmma: fragments by hand, products by float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from rubin_moe.emulator.isa import fragment_kernels, matrix_ldst, mma_sync, wgmma
from rubin_moe.emulator.isa.legality import IllegalOperationError

from .machine import multiplied, put_k_major

DTYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
}

# (register, lane, element) -> (row, k): PTX ISA "matrix fragments for mma.m16n8k..."
A_GOLDEN = {
    ("f16", 16): {(0, 0, 1): (0, 1), (1, 5, 0): (9, 2), (2, 0, 0): (0, 8), (3, 31, 1): (15, 15)},
    ("f16", 8): {(0, 6, 1): (1, 5), (1, 0, 0): (8, 0)},
    ("tf32", 8): {(0, 7, 0): (1, 3), (1, 0, 0): (8, 0), (2, 1, 0): (0, 5), (3, 31, 0): (15, 7)},
    ("tf32", 4): {(0, 7, 0): (1, 3), (1, 2, 0): (8, 2)},
    ("s8", 32): {(0, 1, 3): (0, 7), (1, 0, 0): (8, 0), (2, 0, 2): (0, 18), (3, 31, 3): (15, 31)},
    ("s8", 16): {(0, 1, 3): (0, 7), (1, 31, 3): (15, 15)},
}
B_GOLDEN = {
    ("f16", 16): {(0, 0, 1): (1, 0), (1, 5, 0): (10, 1), (1, 31, 1): (15, 7)},
    ("tf32", 8): {(0, 7, 0): (3, 1), (1, 31, 0): (7, 7)},
    ("s8", 32): {(0, 1, 3): (7, 0), (1, 31, 3): (31, 7)},
    ("s8", 16): {(0, 31, 3): (15, 7)},
}


@pytest.mark.parametrize(("name", "k"), A_GOLDEN)
def test_a_fragment_golden(name: str, k: int) -> None:
    index = mma_sync.a_fragment(k, mma_sync.TYPES[name])
    for place, expected in A_GOLDEN[name, k].items():
        assert tuple(index[place].tolist()) == expected
    assert len({tuple(x) for x in index.reshape(-1, 2).tolist()}) == 16 * k


@pytest.mark.parametrize(("name", "k"), B_GOLDEN)
def test_b_fragment_golden(name: str, k: int) -> None:
    index = mma_sync.b_fragment(k, mma_sync.TYPES[name])
    for place, expected in B_GOLDEN[name, k].items():
        assert tuple(index[place].tolist()) == expected
    assert len({tuple(x) for x in index.reshape(-1, 2).tolist()}) == 8 * k


def test_accumulator_fragment_golden() -> None:
    index = mma_sync.c_fragment(8, 32)
    assert index[0, 6, 0].tolist() == [1, 4]
    assert index[1, 6, 0].tolist() == [1, 5]
    assert index[2, 6, 0].tolist() == [9, 4]
    half = mma_sync.c_fragment(16, 16)
    assert half[1, 0, 1].tolist() == [8, 1]
    assert half[2, 31, 0].tolist() == [7, 14]


def registers_of(tile: np.ndarray, index: np.ndarray) -> np.ndarray:
    codes = tile.view(f"u{tile.dtype.itemsize}")[index[..., 0], index[..., 1]]
    return mma_sync.pack(codes.astype(np.uint32), 8 * tile.dtype.itemsize)


MMA = [("f16", k, d) for k in (8, 16) for d in ("f32", "f16")]
MMA += [("bf16", 8, "f32"), ("bf16", 16, "f32"), ("tf32", 4, "f32"), ("tf32", 8, "f32")]
MMA += [("e4m3", 32, "f32"), ("e5m2", 16, "f32"), ("s8", 16, "s32"), ("u8", 32, "s32")]


@pytest.mark.parametrize(("name", "k", "form"), MMA)
def test_mma_sync_equals_float64(name: str, k: int, form: str) -> None:
    rng = np.random.default_rng(k)
    op = mma_sync.decode_mma_sync(f"m16n8k{k}", form, name, name, form)
    low = 0 if name == "u8" else -4
    a = rng.integers(low, 5, (16, k)).astype(DTYPES[name])
    b = rng.integers(low, 5, (k, 8)).astype(DTYPES[name])
    c = rng.integers(-9, 9, (16, 8)).astype({"f32": "f4", "f16": "f2", "s32": "i4"}[form])
    found = op.multiply(
        registers_of(a, op.a_map), registers_of(b, op.b_map), registers_of(c, op.c_map)
    )
    expected = a.astype(np.float64) @ b.astype(np.float64) + c
    np.testing.assert_array_equal(found, registers_of(expected.astype(c.dtype), op.d_map))
    assert op.macs == 16 * 8 * k


def test_mma_sync_saturates_integers() -> None:
    a, b = np.full((16, 32), 127, np.int8), np.full((32, 8), 127, np.int8)
    c = np.full((16, 8), (1 << 31) - 5, np.int32)
    for saturate, expected in (
        (True, (1 << 31) - 1),
        (False, (1 << 31) - 5 + 32 * 127**2 - (1 << 32)),
    ):
        op = mma_sync.decode_mma_sync("m16n8k32", "s32", "s8", "s8", "s32", saturate)
        maps = zip((a, b, c), (op.a_map, op.b_map, op.c_map), strict=True)
        found = op.multiply(*(registers_of(x, index) for x, index in maps))
        assert (found.view(np.int32) == expected).all()


@pytest.mark.parametrize(
    "arguments",
    [
        ("m8n8k4", "f32", "f16", "f16", "f32"),
        ("m16n8k16", "f32", "tf32", "tf32", "f32"),
        ("m16n8k16", "f32", "f16", "bf16", "f32"),
        ("m16n8k16", "f16", "bf16", "bf16", "f16"),
        ("m16n8k32", "s32", "s4", "s4", "s32"),
        ("m16n8k16", "f32", "f16", "f16", "f32", True),
    ],
)
def test_mma_sync_refusals(arguments: tuple) -> None:
    with pytest.raises(IllegalOperationError):
        mma_sync.decode_mma_sync(*arguments)


def test_ldmatrix_golden() -> None:
    # row r of matrix i holds 100 i + 8 r + column
    smem = np.zeros(4096, np.uint8)
    addresses = np.array([1024 + 48 * (31 - t) for t in range(32)])
    for i in range(4):
        for r in range(8):
            row = (100 * i + 8 * r + np.arange(8)).astype(np.uint16)
            at = addresses[8 * i + r]
            smem[at : at + 16] = row.view(np.uint8)
    plain = matrix_ldst.load_matrices(smem, addresses, 4)
    assert plain[0, 0] == 0 | 1 << 16
    assert plain[1, 6] == (100 + 8 + 4) | (100 + 8 + 5) << 16
    assert plain[3, 31] == (300 + 62) | (300 + 63) << 16
    flipped = matrix_ldst.load_matrices(smem, addresses, 4, trans=True)
    assert flipped[0, 0] == 0 | 8 << 16
    assert flipped[2, 6] == (200 + 32 + 1) | (200 + 40 + 1) << 16
    np.testing.assert_array_equal(matrix_ldst.move_matrix(plain[2]), flipped[2])
    for num, trans in ((1, False), (2, True), (4, True)):
        out = np.zeros_like(smem)
        values = flipped if trans else plain
        matrix_ldst.store_matrices(out, addresses, values[:num], trans)
        kept = np.zeros_like(smem)
        for at in addresses[: 8 * num]:
            kept[at : at + 16] = smem[at : at + 16]
        np.testing.assert_array_equal(out, kept)
    assert matrix_ldst.footprint(addresses, 1, 3).nbytes == 128
    with pytest.raises(IllegalOperationError, match="not 16-byte aligned"):
        matrix_ldst.load_matrices(smem, addresses + 8, 1)
    with pytest.raises(IllegalOperationError):
        matrix_ldst.load_matrices(smem, addresses + 4096, 1)


def wgmma_desc(start: int, lbo: int, sbo: int, swizzle: int) -> int:
    code = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    return start >> 4 | (lbo >> 4) << 16 | (sbo >> 4) << 32 | code << 62


def accumulator_rows(d: np.ndarray, n: int, form: str) -> np.ndarray:
    bits = 16 if form == "f16" else 32
    index = mma_sync.c_fragment(n, bits)
    return np.concatenate([mma_sync.read_accumulator(d[w], index, (16, n), form) for w in range(4)])


WGMMA = [("bf16", "f32", 8, 128), ("f16", "f32", 64, 64), ("f16", "f16", 256, 32)]
WGMMA += [("tf32", "f32", 128, 128), ("e4m3", "f32", 96, 64), ("e5m2", "f16", 16, 32)]
WGMMA += [("s8", "s32", 64, 128), ("u8", "s32", 24, 0), ("bf16", "f32", 192, 0)]


@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize(("name", "form", "n", "swizzle"), WGMMA)
def test_wgmma_equals_float64(name, form, n, swizzle, from_registers) -> None:
    rng = np.random.default_rng(n)
    dtype = DTYPES[name]
    k = 32 // np.dtype(dtype).itemsize
    low = 0 if name == "u8" else -2
    a, b = (rng.integers(low, 3, (rows, k)).astype(dtype) for rows in (64, n))
    smem = np.zeros(1 << 17, np.uint8)
    descs = []
    for matrix, at in ((a, 0), (b, 0x8000)):
        lbo, sbo = put_k_major(smem, at, matrix.view(np.uint8), swizzle)
        descs.append(wgmma_desc(at, lbo, sbo, swizzle))
    op = wgmma.decode_wgmma(
        f"m64n{n}k{k}", form, name, name, descs[1], None if from_registers else descs[0]
    )
    registers = None
    if from_registers:
        index = mma_sync.a_fragment(k, mma_sync.TYPES[name])
        registers = np.stack([registers_of(a[16 * w : 16 * w + 16], index) for w in range(4)])
    d = np.zeros((4, op.registers, 32), np.uint32)
    once = multiplied(op, smem, d, registers)
    twice = multiplied(op, smem, once, registers)
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_array_equal(accumulator_rows(once, n, form), expected)
    np.testing.assert_array_equal(accumulator_rows(twice, n, form), 2 * expected)
    assert op.macs == 64 * n * k
    assert len(op.reads(0)) == (1 if from_registers else 2)


def test_wgmma_transposes_and_signs() -> None:
    rng = np.random.default_rng(11)
    a, b = rng.integers(-2, 3, (16, 64)), rng.integers(-2, 3, (16, 128))
    smem = np.zeros(1 << 16, np.uint8)
    for matrix, at in ((a, 0), (b, 0x4000)):
        half = matrix.astype(np.float16)
        for k in range(16):
            for m in range(0, half.shape[1], 8):
                atom, chunk = m // 64, m // 8 % 8
                to = at + atom * 2048 + k // 8 * 1024 + k % 8 * 128 + (chunk ^ k % 8) * 16
                smem[to : to + 16] = half[k, m : m + 8].view(np.uint8)
    op = wgmma.decode_wgmma(
        "m64n128k16",
        "f32",
        "f16",
        "f16",
        wgmma_desc(0x4000, 2048, 1024, 128),
        wgmma_desc(0, 2048, 1024, 128),
        scale_d=False,
        scale_a=-1,
        trans_a=1,
        trans_b=1,
    )
    garbage = np.full((4, op.registers, 32), 0x7F800000, np.uint32)
    found = accumulator_rows(multiplied(op, smem, garbage), 128, "f32")
    np.testing.assert_array_equal(found, -(a.T @ b))


def aligned(left: np.ndarray, right: np.ndarray, bits: int, total: np.ndarray) -> np.ndarray:
    """What an H200 adds up, in NumPy: multiples of 2^(largest exponent - bits)."""
    exponent = [np.frexp(np.abs(x))[1] - 1 for x in (left, right, total)]
    largest = np.maximum((exponent[0][:, :, None] + exponent[1]).max(axis=1), exponent[2])
    unit = 2.0 ** (largest - bits)
    terms = np.trunc(left[:, :, None] * right / unit[:, None])
    return (terms.sum(axis=1) + np.trunc(total / unit)) * unit


@pytest.mark.parametrize("bits", [13, 25])
def test_sums_drop_what_lies_far_below_the_largest_term(bits: int) -> None:
    rng = np.random.default_rng(bits)
    for _ in range(50):
        left, right, total = (rng.standard_normal(s) for s in ((64, 32), (32, 24), (64, 24)))
        left, right = (np.float32(x * 2.0 ** rng.integers(-9, 9, x.shape)) for x in (left, right))
        left, right = (x.view(np.uint32) & 0xFFFF0000 for x in (left, right))
        left, right = (x.view(np.float32).astype(np.float64) for x in (left, right))
        expected = aligned(left, right, bits, total)
        fragment_kernels.aligned_sums(left, right, bits, total)
        np.testing.assert_array_equal(total, expected)


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    """Rows of a tile that nobody reads may hold anything."""
    rng = np.random.default_rng(3)
    left, right, total = (rng.standard_normal(s) for s in ((64, 16), (16, 24), (64, 24)))
    clean = total.copy()
    fragment_kernels.aligned_sums(left, right, 25, clean)
    left[7, 1], right[3, 5], total[9, 9] = np.inf, np.nan, -np.inf
    fragment_kernels.aligned_sums(left, right, 25, total)
    touched = np.zeros(total.shape, bool)
    touched[7], touched[:, 5], touched[9, 9] = True, True, True
    np.testing.assert_array_equal(total[~touched], clean[~touched])
    assert np.isnan(total[:, 5]).all()
    assert not np.isfinite(total[7]).any()
    assert total[9, 9] == -np.inf


@pytest.mark.parametrize(
    "change",
    [
        {"shape": "m64n12k16"},
        {"shape": "m64n264k16"},
        {"shape": "m64n64k8"},
        {"d": "s32"},
        {"a": "f16", "b": "bf16"},
        {"a": "e4m3", "b": "e4m3", "shape": "m64n64k32", "trans_b": 1},
        {"a": "s8", "b": "s8", "d": "s32", "shape": "m64n40k32"},
        {"scale_b": 0},
        {"a_desc": None, "trans_a": 1},
    ],
)
def test_wgmma_refusals(change: dict) -> None:
    good = {"shape": "m64n64k16", "d": "f32", "a": "f16", "b": "f16", "b_desc": 0, "a_desc": 0}
    with pytest.raises(IllegalOperationError):
        wgmma.decode_wgmma(**{**good, **change})
