"""Tiles, shared memory and scratch of the sm_90a prefill kernels. Standard library only.

A pass is at most ``pass_tokens`` tokens of one expert, a unit ``unit_rows`` rows of its weights
times a pass. FC1 and FC2 are launches of their own over all units (`kernels.sm90.prefill`); both
add a row's products in the order of K, whatever the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from rubin_moe.arch import SM90A
from rubin_moe.errors import PlanError
from rubin_moe.kernels.sm90.plan import ALIGN, BLOCK_K, LayerSizes

MMA_ROWS = 64  # of one wgmma: four tiles of 16, one a warp
PRODUCERS = 4  # warps: three gather tokens, one copies weights
UNIT_BYTES = 32  # what warps that multiply need to know of a unit
MAX_PASS = 160  # two accumulators a token and thread, and A's registers, in 240


@dataclass(frozen=True)
class PrefillTiles:
    """What tuning chooses.

    Attributes:
        pass_tokens: a multiple of 8. narrower, step: passes with fewer tokens take one of so many
            narrower MMAs, each ``step`` tokens narrower than the one before.
        groups: warpgroups that multiply, each two times 64 rows.
        stages13, stages2: of the pipeline. blocks13, blocks2: of 64 of K in a stage at most.
        panel: passes that are walked together, row by row of units, so that what multiplies at the
            same time shares weights and tokens in the L2.
        lag: stages that a warpgroup starts behind the one before, so that their epilogues do not
            coincide.
    """

    pass_tokens: int = 144
    narrower: int = 0
    step: int = 8
    groups: int = 2
    stages13: int = 6
    stages2: int = 6
    blocks13: int = 1
    blocks2: int = 1
    panel: int = 8
    lag: int = 3


@dataclass(frozen=True)
class PrefillPlan:
    """Of one layer; a launch takes any number of tokens."""

    sizes: LayerSizes
    tiles: PrefillTiles

    @property
    def consumers(self) -> int:
        """Warps that multiply."""
        return 4 * self.tiles.groups

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens of an MMA, descending."""
        t = self.tiles
        return tuple(t.pass_tokens - i * t.step for i in range(t.narrower + 1))

    @property
    def threads(self) -> int:
        return 32 * (self.consumers + PRODUCERS)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that multiplies and of one that loads, once they have parted. They share
        what the block was launched with, 168 a thread of 384, else the launch never ends."""
        return {1: (240, 104), 2: (224, 56), 3: (152, 56)}[self.tiles.groups]

    @property
    def unit_tiles(self) -> int:
        return 2 * self.consumers

    @property
    def units13(self) -> int:
        """Of a pass."""
        return -(-self.sizes.tiles13 // self.unit_tiles)

    @property
    def units2(self) -> int:
        return -(-self.sizes.tiles2 // self.unit_tiles)

    @property
    def blocks13(self) -> int:
        return _divisor(self.sizes.k_blocks13, self.tiles.blocks13)

    @property
    def blocks2(self) -> int:
        return _divisor(self.sizes.k_blocks2, self.tiles.blocks2)

    @property
    def token_bytes(self) -> int:
        """Of a pass's tokens over 64 of K."""
        return 2 * BLOCK_K * self.tiles.pass_tokens

    @property
    def weight_bytes(self) -> int:
        """Of a unit over 64 of K."""
        return self.unit_tiles * self.sizes.block_bytes

    @property
    def note_bytes(self) -> int:
        """What FC2 needs of a pass's rows: pairs, then weights."""
        return 8 * self.tiles.pass_tokens

    def passes_of(self, num_pairs: int) -> int:
        """At most, whatever the routing."""
        return min(self.sizes.num_experts, num_pairs) + num_pairs // self.tiles.pass_tokens

    def h_bytes(self, num_pairs: int) -> int:
        """FC1's rows, ``[passes, K blocks, pass_tokens, 64]`` of 16 bits, as FC2 wants them."""
        return self.passes_of(num_pairs) * self.sizes.k_blocks2 * self.token_bytes

    @cached_property
    def offsets13(self) -> dict[str, int]:
        return self._offsets(self.tiles.stages13, self.blocks13)

    @cached_property
    def offsets2(self) -> dict[str, int]:
        return self._offsets(self.tiles.stages2, self.blocks2)

    def _offsets(self, stages: int, blocks: int) -> dict[str, int]:
        """Byte addresses in shared memory, and ``end``."""
        at, out = 0, {}
        for name, nbytes in (  # the first two where 128-byte swizzling wants multiples of 1024
            ("tokens", stages * blocks * self.token_bytes),
            ("staging", self.tiles.groups * self.token_bytes),
            ("weights", stages * blocks * self.weight_bytes),
            ("units", stages * UNIT_BYTES),
            ("notes", 2 * self.note_bytes),
            ("full", 8 * stages),
            ("empty", 8 * stages),
            ("noted", 8 * 2),
            ("read", 8 * 2),
        ):
            out[name] = at
            at += -(-nbytes // ALIGN) * ALIGN
        out["end"] = at
        return out

    @property
    def smem13(self) -> int:
        return self.offsets13["end"]

    @property
    def smem2(self) -> int:
        return self.offsets2["end"]

    def __str__(self) -> str:
        chosen = " ".join(f"{f.name}={getattr(self.tiles, f.name)}" for f in fields(self.tiles))
        return f"{chosen} smem={self.smem13}, {self.smem2}"


def _divisor(number: int, at_most: int) -> int:
    return next(n for n in range(min(at_most, number), 0, -1) if number % n == 0)


def check_prefill(plan: PrefillPlan) -> PrefillPlan:
    """The plan, if it can be built. Raises PlanError."""
    t = plan.tiles
    if min(t.blocks13, t.blocks2, t.panel) < 1:
        raise PlanError(f"{t}: a block or more in a stage, a pass or more in a panel")
    if max(plan.smem13, plan.smem2) > SM90A.smem_per_block:
        raise PlanError(f"{plan}: {SM90A.smem_per_block} bytes of shared memory are there")
    if t.groups not in (1, 2, 3) or min(t.stages13, t.stages2) < 2:
        raise PlanError(f"{plan}: 1 to 3 warpgroups, 2 stages or more")
    if not 0 <= t.lag * (t.groups - 1) < min(t.stages13, t.stages2):
        raise PlanError(f"{plan}: the last warpgroup starts behind the last stage")
    most = MAX_PASS if t.groups < 3 else 80
    if any(not 8 <= n <= most or n % 8 for n in plan.widths) or t.narrower < 0:
        raise PlanError(f"{plan}: passes of 8 to {most} tokens, a multiple of 8")
    return plan
