"""Activations to NVFP4 or MXFP8, each token once, with K padded by zeros to whole tiles.

Device code. A thread quantizes blocks of 16 elements to 8 bytes of codes and a scale (NVFP4), of 32
to 32 bytes and a scale (MXFP8). The codes are those of `rubin_moe.formats.quantize`, bit for bit,
but that the conversion to FP8 takes a subnormal float32 for zero.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from rubin_moe.kernels.cute import blocks as block_ptx
from rubin_moe.kernels.cute import ptx

THREADS = 128
BLOCK = {"ue4m3": 16, "ue5m3": 16, "ue8m0": 32}
VALUE = {"ue4m3": 2.0**120, "ue5m3": 2.0**112}
"""A scale code's exponent and mantissa at the low end of a float32's, times this, is its value."""
NAN_CODE = {"ue4m3": 0x7F, "ue5m3": 0xFF, "ue8m0": 0xFF}


class QuantizeTokens:
    """One kernel.

    Args:
        scale: ``ue4m3`` or ``ue5m3`` (NVFP4), ``ue8m0`` (MXFP8); dtype: of the activations, as
            torch names it.
    """

    def __init__(self, scale: str, dtype: str):
        self.scale = scale
        self.block = BLOCK[scale]
        self.code_words = 8 if scale == "ue8m0" else 2
        self.dtype = dtype
        self.element_bytes = 4 if dtype == "float32" else 2

    @cute.jit
    def __call__(
        self,
        x: Int64,
        dec: Int64,
        factor: Int64,
        codes: Int64,
        scales: Int64,
        row_blocks: Int32,
        padded_blocks: Int32,
        total: Int32,
        ctas: Int32,
        stream,
    ):
        """Launch. Addresses of ``[M, row_blocks]`` blocks of activations, float32 ``[1]`` their
        global scale (read for UE4M3 alone), float32 ``[M]`` factor of each row or 0 for none, uint8
        ``[M, padded_blocks]`` blocks of codes and ``[M, padded_blocks]`` scales; ``total`` is
        M x padded_blocks."""
        self.kernel(x, dec, factor, codes, scales, row_blocks, padded_blocks, total).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        dec: Int64,
        factor: Int64,
        codes: Int64,
        scales: Int64,
        row_blocks: Int32,
        padded_blocks: Int32,
        total: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        i = Int32(bid) * THREADS + thread
        while i < total:
            row = ptx.div_u32(i, padded_blocks)
            column = i - row * padded_blocks
            words = [Uint32(0)] * self.code_words
            scale = Uint32(0)
            if column < row_blocks:
                first = Int64(row) * Int64(row_blocks) + Int64(column)
                v = self.load(x + first * (self.block * self.element_bytes))
                if factor != 0:
                    weight = ptx.load_f32(factor + Int64(row) * 4)
                    v = [e * weight for e in v]
                words, scale = self.quantize(v, dec)
            self.store(codes + Int64(i) * (4 * self.code_words), words)
            ptx.store_b8(scales + Int64(i), scale)
            i += Int32(grid) * THREADS

    @cute.jit
    def load(self, address):
        v = []
        for i in cutlass.range_constexpr(self.block * self.element_bytes // 16):
            for word in block_ptx.load_v4(address + 16 * i):
                v += block_ptx.widen(word, self.dtype)
        return v

    @cute.jit
    def store(self, address, words):
        if cutlass.const_expr(self.code_words == 2):
            ptx.store_v2_b32(address, words[0], words[1])
        else:
            block_ptx.store_v4(address, words[:4])
            block_ptx.store_v4(address + 16, words[4:])

    @cute.jit
    def quantize(self, v, dec):
        """A block's codes, four bytes a word, and its scale's; a dead scale, zero of NVFP4 or NaN,
        has zero codes."""
        amax = Float32(0.0)
        for i in cutlass.range_constexpr(self.block):
            amax = block_ptx.max_abs_nan(amax, v[i])
        if cutlass.const_expr(self.scale == "ue5m3"):
            scale = ptx.encode_scale(ptx.div(amax, Float32(6.0)), True)
            value = ptx.as_f32(scale << Uint32(20)) * Float32(VALUE["ue5m3"])
            q = [ptx.div(v[i], value) for i in range(self.block)]
            words = [ptx.encode_e2m1x8(q[:8]), ptx.encode_e2m1x8(q[8:])]
        elif cutlass.const_expr(self.scale == "ue4m3"):
            factor = ptx.load_f32(dec)
            scale = block_ptx.encode_ue4m3_over(amax, factor)
            value = ptx.as_f32(scale << Uint32(20)) * Float32(VALUE["ue4m3"])
            words = [
                block_ptx.encode_e2m1x8_over(v[:8], value, factor),
                block_ptx.encode_e2m1x8_over(v[8:], value, factor),
            ]
        else:
            scale = block_ptx.encode_ue8m0(amax)
            words = [block_ptx.encode_e4m3x4(v[i : i + 4], scale) for i in range(0, 32, 4)]
        dead = scale == NAN_CODE[self.scale]
        if cutlass.const_expr(self.scale != "ue8m0"):
            dead = dead or scale == 0
        return [Uint32(0) if dead else word for word in words], scale
