"""Tokens in the order of K in which the kernels multiply. Device code.

Within 64 elements, element 16 t + 4 j + 2 e + i comes to 16 j + 8 e + 2 t + i (`wide`): chunk c of
16 bytes takes four bytes from each of four places, 2 c elements into each 16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from rubin_moe.kernels.cute import ptx

AT_ONCE = 4  # blocks of 64 elements whose loads a lane has under way


@cute.jit
def permute(
    lane, warp, warps, x, out, num_tokens, hidden: cutlass.Constexpr, k_blocks: cutlass.Constexpr
):
    """One warp of ``warps``: its share of ``x`` ``[num_tokens, hidden]`` to ``out``
    ``[num_tokens, 64 k_blocks]``, zeros behind the row."""
    chunk = lane & 7
    total = num_tokens * k_blocks
    first = warp * 4 + (lane >> 3)
    while first - (lane >> 3) < total:
        loaded = []
        for u in cutlass.range_constexpr(AT_ONCE):
            at = first + u * 4 * warps
            token = at // k_blocks
            column = (at - token * k_blocks) * 64 + 2 * chunk
            source = x + (Int64(token) * hidden + Int64(column)) * 2
            for t in cutlass.range_constexpr(4):
                bits = Int32(0)
                if at < total and column + 16 * t < hidden:
                    bits = ptx.load_s32(source + 32 * t)
                loaded.append(bits)
        for u in cutlass.range_constexpr(AT_ONCE):
            at = first + u * 4 * warps
            if at < total:
                ptx.store_v4_b32(
                    out + Int64(at) * 128 + Int64(chunk * 16), loaded[4 * u : 4 * u + 4]
                )
        first += AT_ONCE * 4 * warps
