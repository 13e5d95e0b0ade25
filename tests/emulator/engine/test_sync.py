"""Named barriers, clusters, mbarriers, flags across CTAs, and reports of deadlock."""

from functools import partial

import numpy as np
import pytest

from rubin_moe.emulator import Device, EmulationError, Limits, load_ptx
from rubin_moe.emulator.native.blocks import CLUSTER_BYTES
from rubin_moe.emulator.native.compiler import runtime
from rubin_moe.emulator.state.mbarrier import MbarrierWord, pack, unpack
from tests.emulator.engine.harness import module, run

WAIT = """
 { .reg .pred P;
 LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P, [%r1], %r2; @P bra.uni DONE; bra.uni LAB_WAIT;
 DONE: }"""


def test_producer_and_consumer_warps_with_partial_counts() -> None:
    """Warps 0-1 wait at barrier 1 for 96 threads; warp 2 arrives and goes on; warp 3 is free."""
    body = """
     .shared .align 4 .b8 s[16];
     mov.u32 %i0, %tid.x; shr.u32 %i1, %i0, 5; mov.u32 %r1, s;
     setp.eq.u32 %p3, %i1, 3; @%p3 bra END;
     setp.eq.u32 %p2, %i1, 2; @%p2 bra PRODUCE;
     bar.sync 1, 96; ld.shared.b32 %r2, [%r1];
     ld.param.u64 %addr1, [a]; mul.wide.u32 %addr2, %i0, 4; add.s64 %addr1, %addr1, %addr2;
     st.global.b32 [%addr1], %r2; bra END;
    PRODUCE: mov.b32 %r3, 55; st.shared.b32 [%r1], %r3; bar.arrive 1, 96;
    END:"""
    a = np.zeros(64, np.uint32)
    run(module(body, ".param .u64 a"), [a], 1, 128)
    assert (a == 55).all()


def test_barrier_for_all_threads_forgets_exited_warps() -> None:
    body = """
     mov.u32 %i0, %tid.x; setp.ge.u32 %p1, %i0, 96; @%p1 exit;
     bar.sync 0; barrier.cta.sync 3; ld.param.u64 %addr1, [a]; red.global.add.u32 [%addr1], 1;"""
    a = np.zeros(1, np.uint32)
    run(module(body, ".param .u64 a"), [a], 1, 128)
    assert a[0] == 96


def test_two_thread_counts_at_one_barrier_trap() -> None:
    body = """
     mov.u32 %i0, %tid.x; setp.ge.u32 %p1, %i0, 32; @%p1 bra OTHER;
     bar.sync 1, 64; bra END;
    OTHER: bar.sync 1, 96;
    END:"""
    with pytest.raises(EmulationError, match="two different thread counts") as error:
        run(module(body), [], 1, 64)
    assert error.value.outcome == "trap"


def test_deadlock_names_every_waiting_warp_and_what_it_waits_for() -> None:
    body = """
     .shared .align 8 .b8 s[16];
     mov.u32 %i0, %tid.x; mov.u32 %r1, s; setp.eq.u32 %p1, %i0, 0;
     @%p1 mbarrier.init.shared.b64 [%r1], 3; bar.sync 0, 96;
     setp.lt.u32 %p2, %i0, 32; @!%p2 bra REST;
     mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 48; mov.b32 %r2, 0;""" + WAIT + """
     bra END;
    REST: setp.lt.u32 %p3, %i0, 64; @!%p3 bra END; bar.sync 5, 64;
    END:"""  # fmt: skip
    body = body.replace("mbarrier.arrive.expect_tx", "@%p1 mbarrier.arrive.expect_tx")
    with pytest.raises(EmulationError) as error:
        run(module(body), [], 1, 96)
    message = str(error.value)
    assert error.value.outcome == "deadlock"
    assert "warp 0" in message
    assert "warp 1" in message
    assert "warp 2," not in message
    assert "parity 0: phase 0, pending 2 of 3, tx 48 bytes" in message
    assert "named barrier 5: 32 of 64 threads" in message


def test_clusters_exchange_through_distributed_shared_memory() -> None:
    body = """
     .shared .align 4 .b8 s[128];
     mov.u32 %i0, %tid.x; mov.u32 %i1, %cluster_ctarank; mov.u32 %r1, s; shl.b32 %r2, %i0, 2;
     add.u32 %r1, %r1, %r2; mad.lo.u32 %r3, %i1, 100, %i0; st.shared.b32 [%r1], %r3;
     barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
     add.u32 %r4, %i1, 1; and.b32 %r4, %r4, 3; mapa.shared::cluster.u32 %r5, %r1, %r4;
     ld.shared::cluster.b32 %r6, [%r5];
     shr.u32 %r8, %r5, 24; setp.ne.u32 %p1, %r8, %r4; @%p1 trap;
     ld.param.u64 %addr1, [a]; mov.u32 %r7, %ctaid.x; mad.lo.u32 %r7, %r7, 32, %i0;
     mul.wide.u32 %addr2, %r7, 4; add.s64 %addr1, %addr1, %addr2; st.global.b32 [%addr1], %r6;
     barrier.cluster.arrive; barrier.cluster.wait;"""
    a = np.zeros((8, 32), np.uint32)
    run(module(body, ".param .u64 a"), [a], 8, 32, cluster=4)
    for cta in range(8):
        np.testing.assert_array_equal(a[cta], (cta % 4 + 1) % 4 * 100 + np.arange(32))


def test_address_beyond_the_cluster_traps() -> None:
    body = """
     .shared .align 4 .b8 s[4]; mov.u32 %r1, s; mapa.shared::cluster.u32 %r2, %r1, 2;
     st.shared::cluster.b32 [%r2], %r1;"""
    with pytest.raises(EmulationError, match="shared-memory address outside"):
        run(module(body), [], 2, 32, cluster=2)


def test_mbarrier_phases_local_and_remote() -> None:
    """CTA 1 arrives twice and twice more at CTA 0's barrier of two: two phases."""
    body = """
     .shared .align 8 .b8 s[16];
     mov.u32 %i0, %tid.x; mov.u32 %i1, %cluster_ctarank; mov.u32 %r1, s;
     setp.eq.u32 %p1, %i0, 0; @%p1 mbarrier.init.shared.b64 [%r1], 2;
     fence.mbarrier_init.release.cluster;
     barrier.cluster.arrive; barrier.cluster.wait;
     setp.eq.u32 %p2, %i1, 1; @%p2 bra REMOTE;
     mov.b32 %r2, 0;""" + WAIT + """
     barrier.cluster.arrive; barrier.cluster.wait;
     mov.b32 %r2, 1;""" + WAIT + """
     mbarrier.test_wait.parity.shared.b64 %p3, [%r1], 0; selp.b32 %r3, 1, 2, %p3;
     ld.param.u64 %addr1, [a]; st.global.b32 [%addr1], %r3; bra END;
    REMOTE: mapa.shared::cluster.u32 %r4, %r1, 0; setp.lt.u32 %p4, %i0, 2;
     @%p4 mbarrier.arrive.shared::cluster.b64 _, [%r4];
     barrier.cluster.arrive; barrier.cluster.wait;
     @%p4 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];
    END: barrier.cluster.arrive; barrier.cluster.wait;"""  # fmt: skip
    a = np.zeros(1, np.uint32)
    run(module(body, ".param .u64 a"), [a], 2, 32, cluster=2)
    assert a[0] == 2  # the phase of parity 0 is the current one, not complete


def test_state_tokens_counts_and_drops() -> None:
    body = """
     .shared .align 8 .b8 s[16]; mov.u32 %i0, %tid.x; mov.u32 %r1, s;
     setp.eq.u32 %p1, %i0, 0; @!%p1 bra END;
     mbarrier.init.shared.b64 [%r1], 5;
     mbarrier.arrive.shared.b64 %d1, [%r1], 3;
     mbarrier.test_wait.shared.b64 %p2, [%r1], %d1; selp.b32 %r10, 1, 0, %p2;
     mbarrier.arrive_drop.shared.b64 %d2, [%r1]; mbarrier.arrive.shared.b64 %d3, [%r1];
     mbarrier.test_wait.shared.b64 %p2, [%r1], %d1; selp.b32 %r11, 1, 0, %p2;
     ld.shared.b64 %d4, [%r1]; mbarrier.inval.shared.b64 [%r1]; ld.shared.b64 %d5, [%r1];
     ld.param.u64 %addr1, [a]; st.global.v2.b64 [%addr1], {%d4, %d5};
     st.global.v2.b32 [%addr1+16], {%r10, %r11};
    END:"""
    storage = np.zeros(4, np.uint64)
    a = storage[:3] if storage.ctypes.data % 16 == 0 else storage[1:4]
    run(module(body, ".param .u64 a"), [a])
    assert unpack(int(a[0])) == MbarrierWord(pending=4, expected=4, tx=0, phase=1)
    assert a[1] == 0
    assert a[2] == 1 << 32  # not complete after three arrivals, complete after five


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("mbarrier.arrive.shared.b64 _, [%r1];", "not an initialised mbarrier"),
        ("mbarrier.init.shared.b64 [%r1], 1; mbarrier.arrive.shared.b64 _, [%r1], 2;",
         "beyond the expected count"),
        ("mbarrier.init.shared.b64 [%r1], 0;", "count out of range"),
        ("mbarrier.init.shared.b64 [%r1+4], 1;", "misaligned"),
        ("mbarrier.init.shared.b64 [%r1], 2; mbarrier.expect_tx.shared.b64 [%r1], 1048575;"
         "mbarrier.expect_tx.shared.b64 [%r1], 1;", "transaction count"),
    ],
)  # fmt: skip
def test_mbarrier_misuse_traps(code: str, fault: str) -> None:
    body = f"""
     .shared .align 8 .b8 s[16]; mov.u32 %i0, %tid.x; mov.u32 %r1, s;
     setp.ne.u32 %p1, %i0, 0; @%p1 bra END;
     {code}
    END:"""
    with pytest.raises(EmulationError, match=fault) as error:
        run(module(body), [])
    assert error.value.outcome == "trap"


def test_transactions_may_arrive_before_they_are_expected() -> None:
    word = np.array([pack(MbarrierWord(1, 1, 0, 0))], np.uint64)
    cluster = np.zeros(CLUSTER_BYTES // 8, np.uint64)
    update = partial(runtime().mbarrier_update, cluster.ctypes.data)
    update(word.ctypes.data, 0, -64, 0)
    assert unpack(int(word[0])) == MbarrierWord(1, 1, -64, 0)
    update(word.ctypes.data, 1, 64, 0)
    assert unpack(int(word[0])) == MbarrierWord(1, 1, 0, 1)


def test_cp_async_arrivals() -> None:
    """noinc counts among the expected arrivals; the plain form leaves the count as it was."""
    body = (
        """
     .shared .align 16 .b8 s[1024]; mov.u32 %i0, %tid.x; mov.u32 %r1, s;
     setp.eq.u32 %p1, %i0, 0; @%p1 mbarrier.init.shared.b64 [%r1], 32; bar.warp.sync -1;
     cp.async.mbarrier.arrive.shared.b64 [%r1];
     mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0; @%p2 trap;
     cp.async.mbarrier.arrive.noinc.shared.b64 [%r1]; mov.b32 %r2, 0;"""
        + WAIT
    )
    run(module(body), [])


SPIN = """
 ld.param.u64 %addr1, [a]; mov.u32 %i1, %ctaid.x; mov.u32 %i0, %tid.x;
 setp.ne.u32 %p1, %i0, 0; @%p1 bra END;
 add.u32 %r1, %i1, 1; setp.eq.u32 %p2, %r1, 8; @%p2 bra SET;
AGAIN: ld.acquire.gpu.global.b32 %r2, [%addr1]; setp.ne.u32 %p3, %r2, %r1; @%p3 bra AGAIN;
SET: st.release.gpu.global.b32 [%addr1], %i1;
END:"""


def test_ctas_hand_a_flag_down_from_the_last_to_the_first() -> None:
    a = np.full(1, 99, np.uint32)
    run(module(SPIN, ".param .u64 a"), [a], 8)
    assert a[0] == 0


def test_a_gpu_with_too_few_sms_deadlocks_on_the_same_kernel() -> None:
    a = np.full(1, 99, np.uint32)
    device = Device("sm_107a", num_sms=4)
    with pytest.raises(EmulationError, match="spinning") as error:
        device.launch(load_ptx(module(SPIN, ".param .u64 a")), 8, 32, [a], limits=Limits(spins=3))
    assert error.value.outcome == "deadlock"


def test_endless_work_ends_at_its_budget() -> None:
    body = "ld.param.u64 %addr1, [a]; AGAIN: red.global.add.u32 [%addr1], 1; bra AGAIN;"
    a = np.zeros(1, np.uint32)
    with pytest.raises(EmulationError, match="the budget is 10000") as error:
        run(module(body, ".param .u64 a"), [a], limits=Limits(instructions=10_000))
    assert error.value.outcome == "budget"


def test_store_async_signals_the_remote_barrier() -> None:
    body = (
        """
     .shared .align 16 .b8 s[64];
     mov.u32 %i0, %tid.x; mov.u32 %i1, %cluster_ctarank; mov.u32 %r1, s;
     setp.eq.u32 %p1, %i0, 0; @%p1 mbarrier.init.shared.b64 [%r1], 1;
     @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 8;
     barrier.cluster.arrive; barrier.cluster.wait;
     xor.b32 %r3, %i1, 1; mapa.shared::cluster.u32 %r4, %r1, %r3; add.u32 %r5, %i1, 40;
     setp.lt.u32 %p2, %i0, 2; shl.b32 %r6, %i0, 2; add.u32 %r7, %r4, %r6;
     @%p2 st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r7+16], %r5, [%r4];
     mov.b32 %r2, 0;"""
        + WAIT
        + """
     ld.shared.v2.b32 {%r8, %r9}, [%r1+16];
     ld.param.u64 %addr1, [a]; mul.wide.u32 %addr2, %i1, 8; add.s64 %addr1, %addr1, %addr2;
     st.global.v2.b32 [%addr1], {%r8, %r9}; barrier.cluster.arrive; barrier.cluster.wait;"""
    )
    a = np.zeros((2, 2), np.uint32)
    for seed in (None, 1, 2):
        a[:] = 0
        run(module(body, ".param .u64 a"), [a], 2, 32, cluster=2, seed=seed)
        np.testing.assert_array_equal(a, [[41, 41], [40, 40]])
