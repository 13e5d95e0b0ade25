"""Rows of 16-bit activations to E4M3 with a scale each, a warp a row. Device code.

The rounding is `formats.fp8_rows`'. Rows come in the order of K of `permute` and leave in that of
the FP8 MMAs' A fragments: within 64 elements, element 16 t + 4 j + 2 e + i moves from place
16 j + 8 e + 2 t + i to byte 16 j + 4 t + 2 e + i. So 32 bytes in a row become 16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from rubin_moe.kernels.cute import blocks as wide
from rubin_moe.kernels.cute import fp8, ptx

WARPS = 8
HELD = 14  # turns whose values stay in registers between the maximum and the rounding


class Fp8Rows:
    """Tokens ``[rows, K blocks, 64]``, or, with ``pass_tokens``, FC1's tiles ``[passes, K blocks,
    pass_tokens, 64]``, whose 128-byte rows are 128-byte swizzled.

    ``dtype``: ``bfloat16`` or ``float16``.
    """

    def __init__(self, k_blocks: int, dtype: str, pass_tokens: int = 0):
        self.k_blocks = k_blocks
        self.chunks = -(-k_blocks // 2)
        self.dtype = dtype
        self.pass_tokens = pass_tokens
        self.turns = -(-self.chunks // 4)  # 32 pieces of 16 codes a turn

    @cute.jit
    def __call__(
        self,
        rows: Int64,
        passes: Int64,
        codes: Int64,
        scales: Int64,
        num_rows: Int32,
        blocks: Int32,
        stream,
    ):
        """Launch. Addresses: ``rows`` as above; ``passes`` as `sort.Sort` writes it (tiles only);
        ``codes`` ``[rows, K / 128, 128]`` or ``[passes, K / 128, pass_tokens, 128]``, zeros behind
        K; ``scales`` float32 of each row, by its number in ``passes``."""
        self.kernel(rows, passes, codes, scales, num_rows).launch(
            grid=(blocks, 1, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, rows: Int64, passes: Int64, codes: Int64, scales: Int64, num_rows: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = thread & 31
        ptx.launch_dependents()
        ptx.wait_for_launches_before()
        total = num_rows
        if cutlass.const_expr(self.pass_tokens > 0):
            total = ptx.load_s32(passes) * self.pass_tokens
        row = block * WARPS + (thread >> 5)
        while row < total:
            if cutlass.const_expr(self.pass_tokens > 0):
                index = row // self.pass_tokens
                place = row - index * self.pass_tokens
                record = passes + Int64(1 + index) * 16
                first = ptx.load_s32(record + 4)
                count = ptx.load_s32(record + 8)
                if place < count:
                    tile = Int64(index) * (self.pass_tokens * 128)
                    source = rows + tile * self.k_blocks + Int64(place * 128)
                    target = codes + tile * self.chunks + Int64(place * 128)
                    self.one(lane, source, target, scales, first + place, place & 7)
            else:
                source = rows + Int64(row) * (self.k_blocks * 128)
                target = codes + Int64(row) * (self.chunks * 128)
                self.one(lane, source, target, scales, row, Int32(0))
            row += grid * WARPS

    @cute.jit
    def one(self, lane, source, target, scales, row, swizzle):
        """One row; ``swizzle`` is XORed to the number of a 16-byte piece."""
        held = []
        largest = Uint32(0)
        for turn in cutlass.range_constexpr(self.turns):
            words = self.load(lane, source, turn, swizzle)
            if cutlass.const_expr(self.turns <= HELD):
                held.append(words)
            for i in cutlass.range_constexpr(8):
                high = words[i] & Uint32(0x7FFF0000)
                low = (words[i] << Uint32(16)) & Uint32(0x7FFF0000)
                largest = fp8.max_u32(largest, fp8.max_u32(high, low))
        factor, scale = self.scale_of(ptx.warp_max_u32(largest))
        if lane == 0:
            ptx.store_b32(scales + Int64(row) * 4, scale)
        for turn in cutlass.range_constexpr(self.turns):
            if cutlass.const_expr(self.turns <= HELD):
                words = held[turn]
            else:
                words = self.load(lane, source, turn, swizzle)
            self.store(lane, target, turn, swizzle, words, factor)

    @cute.jit
    def load(self, lane, source, turn: cutlass.Constexpr, swizzle):
        """Two 16-byte pieces, zeros behind the row."""
        piece = 32 * turn + lane
        block = piece >> 2
        words = [Uint32(0) for _ in range(8)]
        if block < self.k_blocks:
            at = source + Int64(block) * (128 * max(1, self.pass_tokens))
            first = 2 * (piece & 3)
            words = [
                *wide.load_v4(at + Int64((first ^ swizzle) << 4)),
                *wide.load_v4(at + Int64(((first + 1) ^ swizzle) << 4)),
            ]
        return words

    @cute.jit
    def scale_of(self, largest):
        """What elements are multiplied by, and the bits of its inverse: the power of two that
        brings ``largest`` (the upper half of a word) to 448 at most, NaN for NaN."""
        amax = wide.widen(largest, self.dtype)[1]
        code = Int32(wide.encode_ue8m0(amax))
        scale = code << 23
        if code == 0:
            scale = Int32(1 << 22)  # 2^-127
        if code == 255:
            scale = Int32(0x7FC00000)
        inverse = (Int32(254) - code) << 23
        if code >= 254:
            inverse = Int32(1 << 22)
        return ptx.as_f32(inverse), scale

    @cute.jit
    def store(self, lane, target, turn: cutlass.Constexpr, swizzle, words, factor):
        """16 codes: word t takes i = 0, 1 of both pieces' words t."""
        piece = 32 * turn + lane
        chunk = piece >> 3
        if chunk < self.chunks:
            out = []
            for t in cutlass.range_constexpr(4):
                four = [*wide.widen(words[t], self.dtype), *wide.widen(words[4 + t], self.dtype)]
                out.append(fp8.encode_e4m3x4([v * factor for v in four]))
            at = target + Int64(chunk) * (128 * max(1, self.pass_tokens))
            ptx.store_v4_b32(at + Int64(((piece & 7) ^ swizzle) << 4), out)
