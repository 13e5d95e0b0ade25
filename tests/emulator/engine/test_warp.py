"""Divergence, warp collectives and matrix fragments."""

import numpy as np
import pytest

from rubin_moe.emulator import EmulationError
from rubin_moe.emulator.isa import matrix_ldst
from tests.emulator.engine.harness import elementwise, module, run

LANE = np.arange(32)


def lanewise(body: str, value: np.ndarray) -> np.ndarray:
    return elementwise(f" mov.u32 %r10, %laneid;\n{body}", [np.resize(value, 128)], np.uint32)[:32]


X = np.random.default_rng(0).integers(0, 1 << 32, 32, dtype=np.uint32)


@pytest.mark.parametrize("width", [32, 16, 8])
def test_shuffles_with_segments(width: int) -> None:
    clamp = (32 - width) << 8
    first = LANE // width * width
    cases = {
        f"shfl.sync.idx.b32 %r63, %r0, 3, {clamp | 31}, -1;": X[first + 3],
        f"shfl.sync.up.b32 %r63, %r0, 2, {clamp}, -1;":
            X[np.where(first <= LANE - 2, LANE - 2, LANE)],
        f"shfl.sync.down.b32 %r63, %r0, 5, {clamp | 31}, -1;":
            X[np.where(first + width > LANE + 5, LANE + 5, LANE)],
        f"shfl.sync.bfly.b32 %r63, %r0, 7, {clamp | 31}, -1;": X[LANE ^ 7],
    }  # fmt: skip
    for body, expected in cases.items():
        np.testing.assert_array_equal(lanewise(body, X), expected)
    body = f"""and.b32 %r1, %r0, 31; shfl.sync.idx.b32 %r63|%p1, %r0, %r1, {clamp | 31}, -1;
     @!%p1 mov.b32 %r63, 0;"""
    source = first + (X & 31) % 32 % width if width < 32 else X & 31
    np.testing.assert_array_equal(lanewise(body, X), X[source])


def test_shuffle_reports_lanes_out_of_range() -> None:
    body = "shfl.sync.down.b32 %r1|%p1, %r0, 4, 31, -1; selp.b32 %r63, 1, 0, %p1;"
    np.testing.assert_array_equal(lanewise(body, X), LANE < 28)


def test_votes_ballots_and_matches() -> None:
    odd = X & 1
    ballot = int((odd << LANE.astype(np.uint32)).sum())
    head = "and.b32 %r1, %r0, 1; setp.ne.u32 %p1, %r1, 0;"
    assert (lanewise(f"{head} vote.sync.ballot.b32 %r63, %p1, -1;", X) == ballot).all()
    some = lanewise(f"{head} vote.sync.any.pred %p2, %p1, -1; selp.b32 %r63, 1, 0, %p2;", X)
    assert some.all()
    every = lanewise(f"{head} vote.sync.all.pred %p2, %p1, -1; selp.b32 %r63, 1, 0, %p2;", X)
    assert not every.any()
    small = X % 5
    same = np.array([int(sum(1 << j for j in range(32) if small[j] == v)) for v in small])
    np.testing.assert_array_equal(lanewise("match.any.sync.b32 %r63, %r0, -1;", small), same)
    body = "match.all.sync.b32 %r63|%p1, %r0, -1;"
    assert not lanewise(body, small).any()
    assert (lanewise(body, np.full(32, 7, np.uint32)) == 0xFFFFFFFF).all()


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("add.s32", int(X.astype(np.uint64).sum()) & 0xFFFFFFFF),
        ("max.u32", int(X.max())), ("min.u32", int(X.min())),
        ("max.s32", int(X.view(np.int32).max()) & 0xFFFFFFFF),
        ("min.s32", int(X.view(np.int32).min()) & 0xFFFFFFFF),
        ("and.b32", int(np.bitwise_and.reduce(X))), ("or.b32", int(np.bitwise_or.reduce(X))),
        ("xor.b32", int(np.bitwise_xor.reduce(X))),
    ],
)  # fmt: skip
def test_redux(op: str, expected: int) -> None:
    assert (lanewise(f"redux.sync.{op} %r63, %r0, -1;", X) == expected).all()


def test_redux_over_some_lanes() -> None:
    body = """setp.lt.u32 %p1, %r10, 8; mov.b32 %r63, 0; @!%p1 bra SKIP;
     redux.sync.add.u32 %r63, %r0, 0xFF;
    SKIP:"""
    ours = lanewise(body, X)
    total = int(X[:8].astype(np.uint64).sum()) & 0xFFFFFFFF
    np.testing.assert_array_equal(ours, np.where(LANE < 8, total, 0))


def test_elect_chooses_the_lowest_lane_of_the_mask() -> None:
    body = """setp.ge.u32 %p1, %r10, 20; mov.b32 %r63, 77; @!%p1 bra SKIP;
     elect.sync %r1|%p2, 0xFFF00000; selp.b32 %r63, %r1, 99, %p2;
    SKIP:"""
    ours = lanewise(body, X)
    np.testing.assert_array_equal(ours, np.where(LANE < 20, 77, np.where(LANE == 20, 20, 99)))


def test_lanes_leave_a_loop_one_by_one_and_meet_again() -> None:
    body = """
     mov.b32 %r1, 0; mov.b32 %r2, 0;
    AGAIN: add.u32 %r1, %r1, 1; add.u32 %r2, %r2, %r10; setp.le.u32 %p1, %r1, %r10;
     @%p1 bra AGAIN;
     activemask.b32 %r3; setp.eq.u32 %p2, %r3, -1; selp.b32 %r63, %r2, 0, %p2;"""
    np.testing.assert_array_equal(lanewise(body, X), (LANE + 1) * LANE)


def test_collective_waits_for_lanes_on_a_far_path() -> None:
    """The code of lane 0 lies behind the shuffle: lanes must not shuffle without it."""
    body = """
     mov.b32 %r1, %r10; setp.eq.u32 %p1, %r10, 0; @%p1 bra FAR;
    JOIN: shfl.sync.idx.b32 %r63, %r1, 0, 31, -1; bra END;
    FAR: mov.b32 %r1, 1234; bra JOIN;
    END:"""
    assert (lanewise(body, X) == 1234).all()


def test_spinning_lanes_do_not_starve_the_others() -> None:
    body = """
     .shared .align 4 .b8 s[4];
     mov.u32 %i0, %tid.x; mov.u32 %r1, s; mov.b32 %r2, 0; st.shared.b32 [%r1], %r2;
     setp.eq.u32 %p1, %i0, 5; @%p1 bra SET;
    SPIN: ld.volatile.shared.b32 %r3, [%r1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra SPIN; bra DONE;
    SET: mov.b32 %r4, 9; st.volatile.shared.b32 [%r1], %r4;
    DONE: bar.warp.sync -1; ld.param.u64 %addr1, [a]; ld.shared.b32 %r5, [%r1];
     st.global.b32 [%addr1], %r5;"""
    a = np.zeros(1, np.uint32)
    run(module(body, ".param .u64 a"), [a])
    assert a[0] == 9


def test_lanes_at_different_collectives_are_a_deadlock() -> None:
    body = """
     mov.u32 %i0, %tid.x; setp.lt.u32 %p1, %i0, 16; @%p1 bra LOW;
     bar.warp.sync -1; bra END;
    LOW: bar.warp.sync 0x1FFFF;
    END:"""
    with pytest.raises(EmulationError, match="wait at different warp collectives") as error:
        run(module(body), [])
    assert error.value.outcome == "deadlock"


def test_exited_lanes_are_not_waited_for() -> None:
    body = """
     mov.u32 %i0, %tid.x; setp.lt.u32 %p1, %i0, 9; @%p1 exit;
     bar.warp.sync -1; vote.sync.ballot.b32 %r1, 1, -1;
     ld.param.u64 %addr1, [a]; st.global.b32 [%addr1], %r1;"""
    a = np.zeros(1, np.uint32)
    run(module(body, ".param .u64 a"), [a])
    assert a[0] == 0xFFFFFFFF & -(1 << 9)


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_matrix_loads_and_stores_agree_with_the_unit(num: int, trans: bool) -> None:
    names = ", ".join(f"%r{20 + j}" for j in range(num))
    suffix = ".trans" if trans else ""
    body = f"""
     .shared .align 128 .b8 s[1024];
     mov.u32 %i0, %tid.x; shl.b32 %i1, %i0, 4; mov.u32 %r1, s; add.u32 %r2, %r1, %i1;
     ld.param.u64 %addr1, [a]; cvt.u64.u32 %addr2, %i1; add.s64 %addr1, %addr1, %addr2;
     ld.global.v2.b64 {{%d1, %d2}}, [%addr1]; st.shared.v2.b64 [%r2], {{%d1, %d2}};
     xor.b32 %r3, %i1, 48; add.u32 %r3, %r3, %r1;
     ldmatrix.sync.aligned.m8n8.x{num}{suffix}.shared.b16 {{{names}}}, [%r3];
     add.u32 %r4, %r2, 512;
     stmatrix.sync.aligned.m8n8.x{num}.trans.shared.b16 [%r4], {{{names}}};
     ld.shared.v2.b64 {{%d3, %d4}}, [%r4]; movmatrix.sync.aligned.m8n8.trans.b16 %r30, %r20;
     ld.param.u64 %addr3, [b]; add.s64 %addr3, %addr3, %addr2;
     st.global.v2.b64 [%addr3], {{%d3, %d4}};
     ld.param.u64 %addr4, [c]; mul.wide.u32 %addr5, %i0, 4; add.s64 %addr4, %addr4, %addr5;
     st.global.b32 [%addr4], %r30;"""
    storage = np.zeros(1024 + 16, np.uint8)
    start = -storage.ctypes.data % 16
    a, b = storage[start : start + 512], storage[start + 512 : start + 1024]
    a[:] = np.random.default_rng(3).integers(0, 256, 512)
    c = np.zeros(32, np.uint32)
    run(module(body, ".param .u64 a, .param .u64 b, .param .u64 c"), [a, b, c])
    smem = np.zeros(1024, np.uint8)
    smem[:512] = a
    registers = matrix_ldst.load_matrices(smem, (LANE * 16) ^ 48, num, trans)
    matrix_ldst.store_matrices(smem, LANE * 16 + 512, registers, True)
    np.testing.assert_array_equal(b, smem[512:])
    np.testing.assert_array_equal(c, matrix_ldst.move_matrix(registers[0]))
