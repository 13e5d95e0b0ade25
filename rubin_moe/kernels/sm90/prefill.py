"""One GEMM of a MoE layer for many tokens, persistent, by wgmma. Device code.

A block walks units of 256 rows of weights x a pass (at most ``pass_tokens`` tokens of one expert).
Weights are dequantized in registers as A, tokens are B in shared memory.

    producer warps --full--> consumers --empty--> producer warps      a stage of K
    FC2's other producers --noted--> consumers --read--> they         pairs and weights of a pass

A warpgroup has two row tiles with registers for A each, so that the MMAs of one run while the other
is dequantized; its epilogue runs while the other warpgroup multiplies. FC1's producers gather
tokens by `cp.async`, FC2's copy what FC1 wrote: a pass's tokens as shared memory wants them, 64 of
K a tile of 128-byte rows, 128-byte swizzled, in the order of `layouts.fp4_hopper` (element
16 t + 4 j + 2 e + i at 16 j + 8 e + 2 t + i).

Sums are one chain over K in its order: a row's result depends on nothing but its sizes.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.cute import async_copy, ptx
from rubin_moe.kernels.sm90.activate import activate
from rubin_moe.kernels.sm90.dequant import pairs, scale_pairs
from rubin_moe.kernels.sm90.prefill_plan import MMA_ROWS, PRODUCERS, UNIT_BYTES, PrefillPlan
from rubin_moe.kernels.sm90.prefill_wgmma import start_block, wait

GATHERERS = PRODUCERS - 1  # warps
AT_ONCE = 4 * GATHERERS  # rows that they gather at once, 16 bytes a lane
GROUP_BARRIER = 1  # and those behind: one a warpgroup


class PrefillGemm:
    """FC1 with its activation, or FC2 with the router's weights."""

    def __init__(self, plan: PrefillPlan, fc1: bool, activation: Activation, bias: bool):
        self.plan = plan
        self.fc1 = fc1
        self.activation = activation
        self.bias = bias
        sizes, tiles = plan.sizes, plan.tiles
        self.at = plan.offsets13 if fc1 else plan.offsets2
        self.smem_bytes = self.at["end"]
        self.stages = tiles.stages13 if fc1 else tiles.stages2
        self.k_blocks = sizes.k_blocks13 if fc1 else sizes.k_blocks2
        self.blocks = plan.blocks13 if fc1 else plan.blocks2
        self.chunks = self.k_blocks // self.blocks
        self.stage_tokens = self.blocks * plan.token_bytes
        self.stage_weights = self.blocks * plan.weight_bytes
        self.tiles = sizes.tiles13 if fc1 else sizes.tiles2
        self.units = plan.units13 if fc1 else plan.units2

    @cute.jit
    def __call__(
        self,
        w: Int64,
        alpha: Int64,
        bias: Int64,
        tokens: Int64,
        passes: Int64,
        pairs: Int64,
        weights: Int64,
        out: Int64,
        blocks: Int32,
        stream,
    ):
        """Launch. Addresses of:

        ``w``, ``alpha``, ``bias``: `host.Sm90Experts`'. ``passes``: int32 ``[1 + passes, 4]``:
        their number, then expert, first row, number of rows. ``pairs``: int32, of each row token x
        top_k + choice. FC1: ``tokens`` 16-bit ``[M, 64 K blocks]`` in the order above, not
        swizzled; ``weights`` unused; ``out`` ``[passes, K blocks, pass_tokens, 64]``. FC2:
        ``tokens`` that; ``weights`` float32 of each pair; ``out`` 16-bit ``[pairs, hidden]``.
        """
        self.kernel(w, alpha, bias, tokens, passes, pairs, weights, out).launch(
            grid=(blocks, 1, 1),
            block=(self.plan.threads, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        w: Int64,
        alpha: Int64,
        bias: Int64,
        tokens: Int64,
        passes: Int64,
        pairs: Int64,
        weights: Int64,
        out: Int64,
    ):
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread & 31
        smem = ptx.smem_base()
        self.set_up(smem, thread)
        ptx.launch_dependents()
        ptx.wait_for_launches_before()
        number = ptx.load_s32(passes)
        if warp >= plan.consumers:
            async_copy.set_registers(plan.registers[1], more=False)
            if warp == plan.consumers + GATHERERS:
                self.load_weights(smem, w, alpha, tokens, passes, number)
            elif cutlass.const_expr(self.fc1):
                self.gather(smem, thread - 32 * plan.consumers, tokens, passes, pairs, number)
            else:
                self.note(smem, thread - 32 * plan.consumers, passes, pairs, weights, number)
        else:
            async_copy.set_registers(plan.registers[0], more=True)
            self.consume(smem, warp, lane, bias, out, number)

    @cute.jit
    def set_up(self, smem, thread):
        """Barriers, and zeros where tokens will be: rows that a pass lacks are multiplied too."""
        lanes = 32 * self.plan.consumers
        if thread < self.stages:
            arrivals = 1 + (32 * GATHERERS if self.fc1 else 0)
            ptx.mbarrier_init(smem + self.at["full"] + 8 * thread, arrivals)
            ptx.mbarrier_init(smem + self.at["empty"] + 8 * thread, lanes)
        if thread < 2:
            ptx.mbarrier_init(smem + self.at["noted"] + 8 * thread, 32 * GATHERERS)
            ptx.mbarrier_init(smem + self.at["read"] + 8 * thread, lanes)
        ptx.mbarrier_init_fence()
        at = Int32(thread) * 16
        zeros = [Float32(0.0) for _ in range(4)]
        while at < self.stages * self.stage_tokens:
            ptx.store_shared_v4_f32(smem + self.at["tokens"] + at, zeros)
            at += 16 * self.plan.threads
        ptx.fence_proxy_async()
        cute.arch.sync_threads()

    @cute.jit
    def place(self, unit, passes, number):
        """Record of a unit's pass, index of the pass, and which unit of the expert's rows: panels
        of passes one after another, in one the passes run fastest."""
        panel = self.plan.tiles.panel
        whole = unit // (panel * self.units)
        rest = unit - whole * (panel * self.units)
        first = whole * panel
        width = number - first
        if width > panel:
            width = Int32(panel)
        row = ptx.div_u32(rest, width)
        index = first + rest - row * width
        return passes + Int64(1 + index) * 16, index, row

    # ---- producers

    @cute.jit
    def claim(self, smem, stage, parity):
        """Waits until the consumers have left the stage."""
        ptx.mbarrier_wait(smem + self.at["empty"] + 8 * stage, parity)

    @cute.jit
    def next(self, stage, parity):
        stage += 1
        if stage == self.stages:
            stage = Int32(0)
            parity = parity ^ 1
        return stage, parity

    @cute.jit
    def load_weights(self, smem, w, alpha, tokens, passes, number):
        """A unit's weights, tile by tile; FC2's tokens; and what is to be known of the unit, beside
        its first stage. Nothing here depends on the lane: copies that lanes of a warp start with
        addresses of their own are started one by one, at 60 cycles each."""
        plan = self.plan
        nbytes = self.blocks * plan.sizes.block_bytes
        unit, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        stage, parity = Int32(0), Int32(1)
        while unit < number * self.units:
            record, index, row = self.place(unit, passes, number)
            expert = ptx.load_s32(record)
            count = ptx.load_s32(record + 8)
            tile = row * plan.unit_tiles
            source = w + (Int64(expert) * self.tiles + Int64(tile)) * (self.chunks * nbytes)
            left = self.tiles - tile
            if left > plan.unit_tiles:
                left = Int32(plan.unit_tiles)
            rows = tokens + Int64(index) * (self.k_blocks * plan.token_bytes)
            expected = left * nbytes
            if cutlass.const_expr(not self.fc1):
                expected += count * (128 * self.blocks)
            k = Int32(0)
            while k < self.chunks:
                bar = smem + self.at["full"] + 8 * stage
                to = smem + self.at["weights"] + stage * self.stage_weights
                self.claim(smem, stage, parity)
                with cute.arch.elect_one():
                    if left == plan.unit_tiles:
                        for i in cutlass.range_constexpr(plan.unit_tiles):
                            self.copy_tile(to, source, i, bar)
                    else:
                        i = Int32(0)
                        while i < left:
                            self.copy_tile(to, source, i, bar)
                            i += 1
                    if cutlass.const_expr(not self.fc1):
                        there = smem + self.at["tokens"] + stage * self.stage_tokens
                        for b in cutlass.range_constexpr(self.blocks):
                            at = b * plan.token_bytes
                            ptx.bulk_load(there + at, rows + Int64(at), count * 128, bar)
                    if k == 0:
                        known = smem + self.at["units"] + stage * UNIT_BYTES
                        async_copy.store_shared_v4(known, [index, row, expert, count])
                        self.store_alphas(known + 16, alpha, expert)
                    ptx.mbarrier_arrive_expect_tx(bar, expected)
                cute.arch.sync_warp()
                source += Int64(nbytes)
                rows += Int64(self.stage_tokens)
                stage, parity = self.next(stage, parity)
                k += 1
            unit += grid

    def copy_tile(self, to, source, i, bar):
        nbytes = self.blocks * self.plan.sizes.block_bytes
        ptx.bulk_load(to + i * nbytes, source + Int64(i) * (self.chunks * nbytes), nbytes, bar)

    def store_alphas(self, to, alpha, expert):
        """FC1's two, FC2's one."""
        each = 2 if self.fc1 else 1
        for i in range(each):
            value = ptx.load_s32(alpha + (Int64(expert) * each + i) * 4)
            ptx.store_shared_b32(to + 4 * i, value)

    @cute.jit
    def gather(self, smem, thread, tokens, passes, pairs, number):
        """A pass's tokens, eight lanes a row."""
        plan = self.plan
        turns = -(-plan.tiles.pass_tokens // AT_ONCE)
        unit, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        stage, parity = Int32(0), Int32(1)
        place = thread >> 3
        chunk = thread & 7
        lines = cute.make_rmem_tensor((turns,), Int32)
        while unit < number * self.units:
            record, _, _ = self.place(unit, passes, number)
            first = ptx.load_s32(record + 4)
            count = ptx.load_s32(record + 8)
            for i in cutlass.range_constexpr(turns):
                lines[i] = Int32(0)
                if place + i * AT_ONCE < count:
                    pair = ptx.load_s32(pairs + Int64(first + place + i * AT_ONCE) * 4)
                    lines[i] = pair // plan.sizes.top_k * self.k_blocks
            source = tokens + Int64(chunk * 16)
            k = Int32(0)
            while k < self.chunks:
                self.claim(smem, stage, parity)
                to = smem + self.at["tokens"] + stage * self.stage_tokens + place * 128
                for _ in cutlass.range_constexpr(self.blocks):
                    for i in cutlass.range_constexpr(turns):
                        if place + i * AT_ONCE < count:
                            swizzled = (chunk ^ ((place + i * AT_ONCE) & 7)) << 4
                            line = source + Int64(lines[i]) * 128
                            async_copy.copy_16(to + i * AT_ONCE * 128 + swizzled, line)
                    to += plan.token_bytes
                    source += Int64(128)
                async_copy.arrive_after_copies(smem + self.at["full"] + 8 * stage)
                stage, parity = self.next(stage, parity)
                k += 1
            unit += grid

    @cute.jit
    def note(self, smem, thread, passes, pairs, weights, number):
        """The pairs of FC2's passes and their weights, zero behind them."""
        t = self.plan.tiles.pass_tokens
        unit, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        half, parity = Int32(0), Int32(1)
        while unit < number * self.units:
            record, _, _ = self.place(unit, passes, number)
            first = ptx.load_s32(record + 4)
            count = ptx.load_s32(record + 8)
            to = smem + self.at["notes"] + half * self.plan.note_bytes
            ptx.mbarrier_wait(smem + self.at["read"] + 8 * half, parity)
            for i in cutlass.range_constexpr(-(-t // (32 * GATHERERS))):
                place = thread + 32 * GATHERERS * i
                pair = Int32(0)
                weight = Float32(0.0)
                if place < count:
                    pair = ptx.load_s32(pairs + Int64(first + place) * 4)
                    weight = ptx.load_f32(weights + Int64(pair) * 4)
                if place < t:
                    ptx.store_shared_b32(to + 4 * place, pair)
                    ptx.store_shared_b32(to + 4 * t + 4 * place, ptx.as_u32(weight))
            ptx.mbarrier_arrive(smem + self.at["noted"] + 8 * half)
            parity = parity ^ half
            half = half ^ 1
            unit += grid

    # ---- consumers

    @cute.jit
    def consume(self, smem, warp, lane, bias, out, number):
        plan = self.plan
        unit, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        stage, parity = Int32(0), Int32(0)
        half, noted = Int32(0), Int32(0)
        group = warp >> 2
        behind = group * min(plan.tiles.lag, (self.chunks - 1) // max(1, plan.tiles.groups - 1))
        if (behind > 0) & (unit < number * self.units):
            ptx.mbarrier_wait(smem + self.at["full"] + 8 * behind, Int32(0))
        while unit < number * self.units:
            self.await_stage(smem, stage, parity)
            known = smem + self.at["units"] + stage * UNIT_BYTES
            index, row, expert, count = async_copy.load_shared_v4_s32(known)
            alphas = async_copy.load_shared_v2_f32(known + 16)
            tile = row * plan.unit_tiles + 8 * group  # the first of this warpgroup's eight
            where = (index, expert, count, tile, alphas[0], alphas[1])
            if tile < self.tiles:
                for i in cutlass.range_constexpr(len(plan.widths)):
                    n = plan.widths[i]
                    least = plan.widths[i + 1] if i + 1 < len(plan.widths) else 0
                    if (count > least) & (count <= n):
                        acc, stage, parity = self.multiply(smem, warp, lane, stage, parity, n)
                        if cutlass.const_expr(self.fc1):
                            self.finish1(smem, warp, lane, acc, n, where, bias, out)
                        else:
                            note = (half, noted)
                            self.finish2(smem, warp, lane, acc, n, where, note, bias, out)
            else:
                stage, parity = self.skip(smem, stage, parity)
            if cutlass.const_expr(not self.fc1):
                ptx.mbarrier_wait(smem + self.at["noted"] + 8 * half, noted)
                ptx.mbarrier_arrive(smem + self.at["read"] + 8 * half)
                noted = noted ^ half
                half = half ^ 1
            unit += grid
        async_copy.bulk_wait()

    @cute.jit
    def skip(self, smem, stage, parity):
        """A unit of which this warpgroup has no rows."""
        k = Int32(0)
        while k < self.chunks:
            self.await_stage(smem, stage, parity)
            self.leave(smem, stage)
            stage, parity = self.next(stage, parity)
            k += 1
        return stage, parity

    def await_stage(self, smem, stage, parity):
        """Waits for its loads; tokens that `cp.async` brought are made known to wgmma."""
        ptx.mbarrier_wait(smem + self.at["full"] + 8 * stage, parity)
        if self.fc1:
            ptx.fence_proxy_async()

    def leave(self, smem, stage):
        """Each lane for its own reads."""
        ptx.mbarrier_arrive(smem + self.at["empty"] + 8 * stage)

    @cute.jit
    def multiply(self, smem, warp, lane, stage, parity, n: cutlass.Constexpr):
        """Two row tiles of 64 x the pass's tokens: the MMAs of one and the dequantization of the
        other at a time."""
        plan = self.plan
        sizes = plan.sizes
        acc = [cute.make_rmem_tensor((n // 2,), Float32) for _ in range(2)]
        a = [cute.make_rmem_tensor((16,), Uint32) for _ in range(2)]
        for m in cutlass.range_constexpr(2):
            acc[m].fill(0.0)
        words = cute.make_rmem_tensor((5,), Uint32)
        mine = (8 * (warp >> 2) + (warp & 3)) * (self.blocks * sizes.block_bytes)
        second = 4 * self.blocks * sizes.block_bytes
        block = smem + self.at["weights"] + stage * self.stage_weights + mine
        self.fetch(block, lane, words)
        before = Int32(stage)
        k = Int32(0)
        while k < self.chunks:
            rows = smem + self.at["tokens"] + stage * self.stage_tokens
            now = Int32(stage)
            for b in cutlass.range_constexpr(self.blocks):
                self.decode(words, a[0])
                self.fetch(block + second + b * sizes.block_bytes, lane, words)
                start_block(sizes.kind, n, acc[0], a[0], rows + b * plan.token_bytes)
                wait(1)  # for the other tile's block before
                if cutlass.const_expr(b == 0):  # noqa: SIM102  decided when compiling
                    if k > 0:
                        self.leave(smem, before)
                self.decode(words, a[1])
                start_block(sizes.kind, n, acc[1], a[1], rows + b * plan.token_bytes)
                if cutlass.const_expr(b + 1 < self.blocks):
                    self.fetch(block + (b + 1) * sizes.block_bytes, lane, words)
                else:
                    stage, parity = self.next(stage, parity)
                    if k + 1 < self.chunks:
                        self.await_stage(smem, stage, parity)
                        block = smem + self.at["weights"] + stage * self.stage_weights + mine
                        self.fetch(block, lane, words)
                wait(1)
            before = now
            k += 1
        wait(0)
        self.leave(smem, before)
        return acc, stage, parity

    @cute.jit
    def fetch(self, block, lane, words):
        """A lane's codes of a block, and its scales."""
        v = ptx.load_shared_v4(block + lane * 16)
        for i in cutlass.range_constexpr(4):
            words[i] = v[i]
        if cutlass.const_expr(self.plan.sizes.exponent_only):
            at = ((lane & 2) << 3) + ((lane >> 2) << 1)
        else:
            at = lane * 2
        words[4] = ptx.load_shared_u16(block + 512 + at)

    @cute.jit
    def decode(self, words, a):
        sizes = self.plan.sizes
        low, high = scale_pairs(words[4], sizes.exponent_only, sizes.kind)
        for j in cutlass.range_constexpr(4):
            four = pairs(words[j], low, high, sizes.kind)
            for i in cutlass.range_constexpr(4):
                a[4 * j + i] = four[i]

    # ---- epilogues

    @cute.jit
    def finish1(self, smem, warp, lane, acc, n: cutlass.Constexpr, where, bias, out):
        """Real units, bias, activation, 16 bits; through shared memory to the pass's tile."""
        index, expert, count, tile, low, high = where
        plan = self.plan
        sizes = plan.sizes
        group = warp >> 2
        quarter = warp & 3
        g = lane >> 2
        odd = g & 1
        place = 2 * (lane & 3) + odd
        staging = smem + self.at["staging"] + group * plan.token_bytes
        row = staging + place * 128
        target = out + Int64(index) * (sizes.k_blocks2 * plan.token_bytes)
        selector = Int32(0x5410)
        if odd == 1:
            selector = Int32(0x3276)
        if cutlass.const_expr(sizes.gated):
            biases = [
                self.biases1(bias, expert * self.tiles + tile + 4 * m + quarter, g)
                for m in range(2)
            ]
            self.free_staging(warp, lane)
            at = row + (((4 * (quarter & 1) + (g >> 1)) ^ place) << 4) + 4 * (quarter >> 1)
            for j in cutlass.range_constexpr(n // 8):
                for m in cutlass.range_constexpr(2):
                    gate = [acc[m][4 * j + i] * low + biases[m][0] for i in range(2)]
                    up = [acc[m][4 * j + i + 2] * high + biases[m][1] for i in range(2)]
                    v = [activate(self.activation, x, y) for x, y in zip(gate, up, strict=True)]
                    word = self.turn(v, selector)
                    ptx.store_shared_b32(at + j * 1024 + 8 * m, word)
            self.store_tile(warp, lane, staging, target, tile >> 3, count)
        else:
            for m in cutlass.range_constexpr(2):
                if tile + 4 * m < self.tiles:
                    biases = self.biases1(bias, expert * self.tiles + tile + 4 * m + quarter, g)
                    self.free_staging(warp, lane)
                    for j in cutlass.range_constexpr(n // 8):
                        for h in cutlass.range_constexpr(2):
                            scaled = [acc[m][4 * j + 2 * h + i] * low + biases[h] for i in range(2)]
                            v = [activate(self.activation, x, x) for x in scaled]
                            at = row + (((4 * h + (g >> 1)) ^ place) << 4) + 4 * quarter
                            ptx.store_shared_b32(at + j * 1024, self.turn(v, selector))
                    self.store_tile(warp, lane, staging, target, (tile >> 2) + m, count)

    def biases1(self, bias, tile, g):
        """Of rows g and g + 8 of a tile."""
        if not self.bias:
            return Float32(0.0), Float32(0.0)
        at = bias + (Int64(tile) * 16 + Int64(g)) * 4
        return ptx.load_f32(at), ptx.load_f32(at + 32)

    def turn(self, v, selector):
        """Two tokens of a feature to two features of a token: lanes of neighbouring features
        (lane ^ 4) exchange one."""
        word = ptx.pack_x2(self.plan.sizes.kind, v[0], v[1])
        return async_copy.permute_bytes(word, async_copy.shuffle_xor(word, 4), selector)

    @cute.jit
    def free_staging(self, warp, lane):
        """The warpgroup's last store has left it."""
        if ((warp & 3) == 0) & (lane == 0):
            async_copy.bulk_wait_read()
        ptx.barrier_sync_at(GROUP_BARRIER + (warp >> 2), 2 * MMA_ROWS)

    @cute.jit
    def store_tile(self, warp, lane, staging, target, k_block, count):
        ptx.fence_proxy_async()
        ptx.barrier_sync_at(GROUP_BARRIER + (warp >> 2), 2 * MMA_ROWS)
        if ((warp & 3) == 0) & (lane == 0):
            to = target + Int64(k_block) * self.plan.token_bytes
            async_copy.bulk_store(to, staging, count * 128)
            async_copy.bulk_commit()

    @cute.jit
    def finish2(self, smem, warp, lane, acc, n: cutlass.Constexpr, where, note, bias, out):
        """Real units, bias, the router's weight, 16 bits; through shared memory to the pairs'
        rows."""
        _, expert, count, tile, factor, _ = where
        half, noted = note
        plan = self.plan
        sizes = plan.sizes
        group = warp >> 2
        quarter = warp & 3
        staging = smem + self.at["staging"] + group * plan.token_bytes
        table = smem + self.at["notes"] + half * plan.note_bytes
        ptx.mbarrier_wait(smem + self.at["noted"] + 8 * half, noted)
        column = table + 4 * plan.tiles.pass_tokens + 8 * (lane & 3)
        thread = 32 * quarter + lane
        chunk = thread & 7
        for m in cutlass.range_constexpr(2):
            feature = (tile + 4 * m) * 16
            biases = [Float32(0.0), Float32(0.0)]
            if cutlass.const_expr(self.bias):
                row = feature + 16 * quarter + (lane >> 2)
                if row < sizes.hidden:
                    at = bias + (Int64(expert) * sizes.hidden + Int64(row)) * 4
                    biases = [ptx.load_f32(at), ptx.load_f32(at + 32)]
            ptx.barrier_sync_at(GROUP_BARRIER + group, 2 * MMA_ROWS)
            self.stage2(lane, quarter, acc[m], n, biases, factor, column, staging)
            ptx.barrier_sync_at(GROUP_BARRIER + group, 2 * MMA_ROWS)
            if feature + chunk * 8 < sizes.hidden:
                self.store_rows(thread, count, n, table, staging, out, feature + chunk * 8)

    @cute.jit
    def store_rows(self, thread, count, n: cutlass.Constexpr, table, staging, out, feature):
        """16 bytes a thread of each sixteenth token."""
        place = thread >> 3
        source = staging + place * 128 + (((thread & 7) ^ (place & 7)) << 4)
        for i in cutlass.range_constexpr(-(-n // 16)):
            if place + 16 * i < count:
                pair = ptx.load_shared_s32(table + 4 * place + 64 * i)
                v = ptx.load_shared_v4(source + 2048 * i)
                to = Int64(pair) * self.plan.sizes.hidden + Int64(feature)
                ptx.store_v4_b32(out + to * 2, v)

    def stage2(self, lane, quarter, acc, width, biases, factor, column, staging):
        """One row tile, transposed: tokens' rows of 64 features, 128-byte swizzled."""
        kind = self.plan.sizes.kind
        matrix = lane >> 3
        chunk = 2 * quarter + (matrix & 1)
        to = staging + (8 * (matrix >> 1) + (lane & 7)) * 128 + ((chunk ^ (lane & 7)) << 4)
        eights = width // 8
        for n in range(0, eights, 2):
            registers = []
            for j in range(n, min(n + 2, eights)):
                w = async_copy.load_shared_v2_f32(column + 32 * j)
                for h in range(2):
                    v = [(acc[4 * j + 2 * h + i] * factor + biases[h]) * w[i] for i in range(2)]
                    registers.append(ptx.pack_x2(kind, v[0], v[1]))
            async_copy.store_matrices(to + 1024 * n, registers)
