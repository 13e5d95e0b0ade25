"""The inner product: one tile of 16 weight rows times a few rows of activations.

A block's products are summed first, its scale is applied once to the sum, and the blocks are
summed in order of K; each row of activations has accumulators of its own. So a result depends
neither on how many rows share a call nor on where the tile lies.
"""

from __future__ import annotations

from llvmlite import ir

from rubin_moe.formats.spec import BlockFormat
from rubin_moe.kernels.cpu import decode, panel
from rubin_moe.kernels.cpu.decode import F32V, I32V
from rubin_moe.kernels.cpu.ir import F32, I8, I16, I32, I64, PTR, Function, Value, vec
from rubin_moe.kernels.cpu.isa import LANES, Isa
from rubin_moe.kernels.cpu.panel import Product

PREFETCH_BYTES = 12288
"""How far ahead of the codes in use memory is asked for more; scales as many rows ahead.

Measured, docs/notes/cpu.md: from 8192 on equal, 4096 slower by a fifth.
"""

TILE_BYTES = 2 * 4 * LANES
"""Codes of 16 elements of K for 16 rows."""


def gemm_module(isa: Isa, fmt: BlockFormat, product: Product) -> ir.Module:
    """Functions ``gemm1`` to ``gemm{max_tokens}``."""
    module = ir.Module("gemm")
    for tokens in range(1, isa.max_tokens + 1):
        _Gemm(module, isa, fmt, product, tokens).write()
    return module


class _Gemm:
    """``gemmT(codes, scales, blocks, x, out)``.

    codes: ``[K / 8, 16]`` words; scales: ``[K / block, 16]`` bytes; x: a panel of `panel`;
    out: fp32 ``[T, 16]``.
    """

    def __init__(
        self, module: ir.Module, isa: Isa, fmt: BlockFormat, product: Product, tokens: int
    ) -> None:
        self.isa, self.fmt, self.product, self.tokens = isa, fmt, product, tokens
        self.f = Function(module, f"gemm{tokens}", [PTR, PTR, I64, PTR, PTR])

    def write(self) -> None:
        f, block = self.f, self.fmt.sf_vec_size
        codes, scales, blocks, x, out = f.args
        tiles = block // LANES  # of 16 elements of K
        zero = f.const(F32V, 0.0)
        sum_tile = {"f32": self._f32, "bf16": self._bf16, "int8": self._int8}[self.product]
        with f.loop(blocks, carry=[zero] * self.tokens) as loop:
            here = f.offset(codes, loop.i * (tiles * TILE_BYTES))
            tile_bytes = panel.tile_bytes(self.product) * self.tokens
            beside = f.offset(x, loop.i * (tiles * tile_bytes))
            sums: list[Value | None] = [None] * self.tokens
            for tile in range(tiles):
                words = []
                for at in (tile * TILE_BYTES, tile * TILE_BYTES + TILE_BYTES // 2):
                    words.append(f.load(here, I32V, at))
                    f.prefetch(here, at + PREFETCH_BYTES)
                sum_tile(words, f.offset(beside, tile * tile_bytes), sums)
            beside_codes = f.offset(scales, loop.i * LANES)
            f.prefetch(beside_codes, PREFETCH_BYTES * LANES // (tiles * TILE_BYTES))
            codes16 = f.load(beside_codes, vec(I8, LANES))
            scale = decode.scale(f, self.isa, self.fmt.scale, codes16)
            pairs = zip(sums, loop.carried, strict=True)
            loop.following = [f.fma(s, scale, total) for s, total in pairs if s]
        for t, total in enumerate(loop.carried):
            f.store(total, out, t * 4 * LANES)
        f.ret()

    def _broadcast(self, tile: Value, row: int, t: int, kind: ir.Type) -> Value:
        """Panel word ``row`` of a tile for token ``t``, in every lane."""
        return self.f.splat(self.f.load(tile, kind, (row * self.tokens + t) * 4), LANES)

    def _f32(self, words: list[Value], tile: Value, sums: list[Value | None]) -> None:
        for w, word in enumerate(words):
            for n, weight in decode.weights_f32(self.f, self.isa, word):
                for t, total in enumerate(sums):
                    x = self._broadcast(tile, 8 * w + n, t, F32)
                    sums[t] = weight * x if total is None else self.f.fma(weight, x, total)

    def _bf16(self, words: list[Value], tile: Value, sums: list[Value | None]) -> None:
        f, name = self.f, "llvm.x86.avx512bf16.dpbf16ps.512"
        for w, word in enumerate(words):
            for n, weight in decode.weights_bf16(f, word):
                for t, total in enumerate(sums):
                    start = f.const(F32V, 0.0) if total is None else total
                    x = self._broadcast(tile, 4 * w + n, t, I32)
                    sums[t] = f.intrinsic(name, F32V, start, weight, x)

    def _int8(self, words: list[Value], tile: Value, sums: list[Value | None]) -> None:
        """Exact in integers, then one multiplication with the activations' scale."""
        f = self.f
        weights = [v for word in words for v in decode.weights_int8(f, self.isa, word)]
        for t, total in enumerate(sums):
            xs = [self._broadcast(tile, row, t, I32) for row in range(4)]
            start = self._broadcast(tile, 4, t, I32)
            ints = _INT8_DOTS[self.isa.int8_dot](f, self.isa, start, weights, xs)
            scale = self._broadcast(tile, 5, t, F32)
            value = f.cast("sitofp", ints, F32V)
            sums[t] = value * scale if total is None else f.fma(value, scale, total)


def _vnni(f: Function, isa: Isa, start: Value, weights: list[Value], xs: list[Value]) -> Value:
    for weight, x in zip(weights, xs, strict=True):
        start = f.intrinsic("llvm.x86.avx512.vpdpbusd.512", I32V, start, weight, x)
    return start


def _maddubs(f: Function, isa: Isa, start: Value, weights: list[Value], xs: list[Value]) -> Value:
    """Sums of pairs, 16 elements of K: 4 x 2 x 24 x 127 stays below 2^15."""
    lanes, bytes_name, words_name = _MADD[isa.lookup]
    parts = []
    for low in range(0, LANES, lanes):
        pairs = None
        for operands in zip(weights, xs, strict=True):
            part = [f.shuffle(v, range(low, low + lanes)) for v in operands]
            as_bytes = [f.cast("bitcast", v, vec(I8, 4 * lanes)) for v in part]
            dot = f.intrinsic(bytes_name, vec(I16, 2 * lanes), *as_bytes)
            pairs = dot if pairs is None else pairs + dot
        assert pairs is not None
        ones = f.const(vec(I16, 2 * lanes), 1)
        parts.append(f.intrinsic(words_name, vec(I32, lanes), pairs, ones))
    return start + (parts[0] if len(parts) == 1 else f.concat(*parts))


_MADD = {
    "avx512": (16, "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
    "avx2": (8, "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
}


def _wide(f: Function, isa: Isa, start: Value, weights: list[Value], xs: list[Value]) -> Value:
    for weight, x in zip(weights, xs, strict=True):
        for byte in range(4):
            signed = f.arithmetic_shift(x << (24 - 8 * byte), 24)
            start = start + ((weight >> 8 * byte) & 255) * signed
    return start


_INT8_DOTS = {"vnni": _vnni, "maddubs": _maddubs, "wide": _wide}
