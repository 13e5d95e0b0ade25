"""Integer arithmetic and bit manipulation (PTX ISA 9.7.1, 9.7.8)."""

from __future__ import annotations

from rubin_moe.emulator.codegen import Emitter
from rubin_moe.emulator.native.ir import LANES, V32, Type, Val
from rubin_moe.emulator.ptx.ast import Imm, Instruction


def type_bits(name: str) -> int:
    """Width in the name of a type (``s32`` is 32, ``pred`` 1)."""
    return 1 if name == "pred" else int(name[1:])


def emit_integer(em: Emitter, ins: Instruction) -> None:
    """add, sub, mul, mad, div, rem, abs, neg, min, max, sad, dp4a."""
    op, kind = ins.parts[0], ins.parts[-1]
    bits, signed = type_bits(kind), kind[0] == "s"
    if op in ("mul", "mad", "mul24", "mad24"):
        _multiply(em, ins, bits, signed)
        return
    if op == "dp4a":
        _dot4(em, ins)
        return
    sources = [em.read(operand, bits) for operand in ins.operands[1:]]
    if "sat" in ins.parts:
        name = "sadd.sat" if op == "add" else "ssub.sat"
        result = em.b.math(name, *sources)
    elif op in ("add", "sub"):
        result = sources[0] + sources[1] if op == "add" else sources[0] - sources[1]
    elif op in ("div", "rem"):
        result = _divide(em, op, sources, signed)
    elif op == "neg":
        result = -sources[0]
    elif op == "abs":
        result = em.b.math("abs", sources[0], em.b.const(0, Type("i", 1)))
    elif op == "sad":
        low, high = (
            em.b.math(f"{'s' if signed else 'u'}{m}", *sources[:2]) for m in ("min", "max")
        )
        result = high - low + sources[2]
    else:
        result = em.b.math(f"{'s' if signed else 'u'}{op}", *sources)
        if "relu" in ins.parts:
            result = em.b.math("smax", result, em.b.const(0, result.ty))
    em.write(ins.operands[0], result)


def _divide(em: Emitter, op: str, sources: list[Val], signed: bool) -> Val:
    """Division by zero gives all ones (quotient) or the dividend (remainder), as the GPU does."""
    a, d = sources
    zero = d.eq(0)
    safe = zero.select(1, d)
    if signed:  # INT_MIN / -1 overflows: it is INT_MIN, remainder 0
        lowest = em.b.const(1 << (a.ty.bits - 1), a.ty)
        overflow = a.eq(lowest) & d.eq(-1)
        safe = overflow.select(1, safe)
        result = a.op("sdiv" if op == "div" else "srem", safe)
    else:
        result = a.op("udiv" if op == "div" else "urem", safe)
    return zero.select(-1, result) if op == "div" else zero.select(a, result)


def _multiply(em: Emitter, ins: Instruction, bits: int, signed: bool) -> None:
    op, part = ins.parts[0], ins.parts[1]
    a, c = (em.read(operand, bits) for operand in ins.operands[1:3])
    if op in ("mul24", "mad24"):
        shift = 8
        a, c = ((v << shift).ashr(shift) if signed else v & 0xFFFFFF for v in (a, c))
        result = a * c
    elif part == "lo":
        result = a * c
    else:
        wide = a.resize(2 * bits, signed) * c.resize(2 * bits, signed)
        result = wide if part == "wide" else (wide >> bits).resize(bits)
    if op.startswith("mad"):
        result = result + em.read(ins.operands[3], result.ty.bits)
    em.write(ins.operands[0], result, signed)


def _dot4(em: Emitter, ins: Instruction) -> None:
    a, c = (em.read(operand, 32) for operand in ins.operands[1:3])
    total = em.read(ins.operands[3], 32)
    for byte in range(4):
        terms = []
        for value, kind in ((a, ins.parts[1]), (c, ins.parts[2])):
            top = value << 24 - 8 * byte
            terms.append(top.ashr(24) if kind[0] == "s" else top >> 24)
        total = total + terms[0] * terms[1]
    em.write(ins.operands[0], total)


def emit_bits(em: Emitter, ins: Instruction) -> None:
    """Logic, shifts, bit fields, permutes."""
    op, kind = ins.parts[0], ins.parts[-1]
    if kind == "pred":
        sources = [em.predicate(operand) for operand in ins.operands[1:]]
        em.write(ins.operands[0], _logic(op, sources))
        return
    _BIT_EMITTERS.get(op, _emit_plain)(em, ins, type_bits(kind))


def _logic(op: str, sources: list[Val]) -> Val:
    if op == "not":
        return ~sources[0]
    a, c = sources
    return {"and": a.__and__, "or": a.__or__, "xor": a.__xor__}[op](c)


def _emit_plain(em: Emitter, ins: Instruction, bits: int) -> None:
    op = ins.parts[0]
    sources = [em.read(operand, bits) for operand in ins.operands[1:]]
    if op == "cnot":
        result = sources[0].eq(0).cast("zext", sources[0].ty)
    elif op == "brev":
        result = em.b.math("bitreverse", sources[0])
    elif op == "popc":
        result = em.b.math("ctpop", sources[0]).resize(32)
    elif op == "clz":
        zero = em.b.const(0, Type("i", 1))
        result = em.b.math("ctlz", sources[0], zero).resize(32)
    else:
        result = _logic(op, sources)
    em.write(ins.operands[0], result)


def shift_left(value: Val, amount: Val) -> Val:
    """Shift by 32-bit amounts that clamp at the width (the GPU's rule)."""
    bits = value.ty.bits
    amount32 = amount
    shifted = value << amount.resize(bits)
    return amount32.cmp("uge", bits).select(0, shifted)


def shift_right(value: Val, amount: Val, signed: bool) -> Val:
    """As :func:`shift_left`, to the right."""
    bits = value.ty.bits
    over = amount.cmp("uge", bits)
    if signed:
        clamped = over.select(bits - 1, amount)
        return value.ashr(clamped.resize(bits))
    return over.select(0, value >> amount.resize(bits))


def _emit_shift(em: Emitter, ins: Instruction, bits: int) -> None:
    value = em.read(ins.operands[1], bits)
    signed = ins.parts[-1][0] == "s"
    amount = ins.operands[2]
    if isinstance(amount, Imm):
        count = int(amount.value) & 0xFFFFFFFF
        if count >= bits:
            count = bits - 1 if ins.parts[0] == "shr" and signed else -1
        if count < 0:
            result = em.b.const(0, value.ty)
        elif ins.parts[0] == "shl":
            result = value << count
        else:
            result = value.ashr(count) if signed else value >> count
    elif ins.parts[0] == "shl":
        result = shift_left(value, em.read(amount, 32))
    else:
        result = shift_right(value, em.read(amount, 32), signed)
    em.write(ins.operands[0], result, signed)


def _emit_funnel(em: Emitter, ins: Instruction, bits: int) -> None:
    low, high, amount = (em.read(operand, 32) for operand in ins.operands[1:4])
    if "wrap" in ins.parts:
        amount = amount & 31
    else:
        amount = em.b.math("umin", amount, em.b.const(32, V32))
    wide = low.resize(64) | high.resize(64) << 32
    count = amount.resize(64)
    result = (wide << count) >> 32 if ins.parts[1] == "l" else wide >> count
    em.write(ins.operands[0], result.resize(32))


def _emit_lop3(em: Emitter, ins: Instruction, bits: int) -> None:
    a, c, d = (em.read(operand, 32) for operand in ins.operands[1:4])
    table = ins.operands[4]
    if not isinstance(table, Imm):
        raise em.refuse("the lookup table must be a literal")
    result: Val | None = None
    for row in range(8):
        if int(table.value) >> row & 1:
            terms = [v if row >> s & 1 else ~v for v, s in ((a, 2), (c, 1), (d, 0))]
            product = terms[0] & terms[1] & terms[2]
            result = product if result is None else result | product
    em.write(ins.operands[0], result if result is not None else em.b.const(0, V32))


def _field_mask(em: Emitter, length: Val, bits: int) -> Val:
    ones = em.b.const(-1, Type("i", bits, LANES))
    return ~shift_left(ones, length)


def _emit_insert(em: Emitter, ins: Instruction, bits: int) -> None:
    a, c = (em.read(operand, bits) for operand in ins.operands[1:3])
    start, length = (em.read(operand, 32) & 0xFF for operand in ins.operands[3:5])
    mask = shift_left(_field_mask(em, length, bits), start)
    em.write(ins.operands[0], (shift_left(a, start) & mask) | (c & ~mask))


def _emit_extract(em: Emitter, ins: Instruction, bits: int) -> None:
    value = em.read(ins.operands[1], bits)
    start, length = (em.read(operand, 32) & 0xFF for operand in ins.operands[2:4])
    signed = ins.parts[-1][0] == "s"
    field = shift_right(value, start, signed) & _field_mask(em, length, bits)
    if signed:
        last = start + length - 1
        top = em.b.const(bits - 1, V32)
        position = last.cmp("ugt", top).select(top, last)
        sign = shift_right(value, position, False) & 1
        fill = sign.ne(0) & length.ne(0)
        mask = _field_mask(em, length, bits)
        field = fill.select(field | ~mask, field)
    em.write(ins.operands[0], field)


def _emit_find(em: Emitter, ins: Instruction, bits: int) -> None:
    value = em.read(ins.operands[1], bits)
    if ins.parts[-1][0] == "s":
        value = value.cmp("slt", 0).select(~value, value)
    leading = em.b.math("ctlz", value, em.b.const(0, Type("i", 1))).resize(32)
    found = leading if "shiftamt" in ins.parts else em.b.const(bits - 1, V32) - leading
    em.write(ins.operands[0], value.eq(0).select(-1, found))


def _emit_permute(em: Emitter, ins: Instruction, bits: int) -> None:
    a, c, selector = (em.read(operand, 32) for operand in ins.operands[1:4])
    wide = a.resize(64) | c.resize(64) << 32
    result: Val | None = None
    for byte in range(4):
        nibble = selector >> 4 * byte
        picked = (wide >> ((nibble & 7) << 3).resize(64)).resize(32) & 0xFF
        sign = (picked << 24).ashr(31) & 0xFF
        picked = (nibble & 8).ne(0).select(sign, picked) << 8 * byte
        result = picked if result is None else result | picked
    assert result is not None
    em.write(ins.operands[0], result)


def _emit_sign_extend(em: Emitter, ins: Instruction, bits: int) -> None:
    value, count = (em.read(operand, 32) for operand in ins.operands[1:3])
    if "wrap" in ins.parts:
        count = count & 31
    mask = _field_mask(em, count, 32)
    if ins.parts[-1][0] == "s":
        place = count - 1
        sign = shift_right(value, em.b.math("umin", place, em.b.const(31, V32)), False) & 1
        result = sign.ne(0).select(value | ~mask, value & mask)
    else:
        result = value & mask
    em.write(ins.operands[0], count.eq(0).select(0, result))


def _emit_mask(em: Emitter, ins: Instruction, bits: int) -> None:
    start, count = (em.read(operand, 32) for operand in ins.operands[1:3])
    if "wrap" in ins.parts:
        start, count = start & 31, count & 31
    em.write(ins.operands[0], shift_left(_field_mask(em, count, 32), start))


_BIT_EMITTERS = {
    "shl": _emit_shift,
    "shr": _emit_shift,
    "shf": _emit_funnel,
    "lop3": _emit_lop3,
    "bfi": _emit_insert,
    "bfe": _emit_extract,
    "bfind": _emit_find,
    "prmt": _emit_permute,
    "szext": _emit_sign_extend,
    "bmsk": _emit_mask,
}

EMITTERS = {"integer": emit_integer, "bits": emit_bits}
