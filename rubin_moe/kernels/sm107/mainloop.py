"""The mainloop that both GEMMs share: work list, gather, weights, MMA. Device code.

Roles (warps): 0-3 epilogue, 4 MMA, 5 weights, 6-9 gather. Rings and who signals whom:

    weights --full_w--> MMA --empty--> weights, gather      one ring, ``plan.stages`` deep
    gather  --full_t--> MMA
    MMA     --acc_full--> epilogue --acc_empty--> MMA       two accumulators

A tile is (work item, row tile): a work item is (expert, first row, rows) of the routing's sorted
rows, made on the device; its number is read from device memory, so a captured launch is right for
any routing and an empty expert has no item. Every role walks the same tiles in the same order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from rubin_moe.kernels.cute import ptx
from rubin_moe.kernels.sm107 import plan as plans
from rubin_moe.kernels.sm107.plan import GemmPlan

BARRIER_BYTES = 8
WORK_BYTES = 16
SW128_DESC = (1 << 46) | (2 << 61) | ((1024 // 16) << 32) | (1 << 16)
SCALE_DESC = (1 << 46) | ((128 // 16) << 32) | (1 << 16)


class Barriers:
    """Addresses of the block's mbarriers, in shared memory from ``base`` on."""

    def __init__(self, base, stages: int):
        self.full_w = base
        self.full_t = base + BARRIER_BYTES * stages
        self.empty = base + 2 * BARRIER_BYTES * stages
        self.acc_full = base + 3 * BARRIER_BYTES * stages
        self.acc_empty = self.acc_full + 2 * BARRIER_BYTES
        self.tmem_slot = self.acc_empty + 2 * BARRIER_BYTES


class Mainloop:
    """Device methods over one plan. ``k_tiles`` and ``row_tiles`` of the weights are the launch's:
    one kernel serves layers of any size."""

    def __init__(self, plan: GemmPlan):
        self.plan = plan
        self.lag = min(plans.LAG, plan.stages - 1)

    def barriers(self, smem):
        return Barriers(smem, self.plan.stages)

    @cute.jit
    def setup(self, smem, warp, lane):
        """Barriers and tensor memory; returns the address of tensor memory. Whole block."""
        plan = self.plan
        bars = self.barriers(smem)
        if warp == plans.MMA_WARP:
            if lane == 0:
                for s in cutlass.range_constexpr(plan.stages):
                    ptx.mbarrier_init(bars.full_w + 8 * s, plan.weight_edge.full_arrivals)
                    ptx.mbarrier_init(bars.full_t + 8 * s, plan.token_edge.full_arrivals)
                    ptx.mbarrier_init(bars.empty + 8 * s, plan.weight_edge.empty_arrivals)
                for s in cutlass.range_constexpr(2):
                    ptx.mbarrier_init(bars.acc_full + 8 * s, plan.accumulator_edge.full_arrivals)
                    ptx.mbarrier_init(bars.acc_empty + 8 * s, plan.accumulator_edge.empty_arrivals)
                ptx.mbarrier_init_fence()
            cute.arch.sync_warp()
        if warp == 0:
            ptx.tmem_alloc(bars.tmem_slot, plan.tmem.allocated)
            ptx.tmem_relinquish()
        ptx.tcgen05_fence_before()
        cute.arch.sync_threads()
        ptx.tcgen05_fence_after()
        return ptx.load_shared_s32(bars.tmem_slot)

    @cute.jit
    def load_weights(self, smem, lane, work, num_work, weights, k_tiles, row_tiles):
        """One thread: a bulk copy a stage."""
        bars = self.barriers(smem)
        stage = Int32(0)
        parity = Int32(1)
        if lane == 0:
            bid, _, _ = cute.arch.block_idx()
            grid, _, _ = cute.arch.grid_dim()
            total = ptx.load_s32(num_work) * row_tiles
            tile = Int32(bid)
            while tile < total:
                item = ptx.div_u32(tile, row_tiles)
                expert = ptx.load_s32(work + Int64(item) * WORK_BYTES)
                first = Int64(expert) * row_tiles + (tile - item * row_tiles)
                source = weights + first * k_tiles * plans.WEIGHT_STAGE_BYTES
                k = Int32(0)
                while k < k_tiles:
                    ptx.mbarrier_wait(bars.empty + 8 * stage, parity)
                    ptx.mbarrier_arrive_expect_tx(bars.full_w + 8 * stage, plans.WEIGHT_STAGE_BYTES)
                    ptx.bulk_load(
                        smem + self.plan.offset("sA") + stage * plans.WEIGHT_STAGE_BYTES,
                        source,
                        plans.WEIGHT_STAGE_BYTES,
                        bars.full_w + 8 * stage,
                    )
                    source += plans.WEIGHT_STAGE_BYTES
                    stage += 1
                    if stage == self.plan.stages:
                        stage = Int32(0)
                        parity = parity ^ 1
                    k += 1
                tile += grid

    @cute.jit
    def gather(self, smem, thread, work, num_work, row_index, codes, scales, k_tiles, row_tiles):
        """128 threads: token codes by 16 bytes into the swizzle, scales by 4 into their chunks.

        Rows past the item's are zero-filled. A thread keeps ``lag`` groups in flight, then fences
        its own writes and arrives.
        """
        bars = self.barriers(smem)
        plan = self.plan
        code_rows = plan.tile_n // 16
        scale_rows = plan.tile_n // 32
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        total = ptx.load_s32(num_work) * row_tiles
        stage = Int32(0)
        parity = Int32(1)
        done = Int32(0)  # stage that the oldest group in flight fills
        flying = Int32(0)
        piece = thread & 7
        group = thread & 3
        tile = Int32(bid)
        while tile < total:
            item = work + Int64(ptx.div_u32(tile, row_tiles)) * WORK_BYTES
            first = ptx.load_s32(item + 4)
            count = ptx.load_s32(item + 8)
            code_source, code_bytes = self.rows(
                code_rows, thread >> 3, 16, first, count, row_index, codes, k_tiles * 128
            )
            scale_source, scale_bytes = self.rows(
                scale_rows, thread >> 2, 32, first, count, row_index, scales, k_tiles * 16
            )
            k = Int32(0)
            while k < k_tiles:
                ptx.mbarrier_wait(bars.empty + 8 * stage, parity)
                b = smem + plan.offset("sB") + stage * (plan.tile_n * 128)
                sfb = smem + plan.offset("sSFB") + stage * plans.SFB_STAGE_BYTES
                for i in cutlass.range_constexpr(code_rows):
                    row = (thread >> 3) + 16 * i
                    ptx.cp_async_16(
                        b + row * 128 + ((piece ^ (row & 7)) << 4),
                        code_source[i] + Int64(k * 128 + piece * 16),
                        code_bytes[i] << 4,
                    )
                for i in cutlass.range_constexpr(scale_rows):
                    ptx.cp_async_4(
                        sfb + group * 512 + (thread >> 2) * 16 + 4 * i,
                        scale_source[i] + Int64(k * 16 + group * 4),
                        scale_bytes[i] << 2,
                    )
                ptx.cp_async_commit()
                flying += 1
                if flying > self.lag:
                    ptx.cp_async_wait(self.lag)
                    ptx.fence_proxy_async()
                    ptx.mbarrier_arrive(bars.full_t + 8 * done)
                    flying -= 1
                    done += 1
                    if done == plan.stages:
                        done = Int32(0)
                stage += 1
                if stage == plan.stages:
                    stage = Int32(0)
                    parity = parity ^ 1
                k += 1
            tile += grid
        ptx.cp_async_wait(0)
        ptx.fence_proxy_async()
        while flying > 0:
            ptx.mbarrier_arrive(bars.full_t + 8 * done)
            flying -= 1
            done += 1
            if done == plan.stages:
                done = Int32(0)

    @cute.jit
    def rows(
        self,
        number: cutlass.Constexpr,
        start,
        step: cutlass.Constexpr,
        first,
        count,
        row_index,
        base,
        pitch,
    ):
        """Addresses of this thread's rows, and 1 or 0: whether the row is one of the item's."""
        address = []
        valid = []
        for i in cutlass.range_constexpr(number):
            row = start + step * i
            real = Int32(1) if row < count else Int32(0)
            index = Int32(0)
            if row < count:
                index = ptx.load_s32(row_index + Int64(first + row) * 4)
            address.append(base + Int64(index) * Int64(pitch))
            valid.append(real)
        return address, valid

    @cute.jit
    def mma(self, smem, lane, tmem, work, num_work, k_tiles, row_tiles):
        """One thread: scales to tensor memory, then two instructions a K tile."""
        plan = self.plan
        bars = self.barriers(smem)
        if lane == 0:
            bid, _, _ = cute.arch.block_idx()
            grid, _, _ = cute.arch.grid_dim()
            total = ptx.load_s32(num_work) * row_tiles
            stage = Int32(0)
            parity = Int32(0)
            acc = Int32(0)
            acc_parity = Int32(1)
            sfa = tmem + plan.tmem.start("sfa")
            sfb = tmem + plan.tmem.start("sfb")
            tile = Int32(bid)
            while tile < total:
                count = ptx.load_s32(work + Int64(ptx.div_u32(tile, row_tiles)) * WORK_BYTES + 8)
                # N in eighths: a 1-CTA instruction takes any multiple of 8
                idesc = Int32(plan.idesc) | (((count + 7) >> 3) << 17)
                ptx.mbarrier_wait(bars.acc_empty + 8 * acc, acc_parity)
                ptx.tcgen05_fence_after()
                d = tmem + acc * plan.tmem.start("acc1")
                k = Int32(0)
                while k < k_tiles:
                    ptx.mbarrier_wait(bars.full_w + 8 * stage, parity)
                    ptx.mbarrier_wait(bars.full_t + 8 * stage, parity)
                    ptx.tcgen05_fence_after()
                    a = smem + plan.offset("sA") + stage * plans.WEIGHT_STAGE_BYTES
                    b = smem + plan.offset("sB") + stage * (plan.tile_n * 128)
                    s = smem + plan.offset("sSFB") + stage * plans.SFB_STAGE_BYTES
                    for c in cutlass.range_constexpr(4):
                        chunk = a + 128 * 128 + 512 * c
                        ptx.copy_scales(sfa + 4 * c, Int64(SCALE_DESC) | Int64(chunk >> 4))
                        ptx.copy_scales(sfb + 4 * c, Int64(SCALE_DESC) | Int64((s + 512 * c) >> 4))
                    for j in cutlass.range_constexpr(2):
                        ptx.mma_nvfp4(
                            d,
                            Int64(SW128_DESC) | Int64((a + 64 * j) >> 4),
                            Int64(SW128_DESC) | Int64((b + 64 * j) >> 4),
                            idesc,
                            sfa + 8 * j,
                            sfb + 8 * j,
                            k + j,
                        )
                    ptx.tcgen05_commit(bars.empty + 8 * stage)
                    stage += 1
                    if stage == plan.stages:
                        stage = Int32(0)
                        parity = parity ^ 1
                    k += 1
                ptx.tcgen05_commit(bars.acc_full + 8 * acc)
                acc = acc ^ 1
                if acc == 0:
                    acc_parity = acc_parity ^ 1
                tile += grid
