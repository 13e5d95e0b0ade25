"""The prefill's routing: pairs sorted by expert, passes, and the tokens in the order of K.

    some blocks: count a chunk of the pairs --grid counter--> the same blocks: sort them
    all blocks: permute the tokens

Device code. A pair is token x top_k + choice. Experts come by their number of pairs, the most
first, the lower id first where they are equal; an expert's pairs keep their order, so every launch
writes the same tables whatever the blocks' timing:

- ``passes``: int32 ``[1 + passes, 4]``: first the number of passes and of sorted pairs, then of
  each pass its expert, first sorted pair and number of pairs: as few passes as hold an expert's
  pairs, of the same size or one more.
- ``pairs``: int32, the pairs in sorted order; those without an expert here are not among them.
- tokens as `permute` writes them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from rubin_moe.kernels.cute import ptx
from rubin_moe.kernels.sm90 import grid as barrier
from rubin_moe.kernels.sm90.permute import permute
from rubin_moe.kernels.sm90.sort_plan import RECORD, ROUNDS, SortPlan

EXPERT_BITS = 10  # of a pair's word: its place among its segment's pairs of that expert above
EXPERT_MASK = (1 << EXPERT_BITS) - 1
LOADS = 8  # of a thread under way


@cute.jit
def local_expert(ids, pair, expert_map, num_experts: cutlass.Constexpr) -> Int32:
    """Of an int32 id, through ``expert_map`` (int32) unless its address is 0; what is no local
    expert becomes -1."""
    expert = ptx.load_s32(ids + Int64(pair) * 4)
    if expert_map != 0 and expert >= 0:
        expert = ptx.load_s32(expert_map + Int64(expert) * 4)
    if expert >= num_experts or expert < 0:
        expert = Int32(-1)
    return expert


class Sort:
    """One kernel."""

    def __init__(self, plan: SortPlan):
        self.plan = plan

    @cute.jit
    def __call__(
        self,
        ids: Int64,
        expert_map: Int64,
        x: Int64,
        counts: Int64,
        passes: Int64,
        pairs: Int64,
        tokens: Int64,
        counter: Int64,
        num_tokens: Int32,
        blocks: Int32,
        stream,
    ):
        """Launch. Addresses of int32 ids ``[M, top_k]`` and map (or 0), 16-bit x ``[M, hidden]``,
        int32 scratch ``[blocks, num_experts]``, the three results, and a word that starts as 0."""
        self.kernel(
            ids, expert_map, x, counts, passes, pairs, tokens, counter, num_tokens
        ).launch(
            grid=(blocks, 1, 1),
            block=(self.plan.threads, 1, 1),
            smem=self.plan.smem_bytes,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        ids: Int64,
        expert_map: Int64,
        x: Int64,
        counts: Int64,
        passes: Int64,
        pairs: Int64,
        tokens: Int64,
        counter: Int64,
        num_tokens: Int32,
    ):
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread & 31
        smem = ptx.smem_base()
        ptx.launch_dependents()
        ptx.wait_for_launches_before()
        num_pairs = num_tokens * plan.top_k
        step = grid * plan.threads
        chunk = ((num_pairs + (step - 1)) // step) * plan.threads
        if num_pairs <= ROUNDS * plan.threads:
            chunk = Int32(ROUNDS * plan.threads)  # one block sorts, and meets nobody
        sorters = (num_pairs + (chunk - 1)) // chunk
        start = block * chunk
        segment = start + warp * (chunk // plan.warps)
        end = segment + chunk // plan.warps
        end = end if end < num_pairs else num_pairs
        old = Int32(0)
        if block < sorters:
            self.clear(smem, thread)
            cute.arch.sync_threads()
            self.rank(smem, warp, lane, start, segment, end, ids, expert_map)
            cute.arch.sync_threads()
            self.add_segments(smem, thread, counts + Int64(block) * (4 * plan.num_experts))
            cute.arch.sync_threads()
            if sorters > 1 and thread == 0:
                old = barrier.arrive(counter, block == 0, sorters)
        if sorters > 1 or block > 0 or grid == 1:
            before = Int32(1) if sorters == 1 and grid > 1 else Int32(0)
            permute(
                lane, (block - before) * plan.warps + warp, (grid - before) * plan.warps, x, tokens,
                num_tokens, plan.hidden, plan.k_blocks,
            )  # fmt: skip
        if block < sorters:
            if sorters > 1:
                if thread == 0:
                    barrier.wait(counter, old)
                cute.arch.sync_threads()
                self.add_blocks(smem, thread, block, sorters, counts)
                cute.arch.sync_threads()
            self.order(smem, thread, warp, lane)
            self.list_passes(smem, block * plan.warps + warp, sorters * plan.warps, lane, passes)
            self.place(smem, warp, lane, start, segment, end, pairs)

    # ---- before the barrier: a chunk's pairs of each expert

    @cute.jit
    def clear(self, smem, thread):
        plan = self.plan
        i = Int32(thread)
        while i < (plan.warps * plan.num_experts + 1) // 2:
            ptx.store_shared_b32(smem + plan.offsets["segments"] + 4 * i, Int32(0))
            i += plan.threads

    @cute.jit
    def rank(self, smem, warp, lane, start, segment, end, ids, expert_map):
        """A warp's segment of the chunk, 32 pairs a round: each pair's place among the segment's
        pairs of its expert, in its word; the expert's number of them in the table."""
        plan = self.plan
        table = smem + plan.offsets["segments"] + 2 * plan.num_experts * warp
        below = (Uint32(1) << Uint32(lane)) - Uint32(1)
        found = []
        for r in cutlass.range_constexpr(ROUNDS):
            i = segment + 32 * r + lane
            expert = Int32(-1)
            if i < end:
                expert = local_expert(ids, i, expert_map, plan.num_experts)
            found.append(expert)
        for r in cutlass.range_constexpr(ROUNDS):
            if segment + 32 * r < end:
                i = segment + 32 * r + lane
                expert = found[r]
                same = ptx.match_any(expert)
                earlier = ptx.count_ones(same & below)
                entry = table + (2 * expert if expert >= 0 else Int32(0))
                before = Int32(ptx.load_shared_u16(entry))
                cute.arch.sync_warp()
                word = Int32(-1)
                if expert >= 0:
                    word = ((before + earlier) << EXPERT_BITS) | expert
                    if earlier == 0:
                        ptx.store_shared_b16(entry, before + ptx.count_ones(same))
                ptx.store_shared_b32(smem + plan.offsets["words"] + 4 * (i - start), word)
                cute.arch.sync_warp()

    @cute.jit
    def add_segments(self, smem, thread, counts):
        """The chunk's counts to device memory, and as if it were the only one to ``totals``; the
        table then says how many pairs the segments before have."""
        plan = self.plan
        for g in cutlass.range_constexpr(plan.groups):
            i = Int32(thread)
            while i < plan.slots:
                at = smem + 4 * (g * plan.slots + i)
                ptx.store_shared_b32(at + plan.offsets["totals"], Int32(0))
                ptx.store_shared_b32(at + plan.offsets["before"], Int32(0))
                i += plan.threads
        expert = Int32(thread)
        while expert < plan.num_experts:
            table = smem + plan.offsets["segments"] + 2 * expert
            found = []
            for s in cutlass.range_constexpr(plan.warps):
                found.append(Int32(ptx.load_shared_u16(table + 2 * plan.num_experts * s)))
            total = Int32(0)
            for s in cutlass.range_constexpr(plan.warps):
                ptx.store_shared_b16(table + 2 * plan.num_experts * s, total)
                total += found[s]
            ptx.store_s32(counts + Int64(expert) * 4, total)
            ptx.store_shared_b32(smem + plan.offsets["totals"] + 4 * expert, total)
            expert += plan.threads

    # ---- behind the barrier: the order of the experts

    @cute.jit
    def order(self, smem, thread, warp, lane):
        """Fills the tables ``ranked``, ``rows`` and ``passes`` by the experts' order, ``places`` by
        expert: where this chunk's first pair of it goes. Whole block; ends with a barrier."""
        plan = self.plan
        at = plan.offsets
        before = []
        for r in cutlass.range_constexpr(plan.rounds):
            before.append(self.add_groups(smem, thread + plan.threads * r))
        cute.arch.sync_threads()
        ranks = []
        for r in cutlass.range_constexpr(plan.rounds):
            ranks.append(self.rank_of(smem, thread + plan.threads * r))
        cute.arch.sync_threads()
        scans = []
        for r in cutlass.range_constexpr(plan.rounds):
            scans.append(self.scan(smem, thread + plan.threads * r, lane))
        cute.arch.sync_threads()
        for r in cutlass.range_constexpr(plan.rounds):
            index = thread + plan.threads * r
            if index < plan.slots:
                rows, passes = self.sums_before(smem, index >> 5)
                ptx.store_shared_b32(smem + at["rows"] + 4 * index, scans[r][0] + rows)
                ptx.store_shared_b32(smem + at["passes"] + 4 * index, scans[r][1] + passes)
        cute.arch.sync_threads()
        for r in cutlass.range_constexpr(plan.rounds):
            expert = thread + plan.threads * r
            if expert < plan.num_experts:
                first = ptx.load_shared_s32(smem + at["rows"] + 4 * ranks[r])
                ptx.store_shared_b32(smem + at["places"] + 4 * expert, first + before[r])
        cute.arch.sync_threads()

    @cute.jit
    def add_blocks(self, smem, thread, block, sorters, counts):
        """An expert's pairs of all chunks and of those before this one; groups of threads share
        the chunks."""
        plan = self.plan
        group = thread // plan.slots
        for r in cutlass.range_constexpr(plan.rounds):
            expert = thread - group * plan.slots + plan.threads * r
            total = Int32(0)
            before = Int32(0)
            if expert < plan.num_experts and group < plan.groups:
                row = Int32(group)
                while row < sorters:
                    found = []
                    for u in cutlass.range_constexpr(LOADS):
                        other = row + plan.groups * u
                        value = Int32(0)
                        if other < sorters:
                            place = Int64(other) * plan.num_experts + Int64(expert)
                            value = ptx.load_s32(counts + place * 4)
                        found.append(value)
                    for u in cutlass.range_constexpr(LOADS):
                        total += found[u]
                        before += found[u] if row + plan.groups * u < block else Int32(0)
                    row += plan.groups * LOADS
            if group < plan.groups and expert < plan.slots:
                to = smem + 4 * (group * plan.slots + expert)
                ptx.store_shared_b32(to + plan.offsets["totals"], total)
                ptx.store_shared_b32(to + plan.offsets["before"], before)

    @cute.jit
    def add_groups(self, smem, expert) -> Int32:
        """Of the chunks before; the key that orders the experts goes to its table: the number of
        pairs, then the lower id; -1 where there is no expert."""
        plan = self.plan
        total = Int32(0)
        before = Int32(0)
        if expert < plan.slots:
            for g in cutlass.range_constexpr(plan.groups):
                at = smem + 4 * (g * plan.slots + expert)
                total += ptx.load_shared_s32(at + plan.offsets["totals"])
                before += ptx.load_shared_s32(at + plan.offsets["before"])
            key = (total << EXPERT_BITS) | (EXPERT_MASK - expert)
            key = key if expert < plan.num_experts else Int32(-1)
            ptx.store_shared_b32(smem + plan.offsets["keys"] + 4 * expert, key)
            ptx.store_shared_b32(smem + plan.offsets["ranked"] + 4 * expert, Int32(-1))
        return before

    @cute.jit
    def rank_of(self, smem, expert) -> Int32:
        """An expert's place in the order; its key goes there."""
        plan = self.plan
        rank = Int32(0)
        if expert < plan.num_experts:
            key = ptx.load_shared_s32(smem + plan.offsets["keys"] + 4 * expert)
            other = Int32(0)
            while other < plan.slots:
                four = ptx.load_shared_v4(smem + plan.offsets["keys"] + 4 * other)
                for i in cutlass.range_constexpr(4):
                    rank += Int32(1) if Int32(four[i]) > key else Int32(0)
                other += 4
            ptx.store_shared_b32(smem + plan.offsets["ranked"] + 4 * rank, key)
        return rank

    @cute.jit
    def scan(self, smem, index, lane):
        """Pairs and passes of the experts before, of the same 32; the sums of all 32 to their
        table."""
        plan = self.plan
        key = Int32(-1)
        if index < plan.slots:
            key = ptx.load_shared_s32(smem + plan.offsets["ranked"] + 4 * index)
        count = key >> EXPERT_BITS if key >= 0 else Int32(0)
        number = (count + (plan.pass_tokens - 1)) // plan.pass_tokens
        rows = count
        passes = number
        for d in cutlass.range_constexpr(5):
            more_rows = ptx.shuffle_up(rows, 1 << d)
            more_passes = ptx.shuffle_up(passes, 1 << d)
            rows += more_rows if lane >= (1 << d) else Int32(0)
            passes += more_passes if lane >= (1 << d) else Int32(0)
        if lane == 31 and index < plan.slots:
            to = smem + plan.offsets["sums"] + 8 * (index >> 5)
            ptx.store_shared_b32(to, rows)
            ptx.store_shared_b32(to + 4, passes)
        return rows - count, passes - number

    @cute.jit
    def sums_before(self, smem, group):
        """Pairs and passes of the groups of 32 experts before."""
        rows = Int32(0)
        passes = Int32(0)
        for g in cutlass.range_constexpr(self.plan.slots // 32):
            at = smem + self.plan.offsets["sums"] + 8 * g
            more_rows = ptx.load_shared_s32(at)
            more_passes = ptx.load_shared_s32(at + 4)
            rows += more_rows if g < group else Int32(0)
            passes += more_passes if g < group else Int32(0)
        return rows, passes

    # ---- results

    @cute.jit
    def list_passes(self, smem, worker, workers, lane, passes):
        """A warp an expert, a lane a pass."""
        plan = self.plan
        at = plan.offsets
        if worker == 0 and lane == 0:
            rows, number = self.sums_before(smem, Int32(plan.slots // 32))
            ptx.store_v4_b32(passes, [number, rows, Int32(0), Int32(0)])
        index = Int32(worker)
        while index < plan.num_experts:
            key = ptx.load_shared_s32(smem + at["ranked"] + 4 * index)
            expert = EXPERT_MASK - (key & EXPERT_MASK)
            count = key >> EXPERT_BITS
            first = ptx.load_shared_s32(smem + at["rows"] + 4 * index)
            before = ptx.load_shared_s32(smem + at["passes"] + 4 * index)
            number = (count + (plan.pass_tokens - 1)) // plan.pass_tokens
            size = count // (number if number > 0 else Int32(1))
            larger = count - size * number
            piece = Int32(lane)
            while piece < number:
                done = piece * size + (piece if piece < larger else larger)
                to = passes + Int64(1 + before + piece) * RECORD
                tokens = size + (Int32(1) if piece < larger else Int32(0))
                ptx.store_v4_b32(to, [expert, first + done, tokens, Int32(0)])
                piece += 32
            index += workers

    @cute.jit
    def place(self, smem, warp, lane, start, segment, end, pairs):
        """A warp's pairs to their places in the sorted order."""
        plan = self.plan
        at = plan.offsets
        i = segment + lane
        while i < end:
            word = ptx.load_shared_s32(smem + at["words"] + 4 * (i - start))
            if word >= 0:
                expert = word & EXPERT_MASK
                place = ptx.load_shared_s32(smem + at["places"] + 4 * expert)
                table = smem + at["segments"] + 2 * plan.num_experts * warp
                place += Int32(ptx.load_shared_u16(table + 2 * expert))
                place += word >> EXPERT_BITS
                ptx.store_s32(pairs + Int64(place) * 4, i)
            i += 32
