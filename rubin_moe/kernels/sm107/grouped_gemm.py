"""One grouped GEMM: launch, roles, and the loop of the epilogue. Device code.

FC1 and FC2 are this kernel with an epilogue of their own: what it loads for a tile (`open_tile`)
and what it does with 32 tokens of the accumulator (`drain`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from rubin_moe.kernels.cute import ptx, tcgen05
from rubin_moe.kernels.sm107 import plan as plans
from rubin_moe.kernels.sm107.mainloop import Mainloop
from rubin_moe.kernels.sm107.plan import GemmPlan


class GroupedGemm:
    """One kernel, for layers of any size.

    Args:
        plan: formats, tile, rings.
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
        own: tuple[Int64, ...],
        k_tiles: Int32,
        row_tiles: Int32,
        size: Int32,
        ctas: Int32,
        stream,
    ):
        """Launch. Addresses of: int32 work ``[items, 4]``, int32 their number, int32 token of each
        sorted row (0: the sorted rows themselves are multiplied), uint8 token codes and scales,
        weight tiles; what the epilogue reads and writes. K tiles and row tiles of the weights, the
        epilogue's size."""
        self.kernel(
            work, num_work, row_index, codes, scales, weights, own, k_tiles, row_tiles, size
        ).launch(
            grid=(ctas, 1, 1),
            block=(plans.THREADS, 1, 1),
            cluster=(self.plan.cta_group, 1, 1),
            smem=self.plan.smem_bytes,
            min_blocks_per_mp=1,  # else ptxas spills to stay at 64 registers
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        work: Int64,
        num_work: Int64,
        row_index: Int64,
        codes: Int64,
        scales: Int64,
        weights: Int64,
        own: tuple[Int64, ...],
        k_tiles: Int32,
        row_tiles: Int32,
        size: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread & 31
        smem = ptx.smem_base()
        tmem = self.loop.setup(smem, warp, lane)
        if warp >= plans.FIRST_GATHER_WARP:
            self.loop.gather(
                smem, thread - 32 * plans.FIRST_GATHER_WARP, work, num_work, row_index, codes,
                scales, k_tiles, row_tiles,
            )  # fmt: skip
        elif warp == plans.WEIGHT_WARP:
            self.loop.load_weights(smem, lane, work, num_work, weights, k_tiles, row_tiles)
        elif warp == plans.MMA_WARP:
            self.loop.mma(smem, lane, tmem, work, num_work, k_tiles, row_tiles)
        else:
            self.epilogue(smem, warp, lane, tmem, work, num_work, own, row_tiles, size)
        cute.arch.sync_warp()  # roles of one thread leave the rest of their warp here
        tcgen05.fence_before()
        self.loop.sync()
        if warp == 0:
            tcgen05.fence_after()
            tcgen05.dealloc(tmem, self.plan.tmem.allocated, self.plan.cta_group)

    @cute.jit
    def epilogue(self, smem, warp, lane, tmem, work, num_work, own, row_tiles, size):
        """Four warps: 32 lanes of every accumulator each, 32 columns at a time."""
        plan = self.plan
        bars = self.loop.barriers(smem)
        tile, step, end, each = self.loop.walk(num_work, row_tiles)
        acc = Int32(0)
        acc_parity = Int32(0)
        turn = Int32(0)
        while tile < end:
            item, row_tile = self.loop.place(tile, each, work)
            expert = ptx.load_s32(item)
            first = ptx.load_s32(item + 4)
            count = ptx.load_s32(item + 8)
            opened = self.open_tile(own, expert, row_tile, row_tiles, warp, lane)
            ptx.mbarrier_wait(bars.acc_full + 8 * acc, acc_parity)
            tcgen05.fence_after()
            columns = tmem + acc * plan.tmem.start("acc1") + (warp << 21)
            column = Int32(0)
            left = count if row_tile < row_tiles else Int32(0)
            while column < left:
                self.drain(
                    own, opened, smem, columns + column, first + column, left - column, size,
                    warp, lane, turn,
                )  # fmt: skip
                turn = turn ^ 1
                column += plans.SUBTILE
            tcgen05.fence_before()
            cute.arch.sync_warp()
            if lane == 0:
                if cutlass.const_expr(plan.cta_group == 1):
                    ptx.mbarrier_arrive(bars.acc_empty + 8 * acc)
                else:
                    ptx.mbarrier_arrive_at(bars.acc_empty + 8 * acc, 0)
            acc = acc ^ 1
            if acc == 0:
                acc_parity = acc_parity ^ 1
            tile += step

    def open_tile(self, own, expert, row_tile, row_tiles, warp, lane):
        """What `drain` needs of a tile, loaded while the accumulator fills."""
        raise NotImplementedError

    def drain(self, own, opened, smem, taddr, row, left, size, warp, lane, turn):
        """One warp: 32 lanes of 32 tokens, sorted rows from ``row`` on, of which ``left`` exist.

        ``turn`` alternates from call to call. Every warp of the block makes the same calls.
        """
        raise NotImplementedError
