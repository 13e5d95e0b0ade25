"""Delayed asynchronous operations: legal kernels agree under every seed, missing waits show."""

from functools import partial

import numpy as np
import pytest

from rubin_moe.emulator import DelayPolicy, Device, EmulationError, LaunchError, load_ptx
from rubin_moe.emulator.async_ops import AsyncOperation
from tests.emulator.engine.harness import module, run

SEEDS = range(8)
WAIT = """
 { .reg .pred P;
 LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P, [%r20], %r21; @P bra.uni DONE; bra.uni LAB_WAIT;
 DONE: }"""


def aligned(nbytes: int) -> np.ndarray:
    storage = np.zeros(nbytes + 128, np.uint8)
    start = -storage.ctypes.data % 128
    return storage[start : start + nbytes]


def cp_async_kernel(wait: str) -> str:
    """Two groups of copies; after ``wait`` the first is read back."""
    return module(
        f"""
     .shared .align 16 .b8 s[1024];
     mov.u32 %i0, %tid.x; shl.b32 %i1, %i0, 4; mov.u32 %r1, s; add.u32 %r1, %r1, %i1;
     ld.param.u64 %addr1, [a]; cvt.u64.u32 %addr2, %i1; add.s64 %addr1, %addr1, %addr2;
     cp.async.cg.shared.global [%r1], [%addr1], 16; cp.async.commit_group;
     cp.async.cg.shared.global [%r1+512], [%addr1], 16; cp.async.commit_group;
     {wait}
     ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r1];
     ld.param.u64 %addr3, [b]; add.s64 %addr3, %addr3, %addr2;
     st.global.v4.b32 [%addr3], {{%r4, %r5, %r6, %r7}};""",
        ".param .u64 a, .param .u64 b",
    )


@pytest.mark.parametrize("wait", ["cp.async.wait_group 1;", "cp.async.wait_all;"])
def test_waited_copies_are_there_under_every_seed(wait: str) -> None:
    a, b = aligned(512), aligned(512)
    a[:] = np.arange(512) % 250 + 1
    for seed in SEEDS:
        b[:] = 0
        run(cp_async_kernel(wait), [a, b], seed=seed)
        np.testing.assert_array_equal(b, a)


def test_a_missing_wait_shows_under_some_seed() -> None:
    a, b = aligned(512), aligned(512)
    a[:] = 7
    outcomes = set()
    for seed in SEEDS:
        run(cp_async_kernel(""), [a, b], seed=seed)
        outcomes.add(bytes(b) == bytes(a))
    assert outcomes == {True, False}


def bulk_kernel(expect: int) -> str:
    """A bulk load that signals an mbarrier, then a bulk store of what came."""
    return module(
        f"""
     .shared .align 128 .b8 s[1024];
     mov.u32 %i0, %tid.x; mov.u32 %r20, s; add.u32 %r1, %r20, 128; mov.b32 %r21, 0;
     ld.param.u64 %addr1, [a]; ld.param.u64 %addr2, [b];
     setp.eq.u32 %p1, %i0, 0; @%p1 mbarrier.init.shared.b64 [%r20], 1; bar.sync 0;
     @!%p1 bra CONSUME;
     mbarrier.arrive.expect_tx.shared.b64 _, [%r20], {expect};
     cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%addr1], 512, [%r20];
    CONSUME:{WAIT}
     bar.sync 0; @!%p1 bra END;
     cp.async.bulk.global.shared::cta.bulk_group [%addr2], [%r1], 512;
     cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    END:""",
        ".param .u64 a, .param .u64 b",
    )


def test_bulk_copies_signal_and_complete() -> None:
    a, b = aligned(512), aligned(512)
    a[:] = np.arange(512) % 256
    for seed in (None, *SEEDS):
        b[:] = 0
        report = run(bulk_kernel(512), [a, b], 1, 64, seed=seed)
        np.testing.assert_array_equal(b, a)
        assert report.bytes == {"bulk copy": 1024}


@pytest.mark.parametrize("expect", [496, 528])
def test_a_wrong_transaction_count_is_a_deadlock(expect: int) -> None:
    for seed in (None, 0):
        with pytest.raises(EmulationError, match=f"tx {expect - 512} bytes") as error:
            run(bulk_kernel(expect), [aligned(512), aligned(512)], 1, 64, seed=seed)
        assert error.value.outcome == "deadlock"


def test_one_seed_is_one_execution() -> None:
    a, b = aligned(512), aligned(512)
    a[:] = 7
    results = []
    for _ in range(2):
        rows = []
        for seed in SEEDS:
            b[:] = 0
            run(cp_async_kernel(""), [a, b], seed=seed)
            rows.append(bytes(b))
        results.append(rows)
    assert results[0] == results[1]


def test_operations_of_one_pipe_stay_in_order_and_others_do_not() -> None:
    orders = set()
    for seed in SEEDS:
        policy, order = DelayPolicy(seed, eagerness=0.0), []
        for pipe, name in (("x", "x0"), ("x", "x1"), ("y", "y0")):
            policy.submit(AsyncOperation(name, (pipe,), lambda: None, partial(order.append, name)))
        assert len(policy.outstanding()) == 3
        while policy.advance():
            pass
        assert order.index("x0") < order.index("x1")
        orders.add(tuple(order))
    assert len(orders) > 1


def test_delays_need_code_that_waits() -> None:
    loaded = load_ptx(module(""))
    with pytest.raises(LaunchError, match="deferred=True"):
        Device("sm_107a").launch(loaded, 1, 32, [], seed=1)


TMEM = """
 .shared .align 8 .b8 s[16]; mov.u32 %i0, %tid.x; mov.u32 %r1, s;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64;
 ld.shared.b32 %r2, [%r1]; mul.lo.u32 %r3, %i0, 3;
 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2+{store}], {{%r3}}; tcgen05.wait::st.sync.aligned;
 tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r4}}, [%r2+{store}]; tcgen05.wait::ld.sync.aligned;
 ld.param.u64 %addr1, [a]; mul.wide.u32 %addr2, %i0, 4; add.s64 %addr1, %addr1, %addr2;
 st.global.b32 [%addr1], %r4;
 {free}"""
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64;"


def test_tensor_memory_keeps_what_a_warp_stored() -> None:
    a = np.zeros(32, np.uint32)
    report = run(module(TMEM.format(store=63, free=FREE), ".param .u64 a"), [a])
    np.testing.assert_array_equal(a, 3 * np.arange(32))
    assert report.peak_tmem_columns == 64


HANDED_OVER = """
 .shared .align 8 .b8 s[16]; mov.u32 %i0, %tid.x; shr.u32 %i1, %i0, 5; mov.u32 %r1, s;
 setp.ne.u32 %p1, %i1, 0; @%p1 bra SHARE;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64;
SHARE: bar.sync 0; ld.shared.b32 %r2, [%r1]; mul.lo.u32 %r3, %i0, 3; @%p1 bra MEET;
 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3}; WAIT
MEET: bar.sync 0; setp.ne.u32 %p2, %i1, 4; @%p2 bra LAST;
 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r2];
 ld.param.u64 %addr1, [a]; and.b32 %r5, %i0, 31; mul.wide.u32 %addr2, %r5, 4;
 add.s64 %addr1, %addr1, %addr2; st.global.b32 [%addr1], %r4;
LAST: bar.sync 0; @%p1 bra END;
 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64;
END:"""


@pytest.mark.parametrize("wait", ["tcgen05.wait::st.sync.aligned;", ""])
def test_a_missing_wait_for_a_store_to_tensor_memory_shows_under_some_seed(wait: str) -> None:
    """Warp 4 reads what warp 0 stored: without wait::st it may read before."""
    right = []
    for seed in SEEDS:
        a = np.zeros(32, np.uint32)
        run(module(HANDED_OVER.replace("WAIT", wait), ".param .u64 a"), [a], 1, 160, seed=seed)
        right.append((a == 3 * np.arange(32)).all())
    assert all(right) == bool(wait)
    assert any(right)


def test_a_warp_loads_what_it_stored_without_a_wait() -> None:
    kernel = TMEM.format(store=0, free=FREE).replace("tcgen05.wait::st.sync.aligned;", "")
    kernel = kernel.replace("tcgen05.wait::ld.sync.aligned;", "")
    for seed in SEEDS:
        a = np.zeros(32, np.uint32)
        run(module(kernel, ".param .u64 a"), [a], seed=seed)
        np.testing.assert_array_equal(a, 3 * np.arange(32))


@pytest.mark.parametrize(
    ("store", "free", "fault"),
    [
        (64, FREE, "columns 64..64 of CTA 0 are not allocated"),
        (32 << 16, FREE, "lane quarter"),
        (0, "", "exits holding tensor memory"),
        (0, FREE + FREE, "not an allocation"),
    ],
)
def test_tensor_memory_rules(store: int, free: str, fault: str) -> None:
    a = np.zeros(32, np.uint32)
    with pytest.raises(EmulationError, match=fault) as error:
        run(module(TMEM.format(store=store, free=free), ".param .u64 a"), [a])
    assert error.value.outcome == "trap"


def test_columns_are_waited_for_and_never_granted_is_a_deadlock() -> None:
    """Two warps want 512 columns each: the second gets them when the first frees them."""
    body = """
     .shared .align 8 .b8 s[16]; mov.u32 %i0, %tid.x; shr.u32 %i1, %i0, 5; mov.u32 %r1, s;
     mad.lo.u32 %r1, %i1, 4, %r1;
     tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 512;
     ld.shared.b32 %r2, [%r1]; {free}"""
    free = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 512;"
    run(module(body.format(free=free)), [], 1, 64)
    with pytest.raises(EmulationError, match="tensor-memory columns") as error:
        run(module(body.format(free="")), [], 1, 64)
    assert error.value.outcome == "deadlock"
