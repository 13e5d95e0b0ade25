"""FC1: gathered tokens x expert weights, SwiGLU, block quantization. Device code.

Swap-AB: the accumulator has features in lanes and tokens in columns. Rows of ``w13`` come in
stripes of 16, gate then up, so that each epilogue warp's 32 lanes hold gate and up of the same 16
features; it loads both with the 16-lane shape, and a thread's two registers meet without a shuffle.

A thread then holds 16 values of four features. To quantize blocks of 16 features it needs all of
one token: three rounds of store and load with different shapes through the very columns that the
warp is draining turn features x tokens into tokens x features; no shared memory is used. Each round
permutes the nine bits of (register, lane); `FEATURE` and `token_of` are what the three leave.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from rubin_moe.kernels.cute import ptx
from rubin_moe.kernels.sm107 import plan as plans
from rubin_moe.kernels.sm107.mainloop import WORK_BYTES, Mainloop
from rubin_moe.kernels.sm107.plan import GemmPlan

SUBTILE = 32
FIRST_GATHER_THREAD = 32 * plans.FIRST_GATHER_WARP
FEATURES = 16  # of a warp
FEATURE = (0, 2, 8, 10, 4, 6, 12, 14, 1, 3, 9, 11, 5, 7, 13, 15)
"""Feature that register r holds after the transpose."""
LOG2E = 1.4426950408889634
# A scale code's exponent and mantissa at the low end of a float32's: this factor is its value.
SCALE_FACTOR = {"ue4m3": 2.0**120, "ue5m3": 2.0**112}


def token_of(lane):
    """Token of the subtile that a lane holds after the transpose."""
    return ((lane & 3) << 3) | ((lane & 8) >> 1) | ((lane & 16) >> 3) | ((lane & 4) >> 2)


class GatherGemmSwiglu:
    """One FC1 kernel, for layers of any size.

    Args:
        plan: tile, scale format.
    """

    def __init__(self, plan: GemmPlan):
        self.plan = plan
        self.loop = Mainloop(plan)

    @cute.jit
    def __call__(
        self,
        work: Int64,
        num_work: Int64,
        row_index: Int64,
        codes: Int64,
        scales: Int64,
        weights: Int64,
        alpha: Int64,
        out_codes: Int64,
        out_scales: Int64,
        norm: Int64,
        k_tiles: Int32,
        row_tiles: Int32,
        out_tiles: Int32,
        ctas: Int32,
        stream,
    ):
        """Launch. Addresses of: int32 work ``[items, 4]``, int32 their number, int32 token of each
        sorted row, uint8 token codes and scales, weight tiles, float32 alpha ``[E, 2]`` (gate, up),
        uint8 output codes ``[rows, 128 out_tiles]`` and scales ``[rows, 16 out_tiles]``, float32
        global scale of the output ``[E]``. K tiles and row tiles of the weights, K tiles of FC2."""
        self.kernel(
            work, num_work, row_index, codes, scales, weights, alpha, out_codes, out_scales, norm,
            k_tiles, row_tiles, out_tiles,
        ).launch(
            grid=(ctas, 1, 1),
            block=(plans.THREADS, 1, 1),
            smem=self.plan.smem_bytes,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        work: Int64,
        num_work: Int64,
        row_index: Int64,
        codes: Int64,
        scales: Int64,
        weights: Int64,
        alpha: Int64,
        out_codes: Int64,
        out_scales: Int64,
        norm: Int64,
        k_tiles: Int32,
        row_tiles: Int32,
        out_tiles: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread & 31
        smem = ptx.smem_base()
        tmem = self.loop.setup(smem, warp, lane)
        if warp >= plans.FIRST_GATHER_WARP:
            self.loop.gather(
                smem, thread - FIRST_GATHER_THREAD, work, num_work, row_index, codes, scales,
                k_tiles, row_tiles,
            )  # fmt: skip
        elif warp == plans.WEIGHT_WARP:
            self.loop.load_weights(smem, lane, work, num_work, weights, k_tiles, row_tiles)
        elif warp == plans.MMA_WARP:
            self.loop.mma(smem, lane, tmem, work, num_work, k_tiles, row_tiles)
        else:
            self.epilogue(
                smem, warp, lane, tmem, work, num_work, alpha, out_codes, out_scales, norm,
                row_tiles, out_tiles,
            )  # fmt: skip
        cute.arch.sync_warp()  # roles of one thread leave the rest of their warp here
        ptx.tcgen05_fence_before()
        cute.arch.sync_threads()
        if warp == 0:
            ptx.tcgen05_fence_after()
            ptx.tmem_dealloc(tmem, self.plan.tmem.allocated)

    @cute.jit
    def epilogue(
        self, smem, warp, lane, tmem, work, num_work, alpha, out_codes, out_scales, norm,
        row_tiles, out_tiles,
    ):  # fmt: skip
        plan = self.plan
        bars = self.loop.barriers(smem)
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        total = ptx.load_s32(num_work) * row_tiles
        acc = Int32(0)
        acc_parity = Int32(0)
        tile = Int32(bid)
        while tile < total:
            item = ptx.div_u32(tile, row_tiles)
            base = work + Int64(item) * WORK_BYTES
            expert = ptx.load_s32(base)
            first = ptx.load_s32(base + 4)
            count = ptx.load_s32(base + 8)
            feature = (tile - item * row_tiles) * 64 + warp * FEATURES
            alpha_gate = ptx.load_f32(alpha + Int64(expert) * 8)
            alpha_up = ptx.load_f32(alpha + Int64(expert) * 8 + 4)
            dec = ptx.load_f32(norm + Int64(expert) * 4)
            ptx.mbarrier_wait(bars.acc_full + 8 * acc, acc_parity)
            ptx.tcgen05_fence_after()
            columns = tmem + acc * plan.tmem.start("acc1") + (warp << 21)
            column = Int32(0)
            while column < count:
                values = self.activate(columns + column, alpha_gate, alpha_up)
                values = self.transpose(columns + column, values)
                token = column + token_of(lane)
                low, high, scale = self.quantize(values, dec)
                if token < count:
                    row = Int64(first + token) * Int64(out_tiles)
                    ptx.store_v2_b32(
                        out_codes + row * (plans.TILE_K // 2) + Int64(feature >> 1), low, high
                    )
                    ptx.store_b8(
                        out_scales + row * (plans.TILE_K // 16) + Int64(feature >> 4), scale
                    )
                column += SUBTILE
            ptx.tcgen05_fence_before()
            cute.arch.sync_warp()
            if lane == 0:
                ptx.mbarrier_arrive(bars.acc_empty + 8 * acc)
            acc = acc ^ 1
            if acc == 0:
                acc_parity = acc_parity ^ 1
            tile += grid

    @cute.jit
    def activate(self, taddr, alpha_gate, alpha_up):
        """Gate and up of 32 tokens in real units, then ``up * gate * sigmoid(gate)``.

        Relative error at most (11 + 2.3 |gate|) 2^-24, so 2^-17 where |gate| <= 32: ex2.approx 4
        and rcp.approx 2 (PTX ISA), five roundings, the exponent's 1.23 |gate|, gate's own through
        silu |gate|.
        """
        both = ptx.tmem_load("16x64b", 16, [taddr, taddr + (16 << 16)], 16)
        out = []
        for i in cutlass.range_constexpr(16):
            gate = ptx.as_f32(both[i]) * alpha_gate
            up = ptx.as_f32(both[16 + i]) * alpha_up
            sigmoid = ptx.rcp_approx(Float32(1.0) + ptx.exp2_approx(gate * Float32(-LOG2E)))
            out.append(ptx.as_u32(up * (gate * sigmoid)))
        return out

    @cute.jit
    def transpose(self, taddr, v):
        """Features x tokens -> tokens x features, through the warp's own 32 columns."""
        low = taddr
        high = taddr + (16 << 16)
        ptx.tmem_store("16x128b", 8, [low], v)
        v = ptx.tmem_load("16x64b", 16, [low], 16)
        ptx.tmem_store("32x32b", 16, [low], v)
        v = ptx.tmem_load("16x128b", 4, [low, high], 8)
        ptx.tmem_store("32x32b", 16, [low], v)
        return ptx.tmem_load("16x256b", 2, [low, high], 8)

    @cute.jit
    def quantize(self, v, dec):
        """Codes of 16 features, in order, and their block scale's code."""
        h = [None] * FEATURES
        for i in cutlass.range_constexpr(FEATURES):
            h[FEATURE[i]] = ptx.as_f32(v[i])
        amax = Float32(0.0)
        for i in cutlass.range_constexpr(FEATURES):
            amax = ptx.max_abs(amax, h[i])
        scale = ptx.encode_scale(
            ptx.div(ptx.div(amax, Float32(6.0)), dec), self.plan.scale == "ue5m3"
        )
        value = ptx.as_f32(scale << Uint32(20)) * Float32(SCALE_FACTOR[self.plan.scale]) * dec
        divisor = value if value > Float32(0.0) else Float32(float("inf"))
        q = [ptx.div(h[i], divisor) for i in range(FEATURES)]
        return ptx.encode_e2m1x8(q[:8]), ptx.encode_e2m1x8(q[8:]), scale
