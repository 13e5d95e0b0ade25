"""FC1 with its activation, and FC2, of one group of pairs and 64 rows of weights. Device code.

Weights are the left operand, decoded in registers; tokens the right one, so that a group may be as
small as the instruction's narrow side. The sum over K runs tile by tile in one order: neither the
group's size nor its other tokens change a bit of a token's result.
"""

import triton
import triton.language as tl

from rubin_moe.kernels.triton.activate import activate
from rubin_moe.kernels.triton.dequant import TILE, load_tile


@triton.jit
def load_tokens(x, row, first_k, width, mask):
    """``[64, tokens]`` of the rows at ``x + row``, K from ``first_k`` on; zero beyond ``width``."""
    k = first_k + tl.arange(0, TILE)
    inside = (k[:, None] < width) & mask[None, :]
    return tl.load(x + row[None, :] + k[:, None], mask=inside, other=0.0)


@triton.jit
def add_tile(codes, words, tile, low, high, total, UE8M0: tl.constexpr, UNIT: tl.constexpr):
    """``total`` plus a tile of weights times 128 of K of the tokens, in the tokens' type."""
    w_low, w_high = load_tile(codes, words, tile, UE8M0, UNIT)
    total = tl.dot(w_low.to(low.dtype), low, total, input_precision="ieee")
    return tl.dot(w_high.to(high.dtype), high, total, input_precision="ieee")


@triton.jit
def fc1(
    x,
    codes,
    words,
    alpha,
    bias,
    pairs,
    block_expert,
    block_count,
    h,
    hidden,
    width,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    UE8M0: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``h[pair] = activation(w13 @ x[pair // TOP_K] * alpha + bias)`` of one group and 64 features.

    Args:
        x: ``[M, hidden]``; codes, words (scales): ``[E, halves, width / 64, K tiles, ...]``
            (`layouts.fp4_planes`), gate first; alpha: float32 ``[E, halves]``; bias: float32
            ``[E, halves, width]``. pairs, block_expert, block_count: from `route`.
        h: ``[pairs, width]`` of x's type; width: the padded expert width.
        KIND, LIMIT, ALPHA, BETA: of `activate`; UE8M0, UNIT: of `dequant.scales`.
    """
    HALVES: tl.constexpr = 2 if GATED else 1
    group, tile_n = tl.program_id(0), tl.program_id(1)
    expert = tl.load(block_expert + group).to(tl.int64)
    if expert < 0:
        return
    column = tl.arange(0, BLOCK)
    mask = column < tl.load(block_count + group)
    pair = tl.load(pairs + group * BLOCK + column, mask=mask, other=0).to(tl.int64)
    row = pair // TOP_K * hidden
    k_tiles = tl.cdiv(hidden, 2 * TILE)
    n_tiles = width // TILE
    up_tile = ((expert * HALVES + HALVES - 1) * n_tiles + tile_n) * k_tiles
    gate_tile = (expert * HALVES * n_tiles + tile_n) * k_tiles
    up = tl.zeros([TILE, BLOCK], tl.float32)
    gate = tl.zeros([TILE, BLOCK], tl.float32)
    for k in range(k_tiles):
        low = load_tokens(x, row, k * (2 * TILE), hidden, mask)
        high = load_tokens(x, row, k * (2 * TILE) + TILE, hidden, mask)
        if GATED:
            gate = add_tile(codes, words, gate_tile + k, low, high, gate, UE8M0, UNIT)
        up = add_tile(codes, words, up_tile + k, low, high, up, UE8M0, UNIT)
    feature = tile_n * TILE + tl.arange(0, TILE)
    up_half = expert * HALVES + HALVES - 1
    up *= tl.load(alpha + up_half)
    gate *= tl.load(alpha + expert * HALVES)
    if BIAS:
        up += tl.load(bias + up_half * width + feature)[:, None]
        gate += tl.load(bias + expert * HALVES * width + feature)[:, None]
    result = activate(gate, up, KIND, LIMIT, ALPHA, BETA)
    at = h + pair[None, :] * width + feature[:, None]
    tl.store(at, result.to(h.dtype.element_ty), mask=mask[None, :])


@triton.jit
def fc2(
    h,
    codes,
    words,
    alpha,
    bias,
    pairs,
    block_expert,
    block_count,
    y,
    hidden,
    width,
    BIAS: tl.constexpr,
    UE8M0: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``y[pair] = w2 @ h[pair] * alpha + bias`` of one group and 64 of hidden.

    Args:
        codes, words: ``[E, hidden tiles, K tiles, ...]``; alpha: float32 ``[E]``; bias: float32
            ``[E, hidden]``; y: float32 ``[pairs, hidden]``. The others as in `fc1`.
    """
    group, tile_n = tl.program_id(0), tl.program_id(1)
    expert = tl.load(block_expert + group).to(tl.int64)
    if expert < 0:
        return
    column = tl.arange(0, BLOCK)
    mask = column < tl.load(block_count + group)
    pair = tl.load(pairs + group * BLOCK + column, mask=mask, other=0).to(tl.int64)
    row = pair * width
    k_tiles = tl.cdiv(width, 2 * TILE)
    tile = (expert * tl.cdiv(hidden, TILE) + tile_n) * k_tiles
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for k in range(k_tiles):
        low = load_tokens(h, row, k * (2 * TILE), width, mask)
        high = load_tokens(h, row, k * (2 * TILE) + TILE, width, mask)
        total = add_tile(codes, words, tile + k, low, high, total, UE8M0, UNIT)
    feature = tile_n * TILE + tl.arange(0, TILE)
    inside = feature < hidden
    total *= tl.load(alpha + expert)
    if BIAS:
        total += tl.load(bias + expert * hidden + feature, mask=inside, other=0.0)[:, None]
    at = y + pair[None, :] * hidden + feature[:, None]
    tl.store(at, total, mask=mask[None, :] & inside[:, None])
