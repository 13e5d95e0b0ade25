"""FC2: activations x expert weights, times alpha, bias, router weight. Device code.

The sorted rows themselves are its tokens. A lane is a feature, a register a token, so a warp's
stores are 128 contiguous bytes. Deterministic: each (token, expert choice) has a slot of its own
and an ordered sum follows; atomic: added to the token's row at once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from rubin_moe.kernels.cute import ptx, tcgen05
from rubin_moe.kernels.sm107 import plan as plans
from rubin_moe.kernels.sm107.grouped_gemm import GroupedGemm
from rubin_moe.kernels.sm107.plan import GemmPlan


class GemmFinalize(GroupedGemm):
    """One FC2 kernel, for layers of any size.

    The epilogue's own addresses: float32 alpha ``[E]`` and bias ``[E, 128 row_tiles]``; float32 out
    rows of ``size`` features; int32 the row of ``out`` and float32 the router weight of each sorted
    row.

    Args:
        plan: formats, tile, rings.
        atomic: add to the token's row instead of writing the choice's slot.
    """

    def __init__(self, plan: GemmPlan, atomic: bool):
        super().__init__(plan)
        self.atomic = atomic

    @cute.jit
    def open_tile(self, own, expert, row_tile, row_tiles, warp, lane):
        alpha, bias, _, _, _ = own
        feature = row_tile * plans.TILE_M + warp * 32 + lane
        added = Float32(0.0)
        if row_tile < row_tiles:
            at = Int64(expert) * row_tiles * plans.TILE_M + Int64(feature)
            added = ptx.load_f32(bias + at * 4)
        return feature, ptx.load_f32(alpha + Int64(expert) * 4), added

    @cute.jit
    def drain(self, own, opened, smem, taddr, row, left, size, warp, lane, turn):
        _, _, out, out_row, router_weight = own
        feature, factor, added = opened
        values = tcgen05.load("32x32b", plans.SUBTILE, [taddr], plans.SUBTILE)
        mine = Int32(0)  # this lane's token: where it goes and what it weighs
        weight = Float32(0.0)
        if lane < left:
            mine = ptx.load_s32(out_row + Int64(row + lane) * 4)
            weight = ptx.load_f32(router_weight + Int64(row + lane) * 4)
        some = left if feature < size else Int32(0)
        for i in cutlass.range_constexpr(plans.SUBTILE):
            target = Int64(ptx.broadcast(mine, i))
            value = ptx.fma(ptx.as_f32(values[i]), factor, added) * ptx.broadcast_f32(weight, i)
            address = out + (target * Int64(size) + Int64(feature)) * 4
            if i < some:
                if cutlass.const_expr(self.atomic):
                    ptx.add_f32(address, value)
                else:
                    ptx.store_f32(address, value)
