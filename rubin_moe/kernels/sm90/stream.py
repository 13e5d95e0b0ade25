"""A warp's stream of weight chunks: FC1's tiles, then FC2's, through its own ring. Device code."""

import cutlass.cute as cute
from cutlass import Int32, Int64

from rubin_moe.kernels.cute import ptx
from rubin_moe.kernels.sm90.plan import DecodePlan
from rubin_moe.kernels.sm90.route import expert_of


class Stream:
    """Device methods over one plan. Its state: item, chunks left of it, address, bytes, slot."""

    def __init__(self, plan: DecodePlan):
        self.plan = plan

    def start(self):
        return Int32(0), Int32(0), Int64(0), Int32(0), Int32(0)

    @cute.jit
    def issue(
        self, smem, warp, lane, w13, w2, first1, first2, items1, items, item, left, source, nbytes,
        slot,
    ):  # fmt: skip
        """Starts the next chunk's copy, if there is one; the new state."""
        plan = self.plan
        sizes = plan.sizes
        warps = plan.tiles.warps
        if left == 0 and item < items:
            if item < items1:
                work = warp + item * warps
                tile = first1 + work // plan.split13
                index = tile // sizes.tiles13
                word = ptx.load_shared_s32(smem + plan.offsets["passes"] + 4 * index)
                row = Int64(expert_of(word)) * sizes.tiles13 + Int64(tile - index * sizes.tiles13)
                part = sizes.k_blocks13 // plan.split13
                block = row * sizes.k_blocks13 + Int64((work % plan.split13) * part)
                source = w13 + block * sizes.block_bytes
                left = Int32(part // plan.blocks13)
                nbytes = Int32(plan.blocks13 * sizes.block_bytes)
            else:
                work = warp + (item - items1) * warps
                tile = first2 + work // plan.split2
                index = tile // sizes.tiles2
                number = index // sizes.slabs
                word = ptx.load_shared_s32(smem + plan.offsets["passes"] + 4 * number)
                row = Int64(expert_of(word)) * sizes.tiles2 + Int64(tile - index * sizes.tiles2)
                part = sizes.slab_blocks // plan.split2
                block = row * sizes.k_blocks2
                block += Int64((index - number * sizes.slabs) * sizes.slab_blocks)
                block += Int64((work % plan.split2) * part)
                source = w2 + block * sizes.block_bytes
                left = Int32(part // plan.blocks2)
                nbytes = Int32(plan.blocks2 * sizes.block_bytes)
            item += 1
        if left > 0:
            ring = warp * plan.tiles.slots + slot
            bar = smem + plan.offsets["full"] + 8 * ring
            if lane == 0:
                ptx.mbarrier_arrive_expect_tx(bar, nbytes)
                ptx.bulk_load(smem + ring * plan.slot_bytes, source, nbytes, bar)
            source += Int64(nbytes)
            left -= 1
            slot += 1
            if slot == plan.tiles.slots:
                slot = Int32(0)
        return item, left, source, nbytes, slot
