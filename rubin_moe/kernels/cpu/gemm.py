"""The inner product: one tile of 16 weight rows times a few rows of activations.

A block's products are summed first, its scale is applied once to the sum, and the blocks are
summed in order of K; each row of activations has accumulators of its own. So a result depends
neither on how many rows share a call nor on where the tile lies.
"""

from __future__ import annotations

from llvmlite import ir

from rubin_moe.formats.spec import BlockFormat
from rubin_moe.kernels.cpu import decode
from rubin_moe.kernels.cpu.decode import F32V, I32V
from rubin_moe.kernels.cpu.ir import F32, I8, I32, I64, PTR, Function, Value, vec
from rubin_moe.kernels.cpu.isa import LANES, Isa

PREFETCH_BYTES = 1024
"""How far ahead of the codes in use memory is asked for more."""

ROW_CODES = 8
"""Codes of one row in a 32-bit lane."""


def gemm_module(isa: Isa, fmt: BlockFormat, bf16_dot: bool) -> ir.Module:
    """Functions ``gemm1`` to ``gemm{max_tokens}``."""
    module = ir.Module("gemm")
    for tokens in range(1, isa.max_tokens + 1):
        _gemm(module, isa, fmt, bf16_dot, tokens)
    return module


def _gemm(module: ir.Module, isa: Isa, fmt: BlockFormat, bf16_dot: bool, tokens: int) -> None:
    """``gemmT(codes, scales, blocks, x, out)``.

    codes: ``[K / 8, 16]`` words; scales: ``[K / block, 16]`` bytes; x: the panel of ``tokens`` rows
    that `stages` packs; out: fp32 ``[tokens, 16]``.
    """
    f = Function(module, f"gemm{tokens}", [PTR, PTR, I64, PTR, PTR])
    codes, scales, blocks, x, out = f.args
    block, words = fmt.sf_vec_size, fmt.sf_vec_size // ROW_CODES
    x_block = block * tokens * (2 if bf16_dot else 4)
    zero = f.const(F32V, 0.0)
    with f.loop(blocks, carry=[zero] * tokens) as loop:
        here = f.offset(codes, loop.i * (words * 4 * LANES))
        panel = f.offset(x, loop.i * x_block)
        sums: list[Value | None] = [None] * tokens
        for w in range(words):
            word = f.load(here, I32V, w * 4 * LANES)
            f.prefetch(here, w * 4 * LANES + PREFETCH_BYTES)
            if bf16_dot:
                steps, count = decode.weights_bf16(f, word), ROW_CODES // 2
            else:
                steps, count = decode.weights_f32(f, isa, word), ROW_CODES
            for n, weight in steps:
                for t in range(tokens):
                    at = ((w * count + n) * tokens + t) * 4
                    sums[t] = _multiply_add(f, bf16_dot, weight, panel, at, sums[t])
        scale = decode.scale(f, isa, fmt.scale, f.load(scales, vec(I8, LANES), loop.i * LANES))
        loop.following = [
            f.fma(s, scale, total) for s, total in zip(sums, loop.carried, strict=True) if s
        ]
    for t, total in enumerate(loop.carried):
        f.store(total, out, t * 4 * LANES)
    f.ret()


def _multiply_add(
    f: Function, bf16_dot: bool, weight: Value, panel: Value, at: int, total: Value | None
) -> Value:
    if bf16_dot:
        x = f.splat(f.load(panel, I32, at), LANES)
        start = f.const(F32V, 0.0) if total is None else total
        return f.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", F32V, start, weight, x)
    x = f.splat(f.load(panel, F32, at), LANES)
    return weight * x if total is None else f.fma(weight, x, total)
