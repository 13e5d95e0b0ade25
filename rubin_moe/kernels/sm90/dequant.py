"""Eight E2M1 codes of a word to 16-bit pairs, and block scales to pairs. Device code.

`layouts.fp4_hopper` places a code's bits where bfloat16 has them: sign at 15, exponent at 8 and 7,
mantissa at 6, which is 2^-126 times its value; one mask, rotation or select a pair gets them there,
and float16 takes a shift by three more (2^-14). A scale's byte becomes a float the same way. The
powers of two that both are off by are in the kernel's alphas (`kernels.sm90.scales`). Every product
is exact: two bits of mantissa times four.
"""

from cutlass import Uint32

from rubin_moe.kernels.cute import ptx

PAIR_MASK = 0x81C081C0
SIGNS, HALF_MAGNITUDES = 0x80008000, 0x0E000E00
E5M3_BASE = 0x6F806F80  # exponent field 223 of bfloat16, in both halves


def pairs(word, scale_low, scale_high, kind: str) -> list[Uint32]:
    """The A fragment of one MMA: rows g and g + 8, elements 0 and 1, then 2 and 3."""
    mask = Uint32(PAIR_MASK)
    last = ((word << Uint32(2)) & Uint32(0x80C080C0)) | (
        ptx.rotate_left(word, 10) & Uint32(0x01000100)
    )
    raw = (word & mask, ptx.rotate_left(word, 28) & mask, (word << Uint32(6)) & mask, last)
    scales = (scale_low, scale_high, scale_low, scale_high)
    return [
        ptx.mul_x2(kind, pair if kind == "bf16" else _half(pair), scale)
        for pair, scale in zip(raw, scales, strict=True)
    ]


def _half(pair) -> Uint32:
    return ((pair << Uint32(3)) & Uint32(HALF_MAGNITUDES)) | (pair & Uint32(SIGNS))


def scale_pairs(two, exponent_only: bool, kind: str) -> list[Uint32]:
    """The scales of rows g and g + 8, from 16 bits, each in both halves of a register."""
    out = []
    for selector in (0x4040, 0x4141):
        code = ptx.select_bytes(two, selector)
        if kind == "f16":
            out.append(code << Uint32(10 if exponent_only else 7))
        elif exponent_only:
            out.append(code << Uint32(7))
        else:
            out.append(code * Uint32(16) + Uint32(E5M3_BASE))
    return out
