"""How activations lie in memory while they are multiplied, one form for each product.

A panel holds the ``T`` tokens of a group: 32-bit words ``[K / 16, words, T]``, where the words of
16 elements of K are, by product,

- ``f32``: 16 fp32, times ``isa.panel_scale``;
- ``bf16``: 8 pairs of bf16, elements n and n + 4 of each 8 together;
- ``int8``: 4 words of 4 signed bytes (elements 0 2 4 6, 1 3 5 7, and so on), the int32 that takes
  back the bias of the weights' look-up, and the fp32 block scale. 16 elements share one:
  ``amax / 127``, elements divided by it and rounded to nearest even. The error of an element is
  at most ``amax / 254``.
"""

from __future__ import annotations

from typing import Literal

from rubin_moe.kernels.cpu import convert
from rubin_moe.kernels.cpu.decode import F32V, I32V, INT8_BIAS
from rubin_moe.kernels.cpu.ir import F32, I8, I32, Function, Value, vec
from rubin_moe.kernels.cpu.isa import LANES, Isa

Product = Literal["f32", "bf16", "int8"]
TILE_WORDS: dict[Product, int] = {"f32": 16, "bf16": 8, "int8": 6}
INT8_LEVELS = 127.0

_PAIRS = tuple(8 * g + n + half for g in (0, 1) for n in range(4) for half in (0, 4))
_EVEN_ODD = tuple(8 * g + odd + n for g in (0, 1) for odd in (0, 1) for n in (0, 2, 4, 6))


def tile_bytes(product: Product) -> int:
    """Of 16 elements of one token."""
    return 4 * TILE_WORDS[product]


def store_tile(
    f: Function,
    isa: Isa,
    product: Product,
    dtype: str,
    value: Value,
    panel: Value,
    tile: Value,
    place: tuple[Value, Value],
) -> None:
    """16 fp32 elements of K, from ``16 tile`` on, for the token at ``place`` = (tokens, t)."""
    if product == "bf16":
        pairs = f.shuffle(convert.bf16_bits(f, value), _PAIRS)
        words = f.cast("bitcast", pairs, vec(I32, LANES // 2))
    elif product == "int8":
        words = _int8_words(f, value)
    else:
        scaled = convert.rounded(f, dtype, value) * isa.panel_scale
        words = f.cast("bitcast", scaled, I32V)
    _scatter(f, words, panel, tile * TILE_WORDS[product], *place)


def _scatter(f: Function, lanes: Value, panel: Value, row: Value, tokens: Value, t: Value) -> None:
    """Lanes to column ``t`` of panel rows ``row``, ``row + 1``, ..."""
    with f.either(tokens.equals(1)) as (alone, among):
        with alone:
            f.store(lanes, panel, row * 4)
        with among:
            for lane in range(lanes.type.count):
                f.store(lanes.at(lane), panel, ((row + lane) * tokens + t) * 4)


def _int8_words(f: Function, value: Value) -> Value:
    """The six words of a block; a NaN or infinity makes the block's scale NaN or infinity."""
    bits = f.cast("bitcast", value, I32V) & 0x7FFFFFFF
    # as integers NaN is above infinity is above all numbers
    amax = f.cast("bitcast", f.fold(bits, lambda a, b: f.select(a > b, a, b)), F32)
    scale = amax / INT8_LEVELS
    safe = f.select(scale.equals(0.0), f.const(F32, 1.0), scale)
    magic = f.const(F32V, 1.5 * 2.0**23)  # adding it rounds to an integer in the low bits
    shifted = value / f.splat(safe, LANES) + magic
    ints = f.cast("bitcast", shifted, I32V) - f.cast("bitcast", magic, I32V)
    total = f.fold(ints, lambda a, b: a + b)
    order = f.shuffle(f.cast("trunc", ints, vec(I8, LANES)), _EVEN_ODD)
    four = f.cast("bitcast", order, vec(I32, 4))
    # the look-up's integers are twice the codes' values
    rest = [total * -INT8_BIAS, f.cast("bitcast", scale * 0.5, I32)]
    return f.shuffle(four, range(6), f.vector([*rest, *rest]))
