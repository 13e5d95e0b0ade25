"""FC2: activations x expert weights, times alpha and the router weight. Device code.

The mainloop is FC1's with the sorted rows themselves as rows. A lane is a feature, a register a
token, so a warp's stores are 128 contiguous bytes. Deterministic: each (token, expert choice) has a
slot of its own and an ordered sum follows; atomic: added to the token's row at once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from rubin_moe.kernels.cute import ptx
from rubin_moe.kernels.sm107 import plan as plans
from rubin_moe.kernels.sm107.mainloop import WORK_BYTES, Mainloop
from rubin_moe.kernels.sm107.plan import GemmPlan

SUBTILE = 32
FIRST_GATHER_THREAD = 32 * plans.FIRST_GATHER_WARP


class GemmFinalize:
    """One FC2 kernel, for layers of any size.

    Args:
        plan: tile, scale format.
        atomic: add to the token's row instead of writing the choice's slot.
    """

    def __init__(self, plan: GemmPlan, atomic: bool):
        self.plan = plan
        self.loop = Mainloop(plan)
        self.atomic = atomic

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
        out: Int64,
        out_row: Int64,
        router_weight: Int64,
        k_tiles: Int32,
        row_tiles: Int32,
        features: Int32,
        ctas: Int32,
        stream,
    ):
        """Launch. As FC1; int32 ``row_index`` counts up; float32 alpha ``[E]``; float32 out rows of
        ``features``, int32 the row of ``out`` and float32 the router weight of each sorted row."""
        self.kernel(
            work, num_work, row_index, codes, scales, weights, alpha, out, out_row, router_weight,
            k_tiles, row_tiles, features,
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
        out: Int64,
        out_row: Int64,
        router_weight: Int64,
        k_tiles: Int32,
        row_tiles: Int32,
        features: Int32,
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
                smem, warp, lane, tmem, work, num_work, alpha, out, out_row, router_weight,
                row_tiles, features,
            )  # fmt: skip
        cute.arch.sync_warp()  # roles of one thread leave the rest of their warp here
        ptx.tcgen05_fence_before()
        cute.arch.sync_threads()
        if warp == 0:
            ptx.tcgen05_fence_after()
            ptx.tmem_dealloc(tmem, self.plan.tmem.allocated)

    @cute.jit
    def epilogue(
        self, smem, warp, lane, tmem, work, num_work, alpha, out, out_row, router_weight,
        row_tiles, features,
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
            feature = (tile - item * row_tiles) * plans.TILE_M + warp * 32 + lane
            factor = ptx.load_f32(alpha + Int64(expert) * 4)
            ptx.mbarrier_wait(bars.acc_full + 8 * acc, acc_parity)
            ptx.tcgen05_fence_after()
            columns = tmem + acc * plan.tmem.start("acc1") + (warp << 21)
            column = Int32(0)
            while column < count:
                values = ptx.tmem_load("32x32b", SUBTILE, [columns + column], SUBTILE)
                mine = Int32(0)  # this lane's token: where it goes and what it weighs
                weight = Float32(0.0)
                if column + lane < count:
                    row = Int64(first + column + lane) * 4
                    mine = ptx.load_s32(out_row + row)
                    weight = ptx.load_f32(router_weight + row)
                left = count - column if feature < features else Int32(0)
                for i in cutlass.range_constexpr(SUBTILE):
                    target = Int64(ptx.broadcast(mine, i))
                    value = ptx.as_f32(values[i]) * factor * ptx.broadcast_f32(weight, i)
                    address = out + (target * Int64(features) + Int64(feature)) * 4
                    if i < left:
                        if cutlass.const_expr(self.atomic):
                            ptx.add_f32(address, value)
                        else:
                            ptx.store_f32(address, value)
                column += SUBTILE
            ptx.tcgen05_fence_before()
            cute.arch.sync_warp()
            if lane == 0:
                ptx.mbarrier_arrive(bars.acc_empty + 8 * acc)
            acc = acc ^ 1
            if acc == 0:
                acc_parity = acc_parity ^ 1
            tile += grid
