"""What only the letter of the ISA asks is reported and does not end a launch; wgmma; spinning."""

from __future__ import annotations

import numpy as np
import pytest

from rubin_moe.emulator import Device, EmulationError, Limits, Report, load_ptx
from tests.emulator.engine.harness import module
from tests.emulator.rules.order_kernels import (
    ALLOCATE,
    COPY,
    FREE,
    INIT,
    PUBLISH,
    READ,
    Case,
    barriers,
    wait,
)
from tests.emulator.rules.test_order import launch

LOAD = (
    "mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 128;"
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%addr1], 128, "
    "[%r20];"
)
STORE = (
    "cp.async.bulk.global.shared::cta.bulk_group [%addr2], [%r1], 256; cp.async.bulk.commit_group;"
)

#: A warp loads from tensor memory, another one overwrites the columns.
HANDED = (
    ALLOCATE + barriers(32) + "@%w bra COPY; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r30];"
    "tcgen05.wait::ld.sync.aligned; BEFORE mbarrier.arrive.shared.b64 _, [%r20]; bra LAST;"
    "COPY:" + wait() + "AFTER @!%t bra LAST;" + COPY
    + "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r19];"
    + wait("%r19") + "LAST: bar.sync 0;" + FREE
)  # fmt: skip

REPORTED = [
    Case("mbarrier published to a copy", "order: mbarrier fence",
         barriers(publish="{{ORDER}}") + "@!%t bra GO;" + LOAD + "GO:" + wait() + READ,
         PUBLISH),
    Case("copy over generic writes", "order: asynchronous overwrite",
         barriers() + "st.shared.b32 [%r3], %r22; {{ORDER}} bar.sync 0; @!%t bra GO;" + LOAD
         + "GO:" + wait() + READ,
         "fence.proxy.async;"),
    Case("copy of what cp.async brought", "order: cp.async proxy fence",
         "cvt.u64.u32 %addr3, %r2; add.s64 %addr3, %addr1, %addr3;"
         "cp.async.ca.shared.global [%r3], [%addr3], 4; cp.async.wait_all; {{ORDER}}"
         "bar.sync 0; @!%t bra END;" + STORE + "cp.async.bulk.wait_group 0; END:",
         "fence.proxy.async;"),
    Case("a bulk store again", "order: repeated bulk store",
         "fence.proxy.async; bar.sync 0; @!%t bra END;" + STORE + "{{ORDER}}" + STORE
         + "cp.async.bulk.wait_group 0; END:",
         "cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"),
    Case("tcgen05.fence after a wait", "order: tcgen05 fence",
         ALLOCATE + barriers() + "@!%t bra GO;" + COPY
         + "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r20];"
         "GO:" + wait() + "{{ORDER}} tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r30];"
         "tcgen05.wait::ld.sync.aligned; add.u32 %r5, %r4, 1; bar.sync 0;" + FREE,
         "tcgen05.fence::after_thread_sync;"),
    Case("tcgen05.fence before a barrier", "order: tcgen05 fence",
         ALLOCATE + "setp.eq.u32 %p5, %i1, 4; @%p5 bra MEET; @!%w bra MEET;"
         "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r30], {%r3}; tcgen05.wait::st.sync.aligned;"
         "{{ORDER}} MEET: bar.sync 0; tcgen05.fence::after_thread_sync; @!%p5 bra LAST;"
         "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r30]; tcgen05.wait::ld.sync.aligned;"
         "add.u32 %r5, %r4, 1; LAST:" + FREE,
         "tcgen05.fence::before_thread_sync;", block=160),
    Case("tcgen05.fence before columns are handed back", "order: tcgen05 fence",
         HANDED.replace("BEFORE", "{{ORDER}}").replace("AFTER",
                                                       "tcgen05.fence::after_thread_sync;"),
         "tcgen05.fence::before_thread_sync;"),
    Case("tcgen05.fence after columns are handed back", "order: tcgen05 fence",
         HANDED.replace("AFTER", "{{ORDER}}").replace("BEFORE",
                                                      "tcgen05.fence::before_thread_sync;"),
         "tcgen05.fence::after_thread_sync;"),
    Case("wait::ld before the registers", "order: wait::ld",
         ALLOCATE + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r30]; {{ORDER}}"
         "add.u32 %r5, %r4, 1; bar.sync 0;" + FREE,
         "tcgen05.wait::ld.sync.aligned;"),
]  # fmt: skip


def _rules(report: Report) -> set[str]:
    return {finding.rule for finding in report.findings}


@pytest.mark.parametrize("case", REPORTED, ids=lambda case: case.name)
def test_the_letter_of_the_isa_is_reported(case: Case) -> None:
    for seed in (None, 1):
        assert case.rule not in _rules(launch(case, True, seed))
        report = launch(case, False, seed)
        (finding, *_) = [f for f in report.findings if f.rule == case.rule]
        assert finding.severity == "isa"
        assert finding.line > 0


WGMMA = """
 .shared .align 128 .b8 s[4096]; mov.u32 %i0, %tid.x; mov.u32 %r1, s; shl.b32 %r2, %i0, 2;
 add.u32 %r3, %r1, %r2; mov.b32 %r9, 0;
 st.shared.b32 [%r3], %r9; st.shared.b32 [%r3+512], %r9; st.shared.b32 [%r3+1024], %r9;
 st.shared.b32 [%r3+1536], %r9; st.shared.b32 [%r3+2048], %r9; st.shared.b32 [%r3+2560], %r9;
 {fence} bar.sync 0;
 mov.b32 %r4, 0; mov.b32 %r5, 0; mov.b32 %r6, 0; mov.b32 %r7, 0;
 mov.b64 %d1, {a}; mov.b64 %d2, {b}; wgmma.fence.sync.aligned;
 wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%r4, %r5, %r6, %r7}}, %d1, %d2, 1, 1, 1, 0, 0;
 wgmma.commit_group.sync.aligned; {wait}
 add.u32 %r8, %r4, %r5; {overwrite} wgmma.wait_group.sync.aligned 0;"""
#: 8-row groups of 128 bytes, the two halves of K beside each other.
_LBO, _SBO = 128, 256
A = 1024 >> 4 | (_LBO >> 4) << 16 | (_SBO >> 4) << 32
B = 3072 >> 4 | (_LBO >> 4) << 16 | (_SBO >> 4) << 32


def _wgmma(fence: str, wait_: str, overwrite: str = "", seed: int | None = None) -> Report:
    body = WGMMA.format(fence=fence, wait=wait_, a=A, b=B, overwrite=overwrite)
    kernel = load_ptx(module(body, target="sm_90a"), deferred=seed is not None, checked=True)
    return Device("sm_90a").launch(kernel, 1, 128, [], rules="enforce", seed=seed)


FENCE, WAITED = "fence.proxy.async;", "wgmma.wait_group.sync.aligned 0;"


def test_a_wgmma_that_is_fenced_and_waited_for_passes() -> None:
    for seed in (None, 1, 2):
        _wgmma(FENCE, WAITED, "st.shared.b32 [%r3], %r8;", seed)


@pytest.mark.parametrize(
    ("fence", "waited", "overwrite", "rule"),
    [
        ("", WAITED, "", "order: proxy fence"),
        (FENCE, "", "", "order: wgmma registers"),
        (FENCE, "wgmma.wait_group.sync.aligned 1;", "", "order: wgmma registers"),
    ],
)
def test_a_wgmma_without_order_is_named(fence: str, waited: str, overwrite: str, rule: str) -> None:
    with pytest.raises(EmulationError) as error:
        _wgmma(fence, waited, overwrite)
    assert error.value.rule == rule


def test_a_warp_that_spins_says_on_what() -> None:
    body = INIT + (
        "POLL: ld.acquire.gpu.global.b32 %r5, [%addr1]; setp.eq.u32 %p6, %r5, 0; @%p6 bra POLL;"
    )
    kernel = load_ptx(module(body, ".param .u64 a, .param .u64 b"), checked=True)
    a = np.zeros(4, np.uint32)
    limits = Limits(spins=20, instructions=5_000_000)
    with pytest.raises(EmulationError, match="polls global memory") as error:
        Device("sm_107a").launch(kernel, 1, 32, [a, a], rules="enforce", limits=limits)
    assert error.value.outcome == "deadlock"
    assert error.value.rule == "deadlock: spinning"
    assert f"{a.ctypes.data:#x}" in str(error.value)


def test_a_failing_compare_and_swap_is_no_progress() -> None:
    """A lock that nobody frees: polling it by atomics is spinning as well."""
    body = INIT + (
        "POLL: atom.acquire.gpu.global.cas.b32 %r5, [%addr1], 0, 1; setp.ne.u32 %p6, %r5, 0;"
        "@%p6 bra POLL;"
    )
    kernel = load_ptx(module(body, ".param .u64 a, .param .u64 b"), checked=True)
    a = np.full(4, 7, np.uint32)
    with pytest.raises(EmulationError) as error:
        Device("sm_107a").launch(kernel, 1, 1, [a, a], rules="enforce", limits=Limits(spins=20))
    assert error.value.rule == "deadlock: spinning"
