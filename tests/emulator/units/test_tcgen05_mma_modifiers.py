"""Modifiers of tcgen05.mma: collectors, negation, majors, A in tensor memory, lanes, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from rubin_moe.emulator.isa.legality import IllegalOperationError

from .machine import E2M1, FakeCluster, pack_fp4, plain_idesc, put_k_major, smem_desc
from .test_tcgen05_mma import A_AT, B_AT, SFA_AT, SFB_AT, accumulator, nvfp4_pair, run

F16 = {
    "arch": "sm_107a",
    "kind": "f16",
    "cta_group": 1,
    "a": smem_desc(A_AT, 16, 256, 32),
    "b": smem_desc(B_AT, 16, 256, 32),
    "idesc": plain_idesc("f16", 128, 64),
}


def half_pair(cluster: FakeCluster, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-4, 5, (rows, 16)).astype(np.float16) for rows in (128, 64))
    put_k_major(cluster.smem(0), A_AT, a.view(np.uint8), 32)
    put_k_major(cluster.smem(0), B_AT, b.view(np.uint8), 32)
    return a.astype(np.float64), b.astype(np.float64)


def test_collector_b_multiplies_by_what_was_filled() -> None:
    rng = np.random.default_rng(1)
    first, second, a = (rng.integers(0, 16, (rows, 128)).astype(np.uint8) for rows in (64, 64, 128))
    cluster = FakeCluster()
    operands = nvfp4_pair(cluster, a, first)
    run(cluster, **operands, collector_b="fill")
    put_k_major(cluster.smem(0), B_AT, pack_fp4(second), 64)
    run(cluster, **{**operands, "d": 64}, collector_b="lastuse")
    d = cluster.tmem(0)[:, 64:128].view(np.float32)
    # the buffer's contents count, not what the descriptor points to by now
    np.testing.assert_array_equal(d, (E2M1[a] @ E2M1[first].T).astype(np.float32))
    with pytest.raises(IllegalOperationError, match="empty buffer"):
        run(cluster, **operands, collector_b="lastuse")


def test_collector_is_emptied_by_discard_and_checked_for_shape() -> None:
    cluster = FakeCluster()
    codes = np.zeros((128, 128), np.uint8)
    operands = nvfp4_pair(cluster, codes, codes[:64])
    run(cluster, **operands, collector_b="fill", collector_a="fill")
    run(cluster, **operands, collector_b="use")
    with pytest.raises(IllegalOperationError, match="empty buffer"):
        run(cluster, **operands, collector_a="use", collector_b="use")
    run(cluster, **operands, collector_b="fill")
    narrow = operands["idesc"] ^ 64 << 14 | 32 << 14
    with pytest.raises(IllegalOperationError, match="filled as") as error:
        run(cluster, **{**operands, "idesc": narrow}, collector_b="use")
    assert error.value.rule == "tcgen05.mma: collector"
    with pytest.raises(IllegalOperationError, match="not defined on sm_100a"):
        run(
            cluster,
            **{
                **operands,
                "arch": "sm_100a",
                "idesc": operands["idesc"] & ~8,
                "collector_b": "fill",
            },
        )


@pytest.mark.parametrize("negated", [1 << 13, 1 << 14, 3 << 13])
def test_negate(negated: int) -> None:
    cluster = FakeCluster()
    a, b = half_pair(cluster)
    run(cluster, **{**F16, "idesc": F16["idesc"] | negated})
    sign = 1 if negated == 3 << 13 else -1
    np.testing.assert_array_equal(accumulator(cluster, 0, 64), sign * (a @ b.T))
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (192, 128)).astype(np.uint8)
    operands = nvfp4_pair(cluster, codes[:128], codes[128:])
    run(cluster, **{**operands, "idesc": operands["idesc"] | negated})
    expected = sign * (E2M1[codes[:128]] @ E2M1[codes[128:]].T)
    np.testing.assert_array_equal(accumulator(cluster, 0, 64), expected)


def test_mn_major_operands() -> None:
    # rows along K of 64 16-bit elements along M (128-byte swizzle), written from the definition
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-4, 5, (16, rows)).astype(np.float16) for rows in (128, 64))
    cluster = FakeCluster()
    smem = cluster.smem(0)
    for matrix, at in ((a, A_AT), (b, B_AT)):
        for k in range(16):
            for m in range(0, matrix.shape[1], 8):
                atom, chunk = m // 64, m // 8 % 8
                to = at + atom * 2048 + (k // 8) * 1024 + (k % 8) * 128 + ((chunk ^ k % 8) * 16)
                smem[to : to + 16] = matrix[k, m : m + 8].view(np.uint8)
    operands = {**F16, "idesc": F16["idesc"] | 3 << 15}
    operands["a"], operands["b"] = (smem_desc(at, 2048, 1024, 128) for at in (A_AT, B_AT))
    run(cluster, **operands)
    expected = a.T.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_array_equal(accumulator(cluster, 0, 64), expected)


def test_a_from_tensor_memory() -> None:
    cluster = FakeCluster()
    a, b = half_pair(cluster)
    cluster.tmem(0)[:, 200:208] = a.astype(np.float16).view(np.uint32)
    run(cluster, **{**F16, "a": 200, "a_in_tmem": True})
    np.testing.assert_array_equal(accumulator(cluster, 0, 64), a @ b.T)
    rng = np.random.default_rng(6)
    codes = rng.integers(0, 16, (192, 128)).astype(np.uint8)
    operands = nvfp4_pair(cluster, np.zeros((128, 128), np.uint8), codes[128:])
    cluster.tmem(0)[:, 128:144] = pack_fp4(codes[:128]).view(np.uint32)
    run(cluster, **{**operands, "a": 128, "a_in_tmem": True})
    expected = E2M1[codes[:128]] @ E2M1[codes[128:]].T
    np.testing.assert_array_equal(accumulator(cluster, 0, 64), expected)


def test_disabled_lanes_and_scale_of_d() -> None:
    cluster = FakeCluster()
    a, b = half_pair(cluster)
    cluster.tmem(0)[:, :64] = np.float32(8).view(np.uint32)
    mask = (1 << 3, 0, 0, 1 << 31)
    run(cluster, **F16, enable_input_d=True, disable_output_lane=mask, scale_input_d=2)
    expected = a @ b.T + 2
    expected[[3, 127]] = 8
    np.testing.assert_array_equal(accumulator(cluster, 0, 64), expected)


def test_half_precision_accumulator_and_integer_saturation() -> None:
    cluster = FakeCluster()
    a, b = half_pair(cluster)
    run(cluster, **{**F16, "idesc": F16["idesc"] & ~(3 << 4)})
    cells = cluster.tmem(0)[:, :64]
    np.testing.assert_array_equal(cells.astype(np.uint16).view(np.float16), a @ b.T)
    assert (cells >> 16 == 0).all()
    wide = np.full((128, 32), 127, np.int8)
    put_k_major(cluster.smem(0), A_AT, wide.view(np.uint8), 32)
    put_k_major(cluster.smem(0), B_AT, wide[:64].view(np.uint8), 32)
    operands = {**F16, "arch": "sm_100a", "kind": "i8", "idesc": plain_idesc("i8", 128, 64)}
    start = (1 << 31) - 100
    for saturate, expected in ((0, start + 32 * 127 * 127 - (1 << 32)), (8, (1 << 31) - 1)):
        cluster.tmem(0)[:, :64] = start
        run(cluster, **{**operands, "idesc": operands["idesc"] | saturate}, enable_input_d=True)
        assert (cluster.tmem(0)[:, :64].view(np.int32) == expected).all()


def test_not_a_number_travels() -> None:
    cluster = FakeCluster()
    codes = np.full((128, 128), 2, np.uint8)
    operands = nvfp4_pair(cluster, codes, codes[:64])
    cells = cluster.tmem(0).view(np.uint8).reshape(128, -1, 4)
    cells[7::32, SFA_AT, 0] = 0x7F
    run(cluster, **operands)
    d = accumulator(cluster, 0, 64)
    assert np.isnan(d[7]).all()
    assert not np.isnan(np.delete(d, 7, axis=0)).any()


REFUSED = [
    ("tcgen05.mma: scale factor id", {"sfa": SFA_AT | 1 << 30}),
    ("tcgen05.mma: scale factor lane", {"sfb": SFB_AT | 32 << 16}),
    ("tensor memory: column", {"sfb": 574}),
    ("tensor memory: column", {"d": 520}),
    ("tcgen05.mma: accumulator lane", {"d": 32 << 16}),
    ("tcgen05.mma: disable-output-lane", {"disable_output_lane": (0, 0, 0, 0)}),
    ("tcgen05.mma: scale-input-d", {"scale_input_d": 1}),
    ("tcgen05.mma: collector", {"collector_a": "keep"}),
    ("shared memory: out of bounds", {"a": smem_desc((1 << 18) - 4096, 16, 512, 64)}),
]


@pytest.mark.parametrize(("rule", "change"), REFUSED)
def test_refused(rule: str, change: dict) -> None:
    cluster = FakeCluster()
    codes = np.zeros((128, 128), np.uint8)
    operands = nvfp4_pair(cluster, codes, codes[:64])
    with pytest.raises(IllegalOperationError) as error:
        run(cluster, **{**operands, **change})
    assert error.value.rule == rule


def test_differing_scale_copies_are_found() -> None:
    cluster = FakeCluster()
    codes = np.full((128, 128), 2, np.uint8)
    operands = nvfp4_pair(cluster, codes, codes[:64])
    cluster.tmem(0)[96 + 5, SFB_AT + 1] ^= 0x0100
    with pytest.raises(IllegalOperationError, match="SFB of row 37") as error:
        run(cluster, **operands)
    assert error.value.rule == "tcgen05.mma: scale factor copies"


def test_footprints() -> None:
    cluster = FakeCluster()
    codes = np.zeros((128, 128), np.uint8)
    op = run(cluster, **{**nvfp4_pair(cluster, codes, codes[:64]), "enable_input_d": True})
    reads = {(f.space, tuple(map(tuple, f.ranges.tolist()))) for f in op.reads()}
    assert ("smem", ((A_AT, A_AT + 8192),)) in reads
    assert ("smem", ((B_AT, B_AT + 4096),)) in reads
    sfa = ((0, 128, SFA_AT, SFA_AT + 4), (0, 128, SFA_AT + 4, SFA_AT + 8))
    sfb = ((0, 128, SFB_AT, SFB_AT + 2), (0, 128, SFB_AT + 4, SFB_AT + 6))
    assert {("tmem", sfa), ("tmem", sfb), ("tmem", ((0, 128, 0, 64),))} <= reads
    assert [f.nbytes for f in op.writes()] == [128 * 64 * 4]
