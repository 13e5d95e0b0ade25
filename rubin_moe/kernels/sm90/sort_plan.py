"""Sizes of the prefill's routing launch. Standard library only.

A block ranks a chunk of the pairs (token x top_k + choice); its share of shared memory bounds the
pairs of a launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rubin_moe.arch import SM90A
from rubin_moe.errors import PlanError

ROUNDS = 4  # of 32 pairs that a warp ranks at most
MAX_PAIRS = 131072  # of a launch: what its passes' rows take in device memory
RECORD = 16  # bytes of a pass: expert, first sorted row, rows, 0


@dataclass(frozen=True)
class SortPlan:
    """What the kernel is compiled for.

    Attributes:
        pass_tokens: of one expert, at most, in a pass. warps: of a block.
    """

    num_experts: int
    top_k: int
    hidden: int
    pass_tokens: int
    warps: int = 16

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def k_blocks(self) -> int:
        """Of 64 elements of a token's row; the last may be padded."""
        return -(-self.hidden // 64)

    @property
    def slots(self) -> int:
        """Places for experts: whole warps."""
        return -(-self.num_experts // 32) * 32

    @property
    def groups(self) -> int:
        """Of threads that share an expert's counts of all blocks."""
        return max(1, self.threads // self.slots)

    @property
    def rounds(self) -> int:
        """Experts of a thread where there are more than threads."""
        return -(-self.slots // self.threads)

    def max_tokens(self, num_blocks: int) -> int:
        """Of a launch of that many blocks."""
        return min(MAX_PAIRS, num_blocks * ROUNDS * self.threads) // self.top_k

    def max_passes(self, num_pairs: int) -> int:
        """Whatever the routing."""
        return min(self.num_experts, num_pairs) + num_pairs // self.pass_tokens

    def counts_bytes(self, num_blocks: int) -> int:
        """Of the blocks' counts, in device memory."""
        return 4 * num_blocks * self.num_experts

    def passes_bytes(self, num_pairs: int) -> int:
        """Of the list of passes, its head included."""
        return RECORD * (1 + self.max_passes(num_pairs))

    def tokens_bytes(self, num_tokens: int) -> int:
        """Of the tokens in the kernels' order of K."""
        return 128 * num_tokens * self.k_blocks

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte addresses in shared memory, and ``end``."""
        at, out = 0, {}
        for name, nbytes in (
            ("words", 4 * ROUNDS * self.threads),
            ("segments", 2 * self.warps * self.num_experts),
            ("keys", 4 * self.slots),
            ("ranked", 4 * self.slots),
            ("rows", 4 * self.slots),
            ("passes", 4 * self.slots),
            ("places", 4 * self.slots),
            ("totals", 4 * self.groups * self.slots),
            ("before", 4 * self.groups * self.slots),
            ("sums", 8 * self.slots // 32),
        ):
            out[name] = at
            at += -(-nbytes // 16) * 16
        out["end"] = at
        return out

    @property
    def smem_bytes(self) -> int:
        return self.offsets["end"]


def check(plan: SortPlan) -> SortPlan:
    """The plan, if it can be built. Raises PlanError."""
    if plan.smem_bytes > SM90A.smem_per_block:
        raise PlanError(f"{plan}: {SM90A.smem_per_block} bytes of shared memory are there")
    if not 1 <= plan.num_experts <= 1024 or not 8 <= plan.pass_tokens <= 256:
        raise PlanError(f"{plan}: 1 to 1024 experts, passes of 8 to 256 tokens")
    return plan
