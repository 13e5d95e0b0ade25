"""What both kernels do around the multiplication: scales, the grid's barrier, the weighted sum.
Device code."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from rubin_moe.kernels.cute import ptx
from rubin_moe.kernels.sm90.plan import Plan
from rubin_moe.kernels.sm90.route import expert_of

FIRST_PASS = 32  # int32 word of the counters, behind the grid's


class Finish:
    """Device methods over one plan; ``bias``: whether the layer has any."""

    def __init__(self, plan: Plan, bias: bool):
        self.plan = plan
        self.bias = bias

    @cute.jit
    def scales1(self, smem, lane, row, index, alpha13, bias13):
        """Word of a pass, alphas and biases of rows g and g + 8 of one of FC1's tiles."""
        sizes = self.plan.sizes
        word = ptx.load_shared_s32(smem + self.plan.offsets["passes"] + 4 * index)
        expert = expert_of(word)
        low = ptx.load_f32(alpha13 + Int64(expert) * 8)
        high = ptx.load_f32(alpha13 + Int64(expert) * 8 + 4)
        bias_low = Float32(0.0)
        bias_high = Float32(0.0)
        if cutlass.const_expr(self.bias):
            tile = expert * sizes.tiles13 + row
            at = bias13 + Int64(tile * 16 + (lane >> 2)) * 4
            bias_low = ptx.load_f32(at)
            bias_high = ptx.load_f32(at + 32)
        return word, low, high, bias_low, bias_high

    @cute.jit
    def wait_for_all(self, thread, block, counters, grid):
        """All threads of all blocks; what any of them wrote is seen by all."""
        cute.arch.sync_threads()
        if thread == 0:
            self.arrive_and_wait(block, counters, grid)
        cute.arch.sync_threads()

    @cute.jit
    def arrive_and_wait(self, block, counters, grid):
        """One thread of each block. All add 2^31 to the counter together: when its top bit has
        turned, all are here. It never has to be set back."""
        rest = Int32(-(2**31)) - (grid - 1)
        old = ptx.fetch_add_release(counters, rest if block == 0 else Int32(1))
        seen = ptx.load_acquire(counters)
        while (seen ^ old) >= 0:
            seen = ptx.load_acquire(counters)

    @cute.jit
    def reset(self, thread, block, counters, grid, passes):
        """The passes' counters for the next launch; behind the wait nobody reads them."""
        i = Int32(block) + thread * grid
        while i < passes:
            ptx.store_s32(counters + Int64(FIRST_PASS + i) * 4, Int32(0))
            i += self.plan.threads * grid

    @cute.jit
    def sum_choices(self, smem, thread, block, grid, partial, out, num_tokens):
        """Four features a thread, choices and slabs in order; eight threads read 128 bytes."""
        plan = self.plan
        sizes = plan.sizes
        quads = sizes.hidden // 4
        pieces = (num_tokens * quads + 7) >> 3
        piece = Int32(block) + (thread >> 3) * grid
        while piece < pieces:
            at = piece * 8 + (thread & 7)
            token = at // quads
            if token < num_tokens:
                column = Int64((at - token * quads) * 4)
                loaded = []
                for k in cutlass.range_constexpr(sizes.top_k):
                    pair = token * sizes.top_k + k
                    expert = ptx.load_shared_s32(smem + plan.offsets["ids"] + 4 * pair)
                    for slab in cutlass.range_constexpr(sizes.slabs):
                        row = (Int64(pair) * sizes.slabs + slab) * sizes.hidden
                        loaded.append((expert, ptx.load_v4_f32_cg(partial + (row + column) * 4)))
                total = [Float32(0.0) for _ in range(4)]
                for expert, values in loaded:
                    for i in cutlass.range_constexpr(4):
                        total[i] = total[i] + (values[i] if expert >= 0 else Float32(0.0))
                ptx.store_v2_b32(
                    out + (Int64(token) * sizes.hidden + column) * 2,
                    ptx.pack_x2(sizes.kind, total[0], total[1]),
                    ptx.pack_x2(sizes.kind, total[2], total[3]),
                )
            piece += (plan.threads >> 3) * grid
