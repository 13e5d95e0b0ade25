"""Activations to NVFP4, each token once, with K padded by zeros to whole tiles. Device code.

A thread quantizes blocks of 16 elements: 32 or 64 bytes in, 8 bytes of codes and a scale out. The
codes are those of `rubin_moe.formats.quantize`, bit for bit.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from rubin_moe.kernels.cute import blocks as block_ptx
from rubin_moe.kernels.cute import ptx

THREADS = 128
BLOCK = 16
VALUE = {"ue4m3": 2.0**120, "ue5m3": 2.0**112}
"""A scale code's exponent and mantissa at the low end of a float32's, times this, is its value."""
NAN_CODE = {"ue4m3": 0x7F, "ue5m3": 0xFF}


class QuantizeTokens:
    """One kernel.

    Args:
        scale: ``ue4m3`` or ``ue5m3``; dtype: of the activations, as torch names it.
    """

    def __init__(self, scale: str, dtype: str):
        self.scale = scale
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
        """Launch. Addresses of ``[M, 16 row_blocks]`` activations, float32 ``[1]`` their global
        scale (not read for UE5M3), float32 ``[M]`` factor of each row or 0 for none, uint8
        ``[M, 8 padded_blocks]`` codes and ``[M, padded_blocks]`` scales; ``total`` is
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
            low = Uint32(0)
            high = Uint32(0)
            scale = Uint32(0)
            if column < row_blocks:
                first = Int64(row) * Int64(row_blocks) + Int64(column)
                v = self.load(x + first * (BLOCK * self.element_bytes))
                if factor != 0:
                    weight = ptx.load_f32(factor + Int64(row) * 4)
                    v = [e * weight for e in v]
                low, high, scale = self.quantize(v, dec)
            ptx.store_v2_b32(codes + Int64(i) * (BLOCK // 2), low, high)
            ptx.store_b8(scales + Int64(i), scale)
            i += Int32(grid) * THREADS

    @cute.jit
    def load(self, address):
        v = []
        for i in cutlass.range_constexpr(self.element_bytes):
            for word in block_ptx.load_v4(address + 16 * i):
                v += block_ptx.widen(word, self.dtype)
        return v

    @cute.jit
    def quantize(self, v, dec):
        """Codes of a block's halves, and its scale's; a scale of zero or NaN has zero codes."""
        amax = Float32(0.0)
        for i in cutlass.range_constexpr(BLOCK):
            amax = block_ptx.max_abs_nan(amax, v[i])
        if cutlass.const_expr(self.scale == "ue5m3"):
            scale = ptx.encode_scale(ptx.div(amax, Float32(6.0)), True)
            value = ptx.as_f32(scale << Uint32(20)) * Float32(VALUE["ue5m3"])
            q = [ptx.div(v[i], value) for i in range(BLOCK)]
            low, high = ptx.encode_e2m1x8(q[:8]), ptx.encode_e2m1x8(q[8:])
        else:
            factor = ptx.load_f32(dec)
            scale = block_ptx.encode_ue4m3_over(amax, factor)
            value = ptx.as_f32(scale << Uint32(20)) * Float32(VALUE["ue4m3"])
            low = block_ptx.encode_e2m1x8_over(v[:8], value, factor)
            high = block_ptx.encode_e2m1x8_over(v[8:], value, factor)
        dead = scale == 0 or scale == NAN_CODE[self.scale]
        low = Uint32(0) if dead else low
        high = Uint32(0) if dead else high
        return low, high, scale
