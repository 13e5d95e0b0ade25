"""A whole MoE layer at decode in one persistent launch. Device code.

Each block routes for itself (`route`), then takes an equal share of FC1's tiles (pass x 16 rows)
and of FC2's. Its consumer warps are independent: each has a ring of bulk copies of its own, which
runs on from tile to tile and from FC1 into FC2, and keeps whole tiles in registers. One more warp
brings the tokens of a pass to shared memory.

    gather --tokens_full--> consumers --tokens_empty--> gather          one buffer a pass
    consumers --counter of the pass, in device memory--> gather         FC1 before FC2
    all blocks --grid counter--> all blocks                             FC2 before the weighted sum

An FC1 tile holds gate and up of 8 features, so that both meet in a thread. Intermediate rows and
FC2's results are indexed by pair (token x top_k + choice); the sum over the choices runs in their
order. A launch leaves the counters ready for the next one, so that it can be captured and replayed.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.cute import ptx
from rubin_moe.kernels.sm90.activate import activate
from rubin_moe.kernels.sm90.dequant import pairs, scale_pairs
from rubin_moe.kernels.sm90.finish import FIRST_PASS, Finish
from rubin_moe.kernels.sm90.plan import CHAINS, FREE_BARRIER, DecodePlan
from rubin_moe.kernels.sm90.route import Router, count_of, expert_of, first_of
from rubin_moe.kernels.sm90.stream import Stream


class DecodeMoe:
    """One kernel: its plan, the activation, and whether there are biases."""

    def __init__(self, plan: DecodePlan, activation: Activation, bias: bool):
        self.plan = plan
        self.activation = activation
        self.bias = bias
        self.router = Router(plan)
        self.finish = Finish(plan, bias)
        self.stream = Stream(plan)
        self.tiles_n = plan.tiles.pass_tokens // 8

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
        h: Int64,
        partial: Int64,
        out: Int64,
        counters: Int64,
        num_tokens: Int32,
        blocks: Int32,
        stream,
    ):
        """Launch. Addresses of: weight tiles, float32 alphas ``[E, 2]`` and ``[E]``, float32 biases
        ``[E, tiles13, 16]`` in tile order and ``[E, hidden]``, 16-bit x ``[M, hidden]``, int32
        ids and float32 weights ``[M, top_k]``, int32 map, scratch h 16-bit ``[M top_k, padded
        I]`` and partial float32 ``[M top_k, slabs, hidden]``, 16-bit out, int32 counters, zero
        before the first launch."""
        self.kernel(
            w13, w2, alpha13, alpha2, bias13, bias2, x, ids, weights, expert_map, h, partial, out,
            counters, num_tokens,
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
        h: Int64,
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
        all1 = passes * sizes.tiles13
        all2 = passes * (sizes.tiles2 * sizes.slabs)
        first1 = Int32(Int64(all1) * block // grid)
        last1 = Int32(Int64(all1) * (block + 1) // grid)
        first2 = Int32(Int64(all2) * block // grid)
        last2 = Int32(Int64(all2) * (block + 1) // grid)
        if warp == plan.tiles.warps:
            self.gather(smem, lane, x, h, counters, first1, last1, first2, last2)
        else:
            self.consume(
                smem, warp, lane, w13, w2, alpha13, alpha2, bias13, bias2, weights, h, partial,
                counters, first1, last1, first2, last2,
            )  # fmt: skip
        self.finish.wait_for_all(thread, block, counters, grid)
        self.finish.reset(thread, block, counters, grid, passes)
        self.finish.sum_choices(smem, thread, block, grid, partial, out, num_tokens)

    @cute.jit
    def set_up(self, smem, thread):
        """Barriers, and zeros where K is padded: a bulk copy of a token never gets there."""
        plan = self.plan
        at = plan.offsets
        rings = plan.tiles.warps * plan.tiles.slots
        i = Int32(thread)
        while i < rings:
            ptx.mbarrier_init(smem + at["full"] + 8 * i, 1)
            i += plan.threads
        if thread < plan.tiles.buffers:
            ptx.mbarrier_init(smem + at["tokens_full"] + 8 * thread, 1)
            ptx.mbarrier_init(smem + at["tokens_empty"] + 8 * thread, 32 * plan.tiles.warps)
        words = (plan.sizes.k_blocks13 * 64 - plan.sizes.hidden) // 2
        if cutlass.const_expr(words > 0):
            i = Int32(thread)
            while i < words * plan.tiles.buffers * plan.tiles.pass_tokens:
                row = i // words
                column = plan.sizes.hidden * 2 + (i - row * words) * 4
                ptx.store_shared_b32(
                    smem + at["tokens"] + row * plan.token_pitch + column, Int32(0)
                )
                i += plan.threads
        ptx.mbarrier_init_fence()

    # ---- tokens

    @cute.jit
    def gather(self, smem, lane, x, h, counters, first1, last1, first2, last2):
        """One warp: a bulk copy a token, of FC1's passes, then of FC2's once FC1 is through."""
        plan = self.plan
        sizes = plan.sizes
        at = plan.offsets
        turn = Int32(0)
        if first1 < last1:
            index = first1 // sizes.tiles13
            end = (last1 - 1) // sizes.tiles13
            while index <= end:
                word = ptx.load_shared_s32(smem + at["passes"] + 4 * index)
                buffer = self.claim(smem, lane, turn, count_of(word) * (2 * sizes.hidden))
                if lane < count_of(word):
                    pair = ptx.load_shared_s32(smem + at["pairs"] + 4 * (first_of(word) + lane))
                    ptx.bulk_load(
                        smem + at["tokens"] + buffer * plan.buffer_bytes + lane * plan.token_pitch,
                        x + Int64(pair // sizes.top_k) * (2 * sizes.hidden),
                        2 * sizes.hidden,
                        smem + at["tokens_full"] + 8 * buffer,
                    )
                turn += 1
                index += 1
        if first2 < last2:
            index = first2 // sizes.tiles2
            end = (last2 - 1) // sizes.tiles2
            nbytes = 2 * 64 * sizes.slab_blocks
            while index <= end:
                number = index // sizes.slabs
                counter = counters + Int64(FIRST_PASS + number) * 4
                seen = ptx.load_acquire(counter)
                while seen < sizes.tiles13:
                    seen = ptx.load_acquire(counter)
                ptx.fence_proxy_async_all()
                word = ptx.load_shared_s32(smem + at["passes"] + 4 * number)
                buffer = self.claim(smem, lane, turn, count_of(word) * nbytes)
                if lane < count_of(word):
                    pair = ptx.load_shared_s32(smem + at["pairs"] + 4 * (first_of(word) + lane))
                    row = h + Int64(pair) * (2 * sizes.padded_intermediate)
                    ptx.bulk_load(
                        smem + at["tokens"] + buffer * plan.buffer_bytes + lane * plan.token_pitch,
                        row + Int64((index - number * sizes.slabs) * nbytes),
                        nbytes,
                        smem + at["tokens_full"] + 8 * buffer,
                    )
                turn += 1
                index += 1

    @cute.jit
    def claim(self, smem, lane, turn, nbytes) -> Int32:
        """The buffer of this turn, once it is free, told how many bytes will come."""
        at = self.plan.offsets
        buffers = self.plan.tiles.buffers
        buffer = turn % buffers
        if turn >= buffers:
            ptx.mbarrier_wait(smem + at["tokens_empty"] + 8 * buffer, (turn // buffers - 1) & 1)
        if lane == 0:
            ptx.mbarrier_arrive_expect_tx(smem + at["tokens_full"] + 8 * buffer, nbytes)
        cute.arch.sync_warp()
        return buffer

    @cute.jit
    def await_tokens(self, smem, turn):
        buffers = self.plan.tiles.buffers
        bar = smem + self.plan.offsets["tokens_full"] + 8 * (turn % buffers)
        ptx.mbarrier_wait(bar, (turn // buffers) & 1)

    @cute.jit
    def leave_tokens(self, smem, turn):
        """This warp needs the buffer no more. A warp that never did waits for it all the same: its
        arrival must not count for the turn before. Each lane arrives, for its own reads."""
        self.await_tokens(smem, turn)
        buffer = turn % self.plan.tiles.buffers
        ptx.mbarrier_arrive(smem + self.plan.offsets["tokens_empty"] + 8 * buffer)

    # ---- weights times tokens

    @cute.jit
    def consume(
        self, smem, warp, lane, w13, w2, alpha13, alpha2, bias13, bias2, weights, h, partial,
        counters, first1, last1, first2, last2,
    ):  # fmt: skip
        """One warp: its tiles of FC1, then of FC2."""
        plan = self.plan
        sizes = plan.sizes
        stream = self.stream
        warps = plan.tiles.warps
        items1 = ((last1 - first1) * plan.split13 - warp + (warps - 1)) // warps
        items = items1 + ((last2 - first2) * plan.split2 - warp + (warps - 1)) // warps
        state = stream.start()
        for _ in cutlass.range_constexpr(plan.tiles.slots):
            state = stream.issue(smem, warp, lane, w13, w2, first1, first2, items1, items, *state)
        read = (Int32(0), Int32(0))  # slot, parity
        turn = Int32(0)
        if first1 < last1:
            index = first1 // sizes.tiles13
            ready = Int32(0)  # tiles of this pass that this warp has finished
            item = Int32(0)
            while item < items1:
                work = warp + item * warps
                tile = first1 + work // plan.split13
                while index < tile // sizes.tiles13:
                    self.publish(lane, counters, index, ready)
                    ready = Int32(0)
                    self.leave_tokens(smem, turn)
                    turn += 1
                    index += 1
                self.await_tokens(smem, turn)
                row = tile - index * sizes.tiles13
                scales = self.finish.scales1(smem, lane, row, index, alpha13, bias13)
                total, state, read = self.tile(
                    smem, warp, lane, turn, work, item, w13, w2, first1, first2, items1, items,
                    state, read, True,
                )  # fmt: skip
                if work % plan.split13 == 0:
                    self.finish1(smem, lane, total, tile, index, scales, h)
                    ready += 1
                item += 1
            self.publish(lane, counters, index, ready)
            while index <= (last1 - 1) // sizes.tiles13:
                self.leave_tokens(smem, turn)
                turn += 1
                index += 1
        if cutlass.const_expr(plan.split13 != plan.split2):
            # other groups now, and they may not overwrite what the old ones still read
            ptx.barrier_sync(FREE_BARRIER, 32 * warps)
        if first2 < last2:
            index = first2 // sizes.tiles2
            item = Int32(items1)
            while item < items:
                work = warp + (item - items1) * warps
                tile = first2 + work // plan.split2
                while index < tile // sizes.tiles2:
                    self.leave_tokens(smem, turn)
                    turn += 1
                    index += 1
                self.await_tokens(smem, turn)
                scales = self.scales2(smem, lane, tile, index, alpha2, bias2, weights)
                total, state, read = self.tile(
                    smem, warp, lane, turn, work, item - items1, w13, w2, first1, first2, items1,
                    items, state, read, False,
                )  # fmt: skip
                if work % plan.split2 == 0:
                    self.finish2(smem, lane, total, tile, index, scales, partial)
                item += 1
            while index <= (last2 - 1) // sizes.tiles2:
                self.leave_tokens(smem, turn)
                turn += 1
                index += 1

    @cute.jit
    def publish(self, lane, counters, index, ready):
        """Adds this warp's finished tiles to the pass's counter."""
        if ready > 0:
            cute.arch.sync_warp()
            if lane == 0:
                ptx.add_release(counters + Int64(FIRST_PASS + index) * 4, ready)

    @cute.jit
    def tile(
        self, smem, warp, lane, turn, work, item, w13, w2, first1, first2, items1, items, state,
        read, fc1: cutlass.Constexpr,
    ):  # fmt: skip
        """16 rows x the pass's tokens: this warp's parts of K, then those of its neighbours."""
        plan = self.plan
        slot, parity = read
        k_blocks = plan.sizes.k_blocks13 if fc1 else plan.sizes.slab_blocks
        parts = plan.parts13 if fc1 else plan.parts2
        split = plan.split13 if fc1 else plan.split2
        blocks = plan.blocks13 if fc1 else plan.blocks2
        part_blocks = k_blocks // parts
        tokens = smem + plan.offsets["tokens"]
        tokens += (turn % plan.tiles.buffers) * plan.buffer_bytes
        tokens += (lane >> 2) * plan.token_pitch + (lane & 3) * 32
        tokens += (work % split) * (part_blocks * 128)
        total = cute.make_rmem_tensor((4 * self.tiles_n,), Float32)
        acc = cute.make_rmem_tensor((4 * self.tiles_n * CHAINS,), Float32)
        total.fill(0.0)
        part = Int32(0)
        while part < parts // split:
            acc.fill(0.0)
            chunk = Int32(0)
            while chunk < part_blocks // blocks:
                ring = smem + (warp * plan.tiles.slots + slot) * plan.slot_bytes
                bar = smem + plan.offsets["full"] + 8 * (warp * plan.tiles.slots + slot)
                ptx.mbarrier_wait(bar, parity)
                for b in cutlass.range_constexpr(blocks):
                    self.multiply(ring + b * plan.sizes.block_bytes, tokens + b * 128, lane, acc)
                cute.arch.sync_warp()
                state = self.stream.issue(
                    smem, warp, lane, w13, w2, first1, first2, items1, items, *state
                )
                tokens += blocks * 128
                slot += 1
                if slot == plan.tiles.slots:
                    slot = Int32(0)
                    parity = parity ^ 1
                chunk += 1
            for i in cutlass.range_constexpr(4 * self.tiles_n):
                value = acc[i]
                for c in cutlass.range_constexpr(CHAINS - 1):
                    value = value + acc[i + (c + 1) * 4 * self.tiles_n]
                total[i] = total[i] + value
            part += 1
        if cutlass.const_expr(split > 1):
            first = 1 if fc1 else 1 + plan.tiles.warps // plan.split13
            self.combine(smem, warp, lane, item, total, split, first)
        return total, state, (slot, parity)

    @cute.jit
    def multiply(self, block, tokens, lane, acc):
        """One block of weights: four MMAs for each eight tokens."""
        sizes = self.plan.sizes
        words = ptx.load_shared_v4(block + lane * 16)
        if cutlass.const_expr(sizes.exponent_only):
            at = ((lane & 2) << 3) + ((lane >> 2) << 1)
        else:
            at = lane * 2
        low, high = scale_pairs(
            ptx.load_shared_u16(block + 512 + at), sizes.exponent_only, sizes.kind
        )
        b = []
        for n in cutlass.range_constexpr(self.tiles_n):
            row = tokens + n * 8 * self.plan.token_pitch
            b.append(ptx.load_shared_v4(row) + ptx.load_shared_v4(row + 16))
        for j in cutlass.range_constexpr(4):
            a = pairs(words[j], low, high, sizes.kind)
            for n in cutlass.range_constexpr(self.tiles_n):
                at = ((j % CHAINS) * self.tiles_n + n) * 4
                c = ptx.mma_m16n8k16(
                    sizes.kind, [acc[at + i] for i in range(4)], a, b[n][2 * j], b[n][2 * j + 1]
                )
                for i in cutlass.range_constexpr(4):
                    acc[at + i] = c[i]

    @cute.jit
    def combine(self, smem, warp, lane, item, total, split: cutlass.Constexpr, first_barrier):
        """Adds the neighbours' parts to the first one's, in order; two areas take turns."""
        plan = self.plan
        area = smem + plan.offsets["partial"] + lane * 16
        area += (item & 1) * (plan.tiles.warps * self.tiles_n * 512)
        if warp % split != 0:
            for n in cutlass.range_constexpr(self.tiles_n):
                ptx.store_shared_v4_f32(
                    area + (warp * self.tiles_n + n) * 512, [total[4 * n + i] for i in range(4)]
                )
        ptx.barrier_sync_at(first_barrier + warp // split, 32 * split)
        if warp % split == 0:
            for k in cutlass.range_constexpr(split - 1):
                for n in cutlass.range_constexpr(self.tiles_n):
                    other = ptx.load_shared_v4_f32(area + ((warp + k + 1) * self.tiles_n + n) * 512)
                    for i in cutlass.range_constexpr(4):
                        total[4 * n + i] = total[4 * n + i] + other[i]

    # ---- epilogues

    @cute.jit
    def finish1(self, smem, lane, total, tile, index, scales, h):
        """Real units, bias, activation, 16 bits; rows g and g + 8 are gate and up of a feature."""
        plan = self.plan
        sizes = plan.sizes
        word, low, high, bias_low, bias_high = scales
        row_tile = tile - index * sizes.tiles13
        for i in cutlass.range_constexpr(2 * self.tiles_n):
            column = 8 * (i // 2) + 2 * (lane & 3) + i % 2
            if column < count_of(word):
                pair = ptx.load_shared_s32(
                    smem + plan.offsets["pairs"] + 4 * (first_of(word) + column)
                )
                upper = total[4 * (i // 2) + i % 2] * low + bias_low
                lower = total[4 * (i // 2) + i % 2 + 2] * high + bias_high
                row = h + Int64(pair) * (2 * sizes.padded_intermediate)
                if cutlass.const_expr(sizes.gated):
                    value = activate(self.activation, upper, lower)
                    feature = row_tile * 8 + (lane >> 2)
                    ptx.store_b16(row + Int64(feature) * 2, ptx.pack_x2(sizes.kind, value, value))
                else:
                    feature = row_tile * 16 + (lane >> 2)
                    first = activate(self.activation, upper, upper)
                    second = activate(self.activation, lower, lower)
                    ptx.store_b16(row + Int64(feature) * 2, ptx.pack_x2(sizes.kind, first, first))
                    ptx.store_b16(
                        row + Int64(feature + 8) * 2, ptx.pack_x2(sizes.kind, second, second)
                    )

    @cute.jit
    def scales2(self, smem, lane, tile, index, alpha2, bias2, weights):
        """Alpha, biases (in the first slab only), and of each column its pair and weight."""
        plan = self.plan
        sizes = plan.sizes
        number = index // sizes.slabs
        word = ptx.load_shared_s32(smem + plan.offsets["passes"] + 4 * number)
        expert = expert_of(word)
        alpha = ptx.load_f32(alpha2 + Int64(expert) * 4)
        bias_low = Float32(0.0)
        bias_high = Float32(0.0)
        if cutlass.const_expr(self.bias):  # noqa: SIM102  decided when compiling
            if index == number * sizes.slabs:
                feature = (tile - index * sizes.tiles2) * 16 + (lane >> 2)
                at = bias2 + (Int64(expert) * sizes.hidden + Int64(feature)) * 4
                bias_low = ptx.load_f32(at)
                bias_high = ptx.load_f32(at + 32)
        columns = []
        for i in cutlass.range_constexpr(2 * self.tiles_n):
            column = 8 * (i // 2) + 2 * (lane & 3) + i % 2
            pair = Int32(-1)
            weight = Float32(0.0)
            if column < count_of(word):
                pair = ptx.load_shared_s32(
                    smem + plan.offsets["pairs"] + 4 * (first_of(word) + column)
                )
                weight = ptx.load_f32(weights + Int64(pair) * 4)
            columns.append((pair, weight))
        return alpha, bias_low, bias_high, columns

    @cute.jit
    def finish2(self, smem, lane, total, tile, index, scales, partial):
        """Real units, bias (once), the router's weight; float32 to the pair's own row."""
        sizes = self.plan.sizes
        alpha, bias_low, bias_high, columns = scales
        slab = index % sizes.slabs
        feature = (tile - index * sizes.tiles2) * 16 + (lane >> 2)
        for i in cutlass.range_constexpr(2 * self.tiles_n):
            pair, weight = columns[i]
            if pair >= 0:
                row = Int64(pair) * sizes.slabs + Int64(slab)
                row = partial + (row * sizes.hidden + Int64(feature)) * 4
                upper = total[4 * (i // 2) + i % 2]
                lower = total[4 * (i // 2) + i % 2 + 2]
                ptx.store_f32(row, (upper * alpha + bias_low) * weight)
                ptx.store_f32(row + 32, (lower * alpha + bias_high) * weight)
