"""Comparison, selection, data movement and address conversion (PTX ISA 9.7.6, 9.7.9)."""

from __future__ import annotations

from rubin_moe.emulator.codegen import Emitter
from rubin_moe.emulator.isa.floating import flush_subnormals, widen
from rubin_moe.emulator.isa.integer import type_bits
from rubin_moe.emulator.native.ir import I64, V32, Val
from rubin_moe.emulator.ptx.ast import Instruction, Pair, Reg, Vec

_FLOAT_PREDICATES = {
    "eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge",
    "equ": "ueq", "neu": "une", "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge",
    "num": "ord", "nan": "uno",
}  # fmt: skip
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _compare(em: Emitter, ins: Instruction, kind: str) -> Val:
    name = ins.parts[1]
    if kind in ("f16", "bf16"):
        a, c = (widen(em, em.read(operand, 16), kind) for operand in ins.operands[1:3])
        return a.cmp(_FLOAT_PREDICATES[name], c)
    bits = type_bits(kind)
    a, c = (em.read(operand, bits) for operand in ins.operands[1:3])
    if kind[0] == "f":
        if "ftz" in ins.parts:
            a, c = flush_subnormals(a), flush_subnormals(c)
        return a.as_float().cmp(_FLOAT_PREDICATES[name], c.as_float())
    if name in ("eq", "ne"):
        return a.cmp(name, c)
    name = _UNSIGNED.get(name, name)
    return a.cmp(("s" if kind[0] == "s" else "u") + name, c)


def emit_compare(em: Emitter, ins: Instruction) -> None:
    """setp, set, selp, slct, testp."""
    op, kind = ins.parts[0], ins.parts[-1]
    if op == "setp":
        _emit_setp(em, ins, kind)
    elif op == "selp":
        bits = type_bits(kind)
        yes, no = (em.read(operand, bits) for operand in ins.operands[1:3])
        em.write(ins.operands[0], em.predicate(ins.operands[3]).select(yes, no))
    elif op == "slct":
        bits = type_bits(ins.parts[1])
        yes, no = (em.read(operand, bits) for operand in ins.operands[1:3])
        em.write(ins.operands[0], em.read(ins.operands[3], 32).cmp("sge", 0).select(yes, no))
    elif op == "set":
        hit = _compare(em, ins, kind)
        value = 0x3F800000 if ins.parts[-2] == "f32" else -1
        em.write(ins.operands[0], hit.select(em.b.const(value, V32), em.b.const(0, V32)))
    else:
        _emit_testp(em, ins)


def _emit_setp(em: Emitter, ins: Instruction, kind: str) -> None:
    result = _compare(em, ins, kind)
    dest = ins.operands[0]
    combine = next((p for p in ins.parts[2:] if p in ("and", "or", "xor")), None)
    if combine is not None:
        other = em.predicate(ins.operands[3])
        join = {"and": Val.__and__, "or": Val.__or__, "xor": Val.__xor__}[combine]
        if isinstance(dest, Pair):
            em.write(dest.second, join(~result, other))
            dest = dest.first
        em.write(dest, join(result, other))
        return
    if isinstance(dest, Pair):
        em.write(dest.second, ~result)
        dest = dest.first
    em.write(dest, result)


def _emit_testp(em: Emitter, ins: Instruction) -> None:
    magnitude = em.read(ins.operands[1], 32) & 0x7FFFFFFF
    tests = {
        "finite": magnitude.cmp("ult", 0x7F800000),
        "infinite": magnitude.eq(0x7F800000),
        "number": magnitude.cmp("ule", 0x7F800000),
        "notanumber": magnitude.cmp("ugt", 0x7F800000),
        "normal": magnitude.cmp("ult", 0x7F800000) & magnitude.cmp("uge", 0x00800000),
        "subnormal": magnitude.cmp("ult", 0x00800000) & magnitude.ne(0),
    }
    em.write(ins.operands[0], tests[ins.parts[1]])


def emit_move(em: Emitter, ins: Instruction) -> None:
    """mov, cvta, mapa, getctarank, isspacep."""
    op = ins.parts[0]
    if op == "mov":
        _emit_mov(em, ins)
    elif op == "cvta":
        _emit_cvta(em, ins)
    elif op == "mapa":
        bits = type_bits(ins.parts[-1])
        address = em.read(ins.operands[1], bits)
        rank = em.read(ins.operands[2], 32).resize(bits)
        if "shared::cluster" in ins.parts:
            em.write(ins.operands[0], (address & 0xFFFFFF) | rank << 24)
        else:
            base = em.field("smem", I64).splat()
            em.write(ins.operands[0], ((address - base) & 0xFFFFFF | rank << 24) + base)
    elif op == "getctarank":
        address = em.read(ins.operands[1], 64)
        if "shared::cluster" not in ins.parts:
            address = address - em.field("smem", I64).splat()
        em.write(ins.operands[0], (address >> 24).resize(32))
    else:
        _emit_isspacep(em, ins)


def _emit_mov(em: Emitter, ins: Instruction) -> None:
    kind = ins.parts[-1]
    dest, source = ins.operands
    if kind == "pred":
        em.write(dest, em.predicate(source))
        return
    bits = 128 if kind == "b128" else type_bits(kind)
    if isinstance(source, Reg) and em.registers.get(source.name) == "pred":
        raise em.refuse("a predicate is moved to a register")
    if isinstance(dest, Vec) and isinstance(source, Vec):
        for target, item in zip(dest.items, source.items, strict=True):
            em.write(target, em.read(item, bits // len(dest.items)))
        return
    em.write(dest, em.read(source, bits))


def _emit_cvta(em: Emitter, ins: Instruction) -> None:
    to = "to" in ins.parts
    space = ins.parts[-2]
    value = em.read(ins.operands[1], 64)
    if space.startswith("shared"):
        base = em.field("smem", I64).splat()
        value = value - base if to else value + base
    elif space == "local":
        base = _lane_memory(em)
        value = value - base if to else value + base
    elif space == "param" and not to:
        # Triton moves a parameter's address through 32 bits: the block is near, so its distance
        # from the block's start survives.
        start = em.field("params", I64).splat()
        near = start + ((value - start) & 0xFFFFFFFF)
        value = value.cmp("ult", 1 << 32).select(near, value)
    em.write(ins.operands[0], value)


def _lane_memory(em: Emitter) -> Val:
    """Host address of each lane's local memory."""
    stride = em.b.lane_numbers().resize(64) * em.symbols.local_bytes
    return stride + em.field("local", I64).splat()


def _emit_isspacep(em: Emitter, ins: Instruction) -> None:
    address = em.read(ins.operands[1], 64)
    space = ins.parts[1]
    if space in ("shared", "shared::cluster"):
        distance = address - em.field("smem", I64).splat()
        em.write(ins.operands[0], distance.cmp("ult", 1 << 28))
    elif space == "local":
        distance = address - _lane_memory(em)
        em.write(ins.operands[0], distance.cmp("ult", max(em.symbols.local_bytes, 1)))
    else:
        shared = (address - em.field("smem", I64).splat()).cmp("ult", 1 << 28)
        local = (address - _lane_memory(em)).cmp("ult", max(em.symbols.local_bytes, 1))
        em.write(ins.operands[0], ~(shared | local))


EMITTERS = {"compare": emit_compare, "move": emit_move}
