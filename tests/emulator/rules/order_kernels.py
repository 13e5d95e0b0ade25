"""Small kernels in which something orders accesses, and twins in which nothing does.

Each case is a kernel with a placeholder ``{{ORDER}}``: with ``legal`` in its place every rule
holds, with ``broken`` the named rule does not. ``LEGAL`` are kernels that are right and unusual.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.emulator.engine.harness import module
from tests.emulator.units.machine import smem_desc

INIT = """
 .shared .align 128 .b8 s[4096]; .reg .pred %w; .reg .pred %t;
 mov.u32 %i0, %tid.x; shr.u32 %i1, %i0, 5; mov.u32 %r1, s; shl.b32 %r2, %i0, 2;
 add.u32 %r3, %r1, %r2; ld.param.u64 %addr1, [a]; ld.param.u64 %addr2, [b];
 setp.eq.u32 %w, %i1, 0; setp.eq.u32 %t, %i0, 0; mov.b32 %r21, 0; mov.b32 %r22, 1;
"""
#: s[0..511] data, s[1024] on mbarriers, as %r20, %r19.
BARRIERS = """
 add.u32 %r20, %r1, 1024; add.u32 %r19, %r1, 1032;
 @%t mbarrier.init.shared.b64 [%r20], {count}; @%t mbarrier.init.shared.b64 [%r19], {count2};
 {publish} bar.sync 0;"""
PUBLISH = "fence.mbarrier_init.release.cluster; fence.proxy.async;"
WAIT = """ {{ .reg .pred P;
 W: mbarrier.try_wait.parity.shared.b64 P, [{barrier}], {parity}; @P bra.uni D; bra.uni W; D: }}"""
#: Reads the word of the same lane in the first warp's half and stores it.
READ = """ and.b32 %r9, %i0, 31; shl.b32 %r10, %r9, 2; add.u32 %r11, %r1, %r10;
 ld.shared.b32 %r12, [%r11];"""
CONSUME = (
    READ
    + """ cvt.u64.u32 %addr4, %r2; add.s64 %addr4, %addr2, %addr4;
 st.global.b32 [%addr4], %r12;"""
)


def wait(barrier: str = "%r20", parity: str = "%r21") -> str:
    """A loop until the phase completes."""
    return WAIT.format(barrier=barrier, parity=parity)


def barriers(count: int = 1, count2: int = 1, publish: str = PUBLISH) -> str:
    """Two mbarriers, published."""
    return BARRIERS.format(count=count, count2=count2, publish=publish)


#: 64 columns of tensor memory at %r30, written by tcgen05.cp of the tile that is in s.
ALLOCATE = """
 add.u32 %r29, %r1, 1056; @!%w bra ALLOCATED;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r29], 64;
ALLOCATED: fence.proxy.async; bar.sync 0; ld.shared.b32 %r30, [%r29];"""
FREE = """ bar.sync 0; @!%w bra FREED;
 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 64; FREED:"""
COPY = (
    f" mov.b64 %d9, {smem_desc(1024, 128, 128, 0)};"
    " tcgen05.cp.cta_group::1.32x128b.warpx4 [%r30], %d9;"
)


@dataclass(frozen=True)
class Case:
    """One rule (or ``one|another``, as the execution shows), kept and broken; parameters ``a`` (512
    bytes of data) and ``b`` (4096, output)."""

    name: str
    rule: str
    body: str
    legal: str
    broken: str = ""
    block: int = 64
    grid: int = 1
    cluster: int = 1
    #: write shared memory first, so that poison does not see the fault before
    fill: bool = True

    def text(self, legal: bool) -> str:
        """The PTX module."""
        body = self.body.replace("{{ORDER}}", self.legal if legal else self.broken)
        more = "st.shared.b32 [%r3+256], %i0;" if self.block == 64 else ""
        fill = f"st.shared.b32 [%r3], %i0; {more} bar.sync 15;" if self.fill else ""
        return module(INIT + fill + body, ".param .u64 a, .param .u64 b")


PRODUCE = "@!%w bra READ; st.shared.b32 [%r3], %r22; "

CASES = [
    Case("bar.sync", "order: race",
         PRODUCE + "READ: {{ORDER}} @%w bra END;" + CONSUME + "END:", "bar.sync 0;"),
    Case("split barrier", "order: race",
         PRODUCE + "bar.arrive 1, 64; bra END; READ: {{ORDER}}" + CONSUME + "END:",
         "bar.sync 1, 64;", "bar.sync 2, 32;"),
    Case("named barrier of the right warps", "order: race",
         "setp.eq.u32 %p3, %i1, 2; @%p3 bra OTHER;" + PRODUCE + "READ: {{ORDER}} @%w bra END;"
         + CONSUME + "bra END; OTHER: bar.sync 3, 32; END:",
         "bar.sync 3, 64;", "bar.sync %i1, 32;", block=96),
    Case("mbarrier phase", "order: race",
         barriers() + PRODUCE + "bar.warp.sync -1; @%t mbarrier.arrive.shared.b64 _, [%r20];"
         "bra END; READ: {{ORDER}}" + CONSUME + "END:",
         wait(), ""),
    Case("another phase", "order: race|deadlock: waiting",
         barriers() + PRODUCE + "bar.warp.sync -1; @%t mbarrier.arrive.shared.b64 _, [%r20];"
         "bra END; READ: {{ORDER}}" + CONSUME + "END:",
         wait(), wait(parity="%r22")),
    Case("write after read", "order: race",
         barriers() + "@%w bra OVERWRITE; " + CONSUME + "bar.warp.sync -1; and.b32 %r13, %i0, 31;"
         "setp.eq.u32 %p4, %r13, 0; @%p4 mbarrier.arrive.shared.b64 _, [%r20]; bra END;"
         "OVERWRITE: {{ORDER}} st.shared.b32 [%r3], %r22; END:", wait(), wait(parity="%r22")),
    Case("lanes", "order: warp convergence",
         "st.shared.b32 [%r3], %r22; {{ORDER}} xor.b32 %r4, %r3, 4; ld.shared.b32 %r5, [%r4];"
         "cvt.u64.u32 %addr4, %r2; add.s64 %addr4, %addr2, %addr4; st.global.b32 [%addr4], %r5;",
         "bar.warp.sync -1;"),
    Case("bulk load", "order: asynchronous result",
         barriers() + "@!%t bra READ; mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 128;"
         "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%addr1], 128,"
         " [%r20]; READ: {{ORDER}}" + CONSUME + wait(),
         wait()),
    Case("bulk load over data that is read",
         "order: overwritten source|order: asynchronous result",
         barriers() + "@%w bra LOAD;" + CONSUME + "bar.warp.sync -1; and.b32 %r13, %i0, 31;"
         "setp.eq.u32 %p4, %r13, 0; @%p4 mbarrier.arrive.shared.b64 _, [%r19]; bra END;"
         "LOAD: {{ORDER}} @!%t bra END; mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 128;"
         "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%addr1], 128,"
         " [%r20];" + wait() + "END:",
         wait("%r19"), wait("%r19", "%r22")),
    Case("fence.proxy.async by the writer", "order: proxy fence",
         "st.shared.b32 [%r3], %r22; {{ORDER}} bar.sync 0; @!%t bra END;"
         "cp.async.bulk.global.shared::cta.bulk_group [%addr2], [%r1], 256;"
         "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:",
         "fence.proxy.async.shared::cta;"),
    Case("fence.proxy.async after the writes", "order: proxy fence",
         "{{ORDER}} bar.sync 0; @!%t bra END;"
         "cp.async.bulk.global.shared::cta.bulk_group [%addr2], [%r1], 256;"
         "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:",
         "st.shared.b32 [%r3], %r22; fence.proxy.async.shared::cta;",
         "fence.proxy.async.shared::cta; st.shared.b32 [%r3], %r22;"),
    Case("fence.proxy.async by the reader", "order: proxy fence",
         "st.shared.b32 [%r3], %r22; bar.sync 0; @!%t bra END; {{ORDER}}"
         "cp.async.bulk.global.shared::cta.bulk_group [%addr2], [%r1], 256;"
         "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:",
         "fence.proxy.async.shared::cta;"),
    Case("source of a bulk store", "order: overwritten source",
         "st.shared.b32 [%r3], %r22; fence.proxy.async; bar.sync 0; @!%t bra END;"
         "cp.async.bulk.global.shared::cta.bulk_group [%addr2], [%r1], 256;"
         "cp.async.bulk.commit_group; {{ORDER}} st.shared.b32 [%r1], %r21; "
         "cp.async.bulk.wait_group 0; END:",
         "cp.async.bulk.wait_group.read 0;"),
    Case("group of a bulk store", "order: overwritten source",
         "st.shared.b32 [%r3], %r22; fence.proxy.async; bar.sync 0; @!%t bra END;"
         "cp.async.bulk.global.shared::cta.bulk_group [%addr2], [%r1], 128; {{ORDER}}"
         "cp.async.bulk.global.shared::cta.bulk_group [%addr2+128], [%r1+128], 128;"
         "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 1; st.shared.b32 [%r1], %r21;"
         "cp.async.bulk.wait_group 0; END:",
         "cp.async.bulk.commit_group;"),
    Case("result of a bulk store", "order: asynchronous result",
         "st.shared.b32 [%r3], %r22; fence.proxy.async; bar.sync 0; @!%t bra END;"
         "cp.async.bulk.global.shared::cta.bulk_group [%addr2], [%r1], 256;"
         "cp.async.bulk.commit_group; {{ORDER}} ld.global.b32 %r5, [%addr2];"
         "cp.async.bulk.wait_group 0; END:",
         "cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"),
    Case("cp.async group", "order: asynchronous result",
         "cvt.u64.u32 %addr3, %r2; add.s64 %addr3, %addr1, %addr3;"
         "cp.async.ca.shared.global [%r3], [%addr3], 4; cp.async.commit_group;"
         "cp.async.ca.shared.global [%r3+256], [%addr3], 4; cp.async.commit_group; {{ORDER}}"
         "ld.shared.b32 %r5, [%r3]; cp.async.wait_all;",
         "cp.async.wait_group 1;", "cp.async.wait_group 2;"),
    Case("cp.async for another warp", "order: asynchronous result",
         barriers(32) + "@!%w bra READ; cvt.u64.u32 %addr3, %r2; add.s64 %addr3, %addr1, %addr3;"
         "cp.async.ca.shared.global [%r3], [%addr3], 4; {{ORDER}} bra END; READ:" + wait()
         + CONSUME + "END: cp.async.wait_all; bar.sync 0;",
         "cp.async.mbarrier.arrive.noinc.shared.b64 [%r20];",
         "mbarrier.arrive.shared.b64 _, [%r20];"),
    Case("bulk load before the exit", "order: exit",
         barriers() + "@!%t bra END; mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 128;"
         "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%addr1], 128,"
         " [%r20]; {{ORDER}} END:",
         wait()),
    Case("bulk store before the exit", "order: exit",
         "st.shared.b32 [%r3], %r22; fence.proxy.async; bar.sync 0; @!%t bra END;"
         "cp.async.bulk.global.shared::cta.bulk_group [%addr2], [%r1], 256;"
         "cp.async.bulk.commit_group; {{ORDER}} END:",
         "cp.async.bulk.wait_group.read 0;"),
    Case("arrival from another CTA before the exit", "order: exit",
         barriers() + "barrier.cluster.arrive; barrier.cluster.wait; mov.u32 %i2, %cluster_ctarank;"
         "xor.b32 %i3, %i2, 1; mapa.shared::cluster.u32 %r6, %r20, %i3;"
         "@%t mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6]; {{ORDER}}",
         wait(), cluster=2, grid=2),
    Case("an mbarrier without barrier",
         "order: mbarrier initialisation|mbarrier: not initialised",
         "add.u32 %r20, %r1, 1024; @%t mbarrier.init.shared.b64 [%r20], 2; {{ORDER}}"
         "setp.eq.u32 %p5, %i0, 32; or.pred %p6, %p5, %t;"
         "@%p6 mbarrier.arrive.shared.b64 _, [%r20];",
         "bar.sync 0;"),
    Case("an mbarrier for another CTA", "order: mbarrier initialisation",
         "add.u32 %r20, %r1, 1024; @%t mbarrier.init.shared.b64 [%r20], 1; {{ORDER}}"
         "barrier.cluster.arrive.relaxed; barrier.cluster.wait; mov.u32 %i2, %cluster_ctarank;"
         "xor.b32 %i3, %i2, 1; mapa.shared::cluster.u32 %r6, %r20, %i3;"
         "@%t mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];" + wait(),
         "fence.mbarrier_init.release.cluster;", "", cluster=2, grid=2),
    Case("cluster barrier", "order: race",
         "st.shared.b32 [%r3], %r22; {{ORDER}} barrier.cluster.wait;"
         "mov.u32 %i2, %cluster_ctarank; xor.b32 %i3, %i2, 1;"
         "mapa.shared::cluster.u32 %r6, %r3, %i3;"
         "ld.shared::cluster.b32 %r7, [%r6]; barrier.cluster.arrive; barrier.cluster.wait;",
         "barrier.cluster.arrive.release;", "barrier.cluster.arrive.relaxed;", cluster=2, grid=2),
    Case("cluster barrier before the exit", "order: exit",
         "st.shared.b32 [%r3], %r22; barrier.cluster.arrive; barrier.cluster.wait;"
         "mov.u32 %i2, %cluster_ctarank; xor.b32 %i3, %i2, 1;"
         "mapa.shared::cluster.u32 %r6, %r3, %i3;"
         "ld.shared::cluster.b32 %r7, [%r6]; {{ORDER}}",
         "barrier.cluster.arrive; barrier.cluster.wait;", cluster=2, grid=2),
    Case("flag by release and acquire", "order: race",
         "mov.u32 %i2, %ctaid.x; @!%t bra END; setp.eq.u32 %p5, %i2, 1; @%p5 bra WRITE;"
         "POLL: ld.acquire.gpu.global.b32 %r5, [%addr1]; setp.eq.u32 %p6, %r5, 0; @%p6 bra POLL;"
         "ld.global.b32 %r6, [%addr2]; bra END;"
         "WRITE: st.global.b32 [%addr2], %r22; {{ORDER}} END:",
         "st.release.gpu.global.b32 [%addr1], %r22;", "st.relaxed.gpu.global.b32 [%addr1], %r22;",
         grid=2),
    Case("flag by a fence and a relaxed store", "order: race",
         "mov.u32 %i2, %ctaid.x; @!%t bra END; setp.eq.u32 %p5, %i2, 1; @%p5 bra WRITE;"
         "POLL: ld.volatile.global.b32 %r5, [%addr1]; setp.eq.u32 %p6, %r5, 0; @%p6 bra POLL;"
         "{{ORDER}} ld.global.b32 %r6, [%addr2]; bra END;"
         "WRITE: st.global.b32 [%addr2], %r22; fence.acq_rel.gpu;"
         "st.relaxed.gpu.global.b32 [%addr1], %r22; END:",
         "fence.acq_rel.gpu;", grid=2),
    Case("counter after a barrier and a fence", "order: race",
         "mov.u32 %i2, %ctaid.x; setp.eq.u32 %p5, %i2, 1; @!%p5 bra READ;"
         "cvt.u64.u32 %addr4, %r2; add.s64 %addr4, %addr2, %addr4; st.global.b32 [%addr4], %r22;"
         "{{ORDER}} @%t red.release.gpu.global.add.u32 [%addr1], 1; bra END;"
         "READ: @!%t bra END; POLL: ld.acquire.gpu.global.b32 %r5, [%addr1];"
         "setp.eq.u32 %p6, %r5, 0; @%p6 bra POLL; ld.global.b32 %r6, [%addr2+200]; END:",
         "bar.sync 0;", grid=2),
    Case("wait::st before another warp", "order: tensor memory",
         ALLOCATE + "setp.eq.u32 %p5, %i1, 4; @%p5 bra MEET; @!%w bra MEET;"
         "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r30], {%r3}; {{ORDER}}"
         "MEET: bar.sync 0; @!%p5 bra LAST;"
         "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r30]; add.u32 %r5, %r4, 1; LAST:" + FREE,
         "tcgen05.wait::st.sync.aligned;", block=160),
    Case("commit before a load", "order: tensor memory",
         ALLOCATE + barriers() + "@!%t bra READ;" + COPY
         + "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r20];"
         "READ: {{ORDER}} bar.warp.sync -1; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r30];"
         "add.u32 %r5, %r4, 1; bar.sync 0;" + wait() + FREE,
         wait()),
    Case("load complete before columns are handed back", "order: tensor memory",
         ALLOCATE + barriers(32) + "@%w bra COPY; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, "
         "[%r30]; {{ORDER}} mbarrier.arrive.shared.b64 _, [%r20]; add.u32 %r5, %r4, 1; bra LAST;"
         "COPY:" + wait() + "@!%t bra LAST;" + COPY
         + "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r19];"
         + wait("%r19") + "LAST: bar.sync 0;" + FREE,
         "add.u32 %r6, %r4, 1;"),
    Case("loads complete in order", "order: tensor memory",
         ALLOCATE + barriers(32) + "@%w bra COPY; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, "
         "[%r30]; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r7}, [%r30+1]; {{ORDER}}"
         "mbarrier.arrive.shared.b64 _, [%r20]; add.u32 %r5, %r7, 1; bra LAST;"
         "COPY:" + wait() + "@!%t bra LAST;" + COPY
         + "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r19];"
         + wait("%r19") + "LAST: bar.sync 0;" + FREE,
         "tcgen05.wait::ld.sync.aligned;", "add.u32 %r6, %r4, 1;"),
    Case("source of tcgen05.cp", "order: overwritten source",
         ALLOCATE + barriers() + "@!%t bra LAST;" + COPY
         + "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r20];"
         "{{ORDER}} st.shared.b32 [%r1], %r22;" + wait() + "LAST: bar.sync 0;" + FREE,
         wait()),
]  # fmt: skip


def legal(name: str, body: str, **options: int) -> Case:
    """A kernel that is right, in an order that is not the usual one."""
    return Case(name, "", body, "", **options)


RING = """
 mov.b32 %r40, 0; mov.b32 %r41, 1; @!%w bra CONSUMER; @!%t bra END;
PRODUCE:
 WAIT_EMPTY
 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 128;
 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%addr1], 128, [%r20];
 add.u32 %r40, %r40, 1; xor.b32 %r41, %r41, 1; setp.lt.u32 %p3, %r40, 16; @%p3 bra PRODUCE;
 WAIT_EMPTY
 bra END;
CONSUMER:
 WAIT_FULL
 and.b32 %r9, %i0, 31; shl.b32 %r10, %r9, 2; add.u32 %r11, %r1, %r10; ld.shared.b32 %r12, [%r11];
 mbarrier.arrive.shared.b64 _, [%r19]; xor.b32 %r21, %r21, 1;
 add.u32 %r40, %r40, 1; setp.lt.u32 %p3, %r40, 16; @%p3 bra CONSUMER;
END:"""
RING = (
    RING.replace("WAIT_EMPTY", wait("%r19", "%r41")).replace("WAIT_FULL", wait())
)  # fmt: skip
PEER = """ barrier.cluster.arrive; barrier.cluster.wait; mov.u32 %i2, %cluster_ctarank;
 xor.b32 %i3, %i2, 1; mapa.shared::cluster.u32 %r6, %r20, %i3;
 mapa.shared::cluster.u32 %r7, %r1, %i3;"""
TOGETHER = " barrier.cluster.arrive; barrier.cluster.wait;"

LEGAL = [
    legal("a ring of one stage, sixteen rounds", barriers(1, 32) + RING),
    legal("expect_tx by one warp, the copy by another",
          barriers() + "@%t mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 128; bar.sync 0;"
          "setp.eq.u32 %p3, %i0, 32; @%p3 cp.async.bulk.shared::cluster.global"
          ".mbarrier::complete_tx::bytes [%r1], [%addr1], 128, [%r20];" + wait() + CONSUME),
    legal("the copy before its expect_tx",
          barriers(2) + "@%t cp.async.bulk.shared::cluster.global"
          ".mbarrier::complete_tx::bytes [%r1], [%addr1], 128, [%r20];"
          "@%t mbarrier.expect_tx.shared.b64 [%r20], 128;"
          "setp.eq.u32 %p3, %i0, 32; or.pred %p3, %p3, %t; bar.sync 0;"
          "@%p3 mbarrier.arrive.shared.b64 _, [%r20];" + wait() + CONSUME),
    legal("multicast, released from both CTAs",
          barriers(1, 2) + PEER + "mov.u16 %h1, 3; mapa.shared::cluster.u32 %r8, %r19, 0;"
          "@%t mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 128; "
          "setp.eq.u32 %p3, %i2, 0; and.pred %p3, %p3, %t;" + TOGETHER +
          "@%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
          ".multicast::cluster [%r1], [%addr1], 128, [%r20], %h1;" + wait() + READ +
          "bar.sync 0; @%t mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];"
          "setp.eq.u32 %p4, %i2, 0; @!%p4 bra LAST;" + wait("%r19") +
          "@%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 128; "
          "@%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
          " [%r1], [%addr1], 128, [%r20];" + wait("%r20", "%r22") + "LAST:" + TOGETHER,
          cluster=2, grid=2),
    legal("st.async to the other CTA",
          barriers() + "@%t mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 128;" + PEER
          + "add.u32 %r8, %r7, %r2; setp.lt.u32 %p3, %i0, 32; @%p3 st.async.shared::cluster"
          ".mbarrier::complete_tx::bytes.u32 [%r8], %i0, [%r6];" + wait() + READ + TOGETHER,
          cluster=2, grid=2),
    legal("two stores in flight, buffers in turn",
          "@!%t bra END; mov.b32 %r40, 0; add.u32 %r42, %r1, 0;"
          "NEXT: cp.async.bulk.wait_group.read 1; st.shared.b32 [%r42], %r40;"
          "fence.proxy.async.shared::cta; cp.async.bulk.global.shared::cta.bulk_group [%addr2],"
          " [%r42], 16; cp.async.bulk.commit_group; sub.u32 %r43, %r42, %r1;"
          "xor.b32 %r43, %r43, 64; add.u32 %r42, %r1, %r43; add.s64 %addr2, %addr2, 16;"
          "add.u32 %r40, %r40, 1; setp.lt.u32 %p3, %r40, 8; @%p3 bra NEXT;"
          "cp.async.bulk.wait_group 0; END:"),
    legal("pairs of warps at barriers of their own",
          "shr.u32 %i2, %i1, 1; add.u32 %i2, %i2, 3; st.shared.b32 [%r3], %r22;"
          "bar.sync %i2, 64; xor.b32 %r4, %r2, 128; add.u32 %r4, %r4, %r1;"
          "ld.shared.b32 %r5, [%r4];", block=128),
    legal("bytes of one word by two warps",
          "and.b32 %r9, %i0, 31; shl.b32 %r9, %r9, 2; add.u32 %r9, %r9, %r1; add.u32 %r9, %r9, %i1;"
          "bar.sync 0; cvt.u16.u32 %h1, %i0; st.shared.u8 [%r9+512], %h1; bar.sync 0;"
          "ld.shared.u8 %h2, [%r9+512];"),
    legal("bytes of one word by lanes of a warp",
          "add.u32 %r9, %r1, %i0; cvt.u16.u32 %h1, %i0; ld.shared.u8 %h2, [%r9];"
          "st.shared.u8 [%r9], %h1; ld.shared.u8 %h2, [%r9]; st.shared.u8 [%r9], %h2;"),
    legal("atomic additions of every CTA", "red.global.add.u32 [%addr1], 1;", grid=4),
    legal("a flag handed from CTA to CTA",
          "mov.u32 %i2, %ctaid.x; @!%t bra END; setp.eq.u32 %p5, %i2, 3; @%p5 bra SET;"
          "add.u32 %r7, %i2, 1; POLL: ld.acquire.gpu.global.b32 %r5, [%addr1];"
          "setp.ne.u32 %p6, %r5, %r7; @%p6 bra POLL; ld.global.b32 %r6, [%addr2];"
          "SET: add.u32 %r8, %i2, 16; st.global.b32 [%addr2], %r8;"
          "st.release.gpu.global.b32 [%addr1], %i2; END:", grid=4),
    legal("release by the barrier of a CTA and one thread's fence",
          "mov.u32 %i2, %ctaid.x; setp.eq.u32 %p5, %i2, 1; @!%p5 bra READ;"
          "cvt.u64.u32 %addr4, %r2; add.s64 %addr4, %addr2, %addr4; st.global.b32 [%addr4], %r22;"
          "bar.sync 0; @!%t bra END; membar.gl; atom.global.add.u32 %r5, [%addr1], 1; bra END;"
          "READ: @!%t bra READY; POLL: ld.volatile.global.b32 %r5, [%addr1];"
          "setp.eq.u32 %p6, %r5, 0; @%p6 bra POLL; membar.gl; READY: bar.sync 0;"
          "cvt.u64.u32 %addr4, %r2; add.s64 %addr4, %addr2, %addr4; ld.global.b32 %r6, [%addr4];"
          "END:", grid=2),
    legal("tensor memory handed back before the results are stored",
          ALLOCATE + barriers(32) + "@%w bra COPY; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, "
          "[%r30]; tcgen05.wait::ld.sync.aligned; mbarrier.arrive.shared.b64 _, [%r20];"
          "cvt.u64.u32 %addr4, %r2; add.s64 %addr4, %addr2, %addr4; st.global.b32 [%addr4], %r2;"
          "bra LAST; COPY:" + wait() + "@!%t bra LAST;" + COPY
          + "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r19];"
          + wait("%r19") + "LAST: bar.sync 0;" + FREE),
    legal("a store to tensor memory and the warp's own load",
          ALLOCATE + "@!%w bra LAST; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r30], {%r3};"
          "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r30]; add.u32 %r5, %r4, 1;"
          "tcgen05.wait::st.sync.aligned; LAST: bar.sync 0;" + FREE),
]  # fmt: skip
