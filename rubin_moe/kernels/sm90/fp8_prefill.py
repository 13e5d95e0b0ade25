"""`prefill` with FP8 activations: MXFP4 weights become E4M3 in registers, exactly. Device code.

A row of weights is off by a power of two, its alpha, a token by another, its scale
(`kernels.sm90.fp8_scales`, `formats.fp8_rows`). A stage is 128 of K: of each 64, byte
32 j + 16 h + 4 t + i of a token is element 16 t + 8 j + 4 h + i (`kernels.sm90.fp8_rows`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.cute import async_copy, fp8, ptx
from rubin_moe.kernels.sm90.activate import activate
from rubin_moe.kernels.sm90.fp8_plan import ENTRY, Fp8Plan, table_words
from rubin_moe.kernels.sm90.fp8_wgmma import decode_word, fold, start_fp8, unfold
from rubin_moe.kernels.sm90.prefill import AT_ONCE, GATHERERS, GROUP_BARRIER, PrefillGemm
from rubin_moe.kernels.sm90.prefill_plan import MMA_ROWS, UNIT_BYTES
from rubin_moe.kernels.sm90.prefill_wgmma import wait

HALF_STAGE = 544  # bytes of a tile's weights over 64 of K


class Fp8Gemm(PrefillGemm):
    """FC1 with its activation, or FC2 with the router's weights."""

    def __init__(self, plan: Fp8Plan, fc1: bool, activation: Activation, bias: bool):
        super().__init__(plan, fc1, activation, bias)
        self.k_blocks = self.chunks = plan.sizes.chunks13 if fc1 else plan.sizes.chunks2
        self.exponent = plan.half_exponent(self.k_blocks)
        self.promote = plan.tiles.promote if plan.tiles.promote < self.k_blocks else 0

    @cute.jit
    def __call__(
        self,
        w: Int64,
        alpha: Int64,
        bias: Int64,
        tokens: Int64,
        scales: Int64,
        passes: Int64,
        pairs: Int64,
        weights: Int64,
        out: Int64,
        blocks: Int32,
        stream,
    ):
        """Launch. As `PrefillGemm`, but: ``alpha`` float32 of each row of weights, in the order of
        ``bias``; ``tokens`` E4M3, FC1: ``[M, 128 stages]``, FC2: ``[passes, stages, pass_tokens,
        128]``; ``scales`` float32, FC1: ``[M]``, FC2: of each sorted row."""
        self.kernel(w, alpha, bias, tokens, scales, passes, pairs, weights, out).launch(
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
        scales: Int64,
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
        for i, (low, high) in enumerate(table_words()):
            if thread == i:
                ptx.store_shared_b32(smem + self.at["table"] + ENTRY * i, Uint32(low))
                ptx.store_shared_b32(smem + self.at["table"] + ENTRY * i + 4, Uint32(high))
        self.clear_weights(smem, thread)
        self.set_up(smem, thread)
        ptx.launch_dependents()
        ptx.wait_for_launches_before()
        number = ptx.load_s32(passes)
        if warp >= plan.consumers:
            producer = thread - 32 * plan.consumers
            async_copy.set_registers(plan.registers[1], more=False)
            if warp == plan.consumers + GATHERERS:
                self.load_weights(smem, w, alpha, tokens, passes, number)
            elif cutlass.const_expr(self.fc1):
                self.gather_rows(smem, producer, tokens, scales, passes, pairs, number)
            else:
                self.note_rows(smem, producer, passes, pairs, (weights, scales), number)
        else:
            async_copy.set_registers(plan.registers[0], more=True)
            self.consume_rows(smem, warp, lane, (alpha, bias), out, number)

    @cute.jit
    def clear_weights(self, smem, thread):
        """Tiles that the last unit lacks are multiplied too, and a scale is an address."""
        if cutlass.const_expr(self.tiles % self.plan.unit_tiles > 0):
            at = Int32(thread) * 16
            zeros = [Float32(0.0) for _ in range(4)]
            while at < self.stages * self.plan.weight_bytes:
                ptx.store_shared_v4_f32(smem + self.at["weights"] + at, zeros)
                at += 16 * self.plan.threads

    def store_alphas(self, to, alpha, expert):
        """They are the rows' own."""

    @cute.jit
    def gather_rows(self, smem, thread, tokens, scales, passes, pairs, number):
        """As `PrefillGemm.gather`, and notes the tokens' scales, zeros behind them."""
        plan = self.plan
        turns = -(-plan.tiles.pass_tokens // AT_ONCE)
        unit, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        stage, parity = Int32(0), Int32(1)
        half, noted = Int32(0), Int32(1)
        place = thread >> 3
        chunk = thread & 7
        lines = cute.make_rmem_tensor((turns,), Int32)
        while unit < number * self.units:
            record, _, _ = self.place(unit, passes, number)
            first = ptx.load_s32(record + 4)
            count = ptx.load_s32(record + 8)
            to = smem + self.at["notes"] + half * plan.note_bytes
            ptx.mbarrier_wait(smem + self.at["read"] + 8 * half, noted)
            for i in cutlass.range_constexpr(turns):
                lines[i] = Int32(0)
                scale = Int32(0)
                if place + i * AT_ONCE < count:
                    pair = ptx.load_s32(pairs + Int64(first + place + i * AT_ONCE) * 4)
                    token = pair // plan.sizes.top_k
                    lines[i] = token * self.k_blocks
                    scale = ptx.load_s32(scales + Int64(token) * 4)
                if (chunk == 0) & (place + i * AT_ONCE < plan.tiles.pass_tokens):
                    ptx.store_shared_b32(to + 4 * (place + i * AT_ONCE), scale)
            ptx.mbarrier_arrive(smem + self.at["noted"] + 8 * half)
            noted = noted ^ half
            half = half ^ 1
            source = tokens + Int64(chunk * 16)
            k = Int32(0)
            while k < self.chunks:
                self.claim(smem, stage, parity)
                to = smem + self.at["tokens"] + stage * plan.token_bytes + place * 128
                for i in cutlass.range_constexpr(turns):
                    if place + i * AT_ONCE < count:
                        swizzled = (chunk ^ ((place + i * AT_ONCE) & 7)) << 4
                        line = source + Int64(lines[i]) * 128
                        async_copy.copy_16(to + i * AT_ONCE * 128 + swizzled, line)
                async_copy.arrive_after_copies(smem + self.at["full"] + 8 * stage)
                source += Int64(128)
                stage, parity = self.next(stage, parity)
                k += 1
            unit += grid

    @cute.jit
    def note_rows(self, smem, thread, passes, pairs, factors, number):
        """As `PrefillGemm.note`, and the weights times the rows' scales."""
        t = self.plan.tiles.pass_tokens
        weights, scales = factors
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
                scale = Float32(0.0)
                if place < count:
                    scale = ptx.load_f32(scales + Int64(first + place) * 4)
                    pair = ptx.load_s32(pairs + Int64(first + place) * 4)
                    weight = ptx.load_f32(weights + Int64(pair) * 4)
                if place < t:
                    ptx.store_shared_b32(to + 4 * place, pair)
                    ptx.store_shared_b32(to + 4 * (t + place), ptx.as_u32(weight))
                    ptx.store_shared_b32(to + 4 * (2 * t + place), ptx.as_u32(weight * scale))
            ptx.mbarrier_arrive(smem + self.at["noted"] + 8 * half)
            parity = parity ^ half
            half = half ^ 1
            unit += grid

    # ---- consumers

    @cute.jit
    def consume_rows(self, smem, warp, lane, rows, out, number):
        """As `PrefillGemm.consume`; ``rows``: alpha and bias."""
        plan = self.plan
        unit, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        stage, parity = Int32(0), Int32(0)
        half, noted = Int32(0), Int32(0)
        sums = self.registers()
        group = warp >> 2
        behind = group * min(plan.tiles.lag, (self.chunks - 1) // max(1, plan.tiles.groups - 1))
        if (behind > 0) & (unit < number * self.units):
            ptx.mbarrier_wait(smem + self.at["full"] + 8 * behind, Int32(0))
        while unit < number * self.units:
            self.await_stage(smem, stage, parity)
            known = smem + self.at["units"] + stage * UNIT_BYTES
            index, row, expert, count = async_copy.load_shared_v4_s32(known)
            tile = row * plan.unit_tiles + 8 * group  # the first of this warpgroup's eight
            where = (index, expert, count, tile)
            note = (half, noted)
            if tile < self.tiles:
                for i in cutlass.range_constexpr(len(plan.widths)):
                    n = plan.widths[i]
                    least = plan.widths[i + 1] if i + 1 < len(plan.widths) else 0
                    if (count > least) & (count <= n):
                        acc, stage, parity = self.products(smem, warp, lane, stage, parity, n, sums)
                        finish = self.finish_fc1 if self.fc1 else self.finish_fc2
                        finish(smem, warp, lane, acc, n, where, note, rows, out)
            else:
                stage, parity = self.skip(smem, stage, parity)
            ptx.mbarrier_wait(smem + self.at["noted"] + 8 * half, noted)
            ptx.mbarrier_arrive(smem + self.at["read"] + 8 * half)
            noted = noted ^ half
            half = half ^ 1
            unit += grid
        async_copy.bulk_wait()

    def registers(self):
        """Accumulators, A and weights on their way to it: the same for all widths, else the MMAs of
        one would wait for each other."""
        most = self.plan.tiles.pass_tokens // 2
        acc = [cute.make_rmem_tensor((most,), Float32) for _ in range(2)]
        a = [cute.make_rmem_tensor((8,), Uint32) for _ in range(2)]
        words = cute.make_rmem_tensor((8,), Uint32)
        for m in range(2):
            acc[m].fill(0.0)
            a[m].fill(0)
        words.fill(0)
        return acc, a, words

    # ---- products

    @cute.jit
    def products(self, smem, warp, lane, stage, parity, n: cutlass.Constexpr, sums):
        """Two row tiles of 64 x the pass's tokens: the MMAs of one and the look-ups of the other
        at a time."""
        plan = self.plan
        acc, a, words = sums
        totals = [cute.make_rmem_tensor((n // 4,), Uint32) for _ in range(2)]
        if cutlass.const_expr(self.promote > 0):
            for m in cutlass.range_constexpr(2):
                totals[m].fill(0)
        nbytes = plan.sizes.block_bytes
        mine = (8 * (warp >> 2) + (warp & 3)) * nbytes
        table = smem + self.at["table"]
        block = smem + self.at["weights"] + stage * plan.weight_bytes + mine
        self.fetch_fp8(block, table, lane, words)
        before = Int32(stage)
        fresh = Int32(0)
        left = Int32(self.promote)
        k = Int32(0)
        while k < self.k_blocks:
            rows = smem + self.at["tokens"] + stage * plan.token_bytes
            for b in cutlass.range_constexpr(2):
                for m in cutlass.range_constexpr(2):
                    self.decode_fp8(words, a[m])
                    if cutlass.const_expr(b + m < 2):
                        there = HALF_STAGE * b + 4 * nbytes if m == 0 else HALF_STAGE
                        self.fetch_fp8(block + there, table, lane, words)
                    start_fp8(n, acc[m], a[m], rows + 64 * b, 1 if b else fresh)
                    if cutlass.const_expr(b + m < 2):
                        wait(1)  # for the other tile's block before
                    if cutlass.const_expr(b + m == 0):  # noqa: SIM102  decided when compiling
                        if k > 0:
                            self.leave(smem, before)
            before = Int32(stage)
            stage, parity = self.next(stage, parity)
            k += 1
            fresh = Int32(1)
            if k < self.k_blocks:
                self.await_stage(smem, stage, parity)
                block = smem + self.at["weights"] + stage * plan.weight_bytes + mine
                self.fetch_fp8(block, table, lane, words)
            wait(1)
            if cutlass.const_expr(self.promote > 0):
                left -= 1
                if left == 0:
                    left = Int32(self.promote)
                    if k < self.k_blocks:
                        fresh = Int32(0)
                        self.promote_sums(acc, totals, n)
        wait(0)
        self.leave(smem, before)
        if cutlass.const_expr(self.promote > 0):
            for m in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(n // 4):
                    both = unfold(totals[m][i], [acc[m][2 * i], acc[m][2 * i + 1]], self.exponent)
                    acc[m][2 * i] = both[0]
                    acc[m][2 * i + 1] = both[1]
        return acc, stage, parity

    @cute.jit
    def promote_sums(self, acc, totals, n: cutlass.Constexpr):
        wait(0)
        for m in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(n // 4):
                totals[m][i] = fold(totals[m][i], [acc[m][2 * i], acc[m][2 * i + 1]], self.exponent)

    @cute.jit
    def fetch_fp8(self, block, table, lane, words):
        """A lane's codes of a block, and its two rows' magnitudes."""
        v = ptx.load_shared_v4(block + lane * 16)
        at = block + 512 + ((lane & 2) << 3) + ((lane >> 2) << 1)
        entries = ptx.load_shared_u16(at)
        low = fp8.load_shared_v2(table + Int32(entries & Uint32(0xFF)))
        high = fp8.load_shared_v2(table + Int32(entries >> Uint32(8)))
        for i in cutlass.range_constexpr(4):
            words[i] = v[i]
        for i in cutlass.range_constexpr(2):
            words[4 + i] = low[i]
            words[6 + i] = high[i]

    @cute.jit
    def decode_fp8(self, words, a):
        for j in cutlass.range_constexpr(4):
            both = decode_word(words[j], (words[4], words[5]), (words[6], words[7]))
            a[2 * j] = both[0]
            a[2 * j + 1] = both[1]

    # ---- epilogues

    def alphas(self, alpha, expert, tile, g):
        """Of rows g and g + 8 of a tile."""
        at = alpha + (Int64(expert * self.tiles + tile) * 16 + Int64(g)) * 4
        return ptx.load_f32(at), ptx.load_f32(at + 32)

    @cute.jit
    def finish_fc1(
        self, smem, warp, lane, acc, width: cutlass.Constexpr, where, note, rows, out
    ):  # fmt: skip
        """As `PrefillGemm.finish1`, with a factor of each row and token."""
        index, expert, count, tile = where
        half, noted = note
        alpha, bias = rows
        plan = self.plan
        sizes = plan.sizes
        quarter = warp & 3
        g = lane >> 2
        odd = g & 1
        place = 2 * (lane & 3) + odd
        staging = smem + self.at["staging"] + (warp >> 2) * plan.token_bytes
        row = staging + place * 128
        column = smem + self.at["notes"] + half * plan.note_bytes + 8 * (lane & 3)
        ptx.mbarrier_wait(smem + self.at["noted"] + 8 * half, noted)
        target = out + Int64(index) * (sizes.k_blocks2 * plan.token_bytes)
        selector = Int32(0x5410)
        if odd == 1:
            selector = Int32(0x3276)
        if cutlass.const_expr(sizes.gated):
            tiles = [tile + 4 * m + quarter for m in range(2)]
            biases = [self.biases1(bias, expert * self.tiles + t, g) for t in tiles]
            alphas = [self.alphas(alpha, expert, t, g) for t in tiles]
            self.free_staging(warp, lane)
            at = row + (((4 * (quarter & 1) + (g >> 1)) ^ place) << 4) + 4 * (quarter >> 1)
            for n in cutlass.range_constexpr(width // 8):
                scale = async_copy.load_shared_v2_f32(column + 32 * n)
                for m in cutlass.range_constexpr(2):
                    gate = self.real(acc[m], 4 * n, alphas[m][0], scale, biases[m][0])
                    up = self.real(acc[m], 4 * n + 2, alphas[m][1], scale, biases[m][1])
                    v = [activate(self.activation, x, y) for x, y in zip(gate, up, strict=True)]
                    ptx.store_shared_b32(at + n * 1024 + 8 * m, self.turn(v, selector))
            self.store_tile(warp, lane, staging, target, tile >> 3, count)
        else:
            for m in cutlass.range_constexpr(2):
                if tile + 4 * m < self.tiles:
                    this = tile + 4 * m + quarter
                    biases = self.biases1(bias, expert * self.tiles + this, g)
                    alphas = self.alphas(alpha, expert, this, g)
                    self.free_staging(warp, lane)
                    for n in cutlass.range_constexpr(width // 8):
                        scale = async_copy.load_shared_v2_f32(column + 32 * n)
                        for h in cutlass.range_constexpr(2):
                            x = self.real(acc[m], 4 * n + 2 * h, alphas[h], scale, biases[h])
                            v = [activate(self.activation, y, y) for y in x]
                            at = row + (((4 * h + (g >> 1)) ^ place) << 4) + 4 * quarter
                            ptx.store_shared_b32(at + n * 1024, self.turn(v, selector))
                    self.store_tile(warp, lane, staging, target, (tile >> 2) + m, count)

    def real(self, acc, i: int, alpha, scale, bias):
        """Two tokens' results of a row."""
        return [acc[i + j] * (alpha * scale[j]) + bias for j in range(2)]

    @cute.jit
    def finish_fc2(
        self, smem, warp, lane, acc, width: cutlass.Constexpr, where, note, rows, out
    ):  # fmt: skip
        """As `PrefillGemm.finish2`, with a factor of each row and token."""
        _, expert, count, tile = where
        half, noted = note
        alpha, bias = rows
        plan = self.plan
        sizes = plan.sizes
        group = warp >> 2
        quarter = warp & 3
        staging = smem + self.at["staging"] + group * plan.token_bytes
        table = smem + self.at["notes"] + half * plan.note_bytes
        ptx.mbarrier_wait(smem + self.at["noted"] + 8 * half, noted)
        thread = 32 * quarter + lane
        chunk = thread & 7
        for m in cutlass.range_constexpr(2):
            feature = (tile + 4 * m) * 16
            biases = [Float32(0.0), Float32(0.0)]
            alphas = [Float32(0.0), Float32(0.0)]
            row = feature + 16 * quarter + (lane >> 2)
            if row < sizes.hidden:
                at = (Int64(expert) * sizes.hidden + Int64(row)) * 4
                alphas = [ptx.load_f32(alpha + at), ptx.load_f32(alpha + at + 32)]
                if cutlass.const_expr(self.bias):
                    biases = [ptx.load_f32(bias + at), ptx.load_f32(bias + at + 32)]
            self.group_barrier(group)
            self.stage2_fp8(lane, quarter, acc[m], width, biases, alphas, table, staging)
            self.group_barrier(group)
            if feature + chunk * 8 < sizes.hidden:
                self.store_rows(thread, count, width, table, staging, out, feature + chunk * 8)

    def group_barrier(self, group):
        ptx.barrier_sync_at(GROUP_BARRIER + group, 2 * MMA_ROWS)

    def stage2_fp8(self, lane, quarter, acc, width, biases, alphas, table, staging):
        """One row tile, transposed: tokens' rows of 64 features, 128-byte swizzled."""
        kind, t = self.plan.sizes.kind, self.plan.tiles.pass_tokens
        column = table + 4 * t + 8 * (lane & 3)
        matrix = lane >> 3
        chunk = 2 * quarter + (matrix & 1)
        to = staging + (8 * (matrix >> 1) + (lane & 7)) * 128 + ((chunk ^ (lane & 7)) << 4)
        eights = width // 8
        for n in range(0, eights, 2):
            registers = []
            for j in range(n, min(n + 2, eights)):
                scale = async_copy.load_shared_v2_f32(column + 4 * t + 32 * j)
                added = [Float32(0.0)] * 2
                if self.bias:
                    added = async_copy.load_shared_v2_f32(column + 32 * j)
                for h in range(2):
                    v = [
                        acc[4 * j + 2 * h + i] * (alphas[h] * scale[i]) + biases[h] * added[i]
                        for i in range(2)
                    ]
                    registers.append(ptx.pack_x2(kind, v[0], v[1]))
            async_copy.store_matrices(to + 1024 * n, registers)
