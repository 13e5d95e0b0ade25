"""Floating-point arithmetic and the special functions (PTX ISA 9.7.3-9.7.5).

Arithmetic is IEEE, nearest even; NaN results are the GPU's canonical NaN. The ``approx`` functions
are computed to within an ulp of the correctly rounded result: the ISA leaves the hardware an error
of a few ulp, so their last bits differ from a GPU's.
"""

from __future__ import annotations

from rubin_moe.emulator.codegen import Emitter
from rubin_moe.emulator.native.ir import F16V, F32V, F64V, LANES, V32, V64, Type, Val
from rubin_moe.emulator.ptx.ast import Instruction

_NAN = {16: 0x7FFF, 32: 0x7FFFFFFF, 64: 0x7FF8000000000000}


def flush_subnormals(bits: Val) -> Val:
    """float32 subnormals to zero of the same sign (``.ftz``), on integer lanes."""
    return (bits & 0x7F800000).eq(0).select(bits & 0x80000000, bits)


def canonical_nan(value: Val) -> Val:
    """Integer lanes of a float value with every NaN replaced by the GPU's."""
    return value.cmp("uno", value).select(_NAN[value.ty.bits], value.as_int())


def saturate(value: Val) -> Val:
    """``.sat``: clamp to [0, 1], NaN to +0."""
    low = value.cmp("ogt", 0.0).select(value, value.b.const(0.0, value.ty))
    return low.cmp("olt", 1.0).select(low, value.b.const(1.0, value.ty))


def unpack_pairs(value: Val) -> list[Val]:
    """The low and high halves of each lane."""
    half = value.ty.bits // 2
    return [value.resize(half), (value >> half).resize(half)]


def pack_pairs(parts: list[Val]) -> Val:
    """Inverse of :func:`unpack_pairs`."""
    half = parts[0].ty.bits
    return parts[0].resize(2 * half) | parts[1].resize(2 * half) << half


def widen(em: Emitter, bits: Val, kind: str) -> Val:
    """16-bit lanes of ``f16`` or ``bf16`` as float32, exactly."""
    if kind == "bf16":
        return (bits.resize(32) << 16).as_float()
    return bits.resize(16).bits_as(F16V).cast("fpext", F32V)


def narrow(em: Emitter, value: Val, kind: str) -> Val:
    """float32 lanes to the bits of ``f16`` or ``bf16``, nearest even."""
    return em.b.call(f"emu.to.{kind}.rn", V32, value.as_int()).resize(16)


def _narrow_odd(em: Emitter, value: Val) -> Val:
    """float64 to float32 rounded to odd, so that a second rounding is correct."""
    rounded = value.cast("fptrunc", F32V)
    back = rounded.cast("fpext", F64V)
    bits = rounded.as_int()
    magnitude = (back.as_int() & 0x7FFFFFFFFFFFFFFF).cmp("ugt", value.as_int() & 0x7FFFFFFFFFFFFFFF)
    stepped = magnitude.select(bits - 1, bits) | 1
    return back.cmp("une", value).select(stepped, bits).as_float()


def _fma_odd(em: Emitter, sources: list[Val]) -> Val:
    """a * b + c in float64 rounded to odd; the product of two 16-bit floats is exact there."""
    product, c = sources[0] * sources[1], sources[2]
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)  # what the sum lost (TwoSum)
    bits = total.as_int()
    away = (bits ^ error.as_int()).cmp("slt", 0)
    odd = away.select(bits - 1, bits) | 1
    inexact = error.cmp("one", 0.0) & (bits & 0x7FF0000000000000).ne(0x7FF0000000000000)
    return inexact.select(odd, bits).as_float()


def _arithmetic(em: Emitter, op: str, sources: list[Val]) -> Val:
    if op == "fma":
        return em.b.math("fma", *sources)
    a, c = sources
    return {"add": a.__add__, "sub": a.__sub__, "mul": a.__mul__}[op](c)


def emit_float(em: Emitter, ins: Instruction) -> None:
    """add, sub, mul, fma, neg, abs, min, max, copysign in every floating type."""
    op, kind = ins.parts[0], ins.parts[-1]
    if kind in ("f16", "bf16", "f16x2", "bf16x2") and "f32" not in ins.parts:
        _emit_half(em, ins, op, kind)
    elif kind in ("f16", "bf16"):
        _emit_mixed(em, ins, op, kind)
    elif kind == "f32x2":
        halves = Type("i", 32, 2 * LANES)
        sources = [em.read(operand, 64).bits_as(halves) for operand in ins.operands[1:]]
        em.write(ins.operands[0], _single(em, ins, op, sources).bits_as(V64))
    else:
        bits = int(kind[1:])
        sources = [em.read(operand, bits) for operand in ins.operands[1:]]
        em.write(ins.operands[0], _single(em, ins, op, sources))


def _single(em: Emitter, ins: Instruction, op: str, sources: list[Val]) -> Val:
    """One f32 or f64 operation on integer lanes."""
    bits = sources[0].ty.bits
    ftz = "ftz" in ins.parts and bits == 32
    if ftz:
        sources = [flush_subnormals(s) for s in sources]
    sign = 1 << (bits - 1)
    if op in ("neg", "abs"):
        flipped = sources[0] ^ sign if op == "neg" else sources[0] & (sign - 1)
        return canonical_nan(flipped.as_float())  # as an H200 does (2026-11-30)
    if op == "copysign":
        return (sources[1] & (sign - 1)) | (sources[0] & sign)
    if op in ("min", "max"):
        return extremum(ins.parts, op, sources)
    result = _arithmetic(em, op, [s.as_float() for s in sources])
    if "sat" in ins.parts:
        return saturate(result).as_int()
    out = canonical_nan(result)
    return flush_subnormals(out) if ftz else out


def extremum(parts: tuple[str, ...], op: str, sources: list[Val]) -> Val:
    """min/max of two or three values: NaN loses unless ``.NaN``; -0 is below +0."""
    bits = sources[0].ty.bits
    sign_bit = 1 << (bits - 1)
    result = sources[0]
    if "xorsign" in parts:
        sign = result & sign_bit
        for other in sources[1:]:
            sign = sign ^ (other & sign_bit)
        sources = [s & (sign_bit - 1) for s in sources]
        result = sources[0]
    for other in sources[1:]:
        result = _extremum2("NaN" in parts, op, result, other)
    if "xorsign" in parts:
        nan = result.as_float().cmp("uno", result.as_float())
        result = nan.select(result, result | sign)
    return result


def _extremum2(propagate: bool, op: str, a: Val, c: Val) -> Val:
    x, y = a.as_float(), c.as_float()
    bits = a.ty.bits
    # order as integers: correct for signed zeros too
    first = _ordered(a).cmp("slt" if op == "min" else "sgt", _ordered(c))
    result = first.select(a, c)
    x_nan, y_nan = x.cmp("uno", x), y.cmp("uno", y)
    if propagate:
        return (x_nan | y_nan).select(_NAN[bits], result)
    result = x_nan.select(c, y_nan.select(a, result))
    return (x_nan & y_nan).select(_NAN[bits], result)


def _ordered(bits: Val) -> Val:
    """Float bits as signed integers in the same order."""
    width = bits.ty.bits
    mask = bits.ashr(width - 1) & ((1 << (width - 1)) - 1)
    return bits ^ mask


def _emit_half(em: Emitter, ins: Instruction, op: str, kind: str) -> None:
    base = kind.removesuffix("x2")
    bits = 32 if kind.endswith("x2") else 16
    values = [em.read(operand, bits) for operand in ins.operands[1:]]
    if bits == 16:
        em.write(ins.operands[0], _half(em, ins, op, base, values))
        return
    pairs = [unpack_pairs(value) for value in values]
    parts = [_half(em, ins, op, base, [pair[i] for pair in pairs]) for i in range(2)]
    em.write(ins.operands[0], pack_pairs(parts))


def _half(em: Emitter, ins: Instruction, op: str, base: str, sources: list[Val]) -> Val:
    if op == "neg":
        return sources[0] ^ 0x8000
    if op == "abs":
        return sources[0] & 0x7FFF
    wide = [widen(em, s, base) for s in sources]
    if op in ("min", "max"):
        extreme = extremum(ins.parts, op, [w.as_int() for w in wide])
        return narrow(em, extreme.as_float(), base)
    if op == "fma":
        result = _narrow_odd(em, _fma_odd(em, [w.cast("fpext", F64V) for w in wide]))
    else:
        result = _arithmetic(em, op, wide)
    out = narrow(em, result, base)
    if "relu" in ins.parts:
        negative = (out & 0x8000).ne(0) & (out & 0x7FFF).cmp("ule", _infinity(base))
        out = negative.select(0, out)
    return out


def _infinity(base: str) -> int:
    return 0x7C00 if base == "f16" else 0x7F80


def _emit_mixed(em: Emitter, ins: Instruction, op: str, kind: str) -> None:
    """float32 arithmetic with 16-bit first operands (``add.rn.f32.bf16 d, a, c``)."""
    narrow_count = 2 if op == "fma" else 1
    sources = [
        widen(em, em.read(operand, 16), kind) if i < narrow_count else em.read_float(operand, 32)
        for i, operand in enumerate(ins.operands[1:])
    ]
    em.write(ins.operands[0], canonical_nan(_arithmetic(em, op, sources)))


def emit_special_function(em: Emitter, ins: Instruction) -> None:
    """div, rcp, sqrt, rsqrt, ex2, lg2, sin, cos, tanh."""
    kind = ins.parts[-1]
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        base = kind.removesuffix("x2")
        bits = 32 if kind.endswith("x2") else 16
        value = em.read(ins.operands[1], bits)
        parts = unpack_pairs(value) if bits == 32 else [value]
        done = [narrow(em, _function(em, ins.parts[0], [widen(em, p, base)]), base) for p in parts]
        em.write(ins.operands[0], pack_pairs(done) if bits == 32 else done[0])
        return
    bits = int(kind[1:])
    sources = [em.read(operand, bits) for operand in ins.operands[1:]]
    ftz = "ftz" in ins.parts
    if ftz:
        sources = [flush_subnormals(s) for s in sources]
    result = canonical_nan(_function(em, ins.parts[0], [s.as_float() for s in sources]))
    em.write(ins.operands[0], flush_subnormals(result) if ftz else result)


def _function(em: Emitter, name: str, sources: list[Val]) -> Val:
    b, x = em.b, sources[0]
    one = b.const(1.0, x.ty)
    if name == "div":
        return x / sources[1]
    if name == "rcp":
        return one / x
    if name == "sqrt":
        return b.math("sqrt", x)
    if name == "rsqrt":
        wide = x.cast("fpext", F64V)
        return (b.const(1.0, F64V) / b.math("sqrt", wide)).cast("fptrunc", F32V)
    if name == "tanh":
        return b.call("emu.tanh", F32V, x)
    return b.call(f"emu.{name}", F32V, x)


EMITTERS = {"float": emit_float, "special_function": emit_special_function}
