"""Runtime functions for divergence and for the round-robin over the warps of a cluster."""

from __future__ import annotations

from rubin_moe.emulator.native import blocks
from rubin_moe.emulator.native.blocks import CLUSTER, QUEUE
from rubin_moe.emulator.native.ir import I1, I32, I64, PTR, V1, V32, Builder, Val
from rubin_moe.emulator.native.library import count_effect, runtime_function
from rubin_moe.emulator.native.order import call_block_hook, call_hook
from rubin_moe.emulator.state.mbarrier import MARKER, MARKER_SHIFT, PHASE_SHIFT
from rubin_moe.emulator.state.registers import FIELDS, Outcome, Status

_NEVER = 0x7FFFFFFF


@runtime_function("emu.diverge", None, S=PTR, taken=I32, T=I32, rest=I32, F=I32)
def _diverge(b: Builder, S: Val, taken: Val, T: Val, rest: Val, F: Val) -> None:
    """Lanes of ``taken`` go to segment T, lanes of ``rest`` to F."""
    slot = b.gep(S, FIELDS["pcs"])
    pcs = b.load(slot, V32)
    pcs = taken.bits_as(V1).select(T.splat(), pcs)
    b.store(rest.bits_as(V1).select(F.splat(), pcs), slot)
    b.ret()


@runtime_function("emu.suspend", None, S=PTR, mask=I32, T=I32)
def _suspend(b: Builder, S: Val, mask: Val, T: Val) -> None:
    """Lanes of ``mask`` wait at segment T for the lanes that its collective also needs."""
    slot = b.gep(S, FIELDS["pcs"])
    b.store(mask.bits_as(V1).select(T.splat(), b.load(slot, V32)), slot)
    b.set_field(S, FIELDS["suspended"], b.field(S, FIELDS["suspended"], I32) | mask)
    b.ret()


@runtime_function("emu.slice", None, S=PTR, T=I32)
def _slice(b: Builder, S: Val, T: Val) -> None:
    """A used-up slice at the head of loop T: the warp resumes there, other lanes first."""
    mask = b.field(S, FIELDS["mask"], I32)
    with b.if_(mask.eq(b.field(S, FIELDS["live"], I32))):
        b.set_field(S, FIELDS["resume"], T)
        b.ret()
    b.call("emu.diverge", None, S, mask, T, b.const(0, I32), b.const(0, I32))
    b.set_field(S, FIELDS["floor"], T + 1)
    b.set_field(S, FIELDS["resume"], b.const(-1, I32))
    b.ret()


@runtime_function("emu.pick", I32, S=PTR)
def _pick(b: Builder, S: Val) -> None:
    """Choose the segment to run in a diverged warp and set the mask; -1: all lanes suspended.

    The lowest segment runs, so that lanes meet again where control flow joins. From a used-up
    slice on, ``floor`` keeps the lanes there behind all that are further on, until those have used
    up a slice too, wait or are gone: lanes that spin cannot starve the others.
    """
    live = b.field(S, FIELDS["live"], I32)
    suspended = b.field(S, FIELDS["suspended"], I32)
    runnable = live & ~suspended
    with b.if_(runnable.eq(0)):
        b.ret(-1)
    pcs = b.load(b.gep(S, FIELDS["pcs"]), V32)
    never = b.const(_NEVER, V32)
    candidates = runnable.bits_as(V1).select(pcs, never)
    floor = b.field(S, FIELDS["floor"], I32)
    later = candidates.cmp("sge", floor.splat()).select(candidates, never)
    first = b.call("llvm.vector.reduce.umin.v32i32", I32, later)
    lowest = b.call("llvm.vector.reduce.umin.v32i32", I32, candidates)
    chosen = first.eq(_NEVER).select(lowest, first)
    b.set_field(S, FIELDS["floor"], first.eq(_NEVER).select(b.const(0, I32), floor))
    mask = pcs.eq(chosen.splat()).bits_as(I32) & live
    b.set_field(S, FIELDS["mask"], mask)
    b.set_field(S, FIELDS["suspended"], suspended & ~mask)
    b.ret(chosen)


@runtime_function("emu.mbarrier_phase", I32, word=PTR)
def _mbarrier_phase(b: Builder, word: Val) -> None:
    """Phase parity of the mbarrier at a host address, or -1 when it is none."""
    value = b.load(word, I64)
    with b.if_((value >> MARKER_SHIFT).ne(MARKER)):
        b.ret(-1)
    b.ret((value >> PHASE_SHIFT).cast("trunc", I32) & 1)


def barrier_slot(b: Builder, cta: Val, index: Val) -> Val:
    """Address of named barrier ``index`` (i32) in a CTA block."""
    offset = (index * blocks.BARRIER_BYTES + blocks.CTA_BARRIERS).cast("zext", I64)
    return b.gep(cta, offset)


@runtime_function("emu.ready", I1, S=PTR)
def _ready(b: Builder, S: Val) -> None:
    """Whether what the warp waits for has happened."""
    status = b.field(S, FIELDS["status"], I32)
    with b.if_(status.eq(Status.READY)):
        b.ret(1, I1)
    with b.if_(status.eq(Status.MBARRIER)):
        address = b.field(S, FIELDS["wait_address"], I32).cast("zext", I64)
        word = b.gep(b.field(S, FIELDS["smem"], PTR), address)
        phase = b.call("emu.mbarrier_phase", I32, word)
        b.ret(phase.ne(b.field(S, FIELDS["wait_value"], I32)), I1)
    with b.if_(status.eq(Status.BARRIER)):
        index = b.field(S, FIELDS["wait_address"], I32)
        slot = barrier_slot(b, b.field(S, FIELDS["cta"], PTR), index)
        generation = b.field(slot, blocks.BARRIER_GENERATION, I32)
        b.ret(generation.ne(b.field(S, FIELDS["wait_value"], I32)), I1)
    with b.if_(status.eq(Status.CLUSTER)):
        generation = b.field(b.field(S, FIELDS["cluster"], PTR), CLUSTER["generation"], I32)
        b.ret(generation.ne(b.field(S, FIELDS["cluster_token"], I32)), I1)
    b.ret(0, I1)


@runtime_function("emu.exit", None, S=PTR)
def _exit(b: Builder, S: Val) -> None:
    """A warp has exited: barriers that wait for all live threads may be complete now."""
    b.set_field(S, FIELDS["status"], b.const(Status.EXITED, I32))
    call_hook(b, "leave", S)
    cta, cluster = b.field(S, FIELDS["cta"], PTR), b.field(S, FIELDS["cluster"], PTR)
    live = b.field(cta, blocks.CTA_LIVE, I32) - 1
    b.set_field(cta, blocks.CTA_LIVE, live)
    for index in range(blocks.NUM_BARRIERS):
        slot = b.gep(cta, blocks.CTA_BARRIERS + index * blocks.BARRIER_BYTES)
        arrived = b.field(slot, blocks.BARRIER_ARRIVED, I32)
        everyone = b.field(slot, blocks.BARRIER_EXPECTED, I32).eq(blocks.ALL_THREADS)
        complete = everyone & arrived.ne(0) & arrived.cmp("uge", live * 32)
        with b.if_(complete):
            call_hook(b, "barrier_complete", S, index, 0)
            b.call("emu.barrier_complete", None, slot)
    warps = b.field(cluster, CLUSTER["live"], I32) - 1
    b.set_field(cluster, CLUSTER["live"], warps)
    arrived = b.field(cluster, CLUSTER["arrived"], I32)
    with b.if_(arrived.ne(0) & arrived.cmp("uge", warps)):
        b.call("emu.cluster_complete", None, cluster)
    count_effect(b, cluster)
    b.ret()


@runtime_function("emu.barrier_complete", None, slot=PTR)
def _barrier_complete(b: Builder, slot: Val) -> None:
    """Release the waiters of a named barrier."""
    b.set_field(slot, blocks.BARRIER_ARRIVED, b.const(0, I32))
    b.set_field(slot, blocks.BARRIER_EXPECTED, b.const(0, I32))
    generation = b.field(slot, blocks.BARRIER_GENERATION, I32)
    b.set_field(slot, blocks.BARRIER_GENERATION, generation + 1)
    b.ret()


@runtime_function("emu.cluster_complete", None, cluster=PTR)
def _cluster_complete(b: Builder, cluster: Val) -> None:
    """Release the waiters of the cluster barrier."""
    order = b.field(cluster, CLUSTER["order"], PTR)
    with b.if_(order.cast("ptrtoint", I64).ne(0)):
        call_block_hook(b, "cluster_complete", order, order)
    b.set_field(cluster, CLUSTER["arrived"], b.const(0, I32))
    generation = b.field(cluster, CLUSTER["generation"], I32)
    b.set_field(cluster, CLUSTER["generation"], generation + 1)
    b.ret()


@runtime_function("emu.schedule", I64, Q=PTR)
def _schedule(b: Builder, Q: Val) -> None:
    """Run warps in turn until one needs Python; returns ``outcome << 32 | warp``. The site and
    the lanes that execute it are left in the queue.

    A warp goes on until it waits, exits or uses up its slice. IDLE: every warp waits. SLICED:
    warps only use up slices (they may spin on something outside this cluster).
    """
    count = b.field(Q, QUEUE["count"], I32)
    rounds, budget = b.field(Q, QUEUE["rounds"], I32), b.field(Q, QUEUE["budget"], I32)
    cursor, idle, slices = (b.alloca_slot(I32) for _ in range(3))
    b.store(b.field(Q, QUEUE["cursor"], I32), cursor)
    b.store(b.const(0, I32), idle)
    b.store(b.const(0, I32), slices)
    b.br("loop")
    b.label("loop")
    index = b.load(cursor, I32)
    offset = (index.cast("zext", I64) << 3) + QUEUE["warps"]
    warp = b.load(b.gep(Q, offset), PTR)
    ready = b.call("emu.ready", I1, warp)
    b.cond_br(ready, "run", "skip")
    b.label("run")
    b.set_field(warp, FIELDS["status"], b.const(Status.READY, I32))
    b.set_field(warp, FIELDS["budget"], budget)
    b.store(b.const(0, I32), idle)
    function = b.field(Q, QUEUE["run"], PTR)
    outcome = b.emit(f"call i32 {function.text}({warp})", I32)
    with b.if_(outcome.eq(Outcome.EXITED)):
        b.call("emu.exit", None, warp)
        b.br("next")
    with b.if_(outcome.eq(Outcome.WAIT)):
        b.br("next")
    with b.if_(outcome.eq(Outcome.SLICE)):
        used = b.load(slices, I32) + 1
        b.store(used, slices)
        with b.if_(used.cmp("ult", rounds)):
            b.br("next")
        _leave(b, Q, _after(b, index, count), b.const(blocks.SLICED, I32))
    site = b.load(b.gep(warp, FIELDS["site"]), I32)
    b.set_field(Q, QUEUE["site"], site)
    b.set_field(Q, QUEUE["exec"], b.field(warp, FIELDS["exec"], I32))
    _leave(b, Q, index, outcome)
    b.label("skip")
    waited = b.load(idle, I32) + 1
    b.store(waited, idle)
    with b.if_(waited.cmp("uge", count)):
        live = b.field(b.field(Q, QUEUE["cluster"], PTR), CLUSTER["live"], I32)
        result = live.eq(0).select(b.const(blocks.DONE, I32), b.const(blocks.IDLE, I32))
        _leave(b, Q, index, result)
    b.br("next")
    b.label("next")
    b.store(_after(b, index, count), cursor)
    b.br("loop")


def _after(b: Builder, index: Val, count: Val) -> Val:
    following = index + 1
    return following.eq(count).select(b.const(0, I32), following)


def _leave(b: Builder, Q: Val, index: Val, outcome: Val) -> None:
    b.set_field(Q, QUEUE["cursor"], index)
    b.ret((outcome.cast("zext", I64) << 32) | index.cast("zext", I64), I64)
