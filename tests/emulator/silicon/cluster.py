"""Probes of clusters of two CTAs: distributed shared memory, multicast, remote barriers."""

from __future__ import annotations

import numpy as np

from .copies import BARRIER, DUMP_SHARED, FILL_SHARED, TABLE, WAIT
from .probe import MapSpec, Probe, entry

SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
PEER = "mov.u32 %r20, %cluster_ctarank;\nxor.b32 %r21, %r20, 1;\n"
PEER += "mapa.shared::cluster.u32 %r22, %r0, %r21;\nmapa.shared::cluster.u32 %r23, %r1, %r21;\n"


def _probe(name: str, instruction: str, body: str, size: int, maps: tuple[MapSpec, ...] = ()):
    data = np.random.RandomState(51).randint(1, 256, TABLE + 4096).astype(np.uint8)
    fill = FILL_SHARED.format(step=0, start=0xEEEEEEEE, size=size)
    text = fill + PEER + SYNC + body + SYNC + DUMP_SHARED.format(size=size)
    return Probe(
        name,
        instruction,
        entry(text, maps=len(maps), cluster=2),
        data,
        2 * size,
        block=128,
        grid=2,
        smem=BARRIER + size,
        maps=maps,
    )


def probes() -> list[Probe]:
    """All of this file."""
    out = []
    body = "mul.lo.u32 %r24, %t, 4;\nadd.u32 %r25, %r22, %r24;\nmad.lo.u32 %r26, %r20, 1000, %t;\n"
    body += "st.shared::cluster.b32 [%r25], %r26;\n" + SYNC
    body += "xor.b32 %r27, %r24, 12;\nadd.u32 %r25, %r22, %r27;\n"
    body += "ld.shared::cluster.b32 %r28, [%r25];\nadd.u32 %r29, %r0, %r24;\n" + SYNC
    body += "st.shared.b32 [%r29+512], %r28;\n"
    out.append(_probe("ld, st shared::cluster", "ld.shared::cluster", body, 1024))

    body = "add.u32 %r25, %r22, 16;\natom.shared::cluster.add.u32 %r26, [%r25], %t;\n"
    out.append(_probe("atom.shared::cluster.add.u32", "atom.shared::cluster", body, 512))

    # the peer arrives on our barrier: once with a count, once with bytes to come
    body = "@%p0 mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r23], 16;\n"
    body += "@%p0 st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
    body += "[%r22+32], {%r20, %r21, %c, %n}, [%r23];\n" + WAIT
    out.append(_probe("st.async, remote arrive", "st.async", body, 512))

    body = "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256;\n" + SYNC
    body += "mul.lo.u32 %r24, %t, 4;\nadd.u32 %r25, %r0, %r24;\n"
    body += "mad.lo.u32 %r26, %r20, 777, %t;\nst.shared.b32 [%r25], %r26;\n"
    body += "fence.proxy.async.shared::cta;\nbar.sync 0;\n"
    body += "@%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
    body += "[%r22+512], [%r0], 256, [%r23];\n" + WAIT
    out.append(_probe("bulk copy to the peer", "cp.async.bulk", body, 1024))

    body = "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256;\n" + SYNC
    body += "setp.eq.u32 %p3, %r20, 0;\nand.pred %p4, %p0, %p3;\nmov.u16 %h1, 3;\n"
    body += "@%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    body += ".multicast::cluster [%r0+128], [%in+1024], 256, [%r1], %h1;\n" + WAIT
    out.append(_probe("bulk multicast", "cp.async.bulk", body, 512))

    spec = MapSpec(0, (128, 32), (128,), (128, 8), 128, offset=TABLE)
    for mask in (1, 2, 3):
        receives = f"shr.u32 %r24, {mask}, %r20;\nand.b32 %r24, %r24, 1;\n"
        receives += "setp.eq.u32 %p5, %r24, 1;\nand.pred %p6, %p0, %p5;\n"
        body = receives + "@%p6 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 1024;\n"
        body += "not.pred %p7, %p5;\nand.pred %p7, %p7, %p0;\n"
        body += "@%p7 mbarrier.arrive.shared.b64 _, [%r1];\n" + SYNC
        body += "setp.eq.u32 %p3, %r20, 0;\nand.pred %p4, %p0, %p3;\n"
        body += f"mov.u16 %h1, {mask};\n"
        body += "@%p4 cp.async.bulk.tensor.2d.shared::cluster.global.tile"
        body += ".mbarrier::complete_tx::bytes.multicast::cluster "
        body += "[%r0], [%map0, {0, 8}], [%r1], %h1;\n" + WAIT
        name = f"tma multicast mask {mask}"
        out.append(_probe(name, "cp.async.bulk.tensor.2d multicast", body, 2048, (spec,)))
    return out
