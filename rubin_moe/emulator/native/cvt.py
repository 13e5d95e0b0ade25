"""Runtime functions that convert between float32 and the 4 to 16-bit formats.

Rounding is by integer arithmetic on the bits, one generic routine for all small formats:
``rn`` nearest even, ``rz`` toward zero, ``rp`` toward +infinity. NaN gives the format's NaN (its
largest finite value where it has none); ``satfinite`` clamps to the largest finite value, otherwise
overflow gives infinity or NaN as the format has it. PTX ISA, "cvt".
"""

from __future__ import annotations

from dataclasses import dataclass

from rubin_moe.emulator.native.ir import F16V, F32V, I32, V16, V32, Builder, Val
from rubin_moe.emulator.native.library import runtime_function


@dataclass(frozen=True, slots=True)
class SmallFormat:
    """A sign-magnitude (or unsigned) float of at most 8 bits."""

    exponent: int
    mantissa: int
    bias: int
    largest: int  # code of the largest finite magnitude
    nan: int  # code of NaN (largest finite where there is none)
    overflow: int  # code without satfinite
    signed: bool = True

    @property
    def sign_shift(self) -> int:
        """Bit of the sign."""
        return self.exponent + self.mantissa


SMALL_FORMATS = {
    "e2m1": SmallFormat(2, 1, 1, 0x7, 0x7, 0x7),
    "e2m3": SmallFormat(2, 3, 1, 0x1F, 0x1F, 0x1F),
    "e3m2": SmallFormat(3, 2, 3, 0x1F, 0x1F, 0x1F),
    "e4m3": SmallFormat(4, 3, 7, 0x7E, 0x7F, 0x7F),
    "e5m2": SmallFormat(5, 2, 15, 0x7B, 0x7F, 0x7C),
    "ue4m3": SmallFormat(4, 3, 7, 0x7E, 0x7F, 0x7F, signed=False),
    "ue5m3": SmallFormat(5, 3, 15, 0xFE, 0xFF, 0xFF, signed=False),
}
_SMALL_WIDTH = 32


def _round_bits(b: Builder, x: Val, fmt: SmallFormat, mode: str, finite: bool) -> Val:
    """float32 bits to codes (in 32-bit lanes)."""
    sign, magnitude = x >> 31, x & 0x7FFFFFFF
    raw_exponent = magnitude >> 23
    subnormal = raw_exponent.eq(0)
    exponent = subnormal.select(1, raw_exponent)
    hidden = subnormal.select(b.const(0, V32), b.const(1 << 23, V32))
    mantissa = (magnitude & 0x7FFFFF) | hidden
    lowest = 128 - fmt.bias  # float32 exponent field of the smallest normal of the format
    below = b.math("smax", b.const(lowest, V32) - exponent, b.const(0, V32))
    shift = b.math("umin", below + (23 - fmt.mantissa), b.const(26, V32))
    one = b.const(1, V32)
    kept = mantissa >> shift
    remainder = mantissa & ((one << shift) - 1)
    if mode == "rn":
        half = one << (shift - 1)
        tie = remainder.eq(half) & (kept & 1).ne(0)
        kept = kept + (remainder.cmp("ugt", half) | tie).cast("zext", V32)
    elif mode == "rp":
        up = remainder.ne(0) & sign.eq(0)
        kept = kept + up.cast("zext", V32)
    above = b.math("smax", exponent - lowest, b.const(0, V32))
    code = (above << fmt.mantissa) + kept
    limit = fmt.largest if finite else fmt.overflow
    code = code.cmp("ugt", fmt.largest).select(limit, code)
    code = magnitude.cmp("ugt", 0x7F800000).select(fmt.nan, code)
    return _apply_sign(code, sign, magnitude, fmt)


def _apply_sign(code: Val, sign: Val, magnitude: Val, fmt: SmallFormat) -> Val:
    is_nan = magnitude.cmp("ugt", 0x7F800000)
    if fmt.signed:
        signed = code | sign << fmt.sign_shift
        return is_nan.select(code, signed)
    negative = sign.ne(0) & ~is_nan
    return negative.select(0, code)  # an unsigned format clamps negative values to zero


def _define_small(name: str, fmt: SmallFormat, mode: str, finite: bool) -> None:
    suffix = ".sat" if finite else ""

    @runtime_function(f"emu.to.{name}.{mode}{suffix}", V32, x=V32)
    def convert(b: Builder, x: Val) -> None:
        b.ret(_round_bits(b, x, fmt, mode, finite), V32)


for _name, _format in SMALL_FORMATS.items():
    for _mode in ("rn", "rz", "rp"):
        _define_small(_name, _format, _mode, True)
        if _format.overflow != _format.largest:
            _define_small(_name, _format, _mode, False)


def _define_from_small(name: str, fmt: SmallFormat) -> None:
    @runtime_function(f"emu.from.{name}", V32, code=V32)
    def convert(b: Builder, code: Val) -> None:
        """Codes to float32 bits, exactly (NaN: 0x7FFFFFFF)."""
        magnitude = code & ((1 << fmt.sign_shift) - 1)
        raised = magnitude << (23 - fmt.mantissa)
        scaled = raised.as_float() * 2.0 ** (127 - fmt.bias)
        bits = scaled.as_int()
        if name == "e5m2":
            bits = magnitude.eq(0x7C).select(0x7F800000, bits)
            bits = magnitude.cmp("ugt", 0x7C).select(0x7FFFFFFF, bits)
        elif fmt.nan != fmt.largest:
            bits = magnitude.eq(fmt.nan).select(0x7FFFFFFF, bits)
        if fmt.signed:
            sign = (code >> fmt.sign_shift & 1) << 31
            bits = bits.eq(0x7FFFFFFF).select(bits, bits | sign)
        b.ret(bits, V32)


for _name, _format in SMALL_FORMATS.items():
    _define_from_small(_name, _format)


def _define_ue8m0(mode: str, finite: bool) -> None:
    suffix = ".sat" if finite else ""

    @runtime_function(f"emu.to.ue8m0.{mode}{suffix}", V32, x=V32)
    def convert(b: Builder, x: Val) -> None:
        """Powers of two; the sign is dropped; ``rp`` rounds up, ``rz`` down."""
        magnitude = x & 0x7FFFFFFF
        code = magnitude >> 23
        if mode == "rp":
            # below 2^-127 everything rounds up to code 0, the smallest value
            bump = (magnitude & 0x7FFFFF).ne(0) & magnitude.cmp("ugt", 0x00400000)
            code = code + bump.cast("zext", V32)
        limit = 0xFE if finite else 0xFF
        code = code.cmp("ugt", 0xFE).select(limit, code)
        code = magnitude.cmp("ugt", 0x7F800000).select(0xFF, code)
        b.ret(code, V32)


for _mode in ("rp", "rz"):
    for _finite in (True, False):
        _define_ue8m0(_mode, _finite)


@runtime_function("emu.from.ue8m0", V32, code=V32)
def _from_ue8m0(b: Builder, code: Val) -> None:
    """2^(code - 127); code 0 is the subnormal 2^-127, 0xFF NaN."""
    bits = code.eq(0).select(0x00400000, code << 23)
    b.ret(code.eq(0xFF).select(0x7FFFFFFF, bits), V32)


@runtime_function("emu.to.bf16.rn", V32, x=V32)
def _to_bf16(b: Builder, x: Val) -> None:
    rounded = (x + ((x >> 16 & 1) + 0x7FFF)) >> 16
    b.ret((x & 0x7FFFFFFF).cmp("ugt", 0x7F800000).select(0x7FFF, rounded), V32)


@runtime_function("emu.to.bf16.rz", V32, x=V32)
def _to_bf16_rz(b: Builder, x: Val) -> None:
    b.ret((x & 0x7FFFFFFF).cmp("ugt", 0x7F800000).select(0x7FFF, x >> 16), V32)


@runtime_function("emu.to.f16.rn", V32, x=V32)
def _to_f16(b: Builder, x: Val) -> None:
    half = x.as_float().cast("fptrunc", F16V).bits_as(V16).cast("zext", V32)
    b.ret((x & 0x7FFFFFFF).cmp("ugt", 0x7F800000).select(0x7FFF, half), V32)


@runtime_function("emu.to.f16.rz", V32, x=V32)
def _to_f16_rz(b: Builder, x: Val) -> None:
    """Truncation: one step back where rounding went away from zero."""
    half = x.as_float().cast("fptrunc", F16V)
    bits = half.bits_as(V16).cast("zext", V32)
    back = half.cast("fpext", F32V).as_int() & 0x7FFFFFFF
    magnitude = x & 0x7FFFFFFF
    bits = bits - (back.cmp("ugt", magnitude)).cast("zext", V32)
    b.ret(magnitude.cmp("ugt", 0x7F800000).select(0x7FFF, bits), V32)


@runtime_function("emu.from.f16", V32, code=V32)
def _from_f16(b: Builder, code: Val) -> None:
    wide = code.cast("trunc", V16).bits_as(F16V).cast("fpext", F32V).as_int()
    b.ret((code & 0x7FFF).cmp("ugt", 0x7C00).select(0x7FFFFFFF, wide), V32)


@runtime_function("emu.round", F32V, x=F32V, mode=I32)
def _round(b: Builder, x: Val, mode: Val) -> None:
    """Round to integral: 0 nearest even, 1 toward zero, 2 down, 3 up."""
    result = b.math("rint", x)
    for number, name in ((1, "trunc"), (2, "floor"), (3, "ceil")):
        chosen = mode.eq(number).splat()
        result = chosen.select(b.math(name, x), result)
    b.ret(result, F32V)
