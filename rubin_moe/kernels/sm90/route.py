"""Routing ids to passes, in shared memory, by every block for itself. Device code.

A pass is at most ``pass_tokens`` pairs (token x top_k + choice) of one expert; its word holds the
expert from bit 19, its first place in the sorted list of pairs from bit 8, their number below.
Pairs keep their order within an expert, so all blocks make the same list: a warp takes a segment
of the pairs, 32 at a time, and counts an expert's earlier ones with a match of the lanes and a
table; a thread an expert adds the segments up. Of up to 32 pairs one warp makes the list alone.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from rubin_moe.kernels.cute import ptx
from rubin_moe.kernels.sm90.plan import Plan

EXPERT_BITS = 10  # of a pair's word: its place among its segment's pairs of that expert above


def expert_of(word):
    return word >> 19


def first_of(word):
    return (word >> 8) & 2047


def count_of(word):
    return word & 255


class Router:
    """Device methods over one plan."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.size = plan.tiles.pass_tokens
        self.num_experts = plan.sizes.num_experts

    @cute.jit
    def route(self, smem, thread, warp, lane, ids, expert_map, num_pairs) -> Int32:
        """Number of passes. Whole block; ends with a barrier.

        ``ids``: int32 ``[num_pairs]``; through ``expert_map`` (int32) unless its address is 0. What
        is no local expert becomes -1.
        """
        passes = Int32(0)
        if num_pairs <= 32:
            if warp == 0:
                self.route_few(smem, lane, ids, expert_map, num_pairs)
            cute.arch.sync_threads()
            passes = ptx.load_shared_s32(smem + self.plan.offsets["groups"])
        else:
            passes = self.route_many(smem, thread, warp, lane, ids, expert_map, num_pairs)
        return passes

    @cute.jit
    def route_few(self, smem, lane, ids, expert_map, num_pairs):
        """One warp, a pair a lane; the number of passes to the first word of the groups."""
        at = self.plan.offsets
        expert = self.local_expert(ids, expert_map, lane, num_pairs)
        same = ptx.match_any(expert)
        earlier = ptx.count_ones(same & ((Uint32(1) << Uint32(lane)) - Uint32(1)))
        count = ptx.count_ones(same)
        mine = Int32(0)  # passes, of an expert's first pair
        if expert >= 0 and earlier == 0:
            mine = (count + (self.size - 1)) // self.size
        word = (mine << 16) | (expert & 0xFFFF)  # what is no local expert is above all others
        before = Int32(0)  # pairs << 16 | passes
        for j in cutlass.range_constexpr(32):
            other = ptx.broadcast(word, j)
            if (other & 0xFFFF) < (word & 0xFFFF):
                before += (1 << 16) | (other >> 16)
        if lane < num_pairs:
            ptx.store_shared_b32(smem + at["ids"] + 4 * lane, expert)
        if expert >= 0:
            ptx.store_shared_b32(smem + at["pairs"] + 4 * ((before >> 16) + earlier), lane)
        if mine > 0:
            self.list_passes(smem, expert, before, count)
        passes = self.inclusive(mine, lane)
        if lane == 31:
            ptx.store_shared_b32(smem + at["groups"], passes)

    @cute.jit
    def route_many(self, smem, thread, warp, lane, ids, expert_map, num_pairs) -> Int32:
        """All warps."""
        plan = self.plan
        self.load(smem, thread, ids, expert_map, num_pairs)
        cute.arch.sync_threads()
        segment = ((num_pairs + (32 * plan.segments - 1)) // (32 * plan.segments)) * 32
        end = (warp + 1) * segment
        end = end if end < num_pairs else num_pairs
        if warp < plan.segments:
            self.rank(smem, warp, lane, warp * segment, end)
        cute.arch.sync_threads()
        warps = plan.num_warps
        rounds = -(-plan.groups // warps)
        scans = []
        counts = []
        for r in cutlass.range_constexpr(rounds):
            group = warp + warps * r
            count = self.add_segments(smem, group * 32 + lane)
            packed = (count << 16) | ((count + (self.size - 1)) // self.size)
            total = self.inclusive(packed, lane)
            if group < plan.groups and lane == 31:
                ptx.store_shared_b32(smem + plan.offsets["groups"] + 4 * group, total)
            scans.append(total - packed)
            counts.append(count)
        cute.arch.sync_threads()
        for r in cutlass.range_constexpr(rounds):
            group = warp + warps * r
            before = scans[r] + self.groups_before(smem, group)
            if counts[r] > 0:
                self.list_passes(smem, group * 32 + lane, before, counts[r])
        passes = self.groups_before(smem, Int32(plan.groups)) & 0xFFFF
        cute.arch.sync_threads()
        if warp < plan.segments:
            self.place(smem, warp, lane, warp * segment, end)
        cute.arch.sync_threads()
        return passes

    @cute.jit
    def load(self, smem, thread, ids, expert_map, num_pairs):
        """Ids to shared memory, and zeros to the table of segments."""
        plan = self.plan
        i = Int32(thread)
        while i < num_pairs:
            expert = self.local_expert(ids, expert_map, i, num_pairs)
            ptx.store_shared_b32(smem + plan.offsets["ids"] + 4 * i, expert)
            i += plan.threads
        i = Int32(thread)
        while i < (plan.segments * self.num_experts + 1) // 2:
            ptx.store_shared_b32(smem + plan.offsets["segments"] + 4 * i, Int32(0))
            i += plan.threads

    @cute.jit
    def local_expert(self, ids, expert_map, pair, num_pairs) -> Int32:
        """Of a pair; -1 where there is none."""
        expert = Int32(-1)
        if pair < num_pairs:
            expert = ptx.load_s32(ids + Int64(pair) * 4)
        if expert_map != 0 and expert >= 0:
            expert = ptx.load_s32(expert_map + Int64(expert) * 4)
        if expert >= self.num_experts or expert < 0:
            expert = Int32(-1)
        return expert

    @cute.jit
    def rank(self, smem, warp, lane, start, end):
        """One segment: each pair's place among the segment's pairs of its expert, from bit 10 of
        its word; the expert's number of them to the table."""
        table = smem + self.plan.offsets["segments"] + 2 * self.num_experts * warp
        below = (Uint32(1) << Uint32(lane)) - Uint32(1)
        i = start + lane
        while i - lane < end:
            expert = Int32(-1)
            if i < end:
                expert = ptx.load_shared_s32(smem + self.plan.offsets["ids"] + 4 * i)
            same = ptx.match_any(expert)
            earlier = ptx.count_ones(same & below)
            entry = table + (2 * expert if expert >= 0 else Int32(0))
            before = Int32(ptx.load_shared_u16(entry))
            cute.arch.sync_warp()
            if expert >= 0:
                word = ((before + earlier) << EXPERT_BITS) | expert
                ptx.store_shared_b32(smem + self.plan.offsets["ids"] + 4 * i, word)
                if earlier == 0:
                    ptx.store_shared_b16(entry, before + ptx.count_ones(same))
            cute.arch.sync_warp()
            i += 32

    @cute.jit
    def add_segments(self, smem, expert) -> Int32:
        """Pairs of one expert; the table then says how many the segments before have."""
        total = Int32(0)
        if expert < self.num_experts:
            table = smem + self.plan.offsets["segments"] + 2 * expert
            found = []
            for s in cutlass.range_constexpr(self.plan.segments):
                found.append(Int32(ptx.load_shared_u16(table + 2 * self.num_experts * s)))
            for s in cutlass.range_constexpr(self.plan.segments):
                ptx.store_shared_b16(table + 2 * self.num_experts * s, total)
                total += found[s]
        return total

    @cute.jit
    def inclusive(self, value, lane) -> Int32:
        """Sum over this lane and those below."""
        for d in cutlass.range_constexpr(5):
            other = ptx.shuffle_up(value, 1 << d)
            value += other if lane >= (1 << d) else Int32(0)
        return value

    @cute.jit
    def groups_before(self, smem, group) -> Int32:
        total = Int32(0)
        for i in cutlass.range_constexpr(self.plan.groups):
            value = ptx.load_shared_s32(smem + self.plan.offsets["groups"] + 4 * i)
            total += value if i < group else Int32(0)
        return total

    @cute.jit
    def list_passes(self, smem, expert, before, count):
        """One expert's passes; ``before``: pairs << 16 | passes of the experts before."""
        first = before >> 16
        word = smem + self.plan.offsets["passes"] + 4 * (before & 0xFFFF)
        ptx.store_shared_b32(smem + self.plan.offsets["first"] + 4 * expert, first)
        at = Int32(0)
        while at < count:
            left = count - at
            size = left if left < self.size else Int32(self.size)
            ptx.store_shared_b32(word, (expert << 19) | ((first + at) << 8) | size)
            word += 4
            at += self.size

    @cute.jit
    def place(self, smem, warp, lane, start, end):
        """One segment's pairs to their places in the sorted list."""
        at = self.plan.offsets
        i = start + lane
        while i < end:
            word = ptx.load_shared_s32(smem + at["ids"] + 4 * i)
            if word >= 0:
                expert = word & ((1 << EXPERT_BITS) - 1)
                place = ptx.load_shared_s32(smem + at["first"] + 4 * expert)
                table = smem + at["segments"] + 2 * self.num_experts * warp
                place += Int32(ptx.load_shared_u16(table + 2 * expert))
                place += word >> EXPERT_BITS
                ptx.store_shared_b32(smem + at["pairs"] + 4 * place, i)
            i += 32
