"""Conversions (PTX ISA 9.7.9.21, "cvt" and "cvt.pack").

The destination type is the last dotted part but one; for packed forms ``cvt.x2 d, a, b`` the first
source goes to the upper half.
"""

from __future__ import annotations

from rubin_moe.emulator.codegen import Emitter
from rubin_moe.emulator.isa.floating import (
    canonical_nan,
    flush_subnormals,
    pack_pairs,
    saturate,
    unpack_pairs,
    widen,
)
from rubin_moe.emulator.isa.integer import type_bits
from rubin_moe.emulator.native.ir import F32V, F64V, I32, V32, Type, Val
from rubin_moe.emulator.ptx.ast import Instruction

_ROUND_MODES = {"rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}


def emit_convert_integer(em: Emitter, ins: Instruction) -> None:
    """Between integer types: truncate, extend, or saturate."""
    if ins.parts[1] == "pack":
        _emit_pack(em, ins)
        return
    to, source = ins.parts[-2], ins.parts[-1]
    value = em.read(ins.operands[1], type_bits(source))
    if "sat" in ins.parts:
        value = _clamp(em, value, to, source)
    else:
        value = value.resize(type_bits(to), source[0] == "s")
    em.write(ins.operands[0], value, signed=to[0] == "s")


def _limits(kind: str) -> tuple[int, int]:
    bits = type_bits(kind)
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def _clamp(em: Emitter, value: Val, to: str, source: str) -> Val:
    wide = value.resize(64, source[0] == "s")
    low, high = (em.b.const(limit, wide.ty) for limit in _limits(to))
    if source == "u64":
        clamped = em.b.math("umin", wide, high)
    else:
        clamped = em.b.math("smax", em.b.math("smin", wide, high), low)
    return clamped.resize(type_bits(to))


def _emit_pack(em: Emitter, ins: Instruction) -> None:
    """``cvt.pack.sat.s16.s32 d, a, b`` and ``cvt.pack.sat.s8.s32.b32 d, a, b, c``."""
    to = ins.parts[3]
    a, c = (em.read(operand, 32) for operand in ins.operands[1:3])
    upper, lower = (_clamp(em, v, to, "s32") for v in (a, c))
    bits = type_bits(to)
    packed = upper.resize(32) << bits | lower.resize(32)
    if len(ins.operands) > 3:
        packed = packed | em.read(ins.operands[3], 32) << 2 * bits
    em.write(ins.operands[0], packed)


def emit_convert_float(em: Emitter, ins: Instruction) -> None:
    """Between integers, f16, bf16, f32 and f64."""
    to, source = ins.parts[-2], ins.parts[-1]
    if source[0] in "us":
        _from_integer(em, ins, to, source)
    elif to[0] in "us":
        _to_integer(em, ins, to, source)
    elif to in ("bf16", "f16", "bf16x2", "f16x2"):
        _to_half(em, ins, to)
    elif source in ("f16", "bf16"):
        value = widen(em, em.read(ins.operands[1], 16), source)
        # a bfloat16 NaN keeps its payload, a float16 one does not (H200, 2026-11-30)
        wide = value.as_int() if source == "bf16" else canonical_nan(value)
        em.write(ins.operands[0], wide)
    else:
        _between_wide(em, ins, to, source)


def _from_integer(em: Emitter, ins: Instruction, to: str, source: str) -> None:
    value = em.read(ins.operands[1], type_bits(source))
    cast = "sitofp" if source[0] == "s" else "uitofp"
    mode = ins.parts[1]
    if to in ("f16", "bf16"):
        single = value.cast(cast, F64V)
        bits = em.b.call(f"emu.to.{to}.rn", V32, _to_single(em, single, "rz_odd"))
        em.write(ins.operands[0], bits.resize(16))
    elif mode == "rn":
        em.write(ins.operands[0], value.cast(cast, F32V if to == "f32" else F64V))
    elif to == "f32" and type_bits(source) <= 32:
        em.write(ins.operands[0], _to_single(em, value.cast(cast, F64V), mode))
    else:
        raise em.refuse("directed rounding of 64-bit integers")


def _to_single(em: Emitter, value: Val, mode: str) -> Val:
    """float64 to float32 bits, rounded ``rz``, ``rm``, ``rp`` or ``rz_odd`` (sticky last bit)."""
    nearest = value.cast("fptrunc", F32V)
    back = nearest.cast("fpext", F64V)
    bits = nearest.as_int()
    up, down = back.cmp("ogt", value), back.cmp("olt", value)
    negative = bits.cmp("slt", 0)
    grow, shrink = bits + 1, bits - 1
    toward_plus = negative.select(shrink, grow)
    toward_minus = negative.select(grow, shrink)
    if mode == "rp":
        return down.select(toward_plus, bits)
    if mode == "rm":
        return up.select(toward_minus, bits)
    too_large = negative.select(down, up)
    truncated = too_large.select(shrink, bits)
    if mode == "rz":
        return truncated
    return (up | down).select(truncated | 1, truncated)


def _to_integer(em: Emitter, ins: Instruction, to: str, source: str) -> None:
    """Round to integral, then clamp; NaN gives 0 (64-bit: the sign bit), as the GPU does."""
    if source in ("f16", "bf16"):
        value = widen(em, em.read(ins.operands[1], 16), source)
    elif source == "f32":
        bits = em.read(ins.operands[1], 32)
        value = (flush_subnormals(bits) if "ftz" in ins.parts else bits).as_float()
    else:
        value = em.read_float(ins.operands[1], 64)
    mode = ins.parts[1]
    if value.ty.bits == 32:
        value = em.b.call("emu.round", F32V, value, em.b.const(_ROUND_MODES[mode], I32))
    else:
        value = em.b.math(
            {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[mode], value
        )
    bits_to = type_bits(to)
    target = Type("i", bits_to, value.ty.lanes)
    name = "llvm.fptosi.sat" if to[0] == "s" else "llvm.fptoui.sat"
    result = em.b.call(f"{name}.v32i{bits_to}.v32f{value.ty.bits}", target, value)
    if bits_to == 64:
        nan = value.cmp("uno", value)
        result = nan.select(1 << 63, result)
    em.write(ins.operands[0], result, signed=to[0] == "s")


def _between_wide(em: Emitter, ins: Instruction, to: str, source: str) -> None:
    bits = em.read(ins.operands[1], type_bits(source))
    if "ftz" in ins.parts and source == "f32":
        bits = flush_subnormals(bits)
    value = bits.as_float()
    mode = ins.parts[1]
    if to == source and mode in _ROUND_MODES:
        value = em.b.call("emu.round", F32V, value, em.b.const(_ROUND_MODES[mode], I32))
    elif to == "f32" and source == "f64":
        value = value.cast("fptrunc", F32V)
    elif to == "f64" and source == "f32":
        value = value.cast("fpext", F64V)
    if "sat" in ins.parts:
        value = saturate(value)
    result = canonical_nan(value)
    if "ftz" in ins.parts and to == "f32":
        result = flush_subnormals(result)
    em.write(ins.operands[0], result)


def _halves(em: Emitter, ins: Instruction, to: str, bits: Val) -> Val:
    """float32 bits to 16-bit codes with the instruction's rounding, relu and satfinite."""
    base = to.removesuffix("x2")
    mode = "rz" if "rz" in ins.parts else "rn"
    code = em.b.call(f"emu.to.{base}.{mode}", V32, bits)
    infinity = 0x7C00 if base == "f16" else 0x7F80
    if "satfinite" in ins.parts:
        magnitude = code & 0x7FFF
        code = magnitude.eq(infinity).select((code & 0x8000) | (infinity - 1), code)
    if "relu" in ins.parts:
        negative = (code & 0x8000).ne(0) & (code & 0x7FFF).cmp("ule", infinity)
        code = negative.select(0, code)
    return code.resize(16)


def _to_half(em: Emitter, ins: Instruction, to: str) -> None:
    source = ins.parts[-1]
    if source in ("f16", "bf16"):
        wide = [widen(em, em.read(ins.operands[1], 16), source).as_int()]
    else:
        wide = [em.read(operand, 32) for operand in ins.operands[1:]]
    codes = [_halves(em, ins, to, value) for value in wide]
    if to.endswith("x2"):
        em.write(ins.operands[0], pack_pairs([codes[1], codes[0]]))
    else:
        em.write(ins.operands[0], codes[0])


def emit_convert_small(em: Emitter, ins: Instruction) -> None:
    """The packed 4, 6 and 8-bit forms."""
    to, source = ins.parts[-2], ins.parts[-1]
    if to in ("f16x2", "bf16x2"):
        _unpack_small(em, ins, to, source)
        return
    if source == "f32":
        high, low = (em.read(operand, 32) for operand in ins.operands[1:3])
    else:
        packed = em.read(ins.operands[1], 32)
        base = source.removesuffix("x2")
        low, high = (widen(em, part, base).as_int() for part in unpack_pairs(packed))
    if "scaled::n1::ue8m0" in ins.parts:
        high, low = (_descale(em, ins, v) for v in (high, low))
    codes = [_small_code(em, ins, to, v) for v in (low, high)]
    width = 4 if to == "e2m1x2" else 8
    em.write(ins.operands[0], (codes[0] | codes[1] << width).resize(2 * width))


def _descale(em: Emitter, ins: Instruction, bits: Val) -> Val:
    """``.scaled::n1::ue8m0``: the input divided by the power of two of the scale byte.

    ``fp8(ftz(x) * 2^(127 - byte))``; byte 255 gives NaN. As measured on Rubin parts and recorded in
    FlashInfer 0.7.4 (``tile_dsl/pointwise.py``). The division is exact in float64; rounding to odd
    keeps the sticky bits for the rounding that follows.
    """
    code = em.read(ins.operands[3], 32) & 0xFF
    scale = em.b.call("emu.from.ue8m0", V32, code).as_float().cast("fpext", F64V)
    value = flush_subnormals(bits).as_float().cast("fpext", F64V) / scale
    return _to_single(em, value, "rz_odd")


def _small_code(em: Emitter, ins: Instruction, to: str, bits: Val) -> Val:
    fmt = to.removesuffix("x2")
    mode = next(p for p in ins.parts[1:] if p in ("rn", "rz", "rp"))
    if "relu" in ins.parts:
        negative = bits.cmp("slt", 0) & (bits & 0x7FFFFFFF).cmp("ule", 0x7F800000)
        bits = negative.select(0, bits)
    suffix = ".sat" if "satfinite" in ins.parts else ""
    return em.b.call(f"emu.to.{fmt}.{mode}{suffix}", V32, bits)


def _unpack_small(em: Emitter, ins: Instruction, to: str, source: str) -> None:
    """Exact, except UE8M0 and UE5M3 values that bf16 or f16 round."""
    fmt = source.removesuffix("x2")
    width = 4 if fmt == "e2m1" else 8
    packed = em.read(ins.operands[1], 2 * width).resize(32)
    mask = (1 << width) - 1
    base = to.removesuffix("x2")
    halves = []
    for code in (packed & mask, packed >> width & mask):
        single = em.b.call(f"emu.from.{fmt}", V32, code)
        if "relu" in ins.parts:
            single = single.cmp("slt", 0).select(0, single)
        halves.append(em.b.call(f"emu.to.{base}.rn", V32, single).resize(16))
    em.write(ins.operands[0], pack_pairs(halves))


EMITTERS = {
    "convert_integer": emit_convert_integer,
    "convert_float": emit_convert_float,
    "convert_small": emit_convert_small,
}
