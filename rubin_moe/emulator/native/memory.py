"""Runtime functions for memory: bounds checks, lane-wise loads and stores, atomics.

Checks return true when all lanes of the mask may go ahead; otherwise the first offending lane, its
address and a fault code are in the warp's state. These few functions are the only access sites of
native code.
"""

from __future__ import annotations

from rubin_moe.emulator.native import blocks
from rubin_moe.emulator.native.blocks import CLUSTER
from rubin_moe.emulator.native.ir import (
    I1,
    I32,
    I64,
    LANES,
    PTR,
    V1,
    V32,
    V64,
    Builder,
    Type,
    Val,
)
from rubin_moe.emulator.native.library import add_to_counter, count_effect, runtime_function
from rubin_moe.emulator.state.registers import FIELDS


def record_fault(b: Builder, S: Val, code: Val | int, lane: Val, address: Val) -> None:
    """Leave a fault in the warp's state."""
    value = b.const(code, I32) if isinstance(code, int) else code
    b.set_field(S, FIELDS["trap_code"], value)
    b.set_field(S, FIELDS["trap_lane"], lane)
    b.set_field(S, FIELDS["trap_address"], address)


@runtime_function("emu.check_global", I1, S=PTR, a=V64, mask=I32, size=I64)
def _check_global(b: Builder, S: Val, a: Val, mask: Val, size: Val) -> None:
    """All addresses aligned and within registered memory; the last range hit is tried first."""
    low, high = b.field(S, FIELDS["range_lo"], I64), b.field(S, FIELDS["range_hi"], I64)
    distance = a - low.splat()
    span = (high - low - size).splat()
    inside = distance.cmp("sge", 0) & distance.cmp("sle", span)
    aligned = (a & (size - 1).splat()).eq(0)
    bad = (~(inside & aligned)).bits_as(I32) & mask
    with b.if_(bad.eq(0)):
        b.ret(1, I1)
    addresses = b.alloca_slot(V64)
    b.store(a, addresses, 64)
    with b.for_lanes(bad) as lane:
        slot = b.gep(addresses, (lane << 3).cast("zext", I64))
        address = b.load(slot, I64)
        fault = b.call("emu.find_range", I32, S, address, size)
        with b.if_(fault.ne(0)):
            record_fault(b, S, fault, lane, address)
            b.ret(0, I1)
    b.ret(1, I1)


@runtime_function("emu.find_range", I32, S=PTR, address=I64, size=I64)
def _find_range(b: Builder, S: Val, address: Val, size: Val) -> None:
    """Fault code of one access (0: legal); remembers the range."""
    with b.if_((address & (size - 1)).ne(0)):
        b.ret(blocks.MISALIGNED)
    cluster = b.field(S, FIELDS["cluster"], PTR)
    count = b.field(cluster, CLUSTER["range_count"], I32)
    table = b.field(cluster, CLUSTER["ranges"], PTR)
    index = b.alloca_slot(I32)
    b.store(b.const(0, I32), index)
    b.br("search")
    b.label("search")
    i = b.load(index, I32)
    with b.if_(i.cmp("uge", count)):
        b.ret(blocks.GLOBAL_OUT_OF_BOUNDS)
    b.store(i + 1, index)
    entry = b.gep(table, (i * blocks.RANGE_BYTES).cast("zext", I64))
    low, high = (b.field(entry, blocks.RANGE[name], I64) for name in ("low", "high"))
    with b.if_(address.cmp("uge", low) & (address + size).cmp("ule", high)):
        b.set_field(S, FIELDS["range_lo"], low)
        b.set_field(S, FIELDS["range_hi"], high)
        for name in ("poison", "order"):
            distance = b.field(entry, blocks.RANGE[name], I64)
            b.set_field(S, FIELDS[f"range_{name}"], distance)
        b.ret(0)
    b.br("search")


@runtime_function("emu.check_shared", I1, S=PTR, a=V32, mask=I32, size=I32)
def _check_shared(b: Builder, S: Val, a: Val, mask: Val, size: Val) -> None:
    """All shared::cluster addresses aligned, inside the allocation and of a CTA of the cluster."""
    cluster = b.field(S, FIELDS["cluster"], PTR)
    limit = b.field(cluster, CLUSTER["smem_limit"], I32) - size
    ranks = b.field(cluster, CLUSTER["size"], I32)
    outside = (a & 0xFFFFFF).cmp("ugt", limit.splat()) | (a >> 24).cmp("uge", ranks.splat())
    unaligned = (a & (size - 1).splat()).ne(0)
    bad = (outside | unaligned).bits_as(I32) & mask
    with b.if_(bad.eq(0)):
        b.ret(1, I1)
    lane = b.call("llvm.cttz.i32", I32, bad, b.const(1, I1))
    where = (outside.bits_as(I32) >> lane) & 1
    code = where.ne(0).select(
        b.const(blocks.SHARED_OUT_OF_BOUNDS, I32), b.const(blocks.MISALIGNED, I32)
    )
    record_fault(b, S, code, lane, a.lane(lane).cast("zext", I64))
    b.ret(0, I1)


@runtime_function("emu.check_local", I1, S=PTR, a=V64, mask=I32, size=I64, limit=I64)
def _check_local(b: Builder, S: Val, a: Val, mask: Val, size: Val, limit: Val) -> None:
    """All offsets inside the lane's local memory."""
    bad = a.cmp("ugt", (limit - size).splat()) | (a & (size - 1).splat()).ne(0)
    failing = bad.bits_as(I32) & mask
    with b.if_(failing.eq(0)):
        b.ret(1, I1)
    lane = b.call("llvm.cttz.i32", I32, failing, b.const(1, I1))
    record_fault(b, S, blocks.LOCAL_OUT_OF_BOUNDS, lane, a.lane(lane))
    b.ret(0, I1)


def _define_access(bits: int) -> None:
    vector = Type("i", bits, LANES)
    pointers = Type("p", 64, LANES)
    align = max(bits // 8, 1)

    @runtime_function(f"emu.load{bits}", vector, a=V64, mask=I32)
    def load(b: Builder, a: Val, mask: Val) -> None:
        where = a.cast("inttoptr", pointers)
        zero = b.const(0, vector)
        name = f"llvm.masked.gather.v32i{bits}.v32p0"
        result = b.call(name, vector, where, b.const(align, I32), mask.bits_as(V1), zero)
        b.ret(result, vector)

    @runtime_function(f"emu.store{bits}", None, a=V64, value=vector, mask=I32)
    def store(b: Builder, a: Val, value: Val, mask: Val) -> None:
        where = a.cast("inttoptr", pointers)
        name = f"llvm.masked.scatter.v32i{bits}.v32p0"
        b.call(name, None, value, where, b.const(align, I32), mask.bits_as(V1))
        b.ret()


for _bits in (8, 16, 32, 64):
    _define_access(_bits)

#: Atomic operations by name; the value selects the operation in the runtime function.
ATOMICS = {
    name: number
    for number, name in enumerate(
        ("add", "min.s", "max.s", "min.u", "max.u", "and", "or", "xor", "exch", "cas", "inc",
         "dec", "add.f", "add.f16x2", "add.bf16x2")
    )
}  # fmt: skip


def _atomic_results(b: Builder, old: Val, v: Val, c: Val) -> dict[str, Val]:
    ty = old.ty
    zero = b.const(0, ty)
    results = {
        "add": old + v,
        "min.s": old.cmp("slt", v).select(old, v),
        "max.s": old.cmp("sgt", v).select(old, v),
        "min.u": old.cmp("ult", v).select(old, v),
        "max.u": old.cmp("ugt", v).select(old, v),
        "and": old & v,
        "or": old | v,
        "xor": old ^ v,
        "exch": v,
        "cas": old.eq(v).select(c, old),
        "inc": old.cmp("uge", v).select(zero, old + 1),
        "dec": (old.eq(0) | old.cmp("ugt", v)).select(v, old - 1),
        "add.f": (old.as_float() + v.as_float()).as_int(),
    }
    if ty.bits == 32:
        half = Type("f", 16, 2)
        results["add.f16x2"] = (old.bits_as(half) + v.bits_as(half)).bits_as(ty)
        results["add.bf16x2"] = _add_bf16x2(b, old, v)
    return results


def _add_bf16x2(b: Builder, old: Val, v: Val) -> Val:
    high = old & 0xFFFF0000, v & 0xFFFF0000
    low = old << 16, v << 16
    sums = [(x.as_float() + y.as_float()).as_int() for x, y in (low, high)]
    rounded = [s + ((s >> 16 & 1) + 0x7FFF) for s in sums]
    return rounded[0] >> 16 | (rounded[1] & 0xFFFF0000)


def _define_atomic(bits: int) -> None:
    scalar, vector = Type("i", bits), Type("i", bits, LANES)

    @runtime_function(
        f"emu.atomic{bits}", vector,
        S=PTR, a=V64, value=vector, compare=vector, mask=I32, which=I32,
    )  # fmt: skip
    def atomic(b: Builder, S: Val, a: Val, value: Val, compare: Val, mask: Val, which: Val) -> None:
        """Lanes in ascending order; returns the old values.

        Each is a compare-and-exchange that repeats until no other thread came between, so that
        clusters which run on other threads see one indivisible operation.
        """
        slots = {"a": a, "v": value, "c": compare, "r": b.const(0, vector)}
        memory = {"s": b.alloca_slot(scalar), "e": b.alloca_slot(I32)}
        b.store(b.const(0, I32), memory["e"])
        for key, initial in slots.items():
            memory[key] = b.alloca_slot(initial.ty)
            b.store(initial, memory[key], 64)
        step = bits // 8
        with b.for_lanes(mask) as lane:
            wide = lane.cast("zext", I64)
            place = wide * step
            address = b.load(b.gep(memory["a"], wide << 3), I64).cast("inttoptr", PTR)
            seen = memory["s"]
            b.store(b.load(address, scalar), seen)
            v = b.load(b.gep(memory["v"], place), scalar)
            c = b.load(b.gep(memory["c"], place), scalar)
            again, done = b.fresh("again"), b.fresh("exchanged")
            b.br(again)
            b.label(again)
            old = b.load(seen, scalar)
            result = old
            for name, candidate in _atomic_results(b, old, v, c).items():
                result = which.eq(ATOMICS[name]).select(candidate, result)
            now, unchanged = b.compare_exchange(address, old, result)
            b.store(now, seen)
            b.cond_br(unchanged, done, again)
            b.label(done)
            b.store(old, b.gep(memory["r"], place))
            changed = b.load(memory["e"], I32) | old.ne(result).cast("zext", I32)
            b.store(changed, memory["e"])
        with b.if_(b.load(memory["e"], I32).ne(0)):  # else it only polled
            count_effect(b, b.field(S, FIELDS["cluster"], PTR))
        b.ret(b.load(memory["r"], vector, 64), vector)


for _bits in (32, 64):
    _define_atomic(_bits)


@runtime_function("emu.copy16", None, dst=V64, src=V64, count=V32, mask=I32, size=I32)
def _copy16(b: Builder, dst: Val, src: Val, count: Val, mask: Val, size: Val) -> None:
    """cp.async: ``count`` bytes from src, the rest of ``size`` bytes zero (both host addresses)."""
    places, sources, counts = (b.alloca_slot(v.ty) for v in (dst, src, count))
    b.store(dst, places, 64)
    b.store(src, sources, 64)
    b.store(count, counts, 64)
    false = b.const(0, I1)
    with b.for_lanes(mask) as lane:
        wide = lane.cast("zext", I64)
        to = b.load(b.gep(places, wide << 3), PTR)
        origin = b.load(b.gep(sources, wide << 3), PTR)
        n = b.load(b.gep(counts, wide << 2), I32)
        bytes_ = n.cmp("ult", size).select(n, size).cast("zext", I64)
        zero = b.const(0, Type("i", 8))
        b.call("llvm.memset.p0.i64", None, to, zero, size.cast("zext", I64), false)
        b.call("llvm.memcpy.p0.p0.i64", None, to, origin, bytes_, false)
    b.ret()


@runtime_function("emu.effect", None, S=PTR)
def _effect(b: Builder, S: Val) -> None:
    """A store to memory that other warps may poll."""
    count_effect(b, b.field(S, FIELDS["cluster"], PTR))
    b.ret()


@runtime_function("emu.count_cp_async", None, S=PTR, mask=I32, size=I32)
def _count_cp_async(b: Builder, S: Val, mask: Val, size: Val) -> None:
    """Add the bytes of a cp.async to the cluster's counter."""
    copied = (b.call("llvm.ctpop.i32", I32, mask) * size).cast("zext", I64)
    add_to_counter(b, b.field(S, FIELDS["cluster"], PTR), "cp_async_bytes", copied)
    b.ret()
