"""The weighted sum of a token's choices, from FC2's rows. Device code.

A row is 16-bit and holds an expert's output times the router's weight. Choices are added in
float32, in order; one without an expert here is not read.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from rubin_moe.kernels.cute import blocks as wide
from rubin_moe.kernels.cute import ptx
from rubin_moe.kernels.sm90.sort import local_expert

THREADS = 256
FEATURES = 8  # of a thread: 16 bytes
AT_ONCE = 8  # rows that a thread has under way


class Finalize:
    """``dtype``: of rows and output, ``bfloat16`` or ``float16``."""

    def __init__(self, num_experts: int, top_k: int, hidden: int, dtype: str):
        self.num_experts = num_experts
        self.top_k = top_k
        self.hidden = hidden
        self.dtype = dtype

    @cute.jit
    def __call__(
        self,
        y: Int64,
        ids: Int64,
        expert_map: Int64,
        out: Int64,
        num_tokens: Int32,
        blocks: Int32,
        stream,
    ):
        """Launch. Addresses of rows ``[M, top_k, hidden]``, int32 ids and map (or 0) as `sort`
        takes them, and the output ``[M, hidden]``."""
        self.kernel(y, ids, expert_map, out, num_tokens).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), smem=0, stream=stream
        )

    @cute.kernel
    def kernel(self, y: Int64, ids: Int64, expert_map: Int64, out: Int64, num_tokens: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        ptx.launch_dependents()
        ptx.wait_for_launches_before()
        each = self.hidden // FEATURES
        item = block * THREADS + thread
        while item < num_tokens * each:
            token = item // each
            column = (item - token * each) * FEATURES
            total = [Float32(0.0) for _ in range(FEATURES)]
            for first in cutlass.range_constexpr(0, self.top_k, AT_ONCE):
                rows = []
                for k in cutlass.range_constexpr(first, min(first + AT_ONCE, self.top_k)):
                    rows.append(self.row(y, ids, expert_map, token * self.top_k + k, column))
                for words in rows:
                    values = [v for word in words for v in wide.widen(word, self.dtype)]
                    total = [t + v for t, v in zip(total, values, strict=True)]
            to = out + (Int64(token) * self.hidden + Int64(column)) * 2
            wide.store_v4(to, wide.narrow(total, self.dtype))
            item += grid * THREADS

    @cute.jit
    def row(self, y, ids, expert_map, pair, column):
        """Eight elements of a pair's row, zeros where it has no expert."""
        a = Uint32(0)
        b = Uint32(0)
        c = Uint32(0)
        d = Uint32(0)
        if local_expert(ids, pair, expert_map, self.num_experts) >= 0:
            words = wide.load_v4(y + (Int64(pair) * self.hidden + Int64(column)) * 2)
            a = words[0]
            b = words[1]
            c = words[2]
            d = words[3]
        return a, b, c, d
