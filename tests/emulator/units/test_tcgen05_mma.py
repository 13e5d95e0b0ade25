"""tcgen05.mma against float64, every kind, format and architecture, and its misuse."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from rubin_moe.emulator.isa import operand_kernels, tcgen05_mma
from rubin_moe.emulator.isa.elements import ELEMENT_VALUES, SCALE_VALUES, Element, ScaleFormat
from rubin_moe.emulator.isa.legality import IllegalOperationError

from .machine import (
    E2M1,
    FakeCluster,
    block_scaled_idesc,
    pack_fp4,
    plain_idesc,
    put_k_major,
    put_scales,
    smem_desc,
)

A_AT, B_AT = 0, 0x10000
SFA_AT, SFB_AT = 256, 288


def run(cluster: FakeCluster, **operands) -> tcgen05_mma.Tcgen05Mma:
    op = tcgen05_mma.decode_mma(**{"rank": 0, "d": 0, "enable_input_d": False, **operands})
    tcgen05_mma.perform(op, cluster)
    return op


def accumulator(cluster: FakeCluster, rank: int, n: int) -> np.ndarray:
    return cluster.tmem(rank)[:, :n].view(np.float32).copy()


def scale_codes(rng: np.random.Generator, scale: ScaleFormat, shape: tuple[int, int]) -> np.ndarray:
    low, high = {"UE4M3": (0, 127), "UE8M0": (107, 147), "UE5M3": (0, 255)}[scale.name]
    return rng.integers(low, high, shape).astype(np.uint8)


FP4 = [
    ("sm_100a", "mxf4nvf4", 1, 64, 64, 16, ScaleFormat.UE4M3),
    ("sm_100a", "mxf4nvf4", 2, 192, 64, 16, ScaleFormat.UE4M3),
    ("sm_100a", "mxf4", 1, 32, 64, 32, ScaleFormat.UE8M0),
    ("sm_103a", "mxf4nvf4", 1, 136, 96, 16, ScaleFormat.UE4M3),
    ("sm_103a", "mxf4", 1, 64, 96, 32, ScaleFormat.UE8M0),
    ("sm_107a", "mxf4nvf4", 1, 256, 128, 16, ScaleFormat.UE5M3),
    ("sm_107a", "mxf4nvf4", 1, 8, 128, 16, ScaleFormat.UE4M3),
    ("sm_107a", "mxf4nvf4", 2, 256, 128, 16, ScaleFormat.UE4M3),
    ("sm_107a", "mxf4nvf4", 2, 48, 128, 32, ScaleFormat.UE5M3),
    ("sm_107a", "mxf4", 1, 64, 128, 32, ScaleFormat.UE8M0),
    ("sm_107a", "mxf4nvf4", 1, 64, 64, 32, ScaleFormat.UE8M0),
]


@pytest.mark.parametrize("vnni", [True, False])
@pytest.mark.parametrize(("arch", "kind", "group", "n", "k", "vec", "scale"), FP4)
def test_fp4_equals_float64(arch, kind, group, n, k, vec, scale, vnni, monkeypatch) -> None:
    if vnni and not operand_kernels.HAS_VNNI:
        pytest.skip("no AVX-512 VNNI")
    monkeypatch.setattr(operand_kernels, "HAS_VNNI", vnni)
    rng = np.random.default_rng(n + k)
    a, b = (rng.integers(0, 16, (rows, k)).astype(np.uint8) for rows in (128 * group, n))
    sfa, sfb = (scale_codes(rng, scale, (rows, k // vec)) for rows in (128 * group, n))
    cluster = FakeCluster(group)
    before = rng.standard_normal((128 * group, n)).astype(np.float32)
    share = n // group
    for rank in range(group):
        mine = slice(128 * rank, 128 * rank + 128)
        put_k_major(cluster.smem(rank), A_AT, pack_fp4(a[mine]), 64)
        put_k_major(cluster.smem(rank), B_AT, pack_fp4(b[share * rank : share * (rank + 1)]), 64)
        put_scales(cluster.tmem(rank), SFA_AT, sfa[mine])
        put_scales(cluster.tmem(rank), SFB_AT, sfb)
        cluster.tmem(rank)[:, :n] = before[mine].view(np.uint32)
    idesc = block_scaled_idesc(kind, 128 * group, n, scale=scale.value)
    idesc |= {128: 1 << 3, 96: 1 << 31, 64: 0}[k]
    op = run(
        cluster,
        arch=arch,
        kind=kind,
        cta_group=group,
        a=smem_desc(A_AT, 16, 512, 64),
        b=smem_desc(B_AT, 16, 512, 64),
        idesc=idesc,
        sf_vec=vec,
        sfa=SFA_AT,
        sfb=SFB_AT,
        enable_input_d=True,
    )
    table = SCALE_VALUES[scale]
    left, right = (
        E2M1[codes] * np.repeat(table[sf], vec, axis=1) for codes, sf in ((a, sfa), (b, sfb))
    )
    expected = (left @ right.T + before).astype(np.float32)
    found = np.concatenate([accumulator(cluster, rank, n) for rank in range(group)])
    # float64 sums in another order may differ in the last bit of a float32 now and then
    np.testing.assert_allclose(found, expected, rtol=2**-23, atol=0)
    assert (found == expected).mean() > 0.999
    assert op.macs == 128 * group * n * k
    assert op.useful_macs(100, n, k) == 100 * n * k


def nvfp4_pair(cluster: FakeCluster, a: np.ndarray, b: np.ndarray) -> dict:
    """Operands of a 128 x N x 128 NVFP4 product with all scales 1."""
    n = b.shape[0]
    put_k_major(cluster.smem(0), A_AT, pack_fp4(a), 64)
    put_k_major(cluster.smem(0), B_AT, pack_fp4(b), 64)
    put_scales(cluster.tmem(0), SFA_AT, np.full((128, 8), 0x38, np.uint8))
    put_scales(cluster.tmem(0), SFB_AT, np.full((n, 8), 0x38, np.uint8))
    return {
        "arch": "sm_107a",
        "kind": "mxf4nvf4",
        "cta_group": 1,
        "a": smem_desc(A_AT, 16, 512, 64),
        "b": smem_desc(B_AT, 16, 512, 64),
        "idesc": block_scaled_idesc("mxf4nvf4", 128, n) | 1 << 3,
        "sf_vec": 16,
        "sfa": SFA_AT,
        "sfb": SFB_AT,
    }


def one_hot(n: int, k: int, columns: np.ndarray) -> np.ndarray:
    b = np.zeros((n, k), np.uint8)
    b[np.arange(n), columns] = 2  # E2M1 code 2 is 1.0
    return b


def test_nibble_order_of_a() -> None:
    # byte 0x21 at row 5, byte 3: k = 6 is its low nibble (0.5), k = 7 its high one (1.0)
    cluster = FakeCluster()
    a = np.zeros((128, 128), np.uint8)
    operands = nvfp4_pair(cluster, a, one_hot(8, 128, np.arange(8)))
    cluster.smem(0)[5 * 64 + (3 ^ (5 // 2 % 4) << 4)] = 0x21
    run(cluster, **operands)
    d = accumulator(cluster, 0, 8)
    assert d[5].tolist() == [0, 0, 0, 0, 0, 0, 0.5, 1.0]
    assert np.count_nonzero(d) == 2


def test_every_element_of_a_and_b_is_read_from_its_place() -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (128, 128)).astype(np.uint8)
    for base in range(0, 128, 64):
        cluster = FakeCluster()
        run(cluster, **nvfp4_pair(cluster, codes, one_hot(64, 128, base + np.arange(64))))
        np.testing.assert_array_equal(accumulator(cluster, 0, 64), E2M1[codes[:, base : base + 64]])
    cluster = FakeCluster()
    run(cluster, **nvfp4_pair(cluster, one_hot(128, 128, np.arange(128)), codes))
    np.testing.assert_array_equal(accumulator(cluster, 0, 128), E2M1[codes].T)


@pytest.mark.parametrize("n", [64, 128, 192, 256])
def test_scale_factor_layout_golden(n: int) -> None:
    # one scale at a time: row r, scale k at lane r % 32, column 4 * ceil(rows / 128) * (k // 4)
    # + r // 32, byte k % 4, in all four lane quarters
    ones = np.full((128, 128), 2, np.uint8)
    cluster = FakeCluster()
    operands = nvfp4_pair(cluster, ones, np.full((n, 128), 2, np.uint8))
    row, k = n - 3, 5
    lane, column, byte = row % 32, SFB_AT + 4 * -(-n // 128) * (k // 4) + row // 32, k % 4
    cells = cluster.tmem(0).view(np.uint8).reshape(128, -1, 4)
    for quarter in range(4):
        cells[32 * quarter + lane, column, byte] = 0x40  # 2.0
    run(cluster, **operands)
    d = accumulator(cluster, 0, n)
    assert (np.delete(d, row, axis=1) == 128).all()
    assert (d[:, row] == 128 + 16).all()


def test_scale_factor_id_selects_bytes() -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.integers(0, 126, (rows, 32)).astype(np.uint8) for rows in (128, 64))
    for sf_id in range(4):
        cluster = FakeCluster()
        put_k_major(cluster.smem(0), A_AT, a, 32)
        put_k_major(cluster.smem(0), B_AT, b, 32)
        sfa, sfb = (rng.integers(120, 134, (rows, 4)).astype(np.uint8) for rows in (128, 64))
        put_scales(cluster.tmem(0), SFA_AT, sfa)
        put_scales(cluster.tmem(0), SFB_AT, sfb)
        idesc = block_scaled_idesc("mxf8f6f4", 128, 64, scale=1) | sf_id << 29 | sf_id << 4
        operands = {
            "arch": "sm_100a",
            "kind": "mxf8f6f4",
            "cta_group": 1,
            "a": smem_desc(A_AT, 16, 256, 32),
            "b": smem_desc(B_AT, 16, 256, 32),
            "idesc": idesc,
            "sf_vec": 32,
            "sfa": SFA_AT | sf_id << 30,
            "sfb": SFB_AT | sf_id << 30,
        }
        run(cluster, **operands)
        values, scales = (
            ELEMENT_VALUES[Element.E4M3].astype(np.float64),
            SCALE_VALUES[ScaleFormat.UE8M0],
        )
        left = values[a] * scales[sfa[:, sf_id : sf_id + 1]]
        right = values[b] * scales[sfb[:, sf_id : sf_id + 1]]
        np.testing.assert_array_equal(
            accumulator(cluster, 0, 64), (left @ right.T).astype(np.float32)
        )
        with pytest.raises(IllegalOperationError) as error:
            run(cluster, **{**operands, "sfa": SFA_AT | (sf_id ^ 1) << 30})
        assert error.value.rule == "tcgen05.mma: scale factor id"


F8F6F4 = {0: Element.E4M3, 1: Element.E5M2, 3: Element.E2M3, 4: Element.E3M2, 5: Element.E2M1}


def padded_rows(codes: np.ndarray, element: Element) -> np.ndarray:
    """Codes [rows, K] to bytes [rows, K]: 16 codes packed at the front of every 16 bytes."""
    if element.bits == 8:
        return codes
    rows, k = codes.shape
    bits = (codes[:, :, None] >> np.arange(element.bits)) & 1
    groups = bits.reshape(rows, k // 16, 16 * element.bits)
    out = np.zeros((rows, k // 16, 16), np.uint8)
    out[:, :, : 2 * element.bits] = np.packbits(groups, axis=2, bitorder="little")
    return out.reshape(rows, k)


@pytest.mark.parametrize("code_b", F8F6F4)
@pytest.mark.parametrize("code_a", F8F6F4)
@pytest.mark.parametrize(("arch", "k"), [("sm_100a", 32), ("sm_107a", 64)])
def test_mxf8f6f4_every_pair_of_formats(arch: str, k: int, code_a: int, code_b: int) -> None:
    rng = np.random.default_rng(code_a * 8 + code_b)
    elements = F8F6F4[code_a], F8F6F4[code_b]
    cluster = FakeCluster()
    values = []
    for element, rows, at in ((elements[0], 128, A_AT), (elements[1], 48, B_AT)):
        table = ELEMENT_VALUES[element].astype(np.float64)
        finite = np.flatnonzero(np.isfinite(table))
        codes = rng.choice(finite, (rows, k)).astype(np.uint8)
        values.append(table[codes])
        packed = k == 64 and element.bits == 4 and 6 not in (elements[0].bits, elements[1].bits)
        data = pack_fp4(codes) if packed else padded_rows(codes, element)
        put_k_major(cluster.smem(0), at, data, 64)
    put_scales(cluster.tmem(0), SFA_AT, np.full((128, k // 32), 128, np.uint8))
    put_scales(cluster.tmem(0), SFB_AT, np.full((48, k // 32), 126, np.uint8))
    idesc = block_scaled_idesc("mxf8f6f4", 128, 48, a=code_a, b=code_b, scale=1)
    run(
        cluster,
        arch=arch,
        kind="mxf8f6f4",
        cta_group=1,
        a=smem_desc(A_AT, 16, 512, 64),
        b=smem_desc(B_AT, 16, 512, 64),
        idesc=idesc | (k == 64) << 31,
        sf_vec=32,
        sfa=SFA_AT,
        sfb=SFB_AT,
    )
    expected = (values[0] @ values[1].T).astype(np.float32)
    np.testing.assert_array_equal(accumulator(cluster, 0, 48), expected)


PLAIN = [("f16", 0, np.float16), ("f16", 1, ml_dtypes.bfloat16), ("tf32", 2, np.float32)]
PLAIN += [("f8f6f4", 0, ml_dtypes.float8_e4m3fn), ("i8", 1, np.int8)]


@pytest.mark.parametrize("m", [64, 128, 256])
@pytest.mark.parametrize(("kind", "code", "dtype"), PLAIN)
def test_plain_kinds_and_data_paths(kind: str, code: int, dtype: type, m: int) -> None:
    rng = np.random.default_rng(m)
    group = 2 if m == 256 else 1
    k = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}[kind]
    values = [rng.integers(-4, 5, (rows, k)).astype(dtype) for rows in (m, 64)]
    cluster = FakeCluster(group)
    rows = m // group
    for rank in range(group):
        mine = [values[0][rows * rank : rows * (rank + 1)], values[1][64 // group * rank :]]
        put_k_major(cluster.smem(rank), A_AT, mine[0].view(np.uint8), 32)
        put_k_major(cluster.smem(rank), B_AT, mine[1][: 64 // group].view(np.uint8), 32)
    idesc = plain_idesc(kind, m, 64, a=code, b=code)
    operands = {
        "arch": "sm_100a",
        "kind": kind,
        "cta_group": group,
        "a": smem_desc(A_AT, 16, 256, 32),
        "b": smem_desc(B_AT, 16, 256, 32),
        "idesc": idesc,
    }
    run(cluster, **operands)
    run(cluster, **{**operands, "enable_input_d": True})
    expected = 2 * (values[0].astype(np.float64) @ values[1].astype(np.float64).T)
    lanes = np.arange(rows) if rows == 128 else 32 * (np.arange(64) // 16) + np.arange(64) % 16
    for rank in range(group):
        cells = cluster.tmem(rank)[lanes, :64]
        found = cells.view(np.int32) if kind == "i8" else cells.view(np.float32)
        np.testing.assert_array_equal(found, expected[rows * rank : rows * (rank + 1)])


def test_two_ctas_of_half_m_split_the_columns_over_lanes() -> None:
    rng = np.random.default_rng(9)
    a, b = (rng.integers(-4, 5, (128, 16)).astype(np.float16) for _ in range(2))
    cluster = FakeCluster(2)
    for rank in range(2):
        put_k_major(cluster.smem(rank), A_AT, a[64 * rank : 64 * rank + 64].view(np.uint8), 32)
        put_k_major(cluster.smem(rank), B_AT, b[64 * rank : 64 * rank + 64].view(np.uint8), 32)
    run(
        cluster,
        arch="sm_100a",
        kind="f16",
        cta_group=2,
        a=smem_desc(A_AT, 16, 256, 32),
        b=smem_desc(B_AT, 16, 256, 32),
        idesc=plain_idesc("f16", 128, 128),
    )
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    for rank in range(2):
        d = accumulator(cluster, rank, 64)
        mine = expected[64 * rank : 64 * rank + 64]
        np.testing.assert_array_equal(d[:64], mine[:, :64])
        np.testing.assert_array_equal(d[64:], mine[:, 64:])
