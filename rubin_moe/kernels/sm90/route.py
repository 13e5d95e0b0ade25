"""Routing ids to passes, in shared memory, by every block for itself. Device code.

A pass is at most ``pass_tokens`` pairs (token x top_k + choice) of one expert; its word holds the
expert from bit 16, its first place in the sorted list of pairs from bit 5, their number below.
Pairs keep their order within an expert, so all blocks make the same list.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from rubin_moe.kernels.cute import ptx
from rubin_moe.kernels.sm90.plan import DecodePlan


def expert_of(word):
    return word >> 16


def first_of(word):
    return (word >> 5) & 2047


def count_of(word):
    return word & 31


class Router:
    """Device methods over one plan."""

    def __init__(self, plan: DecodePlan):
        self.plan = plan
        self.size = plan.tiles.pass_tokens

    @cute.jit
    def route(self, smem, thread, warp, lane, ids, expert_map, num_pairs) -> Int32:
        """Number of passes. Whole block; ends with a barrier.

        ``ids``: int32 ``[num_pairs]``; through ``expert_map`` (int32) unless its address is 0. What
        is no local expert becomes -1.
        """
        plan = self.plan
        table = smem + plan.offsets["ids"]
        num_experts = plan.sizes.num_experts
        padded = (num_pairs + 3) & -4
        i = Int32(thread)
        while i < padded:
            expert = Int32(-1)
            if i < num_pairs:
                expert = ptx.load_s32(ids + Int64(i) * 4)
                if expert_map != 0 and expert >= 0:
                    expert = ptx.load_s32(expert_map + Int64(expert) * 4)
                if expert >= num_experts or expert < 0:
                    expert = Int32(-1)
            ptx.store_shared_b32(table + 4 * i, expert)
            i += plan.threads
        cute.arch.sync_threads()
        warps = plan.tiles.warps + 1
        rounds = -(-plan.groups // warps)
        scans = []
        counts = []
        for r in cutlass.range_constexpr(rounds):
            group = warp + warps * r
            count = self.count(table, padded, group * 32 + lane)
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
                self.list_pairs(smem, padded, group * 32 + lane, before, counts[r])
        passes = self.groups_before(smem, Int32(plan.groups)) & 0xFFFF
        cute.arch.sync_threads()
        return passes

    @cute.jit
    def count(self, table, padded, expert) -> Int32:
        """Pairs of one expert."""
        count = Int32(0)
        i = Int32(0)
        while i < padded:
            four = ptx.load_shared_v4(table + 4 * i)
            for j in cutlass.range_constexpr(4):
                count += Int32(1) if Int32(four[j]) == expert else Int32(0)
            i += 4
        return count

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
        i = Int32(0)
        while i < group and i < self.plan.groups:
            total += ptx.load_shared_s32(smem + self.plan.offsets["groups"] + 4 * i)
            i += 1
        return total

    @cute.jit
    def list_pairs(self, smem, padded, expert, before, count):
        """One expert's passes and pairs; ``before``: pairs << 16 | passes of the experts before."""
        first = before >> 16
        word = smem + self.plan.offsets["passes"] + 4 * (before & 0xFFFF)
        at = Int32(0)
        while at < count:
            left = count - at
            size = left if left < self.size else Int32(self.size)
            ptx.store_shared_b32(word, (expert << 16) | ((first + at) << 5) | size)
            word += 4
            at += self.size
        place = smem + self.plan.offsets["pairs"] + 4 * first
        i = Int32(0)
        while i < padded:
            four = ptx.load_shared_v4(smem + self.plan.offsets["ids"] + 4 * i)
            for j in cutlass.range_constexpr(4):
                if Int32(four[j]) == expert:
                    ptx.store_shared_b32(place, i + j)
                    place += 4
            i += 4
