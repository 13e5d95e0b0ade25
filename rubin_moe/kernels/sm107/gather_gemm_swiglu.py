"""FC1: gathered tokens x expert weights, bias, SwiGLU, block quantization. Device code.

Swap-AB: the accumulator has features in lanes and tokens in columns. Rows of ``w13`` come in
stripes of 16, gate then up, so that each epilogue warp's 32 lanes hold gate and up of the same 16
features; it loads both with the 16-lane shape, and a thread's two registers meet without a shuffle.

A thread then holds 16 tokens of one feature. To quantize blocks of features it needs all of one
token: three rounds of store and load with different shapes through the very columns that the
warp is draining turn features x tokens into tokens x features; no shared memory is used. Each round
permutes the nine bits of (register, lane); `FEATURE` and `token_of` are what the three leave.

A block of NVFP4 is one thread's 16 features. A block of MXFP8 is two warps': lanes of the same
token exchange their largest magnitude through 1,024 bytes that lie unused behind the barriers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from rubin_moe.kernels.cute import blocks as block_ptx
from rubin_moe.kernels.cute import ptx, tcgen05
from rubin_moe.kernels.sm107 import plan as plans
from rubin_moe.kernels.sm107.grouped_gemm import GroupedGemm

FEATURES = 16  # of a warp
FEATURE = (0, 2, 8, 10, 4, 6, 12, 14, 1, 3, 9, 11, 5, 7, 13, 15)
"""Feature that register r holds after the transpose."""
LOG2E = 1.4426950408889634
# A scale code's exponent and mantissa at the low end of a float32's: this factor is its value.
SCALE_FACTOR = {"ue4m3": 2.0**120, "ue5m3": 2.0**112}


def feature_of(lane):
    """Feature of the warp's 16 that a lane holds before the transpose."""
    return ((lane & 1) << 3) | (lane >> 2)


def token_of(lane):
    """Token of the subtile that a lane holds after the transpose."""
    return ((lane & 3) << 3) | ((lane & 8) >> 1) | ((lane & 16) >> 3) | ((lane & 4) >> 2)


class GatherGemmSwiglu(GroupedGemm):
    """One FC1 kernel, for layers of any size.

    The epilogue's own addresses: float32 alpha ``[E, 2]`` (gate, up), float32 bias ``[E, 128
    row_tiles]`` in the order of the weights' rows, float32 ``[3]`` limit, alpha and beta of the
    activation; uint8 output codes ``[rows, 128 size]`` and scales, as many a row as ``size`` K
    tiles of FC2 have; float32 global scale of the output ``[E]`` (NVFP4 only).

    The activation is ``(up + beta) * gate * sigmoid(alpha * gate)`` with the gate clamped from
    above and up to both sides: `swigluoai`, and `silu` with alpha 1, beta 0 (limit infinity: none).
    """

    @cute.jit
    def open_tile(self, own, expert, row_tile, row_tiles, warp, lane):
        alpha, bias, activation, _, _, norm = own
        row = row_tile * plans.TILE_M + warp * 32 + feature_of(lane)
        at = bias + (Int64(expert) * row_tiles * plans.TILE_M + Int64(row)) * 4
        gate_bias = Float32(0.0)
        up_bias = Float32(0.0)
        if row_tile < row_tiles:
            gate_bias = ptx.load_f32(at)
            up_bias = ptx.load_f32(at + 4 * FEATURES)
        dec = Float32(1.0)
        if cutlass.const_expr(self.plan.operands.scale != "ue8m0"):
            dec = ptx.load_f32(norm + Int64(expert) * 4)
        return (
            (row_tile * plans.TILE_M >> 1) + warp * FEATURES,
            (ptx.load_f32(alpha + Int64(expert) * 8), gate_bias),
            (ptx.load_f32(alpha + Int64(expert) * 8 + 4), up_bias),
            (
                ptx.load_f32(activation),
                ptx.load_f32(activation + 4) * Float32(-LOG2E),
                ptx.load_f32(activation + 8),
            ),
            dec,
        )

    @cute.jit
    def drain(self, own, opened, smem, taddr, row, left, size, warp, lane, turn):
        _, _, _, out_codes, out_scales, _ = own
        feature, gate, up, activation, dec = opened
        values = self.transpose(taddr, self.activate(taddr, gate, up, activation))
        token = token_of(lane)
        scales_k = self.plan.operands.scales_k
        h = [None] * FEATURES
        for i in cutlass.range_constexpr(FEATURES):
            h[FEATURE[i]] = ptx.as_f32(values[i])
        if cutlass.const_expr(self.plan.operands.scale == "ue8m0"):
            words, scale = self.quantize_mxfp8(h, smem, warp, lane, turn)
            if token < left:
                out = Int64(row + token) * Int64(size)
                block_ptx.store_v4(out_codes + out * 128 + Int64(feature), words)
                if warp & 1 == 0:
                    ptx.store_b8(out_scales + out * scales_k + Int64(feature >> 5), scale)
        else:
            low, high, scale = self.quantize_nvfp4(h, dec)
            if token < left:
                out = Int64(row + token) * Int64(size)
                ptx.store_v2_b32(out_codes + out * 128 + Int64(feature >> 1), low, high)
                ptx.store_b8(out_scales + out * scales_k + Int64(feature >> 4), scale)

    @cute.jit
    def activate(self, taddr, gate, up, activation):
        """The activation of one feature and 16 tokens, in real units.

        Relative error at most (11 + (1.23 + 2) |alpha gate| + |gate|) 2^-24, so where |gate| <= 27
        2^-17 for silu and 2^-16 for swigluoai's alpha of 1.702: ex2.approx 4 and rcp.approx 2 (PTX
        ISA), five roundings, the exponent's, and gate's own; beside it 2^-24 |up| of up's rounding
        where beta nearly cancels it.
        """
        gate_alpha, gate_bias = gate
        up_alpha, up_bias = up
        limit, slope, beta = activation
        both = tcgen05.load("16x64b", 16, [taddr, taddr + (16 << 16)], 16)
        out = []
        for i in cutlass.range_constexpr(16):
            g = ptx.minimum(ptx.fma(ptx.as_f32(both[i]), gate_alpha, gate_bias), limit)
            u = ptx.minimum(ptx.fma(ptx.as_f32(both[16 + i]), up_alpha, up_bias), limit)
            u = ptx.maximum(u, -limit) + beta
            sigmoid = ptx.rcp_approx(Float32(1.0) + ptx.exp2_approx(g * slope))
            out.append(ptx.as_u32(u * (g * sigmoid)))
        return out

    @cute.jit
    def transpose(self, taddr, v):
        """Features x tokens -> tokens x features, through the warp's own 32 columns."""
        low = taddr
        high = taddr + (16 << 16)
        tcgen05.store("16x128b", 8, [low], v)
        v = tcgen05.load("16x64b", 16, [low], 16)
        tcgen05.store("32x32b", 16, [low], v)
        v = tcgen05.load("16x128b", 4, [low, high], 8)
        tcgen05.store("32x32b", 16, [low], v)
        return tcgen05.load("16x256b", 2, [low, high], 8)

    @cute.jit
    def quantize_nvfp4(self, h, dec):
        """Codes of 16 features, in order, and their block scale's code: a NaN among them is the
        scale's."""
        amax = Float32(0.0)
        for i in cutlass.range_constexpr(FEATURES):
            amax = block_ptx.max_abs_nan(amax, h[i])
        form = self.plan.operands.scale
        scale = ptx.encode_scale(ptx.div(ptx.div(amax, Float32(6.0)), dec), form == "ue5m3")
        value = ptx.as_f32(scale << Uint32(20)) * Float32(SCALE_FACTOR[form]) * dec
        divisor = value if value > Float32(0.0) else Float32(float("inf"))
        q = [ptx.div(h[i], divisor) for i in range(FEATURES)]
        return ptx.encode_e2m1x8(q[:8]), ptx.encode_e2m1x8(q[8:]), scale

    @cute.jit
    def quantize_mxfp8(self, h, smem, warp, lane, turn):
        """Codes of 16 features, in order, and the code of the scale that they share with the other
        warp's 16. Turns alternate between two halves of the exchange, so one barrier is enough:
        when a half is written again, both warps have passed the other turn's barrier."""
        amax = Float32(0.0)
        for i in cutlass.range_constexpr(FEATURES):
            amax = block_ptx.max_abs_nan(amax, h[i])
        slots = smem + plans.EXCHANGE_OFFSET + (turn << 9) + (lane << 2)
        ptx.store_shared_b32(slots + (warp << 7), ptx.as_u32(amax))
        ptx.barrier_sync_at(1 + (warp >> 1), 64)
        amax = block_ptx.max_abs_nan(amax, ptx.load_shared_f32(slots + ((warp ^ 1) << 7)))
        scale = block_ptx.encode_ue8m0(amax)
        words = [block_ptx.encode_e4m3x4(h[i : i + 4], scale) for i in range(0, FEATURES, 4)]
        return words, scale
