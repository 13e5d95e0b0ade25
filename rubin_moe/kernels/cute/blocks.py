"""Inline PTX for rows in global memory: wide loads and stores, blocks quantized to NVFP4 and MXFP8.

With a global scale the reference (`rubin_moe.formats.quantize`) divides in float64. The same codes
come out without a division an element: a code counts the rounding boundaries, times the scale,
that an element exceeds, and those products are exact in float64 (24 + 4 + 3 bits).
"""

import struct

from cutlass import Float32, Uint32
from cutlass.cute.arch import inline_ptx

from rubin_moe.kernels.cute import ptx

BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between neighbouring E2M1 magnitudes; a tie goes to the even code: up at every second one."""


def load_v4(address) -> list[Uint32]:
    """16 bytes."""
    return list(
        inline_ptx(
            "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address],
        )
    )


def store_v4(address, v):
    inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *v]
    )


def widen(word, dtype: str) -> list[Float32]:
    """What a 32-bit word of ``dtype`` holds: one float32, or two halves, the low one first."""
    if dtype == "float32":
        return [ptx.as_f32(word)]
    if dtype == "bfloat16":
        return [ptx.as_f32(word << Uint32(16)), ptx.as_f32(word & Uint32(0xFFFF0000))]
    text = (
        "{\n.reg .b16 low, high;\nmov.b32 {low, high}, {$r0};\n"
        "cvt.f32.f16 {$w0}, low;\ncvt.f32.f16 {$w1}, high;\n}"
    )
    return list(inline_ptx(text, write_only_types=[Float32] * 2, read_only_args=[word]))


def narrow(v: list[Float32], dtype: str) -> list[Uint32]:
    """Words of ``dtype`` that hold ``v``, rounded to nearest even."""
    if dtype == "float32":
        return [ptx.as_u32(x) for x in v]
    form = "bf16x2" if dtype == "bfloat16" else "f16x2"
    return [
        inline_ptx(
            f"cvt.rn.{form}.f32 {{$w0}}, {{$r1}}, {{$r0}};",
            write_only_types=[Uint32],
            read_only_args=[v[i], v[i + 1]],
        )
        for i in range(0, len(v), 2)
    ]


def max_abs_nan(x, y) -> Float32:
    """max(x, |y|), NaN if either is."""
    return inline_ptx(
        "{\n.reg .f32 t;\nabs.f32 t, {$r1};\nmax.NaN.f32 {$w0}, {$r0}, t;\n}",
        write_only_types=[Float32],
        read_only_args=[x, y],
    )


def encode_ue4m3_over(amax, dec) -> Uint32:
    """Code of ``amax / 6 / dec``, as float64 divides and rounds once.

    On the way to the conversion from float32 the quotient is rounded to odd, which leaves the
    second rounding what it was.
    """
    return inline_ptx(
        "{\n.reg .f64 a, d, back;\n.reg .f32 f, zero;\n.reg .b32 bits;\n.reg .b16 code;\n"
        ".reg .pred above, inexact;\n"
        f"cvt.f64.f32 a, {{$r0}};\ndiv.rn.f64 a, a, {_f64(6.0)};\n"
        "cvt.f64.f32 d, {$r1};\ndiv.rn.f64 a, a, d;\n"
        "cvt.rn.f32.f64 f, a;\ncvt.f64.f32 back, f;\nmov.b32 bits, f;\n"
        "setp.gt.f64 above, back, a;\n@above sub.u32 bits, bits, 1;\n"
        "setp.ne.f64 inexact, back, a;\n@inexact or.b32 bits, bits, 1;\n"
        "mov.b32 f, bits;\nmov.f32 zero, 0f00000000;\n"
        "cvt.rn.satfinite.e4m3x2.f32 code, zero, f;\ncvt.u32.u16 {$w0}, code;\n}",
        write_only_types=[Uint32],
        read_only_args=[amax, dec],
    )


def encode_e2m1x8_over(v: list[Float32], scale, dec) -> Uint32:
    """Codes of eight elements over ``scale * dec``, the first in the lowest nibble."""
    lines = [
        "{",
        ".reg .f64 s, d, e, c<7>;",
        ".reg .f32 m;",
        ".reg .b32 q, word;",
        ".reg .pred p;",
        "cvt.f64.f32 s, {$r8};",
        "cvt.f64.f32 d, {$r9};",
        "mul.rn.f64 s, s, d;",
        "mov.b32 word, 0;",
        *(f"mul.rn.f64 c{i}, s, {_f64(b)};" for i, b in enumerate(BOUNDARIES)),
    ]
    for n in range(8):
        lines += [f"abs.f32 m, {{$r{n}}};", "cvt.f64.f32 e, m;", f"mov.b32 q, {{$r{n}}};"]
        lines += ["shr.u32 q, q, 31;", "shl.b32 q, q, 3;"]
        for i in range(len(BOUNDARIES)):
            lines += [f"setp.{'ge' if i % 2 else 'gt'}.f64 p, e, c{i};", "@p add.u32 q, q, 1;"]
        lines += [f"shl.b32 q, q, {4 * n};", "or.b32 word, word, q;"]
    return inline_ptx(
        "\n".join([*lines, "mov.b32 {$w0}, word;", "}"]),
        write_only_types=[Uint32],
        read_only_args=[*v, scale, dec],
    )


def encode_ue8m0(amax) -> Uint32:
    """Code of ``amax / 448``, rounded up to a power of two; 254 for infinity, NaN for a NaN.

    448 is 1.75 x 2^8, so the exponent decides, and whether the mantissa exceeds 0x600000; a
    quotient would be rounded before it is rounded up. ``amax`` is not negative.
    """
    return inline_ptx(
        "{\n.reg .b32 t;\n.reg .pred inf, nan;\nadd.u32 t, {$r0}, 0x1FFFFF;\nshr.u32 t, t, 23;\n"
        "max.u32 t, t, 8;\nsub.u32 t, t, 8;\nsetp.eq.u32 inf, {$r0}, 0x7F800000;\n"
        "selp.b32 t, 254, t, inf;\nsetp.gt.u32 nan, {$r0}, 0x7F800000;\n"
        "selp.b32 {$w0}, 255, t, nan;\n}",
        write_only_types=[Uint32],
        read_only_args=[ptx.as_u32(amax)],
    )


def encode_e4m3x4(v: list[Float32], scale) -> Uint32:
    """Codes of four elements over a UE8M0 scale given by its code, the first in the lowest byte.

    The conversion divides by itself. It takes a subnormal float32 for zero.
    """
    form = "cvt.rn.satfinite.scaled::n1::ue8m0.e4m3x2.f32"
    return inline_ptx(
        "{\n.reg .b8 s;\n.reg .b16 low, high;\ncvt.u8.u32 s, {$r4};\n"
        f"{form} low, {{$r1}}, {{$r0}}, s;\n{form} high, {{$r3}}, {{$r2}}, s;\n"
        "mov.b32 {$w0}, {low, high};\n}",
        write_only_types=[Uint32],
        read_only_args=[*v, scale],
    )


def _f64(value: float) -> str:
    return "0d" + struct.pack(">d", value).hex().upper()
