"""Runtime functions for mbarriers, named barriers, the cluster barrier and warp collectives."""

from __future__ import annotations

from rubin_moe.emulator.native import blocks
from rubin_moe.emulator.native.blocks import CLUSTER
from rubin_moe.emulator.native.control import barrier_slot
from rubin_moe.emulator.native.ir import I1, I32, I64, PTR, V32, V64, Builder, Val
from rubin_moe.emulator.native.library import count_effect, runtime_function
from rubin_moe.emulator.native.memory import record_fault
from rubin_moe.emulator.native.order import call_hook
from rubin_moe.emulator.state import mbarrier as word_format
from rubin_moe.emulator.state.registers import FIELDS

_COUNT = word_format.COUNT_MASK


@runtime_function("emu.mbarrier_update", I64, cluster=PTR, word=PTR, count=I32, tx=I32, drop=I32)
def _mbarrier_update(b: Builder, cluster: Val, word: Val, count: Val, tx: Val, drop: Val) -> None:
    """``count`` arrivals and ``tx`` bytes added; ``drop`` leaves the expected count of later
    phases. Returns the word before, or a fault code (below 64)."""
    value = b.load(word, I64)
    with b.if_((value >> word_format.MARKER_SHIFT).ne(word_format.MARKER)):
        b.ret(blocks.NOT_AN_MBARRIER, I64)
    wide = [v.cast("sext", I64) for v in (count, tx, drop)]
    pending = (value & _COUNT) - wide[0]
    expected = (value >> word_format.EXPECTED_SHIFT & _COUNT) - wide[2]
    shift = 64 - word_format.TX_SHIFT - word_format.TX_BITS
    total = (value << shift).ashr(64 - word_format.TX_BITS) + wide[1]
    with b.if_(pending.cmp("slt", 0) | expected.cmp("slt", 0)):
        b.ret(blocks.MBARRIER_UNDERFLOW, I64)
    limit = (1 << (word_format.TX_BITS - 1)) - 1
    with b.if_(total.cmp("sgt", limit) | total.cmp("slt", -limit)):
        b.ret(blocks.MBARRIER_TX_RANGE, I64)
    complete = pending.eq(0) & total.eq(0)
    phase = (value >> word_format.PHASE_SHIFT & 1) ^ complete.cast("zext", I64)
    pending = complete.select(expected, pending)
    out = pending | expected << word_format.EXPECTED_SHIFT
    out = out | (total & ((1 << word_format.TX_BITS) - 1)) << word_format.TX_SHIFT
    out = out | phase << word_format.PHASE_SHIFT
    b.store(out | (word_format.MARKER << word_format.MARKER_SHIFT), word)
    count_effect(b, cluster)
    b.ret(value, I64)


def _words(b: Builder, S: Val, address: Val) -> Val:
    """Slot holding the lanes' host addresses of shared::cluster addresses."""
    base = b.field(S, FIELDS["smem"], I64)
    slot = b.alloca_slot(V64)
    b.store(address.cast("zext", V64) + base.splat(), slot, 64)
    return slot


@runtime_function("emu.mbarrier_init", None, S=PTR, address=V32, count=V32, mask=I32)
def _mbarrier_init(b: Builder, S: Val, address: Val, count: Val, mask: Val) -> None:
    """A fresh mbarrier of ``count`` arrivals, phase 0."""
    words, counts = _words(b, S, address), b.alloca_slot(V32)
    b.store(count, counts, 64)
    with b.for_lanes(mask) as lane:
        wide = lane.cast("zext", I64)
        number = b.load(b.gep(counts, wide << 2), I32)
        with b.if_((number - 1).cmp("uge", word_format.MAX_COUNT)):
            record_fault(b, S, blocks.MBARRIER_COUNT, lane, number.cast("zext", I64))
            b.ret()
        n = number.cast("zext", I64)
        value = n | n << word_format.EXPECTED_SHIFT
        value = value | (word_format.MARKER << word_format.MARKER_SHIFT)
        word = b.load(b.gep(words, wide << 3), PTR)
        b.store(value, word)
        call_hook(b, "mbarrier_init", S, word, lane)
    b.ret()


@runtime_function(
    "emu.mbarrier_arrive", V64, S=PTR, address=V32, count=V32, tx=V32, drop=I32, mask=I32
)
def _mbarrier_arrive(
    b: Builder, S: Val, address: Val, count: Val, tx: Val, drop: Val, mask: Val
) -> None:
    """Arrivals of the lanes in ascending order; returns the words before (state tokens)."""
    words, cluster = _words(b, S, address), b.field(S, FIELDS["cluster"], PTR)
    counts, bytes_, tokens = b.alloca_slot(V32), b.alloca_slot(V32), b.alloca_slot(V64)
    b.store(count, counts, 64)
    b.store(tx, bytes_, 64)
    b.store(b.const(0, V64), tokens, 64)
    with b.for_lanes(mask) as lane:
        wide = lane.cast("zext", I64)
        host = b.load(b.gep(words, wide << 3), PTR)
        n = b.load(b.gep(counts, wide << 2), I32)
        x = b.load(b.gep(bytes_, wide << 2), I32)
        dropped = drop.ne(0).select(n, b.const(0, I32))
        old = b.call("emu.mbarrier_update", I64, cluster, host, n, x, dropped)
        with b.if_(old.cmp("ult", 64)):
            where = host.cast("ptrtoint", I64) - b.field(S, FIELDS["smem"], I64)
            record_fault(b, S, old.cast("trunc", I32), lane, where)
            b.ret(b.const(0, V64), V64)
        b.store(old, b.gep(tokens, wide << 3))
        call_hook(b, "mbarrier_arrive", S, host, old, lane)
    call_hook(b, "converge", S)
    b.ret(b.load(tokens, V64, 64), V64)


@runtime_function("emu.mbarrier_test", I32, S=PTR, address=V32, parity=V32, mask=I32)
def _mbarrier_test(b: Builder, S: Val, address: Val, parity: Val, mask: Val) -> None:
    """Lanes whose phase of ``parity`` has completed; notes what another lane waits for."""
    words, parities = _words(b, S, address), b.alloca_slot(V32)
    b.store(parity, parities, 64)
    passed = b.alloca_slot(I32)
    b.store(b.const(0, I32), passed)
    with b.for_lanes(mask) as lane:
        wide = lane.cast("zext", I64)
        host = b.load(b.gep(words, wide << 3), PTR)
        wanted = b.load(b.gep(parities, wide << 2), I32)
        phase = b.call("emu.mbarrier_phase", I32, host)
        where = host.cast("ptrtoint", I64) - b.field(S, FIELDS["smem"], I64)
        with b.if_(phase.eq(-1)):
            record_fault(b, S, blocks.NOT_AN_MBARRIER, lane, where)
            b.ret(0)
        done = phase.ne(wanted)
        b.store(b.load(passed, I32) | done.cast("zext", I32) << lane, passed)
        with b.if_(~done):
            b.set_field(S, FIELDS["wait_address"], where.cast("trunc", I32))
            b.set_field(S, FIELDS["wait_value"], wanted)
    done = b.load(passed, I32)
    with b.if_(done.ne(0)):
        call_hook(b, "mbarrier_wait", S, words, done)
    b.ret(done)


@runtime_function("emu.barrier_arrive", I32, S=PTR, index=I32, expected=I32, threads=I32, waits=I32)
def _barrier_arrive(
    b: Builder, S: Val, index: Val, expected: Val, threads: Val, waits: Val
) -> None:
    """Arrive at a named barrier; returns 1 when that completed it, else 0.

    ``expected`` ALL_THREADS stands for every live thread of the CTA; ``waits`` says whether the
    warp goes on only after it. The generation waited for is left in the warp's state.
    """
    zero = b.const(0, I32)
    with b.if_(index.cmp("uge", blocks.NUM_BARRIERS)):
        record_fault(b, S, blocks.BARRIER_INDEX, zero, index.cast("zext", I64))
        b.ret(1)
    cta = b.field(S, FIELDS["cta"], PTR)
    slot = barrier_slot(b, cta, index)
    arrived = b.field(slot, blocks.BARRIER_ARRIVED, I32)
    before = b.field(slot, blocks.BARRIER_EXPECTED, I32)
    with b.if_(arrived.ne(0) & before.ne(expected)):
        record_fault(b, S, blocks.BARRIER_MISMATCH, zero, index.cast("zext", I64))
        b.ret(1)
    b.set_field(S, FIELDS["wait_address"], index)
    b.set_field(S, FIELDS["wait_value"], b.field(slot, blocks.BARRIER_GENERATION, I32))
    everyone = b.field(cta, blocks.CTA_LIVE, I32) * 32
    needed = expected.eq(blocks.ALL_THREADS).select(everyone, expected)
    total = arrived + threads
    count_effect(b, b.field(S, FIELDS["cluster"], PTR))
    call_hook(b, "barrier_arrive", S, index)
    with b.if_(total.cmp("uge", needed)):
        b.call("emu.barrier_complete", None, slot)
        call_hook(b, "barrier_complete", S, index, waits)
        b.ret(1)
    b.set_field(slot, blocks.BARRIER_ARRIVED, total)
    b.set_field(slot, blocks.BARRIER_EXPECTED, expected)
    b.ret(0)


@runtime_function("emu.cluster_arrive", None, S=PTR, relaxed=I32)
def _cluster_arrive(b: Builder, S: Val, relaxed: Val) -> None:
    """A warp arrives at the cluster barrier; the generation to wait for goes to its state.

    ``relaxed`` matters to the race detector alone.
    """
    cluster = b.field(S, FIELDS["cluster"], PTR)
    token = b.field(cluster, CLUSTER["generation"], I32)
    b.set_field(S, FIELDS["cluster_token"], token)
    arrived = b.field(cluster, CLUSTER["arrived"], I32) + 1
    b.set_field(cluster, CLUSTER["arrived"], arrived)
    count_effect(b, cluster)
    call_hook(b, "cluster_arrive", S, relaxed)
    with b.if_(arrived.cmp("uge", b.field(cluster, CLUSTER["live"], I32))):
        b.call("emu.cluster_complete", None, cluster)
    b.ret()


@runtime_function("emu.permute", V32, value=V32, source=V32)
def _permute(b: Builder, value: Val, source: Val) -> None:
    """Lane i gets ``value[source[i] & 31]``."""
    memory = b.alloca_slot(V32)
    b.store(value, memory, 64)
    offsets = ((source & 31) << 2).cast("zext", V64) + memory.cast("ptrtoint", I64).splat()
    b.ret(b.call("emu.load32", V32, offsets, b.const(-1, I32)), V32)


@runtime_function("emu.match_any", V32, value=V64, mask=I32)
def _match_any(b: Builder, value: Val, mask: Val) -> None:
    """Each lane: the lanes of the mask that hold the same value."""
    memory, out = b.alloca_slot(V64), b.alloca_slot(V32)
    b.store(value, memory, 64)
    b.store(b.const(0, V32), out, 64)
    with b.for_lanes(mask) as lane:
        wide = lane.cast("zext", I64)
        own = b.load(b.gep(memory, wide << 3), I64)
        same = value.eq(own.splat()).bits_as(I32) & mask
        b.store(same, b.gep(out, wide << 2))
    b.ret(b.load(out, V32, 64), V32)


@runtime_function("emu.elect", I32, mask=I32)
def _elect(b: Builder, mask: Val) -> None:
    """The elected (lowest) lane of a mask."""
    b.ret(b.call("llvm.cttz.i32", I32, mask, b.const(0, I1)))
