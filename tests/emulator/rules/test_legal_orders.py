"""Legal but unusual orders: no rule may object, under any schedule."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.engine.harness import module, run

SEEDS = (None, 1, 2, 3)

HEAD = """
 .shared .align 128 .b8 s[4096];
 mov.u32 %i0, %tid.x; shr.u32 %i1, %i0, 5; and.b32 %i2, %i0, 31; mov.u32 %r1, s; mov.b32 %r2, 0;
 setp.eq.u32 %p1, %i0, 0; setp.eq.u32 %p2, %i2, 0; setp.eq.u32 %p10, %i1, 0;
 ld.param.u64 %addr1, [a]; ld.param.u64 %addr2, [b]; mul.wide.u32 %addr3, %i0, 4;
 shl.b32 %r3, %i0, 2; add.s32 %r4, %r1, %r3; mov.u32 %i3, %cluster_ctarank;
"""


def wait(address: str, parity: int, name: str) -> str:
    """Wait for a phase with a loop of one's own."""
    return (
        f"{name}: mbarrier.try_wait.parity.shared.b64 %p15, [{address}], {parity}; "
        f"@!%p15 bra {name};\n"
    )


def spin(load: str, name: str) -> str:
    """Poll until %r10 is not zero."""
    return f"{name}: {load} setp.eq.u32 %p14, %r10, 0; @%p14 bra {name};\n"


PUBLISH = "fence.mbarrier_init.release.cluster; bar.sync 0;\n"
COPY = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+1024], [%addr1], 512, "
    "[%r1];\n"
)
#: b[tid] = word at shared offset 1024 + 4 tid
TO_B = (
    "ld.shared.b32 %r20, [%r4+1024]; add.s64 %addr4, %addr2, %addr3; "
    "st.global.b32 [%addr4], %r20;\n"
)

ORDERS = {
    "the copy is issued before its bytes are announced": """
        @%p1 mbarrier.init.shared.b64 [%r1], 1;
    """ + PUBLISH + "@!%p1 bra GO;\n" + COPY + """
        mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;
     GO: """ + wait("%r1", 0, "W") + TO_B,
    "one thread announces the bytes, another arrives": """
        @%p1 mbarrier.init.shared.b64 [%r1], 1;
    """ + PUBLISH + "@!%p1 bra GO; mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 512;\n"
    + COPY + """
     GO: setp.eq.u32 %p3, %i0, 64; bar.sync 1; @%p3 mbarrier.arrive.shared.b64 _, [%r1];
    """ + wait("%r1", 0, "W") + TO_B,
    "what was written reaches a third warp through two mbarriers": """
        @%p1 mbarrier.init.shared.b64 [%r1], 32; @%p1 mbarrier.init.shared.b64 [%r1+8], 32;
        bar.sync 0; setp.eq.u32 %p4, %i1, 1; setp.eq.u32 %p5, %i1, 2;
        @%p4 bra SECOND; @%p5 bra THIRD; @!%p10 bra END;
        st.shared.b32 [%r4+1024], %i0; mbarrier.arrive.shared.b64 _, [%r1]; bra END;
     SECOND: """ + wait("%r1", 0, "W1") + """
        mbarrier.arrive.shared.b64 _, [%r1+8]; bra END;
     THIRD: """ + wait("%r1+8", 0, "W2") + """
        ld.shared.b32 %r20, [%r4+768]; add.s64 %addr4, %addr2, %addr3;
        st.global.b32 [%addr4], %r20;
     END:""",
    "a named barrier that the producer only arrives at": """
        @%p10 bra PRODUCE; bar.sync 3, 128; ld.shared.b32 %r20, [%r1+1024]; bra END;
     PRODUCE: @%p1 st.shared.b32 [%r1+1024], %i0; bar.arrive 3, 128;
     END:""",
    "a flag in shared memory with release and acquire": """
        @%p1 st.shared.b32 [%r1], %r2; bar.sync 0; @%p10 bra PRODUCE;
    """ + spin("ld.acquire.cta.shared.b32 %r10, [%r1];", "S") + """
        ld.shared.b32 %r20, [%r1+1024]; bra END;
     PRODUCE: mov.b32 %r11, 1; @%p1 st.shared.b32 [%r1+1024], %r11;
        @%p1 st.release.cta.shared.b32 [%r1], %r11;
     END:""",
    "a flag in global memory, volatile, with fences of memory": """
        @%p10 bra PRODUCE;
    """ + spin("ld.volatile.global.b32 %r10, [%addr2];", "S") + """
        membar.gl; ld.global.b32 %r20, [%addr2+64]; bra END;
     PRODUCE: mov.b32 %r11, 1; @%p1 st.global.b32 [%addr2+64], %r11; membar.gl;
        @%p1 st.volatile.global.b32 [%addr2], %r11;
     END:""",
    "a counter that everybody adds to, read after a barrier": """
        @%p1 st.shared.b32 [%r1], %r2; bar.sync 0; mov.b32 %r11, 1;
        red.shared.add.u32 [%r1], %r11; bar.sync 0; ld.shared.b32 %r20, [%r1];
        setp.ne.u32 %p3, %r20, 128; @%p3 trap;""",
    "neighbouring bytes of one word, written by different warps": """
        add.s32 %r12, %r1, %i1; cvt.u16.u32 %h1, %i1; @%p2 st.shared.b8 [%r12+512], %h1;
        bar.sync 0; ld.shared.b32 %r20, [%r1+512]; setp.ne.u32 %p3, %r20, 0x03020100;
        @%p3 trap;""",
    "the other CTA's memory, between cluster barriers": """
        st.shared.b32 [%r4+1024], %i0; barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned; xor.b32 %r5, %i3, 1;
        mapa.shared::cluster.u32 %r6, %r4, %r5; ld.shared::cluster.b32 %r20, [%r6+1024];
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;""",
    "arrivals at the other CTA's mbarrier": """
        @%p1 mbarrier.init.shared.b64 [%r1], 128; fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
        xor.b32 %r5, %i3, 1; mapa.shared::cluster.u32 %r6, %r1, %r5;
        shl.b32 %r7, %i0, 2; add.s32 %r8, %r6, %r7; st.shared::cluster.b32 [%r8+1024], %i0;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];
     W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p15, [%r1], 0; @!%p15 bra W;
        ld.shared.b32 %r20, [%r4+1024]; barrier.cluster.arrive.aligned;
        barrier.cluster.wait.aligned;""",
    "a store that another thread's fence and barrier prepare, read out before it is reused": """
        st.shared.b32 [%r4+1024], %i0; fence.proxy.async.shared::cta; bar.sync 0; @!%p1 bra SKIP;
        cp.async.bulk.global.shared::cta.bulk_group [%addr2], [%r1+1024], 512;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
     SKIP: bar.sync 0; st.shared.b32 [%r4+1024], %r2; bar.sync 0;""",
    "the fence of a proxy after the barrier, by the thread that copies": """
        st.shared.b32 [%r4+1024], %i0; bar.sync 0; @!%p1 bra SKIP;
        fence.proxy.async.shared::cta;
        cp.async.bulk.global.shared::cta.bulk_group [%addr2], [%r1+1024], 512;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
     SKIP:""",
    "cp.async that arrives at an mbarrier for a warp that never copied": """
        @%p1 mbarrier.init.shared.b64 [%r1], 32; bar.sync 0; @%p10 bra COPY;
    """ + wait("%r1", 0, "W") + """
        ld.shared.b32 %r20, [%r1+1024]; bra END;
     COPY: add.s64 %addr4, %addr1, %addr3;
        cp.async.ca.shared.global [%r4+1024], [%addr4], 4;
        cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];
     END: cp.async.wait_all;""",
    "a ring of one stage: the copy overwrites what three warps have released": """
        @%p1 mbarrier.init.shared.b64 [%r1], 1; @%p1 mbarrier.init.shared.b64 [%r1+8], 3;
    """ + PUBLISH + """
        setp.eq.u32 %p5, %i1, 3; @!%p5 bra CONSUME; @!%p2 bra END;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;
    """ + COPY + wait("%r1+8", 0, "W1") + """
        mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;
    """ + COPY + " bra END;\n CONSUME: " + wait("%r1", 0, "W0") + """
        ld.shared.b32 %r20, [%r4+1024]; bar.warp.sync -1;
        @%p2 mbarrier.arrive.shared.b64 _, [%r1+8];
    """ + wait("%r1", 1, "W2") + TO_B + " END:",
    "undefined bytes travel, and nothing depends on them": """
        @%p1 st.shared.b32 [%r1+1024], %i0; bar.sync 0; ld.shared.v2.b32 {%r20, %r21}, [%r1+1024];
        add.s32 %r22, %r21, 1; selp.b32 %r23, %r22, %r20, %p13; and.b32 %r24, %r22, 0;
        st.shared.b32 [%r4+2048], %r22; add.s64 %addr4, %addr2, %addr3;
        st.global.b32 [%addr4], %r24;""",
    "tensor memory that a warp stores to and loads from with no wait between": """
        @!%p10 bra END; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
        bar.warp.sync -1; ld.shared.b32 %r5, [%r1];
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%i2};
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [%r5];
        setp.ne.u32 %p3, %r20, %i2; @%p3 trap;
        tcgen05.wait::ld.sync.aligned; tcgen05.wait::st.sync.aligned;
        tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
     END:""",
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_no_rule_objects(order: str) -> None:
    body = HEAD + ORDERS[order].replace("%p13", "%p1" if "travel" in order else "%p13")
    a = np.zeros(128 + 32, np.uint32)
    a = a[(-a.ctypes.data % 128) // 4 :][:128]
    b = np.zeros(128 + 32, np.uint32)
    b = b[(-b.ctypes.data % 128) // 4 :][:128]
    a[:] = np.arange(128)
    cluster = 2 if "cluster_ctarank" in ORDERS[order] or "%i3" in ORDERS[order] else 1
    for seed in SEEDS:
        b[:] = 0
        text = module(body, ".param .u64 a, .param .u64 b")
        report = run(text, [a, b], cluster, 128, cluster=cluster, seed=seed, rules="enforce")
        assert [str(f) for f in report.findings if f.severity != "isa"] == []
