"""Rules that a running kernel breaks: each by the smallest kernel that does."""

from __future__ import annotations

import numpy as np
import pytest

from rubin_moe.emulator import EmulationError
from tests.emulator.engine.harness import module, run

SHARED = ".shared .align 16 .b8 s[256]; mov.u32 %r1, s; "
ALLOCATE = (
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64; "
    "bar.warp.sync -1; "
    "ld.shared.b32 %r2, [%r1]; "
)
ONE_THREAD = "mov.u32 %i1, %tid.x; setp.ne.u32 %p9, %i1, 0; @%p9 exit; "
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64;"

BROKEN = [
    ("memory: out of bounds", "mov.b64 %d1, 4096; mov.b32 %r2, 0; st.global.b32 [%d1], %r2;"),
    ("memory: out of bounds", SHARED + "mov.b32 %r2, 0; st.shared.b32 [%r1+65536], %r2;"),
    ("memory: alignment", SHARED + "mov.b32 %r2, 0; st.shared.b32 [%r1+2], %r2;"),
    ("trap", "trap;"),
    ("barrier: thread count",
     "mov.u32 %i0, %tid.x; setp.lt.u32 %p1, %i0, 32; @%p1 bra A; bar.sync 1, 96; bra B; "
     "A: bar.sync 1, 64; B:"),
    ("barrier: index", "mov.b32 %r1, 16; bar.sync %r1, 64;"),
    ("mbarrier: not initialised", SHARED + "mov.b64 %d1, 0; st.shared.b64 [%r1], %d1; "
     "mbarrier.arrive.shared.b64 _, [%r1];"),
    ("mbarrier: arrival count",
     SHARED + "mbarrier.init.shared.b64 [%r1], 1; mbarrier.arrive.shared.b64 _, [%r1], 2;"),
    ("mbarrier: count", SHARED + "mbarrier.init.shared.b64 [%r1], 0;"),
    ("mbarrier: transaction count",
     SHARED + "mbarrier.init.shared.b64 [%r1], 2; mbarrier.expect_tx.shared.b64 [%r1], 1048575; "
     "mbarrier.expect_tx.shared.b64 [%r1], 1;"),
    ("mbarrier: address",
     SHARED + ALLOCATE + "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 "
     "[%r1+1048576]; " + FREE),
    ("tensor memory: not allocated",
     SHARED + ALLOCATE + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r2+64]; "
     "tcgen05.wait::ld.sync.aligned; " + FREE),
    ("tensor memory: lane quarter",
     SHARED + ALLOCATE + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r2+4194304]; " + FREE),
    ("tensor memory: column",
     SHARED + ALLOCATE + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r2+576]; " + FREE),
    ("tcgen05.alloc: never freed", SHARED + ALLOCATE),
    ("tcgen05.dealloc: allocation",
     SHARED + ALLOCATE + "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;"),
    ("deadlock: waiting", SHARED + "mbarrier.init.shared.b64 [%r1], 1; "
     "W: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra W;"),
    ("deadlock: collectives",
     "mov.u32 %i0, %tid.x; setp.lt.u32 %p1, %i0, 16; @%p1 bra LOW; bar.warp.sync -1; bra END; "
     "LOW: bar.warp.sync 0x1FFFF; END:"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "body"), BROKEN, ids=[rule for rule, _ in BROKEN])
@pytest.mark.parametrize("rules", [None, "enforce"])
def test_ends_the_launch(rule: str, body: str, rules: str | None) -> None:
    threads = 64 if rule.startswith("barrier") else 32
    one = ONE_THREAD if "mbarrier.init" in body or rule == "mbarrier: not initialised" else ""
    with pytest.raises(EmulationError) as error:
        run(module(one + body), [], block=threads, rules=rules, seed=1 if rules else None)
    assert error.value.rule == rule


COPY = (
    ".shared .align 16 .b8 s[{size}]; mov.u32 %i0, %tid.x; shl.b32 %r1, %i0, 4; "
    "mov.u32 %r2, s; add.s32 %r2, %r2, %r1; cvt.u64.u32 %addr1, %r1; ld.param.u64 %addr2, [a]; "
    "add.s64 %addr1, %addr1, %addr2; cp.async.cg.shared.global [%r2+{offset}], [%addr1], 16; "
    "cp.async.wait_all;"
)


def test_cached_copies_above_248_kib_are_reported_on_sm_107a() -> None:
    a = np.zeros(512 + 16, np.uint8)
    a = a[-a.ctypes.data % 16 :][:512]
    found = {}
    for offset in (247 * 1024 - 1024, 247 * 1024):
        text = module(COPY.format(size=260 * 1024, offset=offset), ".param .u64 a")
        report = run(text, [a], rules="enforce", seed=1)
        found[offset] = [(f.rule, f.severity, f.line) for f in report.findings]
    line = next(i for i, t in enumerate(text.splitlines(), 1) if "cp.async.cg" in t)
    assert list(found.values()) == [[], [("cp.async: high destination", "warning", line)]]


def product(before: str) -> str:
    """A wgmma of zeros behind some code."""
    d = ", ".join(f"%r{i}" for i in range(4))
    clear = "".join(
        f"st.shared.v4.b32 [%r12+{16 * i}], {{%r13, %r13, %r13, %r13}}; " for i in range(8)
    )
    return (
        ".shared .align 1024 .b8 s[16384]; mov.u32 %r10, %tid.x; shl.b32 %r11, %r10, 7; "
        "mov.u32 %r12, s; add.s32 %r12, %r12, %r11; mov.b32 %r13, 0; "
        + clear
        + "fence.proxy.async; bar.sync 0, 128; mov.u32 %r12, s; shr.u32 %r12, %r12, 4; "
        "cvt.u64.u32 %d1, %r12; " + before +
        f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{d}}}, %d1, %d1, 0, 1, 1, 0, 0; "
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "before"),
    [
        ("wgmma: first fence", "mov.b32 %r0, 0; "),
        ("wgmma: register fence", "wgmma.fence.sync.aligned; mov.b32 %r0, 0; "),
        ("", "mov.b32 %r0, 0; wgmma.fence.sync.aligned; "),
    ],
)
def test_products_without_their_fence(rule: str, before: str) -> None:
    """The first is enforced; clearing accumulators after the fence is only reported."""
    text = module(product(before), target="sm_90a")
    if rule == "wgmma: first fence":
        with pytest.raises(EmulationError, match="no wgmma\\.fence stands before") as error:
            run(text, [], block=128, rules="enforce", seed=1)
        assert error.value.rule == rule
    else:
        report = run(text, [], block=128, rules="enforce", seed=1)
        assert [f.rule for f in report.findings] == ([rule] if rule else [])
