"""Clusters of one launch on several threads: the same results, reports, traps and deadlocks."""

import re
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from rubin_moe.emulator import (
    Device,
    EmulationError,
    LaunchError,
    Limits,
    Report,
    load_ptx,
    scheduler,
)
from rubin_moe.emulator.dsl import emulated_device
from tests.emulator.engine.harness import module, run
from tests.emulator.peers.suite import CASES
from tests.emulator.ptx import test_triton_kernels as triton

THREADS = (1, 2, 5)
PARAMS = ".param .u64 a, .param .u64 b"


def alike(report: Report) -> Report:
    """The report without what may differ between two runs."""
    return replace(report, seconds=0.0, workers=0)


# ---- atomics under contention

CONTENDED = """
 .shared .align 16 .b8 s[512];
 ld.param.u64 %addr1, [a]; ld.param.u64 %addr2, [b]; mov.u32 %i0, %tid.x; mov.u32 %r1, s;
 and.b32 %r2, %i0, 3; mul.wide.u32 %addr3, %r2, 8; add.s64 %addr3, %addr2, %addr3;
 mul.wide.u32 %addr4, %i0, 4; add.s64 %addr4, %addr1, %addr4;
 shl.b32 %r3, %i0, 2; add.u32 %r3, %r1, %r3; st.shared.b32 [%r3], %i0;
 fence.proxy.async.shared::cta; bar.sync 0;
 mov.b32 %r10, 0; mov.b32 %r4, 0f3F800000; mov.b32 %r5, 0x3C003C00; mov.b64 %d1, 3;
AGAIN:
 red.global.add.u32 [%addr4], 1;
 red.relaxed.gpu.global.add.u64 [%addr3], %d1;
 atom.global.add.f32 %r6, [%addr2+64], %r4;
 atom.global.inc.u32 %r7, [%addr2+68], 9;
 red.global.add.noftz.f16x2 [%addr2+72], %r5;
 ld.global.b32 %r8, [%addr2+80];
SWAP: mov.b32 %r9, %r8; add.u32 %r11, %r8, 2;
 atom.global.cas.b32 %r8, [%addr2+80], %r9, %r11; setp.ne.u32 %p2, %r8, %r9; @%p2 bra SWAP;
 setp.ne.u32 %p3, %i0, 0; @%p3 bra NEXT;
 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%addr1], [%r1], 512;
 cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
NEXT: add.u32 %r10, %r10, 1; setp.lt.u32 %p1, %r10, ROUNDS; @%p1 bra AGAIN;
"""


@pytest.mark.parametrize("workers", THREADS)
def test_atomics_of_many_clusters_lose_nothing(workers: int) -> None:
    """``red``, ``atom`` and bulk reductions hit the same words from every CTA."""
    rounds, grid, block = 40, 10, 128
    storage = np.zeros(256, np.uint32)
    a = storage[-storage.ctypes.data // 4 % 4 :][:block]
    b = np.zeros(11, np.uint64)
    text = module(CONTENDED.replace("ROUNDS", str(rounds)), PARAMS)
    report = run(text, [a, b], grid, block, workers=workers, limits=Limits())
    assert report.workers == workers
    times = rounds * grid
    np.testing.assert_array_equal(a, times * (1 + np.arange(block)))
    np.testing.assert_array_equal(b[:4], 3 * times * block // 4)
    words = b.view(np.uint32)
    assert words[16:17].view(np.float32)[0] == times * block
    assert words[17] == times * block % 10
    assert words[18:19].view(np.float16).tolist() == [2048, 2048]  # 2048 + 1 rounds to even
    assert words[20] == 2 * times * block
    assert report.bytes == {"bulk reduction": 512 * times}


# ---- flags between CTAs

HAND_DOWN = """
 ld.param.u64 %addr1, [a]; mov.u32 %i1, %ctaid.x; mov.u32 %i0, %tid.x;
 setp.ne.u32 %p1, %i0, 0; @%p1 bra END;
 add.u32 %r1, %i1, 1; setp.eq.u32 %p2, %r1, 8; @%p2 bra SET;
AGAIN: {load} %r2, [%addr1]; setp.ne.u32 %p3, %r2, %r1; @%p3 bra AGAIN;
SET: {store} [%addr1], %i1;
END:"""


@pytest.mark.parametrize("workers", THREADS)
@pytest.mark.parametrize(
    ("load", "store"),
    [
        ("ld.acquire.gpu.global.b32", "st.release.gpu.global.b32"),
        ("ld.volatile.global.b32", "st.volatile.global.b32"),
        ("ld.relaxed.gpu.global.b32", "red.release.gpu.global.add.s32"),
    ],
)
def test_ctas_hand_a_flag_down_from_the_last_to_the_first(
    workers: int, load: str, store: str
) -> None:
    body = HAND_DOWN.format(load=load, store=store)
    first = 99
    if store.startswith("red"):
        body = body.replace("%i1;\nEND", "%r3;\nEND").replace("SET:", "SET: mov.b32 %r3, -1;")
        first = 8
    a = np.full(1, first, np.uint32)
    run(module(body, ".param .u64 a"), [a], 8, workers=workers)
    assert a[0] == 0


PING_PONG = """
 ld.param.u64 %addr1, [a]; ld.param.u64 %addr2, [b]; mov.u32 %i1, %ctaid.x; mov.u32 %i0, %tid.x;
 mul.wide.u32 %addr3, %i0, 4; add.s64 %addr3, %addr2, %addr3; mov.b32 %r1, 0;
AGAIN: and.b32 %r2, %r1, 1; setp.ne.u32 %p1, %r2, %i1; @%p1 bra NEXT;
WAIT: ld.acquire.gpu.global.b32 %r3, [%addr1]; setp.ne.u32 %p2, %r3, %r1; @%p2 bra WAIT;
 ld.global.b32 %r4, [%addr3]; setp.ne.u32 %p3, %r4, %r1; @%p3 trap;
 add.u32 %r5, %r1, 1; st.global.b32 [%addr3], %r5; bar.sync 0; setp.ne.u32 %p4, %i0, 0;
 @!%p4 fence.acq_rel.gpu; @!%p4 st.relaxed.gpu.global.b32 [%addr1], %r5;
NEXT: add.u32 %r1, %r1, 1; setp.lt.u32 %p5, %r1, 60; @%p5 bra AGAIN;
"""


@pytest.mark.parametrize("workers", THREADS)
def test_data_behind_a_released_flag_is_seen(workers: int) -> None:
    """Two CTAs of two warps write 64 words in turn; each checks what the other wrote."""
    a, b = np.zeros(1, np.uint32), np.zeros(64, np.uint32)
    run(module(PING_PONG, PARAMS), [a, b], 2, 64, workers=workers, limits=Limits())
    assert a[0] == 60
    assert (b == 60).all()


SLOW = """
 ld.param.u64 %addr1, [a]; mov.u32 %i1, %ctaid.x; setp.ne.u32 %p1, %i1, {setter}; @%p1 bra WAIT;
 mov.b32 %r1, 0;
WORK: add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, {loops}; @%p2 bra WORK;
 {ends} bra END;
WAIT: nanosleep.u32 100; ld.acquire.gpu.global.b32 %r2, [%addr1]; setp.eq.u32 %p3, %r2, 0;
 @%p3 bra WAIT;
END:"""


@pytest.mark.parametrize("workers", THREADS)
def test_waiting_for_a_slow_cluster_is_no_deadlock(workers: int) -> None:
    """Seven clusters spin while one works for 1.5 million branches (it moves no memory)."""
    text = SLOW.format(setter=3, loops=1_500_000, ends="st.release.gpu.global.b32 [%addr1], %r1;")
    a = np.zeros(1, np.uint32)
    limits = Limits(slice=100_000, rounds=16, spins=20)
    run(module(text, ".param .u64 a"), [a], 8, workers=workers, limits=limits)
    assert a[0] == 1_500_000


# ---- ends


@pytest.mark.parametrize("workers", THREADS)
def test_a_deadlock_over_all_workers_names_every_waiting_warp(workers: int) -> None:
    device = Device("sm_107a", num_sms=4, workers=workers)
    text = HAND_DOWN.format(load="ld.acquire.gpu.global.b32", store="st.global.b32")
    loaded = load_ptx(module(text, ".param .u64 a"))
    with pytest.raises(EmulationError, match="spinning") as error:
        device.launch(loaded, 8, 32, [np.full(1, 99, np.uint32)], limits=Limits(spins=3))
    assert error.value.outcome == "deadlock"
    ctas = re.findall(r"CTA \((\d), 0, 0\)", str(error.value))
    assert sorted(ctas) == ["0", "1", "2", "3"]
    assert threading.active_count() == 1


@pytest.mark.parametrize("workers", THREADS)
def test_a_barrier_that_nobody_completes_is_a_deadlock(workers: int) -> None:
    """Also while another cluster spins for ever."""
    body = """
     .shared .align 8 .b8 s[16]; mov.u32 %i0, %tid.x; mov.u32 %r1, s; mov.u32 %i1, %ctaid.x;
     ld.param.u64 %addr1, [a];
     setp.eq.u32 %p1, %i1, 2; @%p1 bra SPIN;
     setp.eq.u32 %p2, %i0, 0; @%p2 mbarrier.init.shared.b64 [%r1], 2; bar.warp.sync -1;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r1], 0; @%p3 bra END; bra WAIT;
    SPIN: ld.volatile.global.b32 %r2, [%addr1]; setp.eq.u32 %p4, %r2, 0; @%p4 bra SPIN;
    END:"""
    with pytest.raises(EmulationError) as error:
        run(module(body, ".param .u64 a"), [np.zeros(1, np.uint32)], 3, workers=workers)
    assert error.value.outcome == "deadlock"
    assert str(error.value).count("mbarrier 0x400 of CTA 0, parity 0: phase 0, pending 2") == 2
    assert str(error.value).count("spinning") == 1


@pytest.mark.parametrize("workers", THREADS)
def test_a_trap_in_one_cluster_ends_the_others(workers: int) -> None:
    """CTA 5 traps; the others would spin until a deadlock is reported after minutes."""
    text = SLOW.format(setter=5, loops=1, ends="trap;")
    start = time.perf_counter()
    with pytest.raises(EmulationError, match=r"CTA \(5, 0, 0\).*trap instruction") as error:
        run(
            module(text, ".param .u64 a"),
            [np.zeros(1, np.uint32)],
            6,
            workers=workers,
            limits=Limits(spins=10**9),
        )
    assert error.value.outcome == "trap"
    assert threading.active_count() == 1
    assert time.perf_counter() - start < 60


@pytest.mark.parametrize("workers", THREADS)
def test_the_budget_counts_all_workers(workers: int) -> None:
    body = "ld.param.u64 %addr1, [a]; AGAIN: red.global.add.u32 [%addr1], 1; bra AGAIN;"
    with pytest.raises(EmulationError, match="the budget is 10000") as error:
        run(
            module(body, ".param .u64 a"),
            [np.zeros(1, np.uint32)],
            6,
            workers=workers,
            limits=Limits(instructions=10_000),
        )
    assert error.value.outcome == "budget"


def test_an_interrupt_does_not_wait_for_a_thread_that_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck, release = threading.Event(), threading.Event()

    def turn(*_: object) -> bool:
        if threading.current_thread() is not threading.main_thread():
            stuck.set()
            release.wait(60)
            return False
        assert stuck.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduler.Worker, "run", turn)
    monkeypatch.setattr(scheduler, "_GRACE", 0.1)
    with pytest.raises(KeyboardInterrupt):
        run(module(""), [], grid=2, workers=2)
    (other,) = (t for t in threading.enumerate() if t.name == "emulator")
    release.set()
    other.join(60)
    assert not other.is_alive()


def test_workers_are_limited_by_clusters_sms_and_seeds() -> None:
    loaded, deferred = load_ptx(module("")), load_ptx(module(""), deferred=True)
    device = Device("sm_107a", num_sms=8, workers=3)
    assert device.launch(loaded, 8, 32).workers == 3
    assert device.launch(loaded, 2, 32).workers == 2
    assert device.launch(loaded, 16, 32, cluster=4).workers == 2
    assert device.launch(loaded, 16, 32, workers=6).workers == 6
    assert device.launch(deferred, 8, 32, seed=1).workers == 1
    with pytest.raises(LaunchError, match="at least one"):
        device.launch(loaded, 1, 32, workers=0)


# ---- whole kernels


def test_a_peer_is_the_same_on_two_threads() -> None:
    """CTA pairs, TMA, scale copies and block-scaled MMAs, bit for bit."""
    (case,) = [case for case in CASES if case.key == "sm_107a-dense_nvfp4_ue5m3_2cta_256x128"]
    outputs, reports = [], []
    with emulated_device(case.target) as gpu:
        prepared = case.prepare()
    for workers in (1, 2):
        with emulated_device(case.target, workers=workers) as gpu:
            assert prepared.run(gpu).passed
        reports.append([launch.report for launch in gpu.launches])
        outputs.append([out.view(torch.uint8).clone() for out in prepared.outputs])
    assert [alike(r) for r in reports[0] if r] == [alike(r) for r in reports[1] if r]
    assert all(torch.equal(x, y) for x, y in zip(*outputs, strict=True))
    assert max(r.workers for r in reports[1] if r) == 2


@pytest.mark.parametrize("name", ["histogram", "matmul_tma"])
def test_compiled_kernels_are_the_same_on_two_threads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for workers in (1, 2):
        monkeypatch.setattr(triton, "Device", partial(Device, workers=workers))
        results.append(_triton_result(name))
    (one, alone), (two, both) = results
    assert torch.equal(one, two)
    assert alike(alone) == alike(both)
    assert (alone.workers, both.workers) == (1, 2)


def _triton_result(name: str) -> tuple[torch.Tensor, Report]:
    rng = np.random.default_rng(7)
    if name == "histogram":
        counts = torch.zeros(10, dtype=torch.int32)
        values = torch.from_numpy(rng.integers(0, 10, 700).astype(np.int32))
        return counts, triton.launch(name, (3,), [values, counts, 650])
    m, n, k = 128, 96, 160
    a, b = (torch.from_numpy(rng.normal(size=(rows, k))).bfloat16() for rows in (m, n))
    c = torch.zeros((m, n), dtype=torch.bfloat16)
    matrices = [triton.TensorMap(x) for x in (a, b, c)]
    return c, triton.launch(name, (2, 2), [*matrices, k])
