"""A tile of E2M1 bytes and its block scales to two operands of a product. Device code.

Everything is exact: an element has two bits of mantissa, a scale at most four, and the factor that
`kernels.triton.scales` takes out keeps each product inside the operand's range. Elements and scales
become float32 by moving their bits to float32's exponent and mantissa, where subnormals decode by
themselves, and one multiplication by a power of two.
"""

import triton
import triton.language as tl

TILE = tl.constexpr(64)  # rows of a weight tile, and bytes of a row
CODE_BYTES = tl.constexpr(64 * 64)
CODE_UNIT = tl.constexpr(2.0**126)  # a code's bits at float32's exponent are 2^-126 times its value
UE8M0_ZERO = tl.constexpr(1 << 22)  # byte 0 is 2^-127, float32's subnormal


@triton.jit
def elements(nibbles):
    """int32 codes 0..15 of any shape to float32."""
    bits = ((nibbles & 8) << 28) | ((nibbles & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * CODE_UNIT


@triton.jit
def scales(codes, UE8M0: tl.constexpr, UNIT: tl.constexpr):
    """int32 scale codes 0..255 of any shape to float32, times the format's factor.

    UNIT: undoes the exponent bias, times the factor."""
    if UE8M0:
        bits = tl.where(codes == 0, UE8M0_ZERO, codes << 23)
    else:
        bits = codes << 20
    return bits.to(tl.float32, bitcast=True) * UNIT


@triton.jit
def plane_scales(words, FIRST: tl.constexpr, COUNT: tl.constexpr, UE8M0: tl.constexpr, UNIT):
    """int32 ``[64]``, four scale codes a row, to float32 ``[64, 64]``: ``COUNT`` of them from the
    byte ``FIRST`` on, each for 64 / COUNT elements."""
    shift = 8 * (FIRST + tl.arange(0, COUNT))
    some = scales((words[:, None] >> shift[None, :]) & 255, UE8M0, UNIT)
    wide = tl.broadcast_to(some[:, :, None], (TILE, COUNT, TILE // COUNT))
    return tl.reshape(wide, (TILE, TILE))


@triton.jit
def load_tile(codes, words, tile, UE8M0: tl.constexpr, UNIT: tl.constexpr):
    """Tile number ``tile`` (int64) as two float32 ``[64, 64]``: its first 64 of K, and the others.

    codes: uint8 tiles; words: their scales as int32."""
    row = tl.arange(0, TILE)
    packed = tl.load(codes + tile * CODE_BYTES + (row[:, None] * TILE + row[None, :])).to(tl.int32)
    if UE8M0:
        word = tl.load(words + tile * TILE + row)
        low = plane_scales(word, 0, 2, UE8M0, UNIT)
        high = plane_scales(word, 2, 2, UE8M0, UNIT)
    else:
        at = words + tile * (2 * TILE) + 2 * row
        low = plane_scales(tl.load(at), 0, 4, UE8M0, UNIT)
        high = plane_scales(tl.load(at + 1), 0, 4, UE8M0, UNIT)
    return elements(packed) * low, elements(packed >> 4) * high
