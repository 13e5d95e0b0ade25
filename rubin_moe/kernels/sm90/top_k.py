"""Router logits to expert ids and weights: softmax, the best k, in one launch. Device code."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from rubin_moe.kernels.cute import ptx
from rubin_moe.kernels.sm90.activate import LOG2E

SIGN = 0x80000000


class TopK:
    """``kind``: ``bf16``, ``f16`` or ``f32`` logits; a block's ``warps`` take a token each. Ties go
    to the lower id."""

    def __init__(self, num_experts: int, top_k: int, kind: str, renormalize: bool, warps: int):
        self.num_experts = num_experts
        self.top_k = top_k
        self.kind = kind
        self.renormalize = renormalize
        self.warps = warps
        self.each = -(-num_experts // 32)

    @cute.jit
    def __call__(
        self, logits: Int64, ids: Int64, weights: Int64, num_tokens: Int32, blocks: Int32, stream
    ):
        """Addresses of logits ``[M, E]``, int32 ids and float32 weights ``[M, top_k]``."""
        self.kernel(logits, ids, weights, num_tokens).launch(
            grid=(blocks, 1, 1), block=(32 * self.warps, 1, 1), smem=0, stream=stream
        )

    @cute.kernel
    def kernel(self, logits: Int64, ids: Int64, weights: Int64, num_tokens: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread & 31
        token = block * self.warps + (thread >> 5)
        ptx.launch_dependents()
        ptx.wait_for_launches_before()
        if token < num_tokens:
            row = logits + Int64(token) * (self.num_experts * (4 if self.kind == "f32" else 2))
            self.choose(lane, row, Int64(token) * (4 * self.top_k), ids, weights)

    @cute.jit
    def choose(self, lane, row, at, ids, weights):
        """One warp, one token; a lane holds the experts lane, lane + 32, ..."""
        keys = cute.make_rmem_tensor((self.each,), Uint32)
        for i in cutlass.range_constexpr(self.each):
            expert = lane + 32 * i
            keys[i] = Uint32(0)  # below every logit's
            if expert < self.num_experts:
                keys[i] = self.key(ptx.as_u32(self.load(row, expert)))
        largest = Float32(0.0)
        mine = Float32(0.0)
        chosen = Int32(0)
        whole = Float32(0.0)
        for k in cutlass.range_constexpr(self.top_k):
            best = keys[0]
            for i in cutlass.range_constexpr(self.each - 1):
                best = keys[i + 1] if keys[i + 1] > best else best
            best = ptx.warp_max_u32(best)
            expert = Uint32(0xFFFFFFFF)
            for i in cutlass.range_constexpr(self.each):
                number = Uint32(lane + 32 * (self.each - 1 - i))
                expert = number if keys[self.each - 1 - i] == best else expert
            expert = ptx.warp_min_u32(expert)
            value = ptx.as_f32(self.bits(best))
            if cutlass.const_expr(k == 0):
                largest = value
                if cutlass.const_expr(not self.renormalize):
                    whole = self.sum_of_all(keys, largest)
            for i in cutlass.range_constexpr(self.each):
                keys[i] = Uint32(0) if expert == Uint32(lane + 32 * i) else keys[i]
            score = ptx.exp2_approx((value - largest) * Float32(LOG2E))
            if cutlass.const_expr(self.renormalize):
                whole = whole + score
            mine = score if lane == k else mine
            chosen = Int32(expert) if lane == k else chosen
        if lane < self.top_k:
            ptx.store_s32(ids + at + Int64(lane) * 4, chosen)
            ptx.store_f32(weights + at + Int64(lane) * 4, ptx.div(mine, whole))

    @cute.jit
    def sum_of_all(self, keys, largest) -> Float32:
        total = Float32(0.0)
        for i in cutlass.range_constexpr(self.each):
            value = ptx.as_f32(self.bits(keys[i]))
            score = ptx.exp2_approx((value - largest) * Float32(LOG2E))
            total += score if keys[i] != 0 else Float32(0.0)
        for d in cutlass.range_constexpr(5):
            total += ptx.shuffle_xor_f32(total, 1 << d)
        return total

    @cute.jit
    def load(self, row, expert) -> Float32:
        if cutlass.const_expr(self.kind == "f32"):
            return ptx.load_f32(row + Int64(expert) * 4)
        return ptx.load_half_as_f32(self.kind, row + Int64(expert) * 2)

    @cute.jit
    def key(self, bits) -> Uint32:
        """Unsigned order of floats; NaN of either sign is not lost but first or last."""
        return bits ^ (Uint32(0xFFFFFFFF) if bits >= Uint32(SIGN) else Uint32(SIGN))

    @cute.jit
    def bits(self, key) -> Uint32:
        return key ^ (Uint32(SIGN) if key >= Uint32(SIGN) else Uint32(0xFFFFFFFF))
