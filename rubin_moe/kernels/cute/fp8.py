"""Inline PTX of E4M3 values and byte tables: as `ptx`, one function an instruction or two."""

from cutlass import Float32, Uint32
from cutlass.cute.arch import inline_ptx


def max_u32(x, y) -> Uint32:
    return inline_ptx(
        "max.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[x, y]
    )


def encode_e4m3x4(v: list[Float32]) -> Uint32:
    """To nearest even, saturating; the first in the lowest byte."""
    return inline_ptx(
        "{\n.reg .b16 lo, hi;\ncvt.rn.satfinite.e4m3x2.f32 lo, {$r1}, {$r0};\n"
        "cvt.rn.satfinite.e4m3x2.f32 hi, {$r3}, {$r2};\nmov.b32 {$w0}, {lo, hi};\n}",
        write_only_types=[Uint32],
        read_only_args=list(v),
    )


def look_up(low, high, selector) -> Uint32:
    """Four bytes of a table of eight, by the selector's four low nibbles (0 to 7 each)."""
    return inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[low, high, selector],
    )


def load_shared_v2(address) -> list[Uint32]:
    return list(
        inline_ptx(
            "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
            write_only_types=[Uint32] * 2,
            read_only_args=[address],
        )
    )
