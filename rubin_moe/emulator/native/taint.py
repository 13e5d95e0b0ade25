"""Runtime functions for poison: bytes that nothing wrote, and the registers that depend on them.

Shadow memory holds a byte for each byte, zero where it is defined. A register's taint is a mask of
lanes. Shared and local memory lie at one distance from their shadow; a range of global memory may
have a shadow (``Device.mark_undefined``), without one it is defined.
"""

from __future__ import annotations

from rubin_moe.emulator.native.blocks import CLUSTER, POISON_LOG
from rubin_moe.emulator.native.ir import I1, I32, I64, LANES, PTR, V1, V32, V64, Builder, Type, Val
from rubin_moe.emulator.native.library import runtime_function
from rubin_moe.emulator.native.memory import record_fault
from rubin_moe.emulator.state.registers import FIELDS, SPECIALS

#: Bytes a lane of an access.
SIZES = (1, 2, 4, 8, 16, 32)
#: ``generic`` argument of the functions for global memory: what the instruction names.
GLOBAL, GENERIC = 0, 1


def _steps(size: int) -> tuple[Type, range]:
    """Type of the widest piece and the offsets of all pieces of ``size`` bytes."""
    width = min(size, 8)
    return Type("i", 8 * width, LANES), range(0, size, width)


def _define_shadow_access(size: int) -> None:
    piece, offsets = _steps(size)

    @runtime_function(f"emu.poison{size}", I32, S=PTR, a=V64, mask=I32, site=I32)
    def query(b: Builder, S: Val, a: Val, mask: Val, site: Val) -> None:
        """Lanes with a poisoned byte at their shadow address; notes where the poison is."""
        found: Val | None = None
        for offset in offsets:
            value = b.call(f"emu.load{piece.bits}", piece, a + offset if offset else a, mask)
            found = value if found is None else found | value
        assert found is not None
        lanes = found.ne(0).bits_as(I32) & mask
        with b.if_(lanes.ne(0)):
            b.set_field(S, FIELDS["poison_site"], site)
            first = b.call("llvm.cttz.i32", I32, lanes, b.const(1, I1))
            b.set_field(S, FIELDS["poison_address"], a.lane(first))
        b.ret(lanes)

    @runtime_function(f"emu.define{size}", None, a=V64, mask=I32)
    def define(b: Builder, a: Val, mask: Val) -> None:
        """Bytes at shadow addresses become defined."""
        for offset in offsets:
            place = a + offset if offset else a
            b.call(f"emu.store{piece.bits}", None, place, b.const(0, piece), mask)
        b.ret()

    @runtime_function(f"emu.taint{size}", None, a=V64, taint=I32, mask=I32)
    def taint_memory(b: Builder, a: Val, taint: Val, mask: Val) -> None:
        """Bytes at shadow addresses: poisoned in the lanes of ``taint``, defined in others."""
        value = taint.bits_as(V1).cast("sext", piece)
        for offset in offsets:
            b.call(f"emu.store{piece.bits}", None, a + offset if offset else a, value, mask)
        b.ret()

    @runtime_function(
        f"emu.global_poison{size}", I32, S=PTR, a=V64, mask=I32, generic=I32, site=I32
    )
    def query_global(b: Builder, S: Val, a: Val, mask: Val, generic: Val, site: Val) -> None:
        """As ``emu.poison``, of host addresses in global or generic space."""
        with b.if_(_nowhere(b, S, generic)):
            b.ret(0)
        distance = b.call("emu.poison_distances", V64, S, a, mask)
        lanes = distance.ne(0).bits_as(I32) & mask
        with b.if_(lanes.eq(0)):
            b.ret(0)
        b.ret(b.call(f"emu.poison{size}", I32, S, a + distance, lanes, site))

    @runtime_function(
        f"emu.global_taint{size}", None, S=PTR, a=V64, taint=I32, mask=I32, generic=I32
    )
    def taint_global(b: Builder, S: Val, a: Val, taint: Val, mask: Val, generic: Val) -> None:
        """As ``emu.taint``, of host addresses in global or generic space."""
        with b.if_(_nowhere(b, S, generic)):
            b.ret()
        distance = b.call("emu.poison_distances", V64, S, a, mask)
        lanes = distance.ne(0).bits_as(I32) & mask
        with b.if_(lanes.ne(0)):
            b.call(f"emu.taint{size}", None, a + distance, taint, lanes)
        b.ret()


for _size in SIZES:
    _define_shadow_access(_size)


def _nowhere(b: Builder, S: Val, generic: Val) -> Val:
    """Whether no address that the instruction can name has a shadow."""
    ranges = b.field(b.field(S, FIELDS["cluster"], PTR), CLUSTER["poison_ranges"], I32)
    return generic.eq(GLOBAL) & ranges.eq(0)


def _in_arena(b: Builder, S: Val, a: Val) -> Val:
    """Lanes whose host address lies in the cluster's shared memory, ``<32 x i1>``."""
    base = b.field(S, FIELDS["smem"], I64)
    nbytes = b.field(b.field(S, FIELDS["cluster"], PTR), CLUSTER["smem_bytes"], I64)
    return (a - base.splat()).cmp("ult", nbytes.splat())


@runtime_function("emu.poison_distances", V64, S=PTR, a=V64, mask=I32)
def _poison_distances(b: Builder, S: Val, a: Val, mask: Val) -> None:
    """Distance from each lane's host address to its shadow, 0 where it has none."""
    arena = _in_arena(b, S, a)
    shared = arena.select(b.field(S, FIELDS["smem_poison"], I64).splat(), b.const(0, V64))
    rest = mask & ~arena.bits_as(I32)
    cluster = b.field(S, FIELDS["cluster"], PTR)
    with b.if_(rest.eq(0) | b.field(cluster, CLUSTER["poison_ranges"], I32).eq(0)):
        b.ret(shared, V64)
    low, high = b.field(S, FIELDS["range_lo"], I64), b.field(S, FIELDS["range_hi"], I64)
    inside = (a - low.splat()).cmp("ult", (high - low).splat())
    with b.if_((rest & ~inside.bits_as(I32)).eq(0)):
        last = b.field(S, FIELDS["range_poison"], I64).splat()
        b.ret(arena.select(shared, last), V64)
    places, out = b.alloca_slot(V64), b.alloca_slot(V64)
    b.store(a, places, 64)
    b.store(shared, out, 64)
    with b.for_lanes(rest) as lane:
        offset = (lane << 3).cast("zext", I64)
        fault = b.call(
            "emu.find_range", I32, S, b.load(b.gep(places, offset), I64), b.const(1, I64)
        )
        found = b.field(S, FIELDS["range_poison"], I64)
        b.store(fault.eq(0).select(found, b.const(0, I64)), b.gep(out, offset))
    b.ret(b.load(out, V64, 64), V64)


@runtime_function("emu.outside_arena", I32, S=PTR, a=V64, mask=I32)
def _outside_arena(b: Builder, S: Val, a: Val, mask: Val) -> None:
    """Lanes whose host address is not in the cluster's shared memory."""
    b.ret(mask & ~_in_arena(b, S, a).bits_as(I32))


@runtime_function(
    "emu.copy_poison", None, S=PTR, target=V64, source=V64, count=V32, mask=I32, size=I32
)
def _copy_poison(
    b: Builder, S: Val, target: Val, source: Val, count: Val, mask: Val, size: Val
) -> None:
    """The shadow of ``emu.copy16``: ``target`` is a shadow address, ``source`` a host address."""
    places, sources, counts = (b.alloca_slot(v.ty) for v in (target, source, count))
    cluster = b.field(S, FIELDS["cluster"], PTR)
    none = b.field(cluster, CLUSTER["poison_ranges"], I32).eq(0)
    for nbytes in (4, 8, 16):
        with b.if_(none & size.eq(nbytes)):
            b.call(f"emu.define{nbytes}", None, target, mask)
            b.ret()
    reads = mask & count.ne(0).bits_as(I32)
    distance = b.call("emu.poison_distances", V64, S, source, reads)
    known = distance.ne(0) & reads.bits_as(V1)
    b.store(target, places, 64)
    b.store(source + distance, sources, 64)
    b.store(known.select(count, 0), counts, 64)
    false = b.const(0, I1)
    with b.for_lanes(mask) as lane:
        wide = lane.cast("zext", I64)
        to = b.load(b.gep(places, wide << 3), PTR)
        n = b.load(b.gep(counts, wide << 2), I32)
        bytes_ = n.cmp("ult", size).select(n, size).cast("zext", I64)
        zero = b.const(0, Type("i", 8))
        b.call("llvm.memset.p0.i64", None, to, zero, size.cast("zext", I64), false)
        origin = b.load(b.gep(sources, wide << 3), PTR)
        b.call("llvm.memcpy.p0.p0.i64", None, to, origin, bytes_, false)
    b.ret()


@runtime_function("emu.permute_taint", I32, taint=I32, source=V32)
def _permute_taint(b: Builder, taint: Val, source: Val) -> None:
    """Lane i gets bit ``source[i] & 31``."""
    with b.if_(taint.eq(0)):
        b.ret(0)
    bits = taint.splat() >> (source & 31)
    b.ret((bits & 1).ne(0).bits_as(I32))


@runtime_function("emu.poison_used", I1, S=PTR, lanes=I32, rule=I32, operand=I32, site=I32)
def _poison_used(b: Builder, S: Val, lanes: Val, rule: Val, operand: Val, site: Val) -> None:
    """A value is used that is not defined in ``lanes``; false when that ends the launch.

    ``rule`` is a fault code. The first use by an instruction is kept in the cluster's log, with the
    place where the warp last read poison.
    """
    with b.if_(lanes.eq(0)):
        b.ret(1, I1)
    cluster = b.field(S, FIELDS["cluster"], PTR)
    lane = b.call("llvm.cttz.i32", I32, lanes, b.const(1, I1))
    with b.if_(b.field(cluster, CLUSTER["enforce"], I32).ne(0)):
        record_fault(b, S, rule, lane, operand.cast("zext", I64))
        b.ret(0, I1)
    log = b.field(cluster, CLUSTER["poison_log"], PTR)
    count = b.field(log, 0, I32)
    slot = b.alloca_slot(I32)
    b.store(b.const(0, I32), slot)
    b.br("search")
    b.label("search")
    i = b.load(slot, I32)
    entry = b.gep(log, (i + 1).cast("zext", I64) * POISON_LOG["bytes"])
    with b.if_(i.cmp("uge", count)):
        with b.if_(count.cmp("uge", POISON_LOG["entries"])):
            b.ret(1, I1)
        rank = FIELDS["specials"] + 4 * SPECIALS.index("%cluster_ctarank")
        known = {"site": site, "rule": rule, "operand": operand, "lane": lane,
                 "count": b.const(1, I32), "warp": b.field(S, FIELDS["warp"], I32),
                 "rank": b.field(S, rank, I32),
                 "origin": b.field(S, FIELDS["poison_site"], I32)}  # fmt: skip
        for name, value in known.items():
            b.set_field(entry, POISON_LOG[name], value)
        address = b.field(S, FIELDS["poison_address"], I64)
        b.set_field(entry, POISON_LOG["address"], address)
        b.set_field(log, 0, count + 1)
        b.ret(1, I1)
    same = b.field(entry, POISON_LOG["site"], I32).eq(site)
    same = same & b.field(entry, POISON_LOG["rule"], I32).eq(rule)
    with b.if_(same):
        times = b.field(entry, POISON_LOG["count"], I32)
        b.set_field(entry, POISON_LOG["count"], times + 1)
        b.ret(1, I1)
    b.store(i + 1, slot)
    b.br("search")
