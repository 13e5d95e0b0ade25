"""Tiles, splits and shared memory of the sm_90a kernels. Standard library only.

A tile is 16 rows of weights, a block 16 x 64 (`layouts.fp4_hopper`), a pass at most ``pass_tokens``
tokens of one expert. What decides the order of additions (``parts`` of K, ``slabs`` of FC2) follows
from the sizes alone, so that neither a kernel nor a tile choice nor a number of tokens changes a
bit of the result.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from rubin_moe.arch import SM90A
from rubin_moe.errors import PlanError

ROWS, BLOCK_K = 16, 64
ALIGN = 128
SLAB_K = 4096  # FC2 sums longer rows slab by slab, since its tokens lie in shared memory
MAX_EXPERTS, MAX_TOP_K = 1024, 32
MAX_WIDE_PASS = 96  # two chains of accumulators and their total stay in registers
MAX_PAIRS = 2048  # (token, choice) pairs of a launch: the routing lies in shared memory
CHAINS = 2  # independent accumulators of a tile, so that MMAs need not wait for one another
FREE_BARRIER = 15  # barrier 0 is the block's, those below are the groups' of a split


@dataclass(frozen=True)
class Tiles:
    """What tuning chooses of the decode kernel.

    Attributes:
        warps: consumers; slots: of each one's ring; blocks13, blocks2: a slot holds at most these.
        split: the parts of K go to neighbouring warps instead of one after another.
        pass_tokens: 8, 16 or 24; buffers: of tokens, 1 or 2.
    """

    warps: int = 16
    slots: int = 2
    blocks13: int = 4
    blocks2: int = 4
    split: bool = False
    pass_tokens: int = 8
    buffers: int = 2


@dataclass(frozen=True)
class WideTiles:
    """What tuning chooses of the kernel for many tokens.

    Attributes:
        groups: warpgroups that multiply, 1 to 3. pass_tokens: a multiple of 8.
        blocks13, blocks2: of K in a stage at most; stages: of the pipeline.
    """

    groups: int = 2
    pass_tokens: int = 64
    blocks13: int = 2
    blocks2: int = 2
    stages: int = 4


@dataclass(frozen=True)
class LayerSizes:
    """What the kernel is compiled for.

    Attributes:
        exponent_only: UE8M0 scales for 32 elements. kind: ``bf16`` or ``f16``, of activations.
    """

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    gated: bool
    exponent_only: bool
    kind: str = "bf16"

    @property
    def block_bytes(self) -> int:
        return 512 + (32 if self.exponent_only else 64)

    @property
    def padded_intermediate(self) -> int:
        return -(-self.intermediate // BLOCK_K) * BLOCK_K

    @property
    def k_blocks13(self) -> int:
        return -(-self.hidden // BLOCK_K)

    @property
    def k_blocks2(self) -> int:
        return self.padded_intermediate // BLOCK_K

    @property
    def tiles13(self) -> int:
        """Of one expert: 8 gate and 8 up rows each, or 16 rows where there is no gate."""
        return self.padded_intermediate // (8 if self.gated else 16)

    @property
    def tiles2(self) -> int:
        return self.hidden // ROWS

    @property
    def slabs(self) -> int:
        """Parts of FC2's K with partial results of their own, equal in size."""
        least = -(-self.padded_intermediate // SLAB_K)
        return next(n for n in range(least, self.k_blocks2 + 1) if self.k_blocks2 % n == 0)

    @property
    def slab_blocks(self) -> int:
        return self.k_blocks2 // self.slabs


def parts_of(k_blocks: int) -> int:
    """Pieces of K whose sums are added at the end, in order."""
    if k_blocks % 16 == 0:
        return 4
    return next((n for n in (5, 3, 2) if k_blocks % n == 0), 1)


def blocks_of(k_blocks: int, at_most: int) -> int:
    """Blocks of a copy: the largest divisor of a part."""
    part = k_blocks // parts_of(k_blocks)
    return next(n for n in range(min(at_most, part), 0, -1) if part % n == 0)


@dataclass(frozen=True)
class Plan:
    """What both kernels have in common: sizes, passes and the tables of the routing.

    Attributes:
        max_pairs: tokens x top_k of a launch at most.
    """

    sizes: LayerSizes
    tiles: Tiles | WideTiles
    max_pairs: int

    @property
    def num_warps(self) -> int:
        raise NotImplementedError

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    @property
    def parts13(self) -> int:
        return parts_of(self.sizes.k_blocks13)

    @property
    def parts2(self) -> int:
        return parts_of(self.sizes.slab_blocks)

    @property
    def blocks13(self) -> int:
        return blocks_of(self.sizes.k_blocks13, self.tiles.blocks13)

    @property
    def blocks2(self) -> int:
        return blocks_of(self.sizes.slab_blocks, self.tiles.blocks2)

    def passes_of(self, num_pairs: int) -> int:
        """At most, whatever the routing."""
        return min(self.sizes.num_experts, num_pairs) + num_pairs // self.tiles.pass_tokens

    @property
    def max_passes(self) -> int:
        return self.passes_of(self.max_pairs)

    @property
    def segments(self) -> int:
        """Of the pairs, each ranked by a warp."""
        return min(8, self.num_warps)

    @property
    def groups(self) -> int:
        """Of 32 experts."""
        return -(-self.sizes.num_experts // 32)

    @property
    def areas(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of all that is not routing."""
        raise NotImplementedError

    def scratch_bytes(self, num_pairs: int) -> tuple[int, ...]:
        """In device memory, of each of the kernel's scratch arguments."""
        raise NotImplementedError

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte addresses in shared memory, and ``end``."""
        at, out = 0, {}
        for name, nbytes in (
            *self.areas,
            ("ids", 4 * self.max_pairs),
            ("pairs", 4 * self.max_pairs),
            ("passes", 4 * self.max_passes),
            ("segments", 2 * self.segments * self.sizes.num_experts),
            ("first", 4 * self.sizes.num_experts),
            ("groups", 4 * self.groups),
        ):
            out[name] = at
            at += -(-nbytes // 16) * 16
        out["end"] = -(-at // ALIGN) * ALIGN
        return out

    @property
    def smem_bytes(self) -> int:
        return self.offsets["end"]

    @property
    def counters(self) -> int:
        """int32 words: one of the grid, then one a pass, which is zero between launches."""
        return 32 + self.max_passes

    def __str__(self) -> str:
        chosen = " ".join(f"{f.name}={getattr(self.tiles, f.name)}" for f in fields(self.tiles))
        return f"{chosen} max_pairs={self.max_pairs} smem={self.smem_bytes}"


@dataclass(frozen=True)
class DecodePlan(Plan):
    """Of the kernel that holds a pass's tokens over all of K (`decode`)."""

    tiles: Tiles

    @property
    def num_warps(self) -> int:
        return self.tiles.warps + 1

    @property
    def split13(self) -> int:
        return self.parts13 if self.tiles.split else 1

    @property
    def split2(self) -> int:
        return self.parts2 if self.tiles.split else 1

    @property
    def slot_bytes(self) -> int:
        return max(self.blocks13, self.blocks2) * self.sizes.block_bytes

    @property
    def token_pitch(self) -> int:
        """Bytes of a token's row; 16 more than its elements, against bank conflicts."""
        return 2 * BLOCK_K * max(self.sizes.k_blocks13, self.sizes.slab_blocks) + 16

    @property
    def buffer_bytes(self) -> int:
        return self.tiles.pass_tokens * self.token_pitch

    def scratch_bytes(self, num_pairs: int) -> tuple[int, ...]:
        """Intermediate rows."""
        return (2 * num_pairs * self.sizes.padded_intermediate,)

    @property
    def areas(self) -> tuple[tuple[str, int], ...]:
        t = self.tiles
        split = 2 * t.warps * (t.pass_tokens // 8) * 512 if t.split else 0
        return (
            ("ring", t.warps * t.slots * self.slot_bytes),
            ("tokens", t.buffers * self.buffer_bytes),
            ("partial", split),
            ("full", 8 * t.warps * t.slots),
            ("tokens_full", 8 * t.buffers),
            ("tokens_empty", 8 * t.buffers),
        )


@dataclass(frozen=True)
class WidePlan(Plan):
    """Of the kernel that streams weights and tokens along K (`wide`).

    A unit is four tiles of each warpgroup, one a warp, of one pass.
    """

    tiles: WideTiles

    @property
    def consumers(self) -> int:
        """Warps; one more loads weights, one tokens."""
        return 4 * self.tiles.groups

    @property
    def num_warps(self) -> int:
        return self.consumers + 2

    @property
    def units13(self) -> int:
        return -(-self.sizes.tiles13 // self.consumers)

    @property
    def units2(self) -> int:
        return -(-self.sizes.tiles2 // self.consumers)

    @property
    def block_tokens(self) -> int:
        """Bytes of a pass's tokens over 64 of K."""
        return 2 * BLOCK_K * self.tiles.pass_tokens

    @property
    def stage_tokens(self) -> int:
        return max(self.blocks13, self.blocks2) * self.block_tokens

    @property
    def warp_weights(self) -> int:
        """Bytes of a stage that one warp multiplies."""
        return max(self.blocks13, self.blocks2) * self.sizes.block_bytes

    @property
    def stage_weights(self) -> int:
        return self.consumers * self.warp_weights

    def scratch_bytes(self, num_pairs: int) -> tuple[int, ...]:
        """The passes' tokens, and their intermediate rows."""
        each = self.passes_of(num_pairs) * self.block_tokens
        return each * self.sizes.k_blocks13, each * self.sizes.k_blocks2

    @property
    def areas(self) -> tuple[tuple[str, int], ...]:
        t = self.tiles
        return (
            ("tokens", t.stages * self.stage_tokens),
            ("weights", t.stages * self.stage_weights),
            ("full", 8 * t.stages),
            ("empty", 8 * t.stages),
            ("homes", 4 * self.max_pairs),
        )


def check(plan: Plan) -> Plan:
    """The plan, if it can be built. Raises PlanError."""
    if plan.smem_bytes > SM90A.smem_per_block:
        raise PlanError(f"{plan}: {SM90A.smem_per_block} bytes of shared memory are there")
    if plan.max_pairs > MAX_PAIRS or plan.max_pairs % 4:
        raise PlanError(f"{plan}: at most {MAX_PAIRS} pairs, a multiple of 4")
    if isinstance(plan, DecodePlan):
        _check_decode(plan)
    else:
        w = plan.tiles
        assert isinstance(w, WideTiles)
        if w.groups not in (1, 2, 3) or w.stages < 2:
            raise PlanError(f"{plan}: 1 to 3 warpgroups, 2 stages or more")
        if not 8 <= w.pass_tokens <= MAX_WIDE_PASS or w.pass_tokens % 8:
            raise PlanError(f"{plan}: passes of 8 to {MAX_WIDE_PASS} tokens, a multiple of 8")
    return plan


def _check_decode(plan: DecodePlan) -> None:
    t = plan.tiles
    if t.warps % plan.split13 or t.warps % plan.split2:
        raise PlanError(f"{plan}: parts {plan.split13} and {plan.split2} do not share the warps")
    if t.split and t.warps // plan.split13 + t.warps // plan.split2 > FREE_BARRIER - 1:
        raise PlanError(f"{plan}: more than {FREE_BARRIER - 1} groups of warps")
    if not 1 <= t.warps <= 31 or t.pass_tokens not in (8, 16, 24) or t.buffers not in (1, 2):
        raise PlanError(f"{plan}: 1 to 31 warps, passes of 8, 16 or 24 tokens, 1 or 2 buffers")
