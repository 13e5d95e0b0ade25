"""A whole MoE layer for many tokens in one persistent launch, by wgmma. Device code.

As `decode`, but passes hold more tokens, and weights and tokens come in stages along K, which all
warpgroups of a block share. Weights are dequantized in registers as A (64 rows), tokens are B.

    all warps --x, permuted--> scratch of the passes --grid counter--> token loader
    weight loader, token loader --full--> consumers --empty--> both loaders   a stage of K
    consumers --counter of the pass, in device memory--> token loader         FC1 before FC2
    all blocks --grid counter--> all blocks                                   before the sum

In the scratch a pass's tokens lie as shared memory wants them: 64 of K are a tile of 128-byte rows,
128-byte swizzled. Within it K has the order in which a lane of `layouts.fp4_hopper` holds it:
element 16 t + 4 j + 2 e + i at 16 j + 8 e + 2 t + i. FC1 writes its rows for FC2 the same way.

The tensor cores give the same bits as with `decode`'s mma.sync, and the order of additions is the
same, so the number of tokens may choose the kernel.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.cute import ptx
from rubin_moe.kernels.sm90.activate import activate
from rubin_moe.kernels.sm90.dequant import pairs, scale_pairs
from rubin_moe.kernels.sm90.finish import FIRST_PASS, Finish
from rubin_moe.kernels.sm90.plan import CHAINS, WidePlan
from rubin_moe.kernels.sm90.route import Router, count_of, expert_of, first_of
from rubin_moe.kernels.sm90.wgmma import multiply_block

READY_BARRIER = 1  # the scratch of this block is written
SPAN = 4  # blocks of K that a warp permutes at once


class WideMoe:
    """One kernel: its plan, the activation, and whether there are biases."""

    def __init__(self, plan: WidePlan, activation: Activation, bias: bool):
        self.plan = plan
        self.activation = activation
        self.bias = bias
        self.router = Router(plan)
        self.finish = Finish(plan, bias)
        self.values = plan.tiles.pass_tokens // 2  # accumulators of a thread and chain

    @cute.jit
    def __call__(
        self,
        w13: Int64,
        w2: Int64,
        alpha13: Int64,
        alpha2: Int64,
        bias13: Int64,
        bias2: Int64,
        x: Int64,
        ids: Int64,
        weights: Int64,
        expert_map: Int64,
        x_tiles: Int64,
        h_tiles: Int64,
        partial: Int64,
        out: Int64,
        counters: Int64,
        num_tokens: Int32,
        blocks: Int32,
        stream,
    ):
        """Launch. Addresses as `decode.DecodeMoe`'s, but for the scratch: ``x_tiles`` and
        ``h_tiles``, 16-bit ``[passes, K / 64, pass_tokens, 64]``."""
        self.kernel(
            w13, w2, alpha13, alpha2, bias13, bias2, x, ids, weights, expert_map, x_tiles, h_tiles,
            partial, out, counters, num_tokens,
        ).launch(
            grid=(blocks, 1, 1),
            block=(self.plan.threads, 1, 1),
            smem=self.plan.smem_bytes,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        w13: Int64,
        w2: Int64,
        alpha13: Int64,
        alpha2: Int64,
        bias13: Int64,
        bias2: Int64,
        x: Int64,
        ids: Int64,
        weights: Int64,
        expert_map: Int64,
        x_tiles: Int64,
        h_tiles: Int64,
        partial: Int64,
        out: Int64,
        counters: Int64,
        num_tokens: Int32,
    ):
        plan = self.plan
        sizes = plan.sizes
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread & 31
        smem = ptx.smem_base()
        self.set_up(smem, thread)
        ptx.launch_dependents()
        ptx.wait_for_launches_before()
        num_pairs = num_tokens * sizes.top_k
        passes = self.router.route(smem, thread, warp, lane, ids, expert_map, num_pairs)
        self.find_homes(smem, thread, warp, lane, passes, num_pairs)
        all1 = passes * plan.units13
        all2 = passes * (plan.units2 * sizes.slabs)
        first1 = Int32(Int64(all1) * block // grid)
        last1 = Int32(Int64(all1) * (block + 1) // grid)
        first2 = Int32(Int64(all2) * block // grid)
        last2 = Int32(Int64(all2) * (block + 1) // grid)
        if warp == plan.consumers:
            self.load_weights(smem, w13, w2, first1, last1, first2, last2)
        elif warp == plan.consumers + 1:
            ptx.barrier_sync(READY_BARRIER, 32 * (plan.consumers + 1))
            if lane == 0:
                self.finish.arrive_and_wait(block, counters, grid)
                ptx.fence_proxy_async_all()
                self.load_tokens(smem, x_tiles, h_tiles, counters, first1, last1, first2, last2)
        else:
            self.permute(smem, warp, lane, block, grid, x, x_tiles, num_tokens)
            ptx.fence_proxy_async_all()  # bulk copies will read it
            ptx.barrier_sync(READY_BARRIER, 32 * (plan.consumers + 1))
            self.consume(
                smem, warp, lane, alpha13, alpha2, bias13, bias2, weights, h_tiles, partial,
                counters, first1, last1, first2, last2,
            )  # fmt: skip
        self.finish.wait_for_all(thread, block, counters, grid)
        self.finish.reset(thread, block, counters, grid, passes)
        self.finish.sum_choices(smem, thread, block, grid, partial, out, num_tokens)

    @cute.jit
    def set_up(self, smem, thread):
        plan = self.plan
        if thread < plan.tiles.stages:
            ptx.mbarrier_init(smem + plan.offsets["full"] + 8 * thread, 2)
            ptx.mbarrier_init(smem + plan.offsets["empty"] + 8 * thread, 32 * plan.consumers)
        ptx.mbarrier_init_fence()

    # ---- tokens in the order of the passes

    @cute.jit
    def find_homes(self, smem, thread, warp, lane, passes, num_pairs):
        """Of every pair its pass and place there, pass << 8 | place, or -1."""
        plan = self.plan
        at = plan.offsets
        i = Int32(thread)
        while i < num_pairs:
            ptx.store_shared_b32(smem + at["homes"] + 4 * i, Int32(-1))
            i += plan.threads
        cute.arch.sync_threads()
        index = Int32(warp)
        while index < passes:
            word = ptx.load_shared_s32(smem + at["passes"] + 4 * index)
            place = Int32(lane)
            while place < count_of(word):
                pair = ptx.load_shared_s32(smem + at["pairs"] + 4 * (first_of(word) + place))
                ptx.store_shared_b32(smem + at["homes"] + 4 * pair, (index << 8) | place)
                place += 32
            index += plan.num_warps
        cute.arch.sync_threads()

    @cute.jit
    def permute(self, smem, warp, lane, block, grid, x, x_tiles, num_tokens):
        """Each token to its passes: a lane gathers 16 bytes of the new order from four places."""
        plan = self.plan
        sizes = plan.sizes
        spans = -(-sizes.k_blocks13 // SPAN)
        chunk = lane & 7
        column = 2 * chunk
        item = block * plan.consumers + warp
        while item < num_tokens * spans:
            token = item // spans
            k_block = (item - token * spans) * SPAN + (lane >> 3)
            source = x + (Int64(token) * sizes.hidden + k_block * 64 + column) * 2
            v = []
            for t in cutlass.range_constexpr(4):
                bits = Int32(0)
                if k_block * 64 + 16 * t + column < sizes.hidden:
                    bits = ptx.load_s32(source + 32 * t)
                v.append(bits)
            for k in cutlass.range_constexpr(sizes.top_k):
                at = smem + plan.offsets["homes"] + 4 * (token * sizes.top_k + k)
                home = ptx.load_shared_s32(at)
                if home >= 0 and k_block < sizes.k_blocks13:
                    tile = Int64(home >> 8) * sizes.k_blocks13 + Int64(k_block)
                    place = home & 255
                    row = x_tiles + tile * plan.block_tokens + Int64(place) * 128
                    ptx.store_v4_b32(row + Int64((chunk ^ (place & 7)) << 4), v)
            item += grid * plan.consumers

    # ---- loaders

    @cute.jit
    def claim(self, smem, fill):
        """The stage of this fill, once the consumers have left it."""
        stages = self.plan.tiles.stages
        stage = fill % stages
        if fill >= stages:
            bar = smem + self.plan.offsets["empty"] + 8 * stage
            ptx.mbarrier_wait(bar, (fill // stages - 1) & 1)
        return stage

    @cute.jit
    def load_weights(self, smem, w13, w2, first1, last1, first2, last2):
        """Of each unit, stage by stage."""
        plan = self.plan
        sizes = plan.sizes
        fill = Int32(0)
        unit = Int32(first1)
        while unit < last1:
            index = unit // plan.units13
            row = (unit - index * plan.units13) * plan.consumers
            expert = self.expert(smem, index)
            source = w13 + self.block_of(expert, sizes.tiles13, row, sizes.k_blocks13)
            left = sizes.tiles13 - row
            fill = self.load_tiles(
                smem, source, left, fill, sizes.k_blocks13, sizes.k_blocks13, plan.blocks13
            )
            unit += 1
        unit = Int32(first2)
        while unit < last2:
            index = unit // plan.units2
            row = (unit - index * plan.units2) * plan.consumers
            number = index // sizes.slabs
            expert = self.expert(smem, number)
            source = w2 + self.block_of(expert, sizes.tiles2, row, sizes.k_blocks2)
            part = (index - number * sizes.slabs) * (sizes.slab_blocks * sizes.block_bytes)
            left = sizes.tiles2 - row
            source += Int64(part)
            fill = self.load_tiles(
                smem, source, left, fill, sizes.k_blocks2, sizes.slab_blocks, plan.blocks2
            )
            unit += 1

    def expert(self, smem, index):
        return expert_of(ptx.load_shared_s32(smem + self.plan.offsets["passes"] + 4 * index))

    def block_of(self, expert, tiles, tile, k_blocks):
        row = Int64(expert) * tiles + Int64(tile)
        return row * (k_blocks * self.plan.sizes.block_bytes)

    @cute.jit
    def load_tiles(
        self, smem, source, left, fill, row_blocks: cutlass.Constexpr, k_blocks: cutlass.Constexpr,
        blocks: cutlass.Constexpr,
    ):  # fmt: skip
        """The weights of a unit, ``left`` tiles of which are there, rows of ``row_blocks`` apart.

        One lane issues all copies: of several lanes each would be a turn of a loop.
        """
        plan = self.plan
        nbytes = blocks * plan.sizes.block_bytes
        pitch = row_blocks * plan.sizes.block_bytes
        tiles = left if left < plan.consumers else Int32(plan.consumers)
        chunk = Int32(0)
        while chunk < k_blocks // blocks:
            stage = self.claim(smem, fill)
            bar = smem + plan.offsets["full"] + 8 * stage
            to = smem + plan.offsets["weights"] + stage * plan.stage_weights
            with cute.arch.elect_one():
                ptx.mbarrier_arrive_expect_tx(bar, tiles * nbytes)
                for i in cutlass.range_constexpr(plan.consumers):
                    if i < tiles:
                        ptx.bulk_load(
                            to + i * plan.warp_weights, source + Int64(i * pitch), nbytes, bar
                        )
            source += Int64(nbytes)
            fill += 1
            chunk += 1
        return fill

    @cute.jit
    def load_tokens(self, smem, x_tiles, h_tiles, counters, first1, last1, first2, last2):
        """One thread; of FC2's passes once FC1 is through with them."""
        plan = self.plan
        sizes = plan.sizes
        fill = Int32(0)
        unit = Int32(first1)
        while unit < last1:
            index = unit // plan.units13
            source = x_tiles + Int64(index) * (sizes.k_blocks13 * plan.block_tokens)
            fill = self.load_rows(smem, source, fill, sizes.k_blocks13, plan.blocks13)
            unit += 1
        unit = Int32(first2)
        while unit < last2:
            index = unit // plan.units2
            number = index // sizes.slabs
            counter = counters + Int64(FIRST_PASS + number) * 4
            seen = ptx.load_acquire(counter)
            while seen < sizes.tiles13:
                seen = ptx.load_acquire(counter)
            ptx.fence_proxy_async_all()
            source = h_tiles + Int64(number) * (sizes.k_blocks2 * plan.block_tokens)
            part = (index - number * sizes.slabs) * (sizes.slab_blocks * plan.block_tokens)
            fill = self.load_rows(smem, source + Int64(part), fill, sizes.slab_blocks, plan.blocks2)
            unit += 1

    @cute.jit
    def load_rows(self, smem, source, fill, k_blocks: cutlass.Constexpr, blocks: cutlass.Constexpr):
        plan = self.plan
        nbytes = blocks * plan.block_tokens
        chunk = Int32(0)
        while chunk < k_blocks // blocks:
            stage = self.claim(smem, fill)
            bar = smem + plan.offsets["full"] + 8 * stage
            ptx.mbarrier_arrive_expect_tx(bar, nbytes)
            to = smem + plan.offsets["tokens"] + stage * plan.stage_tokens
            ptx.bulk_load(to, source, nbytes, bar)
            source += Int64(nbytes)
            fill += 1
            chunk += 1
        return fill

    # ---- weights times tokens

    @cute.jit
    def consume(
        self, smem, warp, lane, alpha13, alpha2, bias13, bias2, weights, h_tiles, partial,
        counters, first1, last1, first2, last2,
    ):  # fmt: skip
        """One warp of its warpgroup: its tile of each unit."""
        plan = self.plan
        sizes = plan.sizes
        read = (Int32(0), Int32(0))  # stage, parity
        unit = Int32(first1)
        while unit < last1:
            index = unit // plan.units13
            row = (unit - index * plan.units13) * plan.consumers + warp
            total, read = self.unit(smem, warp, lane, read, True)
            if row < sizes.tiles13:
                scales = self.finish.scales1(smem, lane, row, index, alpha13, bias13)
                self.finish1(lane, total, row, index, scales, h_tiles)
                ptx.fence_proxy_async_all()
                cute.arch.sync_warp()
                if lane == 0:
                    ptx.add_release(counters + Int64(FIRST_PASS + index) * 4, Int32(1))
            unit += 1
        unit = Int32(first2)
        while unit < last2:
            index = unit // plan.units2
            row = (unit - index * plan.units2) * plan.consumers + warp
            total, read = self.unit(smem, warp, lane, read, False)
            if row < sizes.tiles2:
                self.finish2(smem, lane, total, row, index, alpha2, bias2, weights, partial)
            unit += 1

    @cute.jit
    def unit(self, smem, warp, lane, read, fc1: cutlass.Constexpr):
        """64 rows of each warpgroup x the pass's tokens."""
        plan = self.plan
        stage, parity = read
        k_blocks = plan.sizes.k_blocks13 if fc1 else plan.sizes.slab_blocks
        parts = plan.parts13 if fc1 else plan.parts2
        blocks = plan.blocks13 if fc1 else plan.blocks2
        chunks = k_blocks // parts // blocks
        total = cute.make_rmem_tensor((self.values,), Float32)
        acc = cute.make_rmem_tensor((self.values * CHAINS,), Float32)
        total.fill(0.0)
        part = Int32(0)
        while part < parts:
            acc.fill(0.0)
            chunk = Int32(0)
            while chunk < chunks:
                ptx.mbarrier_wait(smem + plan.offsets["full"] + 8 * stage, parity)
                ring = smem + plan.offsets["weights"] + stage * plan.stage_weights
                ring += warp * plan.warp_weights
                tokens = smem + plan.offsets["tokens"] + stage * plan.stage_tokens
                for b in cutlass.range_constexpr(blocks):
                    rows = tokens + b * plan.block_tokens
                    block = ring + b * plan.sizes.block_bytes
                    self.multiply(block, rows, lane, acc)
                ptx.mbarrier_arrive(smem + plan.offsets["empty"] + 8 * stage)
                stage += 1
                if stage == plan.tiles.stages:
                    stage = Int32(0)
                    parity = parity ^ 1
                chunk += 1
            for i in cutlass.range_constexpr(self.values):
                value = acc[i]
                for c in cutlass.range_constexpr(CHAINS - 1):
                    value = value + acc[i + (c + 1) * self.values]
                total[i] = total[i] + value
            part += 1
        return total, (stage, parity)

    @cute.jit
    def multiply(self, block, tokens, lane, acc):
        """One block of weights."""
        sizes = self.plan.sizes
        words = ptx.load_shared_v4(block + lane * 16)
        if cutlass.const_expr(sizes.exponent_only):
            at = ((lane & 2) << 3) + ((lane >> 2) << 1)
        else:
            at = lane * 2
        low, high = scale_pairs(
            ptx.load_shared_u16(block + 512 + at), sizes.exponent_only, sizes.kind
        )
        a = []
        for j in cutlass.range_constexpr(4):
            a.append(pairs(words[j], low, high, sizes.kind))
        multiply_block(sizes.kind, self.plan.tiles.pass_tokens, CHAINS, acc, a, tokens)

    # ---- epilogues

    @cute.jit
    def finish1(self, lane, total, row, index, scales, h_tiles):
        """Real units, bias, activation, 16 bits, to the scratch."""
        sizes = self.plan.sizes
        word, low, high, bias_low, bias_high = scales
        for n in cutlass.range_constexpr(self.values // 4):
            upper = [total[4 * n + i] * low + bias_low for i in range(2)]
            lower = [total[4 * n + i + 2] * high + bias_high for i in range(2)]
            if cutlass.const_expr(sizes.gated):
                values = [
                    activate(self.activation, u, v) for u, v in zip(upper, lower, strict=True)
                ]
                self.store_h(lane, values, n, word, index, row * 8, h_tiles)
            else:
                first = [activate(self.activation, v, v) for v in upper]
                second = [activate(self.activation, v, v) for v in lower]
                self.store_h(lane, first, n, word, index, row * 16, h_tiles)
                self.store_h(lane, second, n, word, index, row * 16 + 8, h_tiles)

    @cute.jit
    def store_h(self, lane, values, n: cutlass.Constexpr, word, index, base, h_tiles):
        """Two tokens of one feature a lane; lanes of neighbouring features (lane ^ 4) exchange
        one, so that each stores one token's two features."""
        plan = self.plan
        odd = (lane >> 2) & 1
        other = ptx.shuffle_xor_f32(values[0] if odd == 1 else values[1], 4)
        first = other if odd == 1 else values[0]
        second = values[1] if odd == 1 else other
        place = 8 * n + 2 * (lane & 3) + odd
        if place < count_of(word):
            feature = base + ((lane >> 2) & 6)
            at = feature & 63
            chunk = (at >> 1) & 7
            tile = Int64(index) * plan.sizes.k_blocks2 + Int64(feature >> 6)
            to = h_tiles + tile * plan.block_tokens + Int64(place) * 128
            to += Int64(((chunk ^ (place & 7)) << 4) + ((at >> 4) << 2))
            ptx.store_b32(to, ptx.pack_x2(plan.sizes.kind, first, second))

    @cute.jit
    def finish2(self, smem, lane, total, row, index, alpha2, bias2, weights, partial):
        """Real units, bias (once), the router's weight; float32 to the pair's own row."""
        plan = self.plan
        sizes = plan.sizes
        number = index // sizes.slabs
        slab = index - number * sizes.slabs
        word = ptx.load_shared_s32(smem + plan.offsets["passes"] + 4 * number)
        expert = expert_of(word)
        feature = row * 16 + (lane >> 2)
        alpha = ptx.load_f32(alpha2 + Int64(expert) * 4)
        bias_low = Float32(0.0)
        bias_high = Float32(0.0)
        if cutlass.const_expr(self.bias):  # noqa: SIM102  decided when compiling
            if slab == 0:
                at = bias2 + (Int64(expert) * sizes.hidden + Int64(feature)) * 4
                bias_low = ptx.load_f32(at)
                bias_high = ptx.load_f32(at + 32)
        for i in cutlass.range_constexpr(self.values // 2):
            place = 8 * (i // 2) + 2 * (lane & 3) + i % 2
            if place < count_of(word):
                at = smem + plan.offsets["pairs"] + 4 * (first_of(word) + place)
                pair = ptx.load_shared_s32(at)
                weight = ptx.load_f32(weights + Int64(pair) * 4)
                to = Int64(pair) * sizes.slabs + Int64(slab)
                to = partial + (to * sizes.hidden + Int64(feature)) * 4
                upper = total[4 * (i // 2) + i % 2]
                lower = total[4 * (i // 2) + i % 2 + 2]
                ptx.store_f32(to, (upper * alpha + bias_low) * weight)
                ptx.store_f32(to + 32, (lower * alpha + bias_high) * weight)
