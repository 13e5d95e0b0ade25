"""Routing to work, in one launch of one block: sorted rows and the list of tiles. Device code.

A pair is (token, choice), numbered ``token * top_k + choice``. Pairs keep their order within an
expert, so the result depends on the ids alone. Each of 32 warps owns a segment of consecutive
pairs and a row of counts in shared memory:

1. count: a warp matches 32 pairs at a time; one lane an expert adds to the warp's own row.
2. scan: a thread an expert sums the 32 rows, leaving in each what the segments before have, then
   two scans over the experts give first rows and first tiles.
3. place: the warp walks its segment again and writes each pair to its row.
4. list: a thread a tile finds its expert by bisection.

Nothing outside shared memory is read that this launch has not written, nothing has to be reset, and
sizes of all arrays follow from the number of pairs: a captured launch is right for any routing.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from rubin_moe.kernels.cute import blocks as block_ptx
from rubin_moe.kernels.cute import ptx
from rubin_moe.kernels.sm107.work import COUNTS_BYTES, ENDS_BYTES, SMEM_BYTES, THREADS, WARPS

UNROLL = 4  # loads of ids in flight a lane
SCANNED = 8  # counts that a thread holds at once: 1024 threads have 64 registers each


class RouteTokens:
    """The kernel; everything it depends on is the launch's."""

    @cute.jit
    def __call__(
        self,
        ids: Int64,
        expert_map: Int64,
        weights: Int64,
        items: Int64,
        num_items: Int64,
        token: Int64,
        choice: Int64,
        weight: Int64,
        num_pairs: Int32,
        top_k: Int32,
        id_bytes: Int32,
        num_experts: Int32,
        tile_n: Int32,
        ctas: Int32,
        stream,
    ):
        """Launch. Addresses of ids ``[num_pairs]`` of 4 or 8 bytes; int32 map from them to local
        experts, or 0; float32 router weights ``[num_pairs]``, or 0 for ones; then of what
        `rubin_moe.kernels.sm107.work.Work` describes. An id or mapped id outside
        ``[0, num_experts)`` has no row."""
        self.kernel(
            ids, expert_map, weights, items, num_items, token, choice, weight,
            num_pairs, top_k, id_bytes, num_experts, tile_n,
        ).launch(
            grid=(ctas, 1, 1),
            block=(THREADS, 1, 1),
            smem=SMEM_BYTES,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        ids: Int64,
        expert_map: Int64,
        weights: Int64,
        items: Int64,
        num_items: Int64,
        token: Int64,
        choice: Int64,
        weight: Int64,
        num_pairs: Int32,
        top_k: Int32,
        id_bytes: Int32,
        num_experts: Int32,
        tile_n: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread & 31
        counts = ptx.smem_base()
        ends = counts + COUNTS_BYTES
        segment = ((num_pairs + (THREADS - 1)) // THREADS) * 32
        start = warp * segment
        end = start + segment
        end = end if end < num_pairs else num_pairs
        own = counts + 4 * num_experts * warp
        i = Int32(thread)
        while i < WARPS * num_experts:
            ptx.store_shared_b32(counts + 4 * i, Int32(0))
            i += THREADS
        cute.arch.sync_threads()
        self.count(own, lane, ids, expert_map, id_bytes, num_experts, start, end)
        cute.arch.sync_threads()
        self.scan(counts, ends, thread, warp, lane, num_experts, tile_n)
        cute.arch.sync_threads()
        self.place(
            own, ends, lane, ids, expert_map, id_bytes, num_experts, start, end,
            weights, token, choice, weight, top_k,
        )  # fmt: skip
        self.list_items(ends + ENDS_BYTES, ends, thread, items, num_items, num_experts, tile_n)

    @cute.jit
    def experts(self, ids, expert_map, id_bytes, num_experts, i, end):
        """Local experts of pairs ``i``, ``i + 32``, ..., -1 for none: all loads, then all uses."""
        found = []
        for u in cutlass.range_constexpr(UNROLL):
            expert = Int32(-1)
            if i + 32 * u < end:
                expert = ptx.load_s32(ids + Int64(i + 32 * u) * Int64(id_bytes))
            found.append(expert)
        for u in cutlass.range_constexpr(UNROLL):
            expert = found[u]
            if expert_map != 0 and expert >= 0:
                expert = ptx.load_s32(expert_map + Int64(expert) * 4)
            if expert >= num_experts or expert < 0:
                expert = Int32(-1)
            found[u] = expert
        return found

    @cute.jit
    def count(self, own, lane, ids, expert_map, id_bytes, num_experts, start, end):
        """One segment's pairs of every expert."""
        below = (Uint32(1) << Uint32(lane)) - Uint32(1)
        i = start + lane
        while i - lane < end:
            found = self.experts(ids, expert_map, id_bytes, num_experts, i, end)
            for u in cutlass.range_constexpr(UNROLL):
                same = ptx.match_any(found[u])
                if found[u] >= 0 and (same & below) == 0:
                    entry = own + 4 * found[u]
                    ptx.store_shared_b32(entry, ptx.load_shared_s32(entry) + ptx.count_ones(same))
                cute.arch.sync_warp()
            i += 32 * UNROLL

    @cute.jit
    def scan(self, counts, ends, thread, warp, lane, num_experts, tile_n):
        """``ends``: rows of all experts up to each, from 0; then tiles, the same."""
        rows = Int32(0)
        if thread < num_experts:
            column = counts + 4 * thread
            warps = Int32(0)
            while warps < WARPS:
                found = []
                for w in cutlass.range_constexpr(SCANNED):
                    found.append(ptx.load_shared_s32(column + 4 * num_experts * w))
                for w in cutlass.range_constexpr(SCANNED):
                    ptx.store_shared_b32(column + 4 * num_experts * w, rows)
                    rows += found[w]
                column += 4 * num_experts * SCANNED
                warps += SCANNED
        tiles = ptx.div_u32(rows + (tile_n - 1), tile_n)
        totals = ends + 2 * ENDS_BYTES
        rows = self.inclusive(rows, lane)
        tiles = self.inclusive(tiles, lane)
        if lane == 31:
            ptx.store_shared_b32(totals + 4 * warp, rows)
            ptx.store_shared_b32(totals + 4 * (WARPS + warp), tiles)
        cute.arch.sync_threads()
        rows += self.before(totals, warp, lane)
        tiles += self.before(totals + 4 * WARPS, warp, lane)
        if thread < num_experts:
            ptx.store_shared_b32(ends + 4 * (thread + 1), rows)
            ptx.store_shared_b32(ends + ENDS_BYTES + 4 * (thread + 1), tiles)
        if thread == 0:
            ptx.store_shared_b32(ends, Int32(0))
            ptx.store_shared_b32(ends + ENDS_BYTES, Int32(0))

    @cute.jit
    def inclusive(self, value, lane) -> Int32:
        """Sum over this lane and those below."""
        for d in cutlass.range_constexpr(5):
            other = ptx.shuffle_up(value, 1 << d)
            value += other if lane >= (1 << d) else Int32(0)
        return value

    @cute.jit
    def before(self, totals, warp, lane) -> Int32:
        """Sum of the totals of the warps before this one."""
        own = ptx.load_shared_s32(totals + 4 * lane)
        return cute.arch.shuffle_sync(self.inclusive(own, lane) - own, warp)

    @cute.jit
    def place(
        self, own, ends, lane, ids, expert_map, id_bytes, num_experts, start, end,
        weights, token, choice, weight, top_k,
    ):  # fmt: skip
        """One segment's pairs to their rows; the segment's row of counts moves on."""
        below = (Uint32(1) << Uint32(lane)) - Uint32(1)
        i = start + lane
        while i - lane < end:
            found = self.experts(ids, expert_map, id_bytes, num_experts, i, end)
            for u in cutlass.range_constexpr(UNROLL):
                expert = found[u]
                same = ptx.match_any(expert)
                earlier = ptx.count_ones(same & below)
                entry = own + (4 * expert if expert >= 0 else Int32(0))
                placed = ptx.load_shared_s32(entry)
                cute.arch.sync_warp()
                if expert >= 0:
                    if earlier == 0:
                        ptx.store_shared_b32(entry, placed + ptx.count_ones(same))
                    row = Int64(ptx.load_shared_s32(ends + 4 * expert) + placed + earlier) * 4
                    pair = i + 32 * u
                    value = Float32(1.0)
                    if weights != 0:
                        value = ptx.load_f32(weights + Int64(pair) * 4)
                    ptx.store_s32(token + row, ptx.div_u32(pair, top_k))
                    ptx.store_s32(choice + row, pair)
                    ptx.store_f32(weight + row, value)
                cute.arch.sync_warp()
            i += 32 * UNROLL

    @cute.jit
    def list_items(self, tile_ends, row_ends, thread, items, num_items, num_experts, tile_n):
        """Every tile: expert, first row, rows."""
        total = ptx.load_shared_s32(tile_ends + 4 * num_experts)
        if thread == 0:
            ptx.store_s32(num_items, total)
        tile = Int32(thread)
        while tile < total:
            low = Int32(0)  # the owner is the first expert whose tiles end after this one
            high = num_experts
            while low < high:
                middle = (low + high) >> 1
                if ptx.load_shared_s32(tile_ends + 4 * (middle + 1)) <= tile:
                    low = middle + 1
                else:
                    high = middle
            within = (tile - ptx.load_shared_s32(tile_ends + 4 * low)) * tile_n
            first = ptx.load_shared_s32(row_ends + 4 * low) + within
            left = ptx.load_shared_s32(row_ends + 4 * (low + 1)) - first
            rows = left if left < tile_n else tile_n
            block_ptx.store_v4(items + Int64(tile) * 16, [low, first, rows, Int32(0)])
            tile += THREADS
