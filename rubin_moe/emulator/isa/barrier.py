"""Named barriers and the cluster barrier (PTX ISA 9.7.13.1, 9.7.13.3).

A warp counts with 32 threads whatever lanes it has left, as the ISA says of barriers that take a
thread count.
"""

from __future__ import annotations

from rubin_moe.emulator.codegen import Emitter
from rubin_moe.emulator.native.blocks import ALL_THREADS, CLUSTER
from rubin_moe.emulator.native.ir import I32, LANES, PTR
from rubin_moe.emulator.ptx.ast import Instruction
from rubin_moe.emulator.state.registers import Outcome, Status


def emit_barrier(em: Emitter, ins: Instruction) -> None:
    """bar / barrier .sync and .arrive, with or without a thread count."""
    em.rendezvous(None)
    mask = em.exec_mask()
    em.require_operands(ins.operands, mask)
    index = em.uniform(ins.operands[0], 32, mask)
    has_count = len(ins.operands) > 1
    expected = em.uniform(ins.operands[1], 32, mask) if has_count else em.b.const(ALL_THREADS, I32)
    em.flush()
    following = em.number + 1
    skip = em.skip_unless_executed(mask, following)
    threads, waits = em.b.const(LANES, I32), em.b.const(int("sync" in ins.parts), I32)
    done = em.b.call("emu.barrier_arrive", I32, em.S, index, expected, threads, waits)
    em.trap_if_recorded()
    if "sync" in ins.parts:
        go_on, wait = em.b.fresh("passed"), em.b.fresh("wait")
        em.b.cond_br(done.ne(0), go_on, wait)
        em.b.label(wait)
        em.set_field("status", Status.BARRIER)
        em.leave(Outcome.WAIT, following)
        em.b.label(go_on)
    em.goto(following)
    em.end_skip(skip, following)


def emit_cluster_arrive(em: Emitter, ins: Instruction) -> None:
    """barrier.cluster.arrive."""
    em.rendezvous(None)
    run, after = em.b.fresh("arrive"), em.b.fresh("arrived")
    em.b.cond_br(em.exec_mask().ne(0), run, after)
    em.b.label(run)
    relaxed = em.b.const(int("relaxed" in ins.parts), I32)
    em.b.call("emu.cluster_arrive", None, em.S, relaxed)
    em.b.br(after)
    em.b.label(after)


def emit_cluster_wait(em: Emitter, ins: Instruction) -> None:
    """barrier.cluster.wait."""
    em.rendezvous(None)
    mask = em.exec_mask()
    em.flush()
    following = em.number + 1
    skip = em.skip_unless_executed(mask, following)
    generation = em.b.field(em.field("cluster", PTR), CLUSTER["generation"], I32)
    go_on, wait = em.b.fresh("passed"), em.b.fresh("wait")
    em.b.cond_br(generation.ne(em.field("cluster_token", I32)), go_on, wait)
    em.b.label(wait)
    em.set_field("status", Status.CLUSTER)
    em.leave(Outcome.WAIT, following)
    em.b.label(go_on)
    em.ordered("cluster_wait")
    em.goto(following)
    em.end_skip(skip, following)


EMITTERS = {
    "barrier": emit_barrier,
    "cluster_arrive": emit_cluster_arrive,
    "cluster_wait": emit_cluster_wait,
}
