"""Inline PTX for rows in global memory: wide loads and stores, blocks of 16 quantized to NVFP4.

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


def _f64(value: float) -> str:
    return "0d" + struct.pack(">d", value).hex().upper()
