"""The sum over a token's expert choices, in their order, in float32, rounded once. Device code."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from rubin_moe.kernels.cute import blocks as block_ptx
from rubin_moe.kernels.cute import ptx

THREADS = 128
FEATURES = 4  # of a thread


class SumChoices:
    """One kernel.

    Args:
        dtype: of the result, as torch names it.
    """

    def __init__(self, dtype: str):
        self.dtype = dtype
        self.element_bytes = 4 if dtype == "float32" else 2

    @cute.jit
    def __call__(
        self,
        slots: Int64,
        out: Int64,
        quads: Int32,
        top_k: Int32,
        total: Int32,
        ctas: Int32,
        stream,
    ):
        """Launch. Addresses of float32 ``[M, top_k, 4 quads]`` and of ``[M, 4 quads]`` out;
        ``total`` is M x quads."""
        self.kernel(slots, out, quads, top_k, total).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, slots: Int64, out: Int64, quads: Int32, top_k: Int32, total: Int32):
        thread, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        i = Int32(bid) * THREADS + thread
        while i < total:
            row = ptx.div_u32(i, quads)
            first = Int64(row) * Int64(top_k) * Int64(quads) + Int64(i - row * quads)
            address = slots + first * 16
            v = [ptx.as_f32(word) for word in block_ptx.load_v4(address)]
            k = Int32(1)
            while k < top_k:
                address += Int64(quads) * 16
                more = block_ptx.load_v4(address)
                for f in cutlass.range_constexpr(FEATURES):
                    v[f] = v[f] + ptx.as_f32(more[f])
                k += 1
            words = block_ptx.narrow(v, self.dtype)
            target = out + Int64(i) * (FEATURES * self.element_bytes)
            if cutlass.const_expr(self.dtype == "float32"):
                block_ptx.store_v4(target, words)
            else:
                ptx.store_v2_b32(target, words[0], words[1])
            i += Int32(grid) * THREADS
