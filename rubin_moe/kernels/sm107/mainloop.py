"""The mainloop that both GEMMs share: work list, tokens, weights, MMA. Device code.

Roles (warps): 0-3 epilogue, 4 MMA, 5 weights, 6-9 gather. Two rings and who signals whom:

    weights --full_w--> MMA --empty_w--> weights      ``plan.weight_stages`` deep
    gather  --full_t--> MMA --empty_t--> gather       ``plan.token_stages`` deep
    MMA   --acc_full--> epilogue --acc_empty--> MMA   two accumulators

A tile is (work item, row tile): a work item is (expert, first row, rows) of the routing's sorted
rows, made on the device; its number is read from device memory, so a captured launch is right for
any routing and an empty expert has no item. Every role walks the same tiles in the same order.

A pair of CTAs (``cta_group`` 2) shares a tile of tokens over two row tiles of weights. Each CTA
loads its own weights, half of the instruction's N tokens and the scales of all N. The first CTA
issues for both: the MMA warp of the second one tells it when a stage is full there (``peer``), and
its commits reach the barriers of both.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from rubin_moe.kernels.cute import ptx, tcgen05
from rubin_moe.kernels.sm107 import plan as plans
from rubin_moe.kernels.sm107.plan import GemmPlan

BARRIER_BYTES = 8
WORK_BYTES = 16
FORMS = {"mxf4nvf4": "mxf4nvf4.block16", "mxf8f6f4": "mxf8f6f4.block32"}
VERSION = 1 << 46
SCALE_DESC = VERSION | ((128 // 16) << 32) | (1 << 16)


def code_desc(row_bytes: int) -> int:
    """Shared-memory descriptor of swizzled rows at address 0: 8 rows from atom to atom."""
    swizzle = {128: 2, 64: 4}[row_bytes]
    return VERSION | (swizzle << 61) | ((8 * row_bytes // 16) << 32) | (1 << 16)


def signed(word: int) -> int:
    """A 32-bit word as the signed number with its bits."""
    return word - (1 << 32) if word >> 31 else word


class Barriers:
    """Addresses of the block's mbarriers, in shared memory from ``base`` on."""

    def __init__(self, base, plan: GemmPlan):
        weights, tokens = BARRIER_BYTES * plan.weight_stages, BARRIER_BYTES * plan.token_stages
        self.full_w = base
        self.empty_w = self.full_w + weights
        self.full_t = self.empty_w + weights
        self.empty_t = self.full_t + tokens
        self.peer = self.empty_t + tokens
        self.acc_full = self.peer + tokens
        self.acc_empty = self.acc_full + 2 * BARRIER_BYTES
        self.tmem_slot = self.acc_empty + 2 * BARRIER_BYTES


@cute.jit
def after(stage, parity, stages: cutlass.Constexpr):
    """The next stage of a ring, and the parity that its barriers are waited for with."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        parity = parity ^ 1
    return stage, parity


class Mainloop:
    """Device methods over one plan. ``k_tiles`` and ``row_tiles`` of the weights are the launch's:
    one kernel serves layers of any size."""

    def __init__(self, plan: GemmPlan):
        self.plan = plan
        self.lag = min(plans.LAG, plan.token_stages - 1)

    def barriers(self, smem):
        return Barriers(smem, self.plan)

    @cute.jit
    def setup(self, smem, warp, lane):
        """Barriers and tensor memory; returns the address of tensor memory. Whole block."""
        plan = self.plan
        bars = self.barriers(smem)
        if warp == plans.MMA_WARP:
            if lane == 0:
                for s in cutlass.range_constexpr(plan.weight_stages):
                    ptx.mbarrier_init(bars.full_w + 8 * s, plan.weight_edge.full_arrivals)
                    ptx.mbarrier_init(bars.empty_w + 8 * s, plan.weight_edge.empty_arrivals)
                for s in cutlass.range_constexpr(plan.token_stages):
                    ptx.mbarrier_init(bars.full_t + 8 * s, plan.token_edge.full_arrivals)
                    ptx.mbarrier_init(bars.empty_t + 8 * s, plan.token_edge.empty_arrivals)
                    ptx.mbarrier_init(bars.peer + 8 * s, 1)
                for s in cutlass.range_constexpr(2):
                    ptx.mbarrier_init(bars.acc_full + 8 * s, plan.accumulator_edge.full_arrivals)
                    ptx.mbarrier_init(bars.acc_empty + 8 * s, plan.accumulator_edge.empty_arrivals)
                ptx.mbarrier_init_fence()
            cute.arch.sync_warp()
        if warp == 0:
            tcgen05.alloc(bars.tmem_slot, plan.tmem.allocated, plan.cta_group)
            tcgen05.relinquish(plan.cta_group)
        tcgen05.fence_before()
        self.sync()
        tcgen05.fence_after()
        return ptx.load_shared_s32(bars.tmem_slot)

    @cute.jit
    def sync(self):
        """All threads of the block, or of the pair: neither may miss the other's barriers."""
        if cutlass.const_expr(self.plan.cta_group == 1):
            cute.arch.sync_threads()
        else:
            ptx.cluster_sync()

    @cute.jit
    def walk(self, num_work, row_tiles):
        """First tile, step and end of this block's tiles, and row tiles a work item has here."""
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        first, step, each = Int32(bid), Int32(grid), row_tiles
        if cutlass.const_expr(self.plan.cta_group == 2):
            first, step, each = first >> 1, step >> 1, (row_tiles + 1) >> 1
        return first, step, ptx.load_s32(num_work) * each, each

    @cute.jit
    def place(self, tile, each, work):
        """Address of a tile's work item, and its row tile in this CTA, which is past the last one
        in the second CTA of a pair where the number of row tiles is odd."""
        item = ptx.div_u32(tile, each)
        row_tile = tile - item * each
        if cutlass.const_expr(self.plan.cta_group == 2):
            row_tile = 2 * row_tile + ptx.cluster_rank()
        return work + Int64(item) * WORK_BYTES, row_tile

    @cute.jit
    def width(self, count):
        """N of the instruction: a 1-CTA one takes any multiple of 8, a pair 8 for each."""
        if cutlass.const_expr(self.plan.cta_group == 1):
            return (count + 7) & -8
        else:
            return (count + 15) & -16

    @cute.jit
    def load_weights(self, smem, lane, work, num_work, weights, k_tiles, row_tiles):
        """One thread: a bulk copy a stage."""
        bars = self.barriers(smem)
        nbytes = self.plan.operands.weight_bytes
        stage = Int32(0)
        parity = Int32(1)
        if lane == 0:
            tile, step, end, each = self.walk(num_work, row_tiles)
            while tile < end:
                item, row_tile = self.place(tile, each, work)
                row_tile = row_tile if row_tile < row_tiles else row_tiles - 1
                first = Int64(ptx.load_s32(item)) * row_tiles + row_tile
                source = weights + first * k_tiles * nbytes
                k = Int32(0)
                while k < k_tiles:
                    ptx.mbarrier_wait(bars.empty_w + 8 * stage, parity)
                    ptx.mbarrier_arrive_expect_tx(bars.full_w + 8 * stage, nbytes)
                    ptx.bulk_load(
                        smem + self.plan.offset("sA") + stage * self.plan.stride("sA"),
                        source,
                        nbytes,
                        bars.full_w + 8 * stage,
                    )
                    source += nbytes
                    stage, parity = after(stage, parity, self.plan.weight_stages)
                    k += 1
                tile += step

    @cute.jit
    def gather(self, smem, thread, work, num_work, row_index, codes, scales, k_tiles, row_tiles):
        """128 threads: token codes by 16 bytes into the swizzle, scales by 4 into their chunks.

        Rows past the item's are zero-filled. A thread keeps ``lag`` groups in flight, then fences
        its own writes and arrives.
        """
        bars = self.barriers(smem)
        plan = self.plan
        scales_k = plan.operands.scales_k
        groups = plan.operands.groups
        code_rows = plan.token_rows // 16
        scale_rows = max(1, plan.tile_n * groups // 128)
        tile, step, end, each = self.walk(num_work, row_tiles)
        stage = Int32(0)
        parity = Int32(1)
        done = Int32(0)  # stage that the oldest group in flight fills
        flying = Int32(0)
        piece = thread & 7
        group = thread & (groups - 1)
        while tile < end:
            item, _ = self.place(tile, each, work)
            first = ptx.load_s32(item + 4)
            count = ptx.load_s32(item + 8)
            skipped = Int32(0)
            if cutlass.const_expr(plan.cta_group == 2):
                skipped = ptx.cluster_rank() * (self.width(count) >> 1)
            code_source, code_bytes = self.rows(
                code_rows, thread >> 3, 16, first + skipped, count - skipped, row_index, codes,
                k_tiles * plans.TOKEN_ROW_BYTES,
            )  # fmt: skip
            scale_source, scale_bytes = self.rows(
                scale_rows, thread // groups, 128 // groups, first, count, row_index, scales,
                k_tiles * scales_k,
            )  # fmt: skip
            k = Int32(0)
            while k < k_tiles:
                ptx.mbarrier_wait(bars.empty_t + 8 * stage, parity)
                b = smem + plan.offset("sB") + stage * plan.stride("sB")
                sfb = smem + plan.offset("sSFB") + stage * plan.stride("sSFB")
                for i in cutlass.range_constexpr(code_rows):
                    row = (thread >> 3) + 16 * i
                    ptx.cp_async_16(
                        b + row * plans.TOKEN_ROW_BYTES + ((piece ^ (row & 7)) << 4),
                        code_source[i] + Int64(k * plans.TOKEN_ROW_BYTES + piece * 16),
                        code_bytes[i] << 4,
                    )
                for i in cutlass.range_constexpr(scale_rows):
                    ptx.cp_async_4(
                        sfb + self.scale_place(thread, group, i),
                        scale_source[i] + Int64(k * scales_k + group * 4),
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
                    if done == plan.token_stages:
                        done = Int32(0)
                stage, parity = after(stage, parity, plan.token_stages)
                k += 1
            tile += step
        ptx.cp_async_wait(0)
        ptx.fence_proxy_async()
        while flying > 0:
            ptx.mbarrier_arrive(bars.full_t + 8 * done)
            flying -= 1
            done += 1
            if done == plan.token_stages:
                done = Int32(0)

    def scale_place(self, thread, group, i: int):
        """Offset of a thread's i-th word of scales: chunks of 128 rows follow one another in each
        group of four scales; row r of a chunk is at ``16 (r % 32) + 4 (r / 32)``."""
        chunks = self.plan.token_chunks
        if self.plan.operands.groups == 4:  # rows 32 apart
            chunk, lane, quarter = group * chunks + i // 4, thread >> 2, i % 4
        else:  # rows 128 apart
            chunk, lane, quarter = group * chunks + i, thread & 31, thread >> 5
        return chunk * plans.CHUNK_BYTES + lane * 16 + quarter * 4

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
                index = first + row
                if row_index != 0:
                    index = ptx.load_s32(row_index + Int64(first + row) * 4)
            address.append(base + Int64(index) * Int64(pitch))
            valid.append(real)
        return address, valid

    @cute.jit
    def mma(self, smem, lane, tmem, work, num_work, k_tiles, row_tiles):
        """One thread. The second CTA of a pair issues nothing: it passes its full stages on."""
        if lane == 0:
            if cutlass.const_expr(self.plan.cta_group == 1):
                self.multiply(smem, tmem, work, num_work, k_tiles, row_tiles)
            else:
                if ptx.cluster_rank() == 0:
                    self.multiply(smem, tmem, work, num_work, k_tiles, row_tiles)
                else:
                    self.relay(smem, num_work, k_tiles, row_tiles)

    @cute.jit
    def relay(self, smem, num_work, k_tiles, row_tiles):
        bars = self.barriers(smem)
        tile, step, end, _ = self.walk(num_work, row_tiles)
        w = Int32(0)
        w_parity = Int32(0)
        t = Int32(0)
        t_parity = Int32(0)
        while tile < end:
            k = Int32(0)
            while k < k_tiles:
                ptx.mbarrier_wait(bars.full_w + 8 * w, w_parity)
                ptx.mbarrier_wait(bars.full_t + 8 * t, t_parity)
                ptx.mbarrier_arrive_at(bars.peer + 8 * t, 0)
                w, w_parity = after(w, w_parity, self.plan.weight_stages)
                t, t_parity = after(t, t_parity, self.plan.token_stages)
                k += 1
            tile += step

    @cute.jit
    def multiply(self, smem, tmem, work, num_work, k_tiles, row_tiles):
        """Scales to tensor memory, then two instructions a K tile."""
        plan = self.plan
        group = plan.cta_group
        bars = self.barriers(smem)
        tile, step, end, each = self.walk(num_work, row_tiles)
        w = Int32(0)
        w_parity = Int32(0)
        t = Int32(0)
        t_parity = Int32(0)
        s = Int32(0)
        acc = Int32(0)
        acc_parity = Int32(1)
        while tile < end:
            item, _ = self.place(tile, each, work)
            n = self.width(ptx.load_s32(item + 8))
            if cutlass.const_expr(group == 1):
                ptx.mbarrier_wait(bars.acc_empty + 8 * acc, acc_parity)
            else:
                ptx.mbarrier_wait_cluster(bars.acc_empty + 8 * acc, acc_parity)
            tcgen05.fence_after()
            d = tmem + acc * plan.tmem.start("acc1")
            k = Int32(0)
            while k < k_tiles:
                ptx.mbarrier_wait(bars.full_w + 8 * w, w_parity)
                ptx.mbarrier_wait(bars.full_t + 8 * t, t_parity)
                if cutlass.const_expr(group == 2):
                    ptx.mbarrier_wait_cluster(bars.peer + 8 * t, t_parity)
                tcgen05.fence_after()
                self.k_tile(smem, tmem, d, w, t, s, n, k)
                tcgen05.commit(bars.empty_w + 8 * w, group)
                tcgen05.commit(bars.empty_t + 8 * t, group)
                w, w_parity = after(w, w_parity, plan.weight_stages)
                t, t_parity = after(t, t_parity, plan.token_stages)
                s = (s + 1) & (plan.scale_stages - 1)
                k += 1
            tcgen05.commit(bars.acc_full + 8 * acc, group)
            acc = acc ^ 1
            if acc == 0:
                acc_parity = acc_parity ^ 1
            tile += step

    @cute.jit
    def k_tile(self, smem, tmem, d, w, t, s, n, k):
        """Weight stage ``w`` times token stage ``t``, their scales by way of scale stage ``s``."""
        plan = self.plan
        o = plan.operands
        chunks = plan.token_chunks
        a = smem + plan.offset("sA") + w * plan.stride("sA")
        b = smem + plan.offset("sB") + t * plan.stride("sB")
        a_scales = a + plans.TILE_M * o.weight_row_bytes
        b_scales = smem + plan.offset("sSFB") + t * plan.stride("sSFB")
        sfa = tmem + plan.tmem.start("sfa") + s * (4 * o.groups)
        sfb = tmem + plan.tmem.start("sfb") + s * (4 * o.groups * chunks)
        # columns from one four scales of K to the next: compact where all tokens fit 128 rows
        pitch = Int32(4)
        if cutlass.const_expr(chunks == 2):
            pitch = Int32(8) if n > 128 else Int32(4)
        for c in cutlass.range_constexpr(o.groups):
            self.copy(sfa + 4 * c, a_scales + plans.CHUNK_BYTES * c)
            self.copy(sfb + pitch * c, b_scales + plans.CHUNK_BYTES * chunks * c)
            if cutlass.const_expr(chunks == 2):
                second = b_scales + plans.CHUNK_BYTES * (2 * c + 1)
                self.copy_second_half(n, sfb + 8 * c + 4, second)
        a_desc, b_desc = code_desc(o.weight_row_bytes), code_desc(plans.TOKEN_ROW_BYTES)
        for j in cutlass.range_constexpr(2):
            scale_id = Int32(signed((plan.idesc[j] >> 4 & 3) << 30))
            column = j * o.groups // 2
            tcgen05.mma_scaled(
                FORMS[o.kind],
                d,
                Int64(a_desc) | Int64((a + o.weight_row_bytes // 2 * j) >> 4),
                Int64(b_desc) | Int64((b + plans.TOKEN_ROW_BYTES // 2 * j) >> 4),
                Int32(signed(plan.idesc[j])) | ((n >> 3) << 17),
                (sfa + 4 * column) | scale_id,
                (sfb + pitch * column) | scale_id,
                k + j,
                plan.cta_group,
            )

    @cute.jit
    def copy(self, taddr, chunk):
        tcgen05.copy_scales(taddr, Int64(SCALE_DESC) | Int64(chunk >> 4), self.plan.cta_group)

    @cute.jit
    def copy_second_half(self, n, taddr, chunk):
        """Scales of tokens 128 on, where the instruction has them."""
        if n > 128:
            self.copy(taddr, chunk)
