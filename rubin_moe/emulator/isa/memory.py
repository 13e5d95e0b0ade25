"""Loads, stores, atomics and ``cp.async`` (PTX ISA 9.7.9).

Warps of a cluster are interleaved on one thread, so that their accesses are sequentially consistent
whatever their order. Towards clusters on other threads, acquire and release are fences of the host
and atomics are compare-and-exchange; the functions that access memory are called and never inlined,
so that no load leaves its loop. Cache operators and hints have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence

from rubin_moe.emulator.codegen import Emitter
from rubin_moe.emulator.isa.integer import type_bits
from rubin_moe.emulator.native.ir import I1, I32, I64, LANES, V32, V64, Type, Val
from rubin_moe.emulator.native.memory import ATOMICS
from rubin_moe.emulator.native.order import ATOMIC, READ, WRITE
from rubin_moe.emulator.order.layout import GROUP_BULK, GROUP_COPY, GROUP_WGMMA
from rubin_moe.emulator.ptx.ast import Imm, Instruction, Mem, Operand, Vec

_SPACES = ("param", "global", "shared", "local", "const")
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


def space_of(ins: Instruction) -> str:
    """State space of an access: ``generic`` when none is named."""
    for part in ins.parts[1:]:
        if part.split("::")[0] in _SPACES:
            return part.split("::")[0]
    return "generic"


def element_count(ins: Instruction) -> int:
    """Elements of a vector access."""
    return next((_VECTORS[p] for p in ins.parts if p in _VECTORS), 1)


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


def checked_address(em: Emitter, operand: Operand, space: str, size: int, mask: Val) -> Val:
    """Host addresses of an access of ``size`` bytes a lane; faults when one is illegal."""
    b = em.b
    em.require_address(operand, mask)
    if space == "shared":
        address = em.address(operand, 32)
        b_size = b.const(size, I32)
        em.trap_unless(b.call("emu.check_shared", I1, em.S, address, mask, b_size))
        return address.cast("zext", V64) + em.field("smem", I64).splat()
    address = em.address(operand, 64)
    if space == "local":
        limit = b.const(em.symbols.local_bytes, I64)
        args = (em.S, address, mask, b.const(size, I64), limit)
        em.trap_unless(b.call("emu.check_local", I1, *args))
        stride = b.lane_numbers().resize(64) * em.symbols.local_bytes
        return address + stride + em.field("local", I64).splat()
    em.trap_unless(b.call("emu.check_global", I1, em.S, address, mask, b.const(size, I64)))
    return address


def emit_load(em: Emitter, ins: Instruction) -> None:
    """ld, ldu."""
    kind = ins.parts[-1]
    bits, signed = type_bits(kind), kind[0] == "s"
    count, space = element_count(ins), space_of(ins)
    items = _items(ins.operands[0])
    source = ins.operands[1]
    if space == "param" and isinstance(source, Mem):
        offset = em.param_offset(source)
        if offset is not None:
            params = em.field("params", Type("p", 64))
            for position, item in enumerate(items):
                slot = em.b.gep(params, offset + position * bits // 8)
                em.write(item, em.b.load(slot, Type("i", bits)).splat(), signed)
            return
    mask = em.exec_mask()
    address = checked_address(em, source, space, count * bits // 8, mask)
    em.accessed(address, mask, count * bits // 8, READ, space)
    em.loaded(items, address, mask, bits, space)
    for position, item in enumerate(items):
        place = address + position * (bits // 8) if position else address
        value = em.b.call(f"emu.load{bits}", Type("i", bits, LANES), place, mask)
        em.write(item, value, signed)
    if "acquire" in ins.parts:
        em.b.fence("acquire")


def emit_store(em: Emitter, ins: Instruction) -> None:
    """st."""
    bits = type_bits(ins.parts[-1])
    count, space = element_count(ins), space_of(ins)
    mask = em.exec_mask()
    items = _items(ins.operands[1])
    address = checked_address(em, ins.operands[0], space, count * bits // 8, mask)
    em.accessed(address, mask, count * bits // 8, WRITE, space)
    em.stored(items, address, mask, bits, space)
    if "release" in ins.parts:
        em.b.fence("release")
    for position, item in enumerate(items):
        place = address + position * (bits // 8) if position else address
        em.b.call(f"emu.store{bits}", None, place, em.read(item, bits), mask)
    if space in ("global", "generic"):
        em.b.call("emu.effect", None, em.S)


def _atomic_code(ins: Instruction) -> str:
    kind = next(p for p in reversed(ins.parts) if not p.startswith("L2"))
    op = next(p for p in ins.parts[1:] if p in _ATOMIC_NAMES)
    if op in ("min", "max"):
        return f"{op}.{'s' if kind[0] == 's' else 'u'}"
    if op == "add" and kind in ("f16x2", "bf16x2"):
        return f"add.{kind}"
    if op == "add" and kind[0] == "f":
        return "add.f"
    return op


_ATOMIC_NAMES = {name.split(".")[0] for name in ATOMICS}
_KIND_BITS = {"f16x2": 32, "bf16x2": 32}


def _atomic_bits(ins: Instruction) -> int:
    kind = next(p for p in reversed(ins.parts) if not p.startswith("L2"))
    return _KIND_BITS.get(kind) or type_bits(kind)


def emit_atomic(em: Emitter, ins: Instruction) -> None:
    """atom: read, combine, write; lanes in ascending order."""
    dest, where, value, *rest = ins.operands
    em.write(dest, _emit_rmw(em, ins, dest, where, value, rest))


def emit_reduce(em: Emitter, ins: Instruction) -> None:
    """red and red.async to global memory, with vectors."""
    bits = _atomic_bits(ins)
    values = _items(ins.operands[1])
    if len(values) == 1:
        _emit_rmw(em, ins, None, ins.operands[0], values[0], ())
        return
    mask = em.exec_mask()
    size = len(values) * bits // 8
    address = checked_address(em, ins.operands[0], space_of(ins), size, mask)
    em.accessed(address, mask, size, ATOMIC, space_of(ins))
    for position, value in enumerate(values):
        place = address + position * (bits // 8)
        em.combined(None, place, mask, bits // 8, space_of(ins), (value,))
        _atomic_call(em, ins, place, em.read(value, bits), None, mask)


def _emit_rmw(
    em: Emitter,
    ins: Instruction,
    dest: Operand | None,
    where: Operand,
    value: Operand,
    rest: Sequence[Operand],
) -> Val:
    bits = _atomic_bits(ins)
    mask = em.exec_mask()
    address = checked_address(em, where, space_of(ins), bits // 8, mask)
    em.accessed(address, mask, bits // 8, ATOMIC, space_of(ins))
    code = _atomic_code(ins)
    values = (value, rest[0]) if code == "cas" else (value,)
    em.combined(dest, address, mask, bits // 8, space_of(ins), values)
    compare = em.read(rest[0], bits) if code == "cas" else None
    return _atomic_call(em, ins, address, em.read(value, bits), compare, mask)


def _atomic_call(
    em: Emitter, ins: Instruction, address: Val, value: Val, compare: Val | None, mask: Val
) -> Val:
    which = em.b.const(ATOMICS[_atomic_code(ins)], I32)
    bits = value.ty.bits
    other = compare if compare is not None else value
    return em.b.call(f"emu.atomic{bits}", value.ty, em.S, address, value, other, mask, which)


def emit_cp_async(em: Emitter, ins: Instruction) -> None:
    """cp.async: 4, 8 or 16 bytes a lane, the tail beyond the source size zero.

    The size is a number, or a predicate that says to ignore the source (all zero).
    """
    size = ins.operands[2]
    if not isinstance(size, Imm) or size.value not in (4, 8, 16):
        raise em.refuse("the copy size must be 4, 8 or 16")
    n = int(size.value)
    mask = em.exec_mask()
    has_size = len(ins.operands) > 3 and not (
        len(ins.operands) == 4 and "L2::cache_hint" in ins.parts
    )
    full = em.b.const(n, V32)
    if has_size:
        em.require_operands(ins.operands[3:4], mask)
    counts = _source_size(em, ins.operands[3], full) if has_size else full
    target = checked_address(em, ins.operands[0], "shared", n, mask)
    reads = mask & counts.ne(0).bits_as(I32) if has_size else mask
    source = checked_address(em, ins.operands[1], "global", n, reads)
    em.accessed(source, reads, n, READ, "global")
    em.accessed(target, mask, n, WRITE, "shared")
    em.copied(target, source, counts, mask, n)
    em.b.call("emu.copy16", None, target, source, counts, mask, em.b.const(n, I32))
    em.b.call("emu.count_cp_async", None, em.S, mask, em.b.const(n, I32))


def _source_size(em: Emitter, operand: Operand, full: Val) -> Val:
    if em.is_predicate(operand):
        return em.predicate(operand).select(em.b.const(0, V32), full)
    return em.b.math("umin", em.read(operand, 32), full)


def emit_cp_async_group(em: Emitter, ins: Instruction) -> None:
    """Copies complete when issued, so that groups have nothing to wait for."""
    order_group(em, ins)


def order_group(em: Emitter, ins: Instruction) -> None:
    """Tell the race detector of a commit_group or wait_group that has nothing to wait for."""
    bulk = "bulk" in ins.parts
    kind = GROUP_WGMMA if ins.parts[0] == "wgmma" else GROUP_BULK if bulk else GROUP_COPY
    if "commit_group" in ins.parts:
        em.ordered("group_commit", kind)
        return
    allowed = ins.operands[0].value if ins.operands else -1  # type: ignore[union-attr]
    em.ordered("group_wait", kind, int(allowed), int("read" in ins.parts))


EMITTERS = {
    "load": emit_load,
    "store": emit_store,
    "atomic": emit_atomic,
    "reduce": emit_reduce,
    "cp_async": emit_cp_async,
    "cp_async_group": emit_cp_async_group,
}
