"""Tiles and shared memory of the prefill with FP8 activations. Standard library only.

A stage is 128 of K: 128 bytes a token, two blocks of weights. The tensor core drops what lies 2^-13
below the largest addend of a sum, so every ``promote`` stages the accumulators go into totals: two
float16 a register, off by a power of two that no sum can exceed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from rubin_moe.errors import PlanError
from rubin_moe.kernels.sm90.plan import ALIGN, LayerSizes
from rubin_moe.kernels.sm90.prefill_plan import PrefillPlan, PrefillTiles, check_prefill

STAGE_K = 128
LEAST, MOST = -8, 6  # E2M1 times 2 to one of these is an E4M3 number: 0.5 its least, 6 becomes 384
EXPONENTS = MOST - LEAST + 1
ENTRY = 8  # bytes of the kernel's table: the eight magnitudes as E4M3
TABLE_BYTES = -(-EXPONENTS * ENTRY // ALIGN) * ALIGN
LARGEST_PRODUCT = 384 * 448
LARGEST_HALF = 65504


def table_words() -> list[tuple[int, int]]:
    """The kernel's table: for each exponent the eight magnitudes' E4M3 bytes, four a word, the
    first in the lowest byte."""
    out = []
    for exponent in range(LEAST, MOST + 1):
        codes = [_e4m3(value * 2.0**exponent) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
        low, high = (int.from_bytes(bytes(codes[i : i + 4]), "little") for i in (0, 4))
        out.append((low, high))
    return out


def _e4m3(value: float) -> int:
    """The code of a value that is one of E4M3's."""
    mantissa, exponent = math.frexp(value)
    if value < 2.0**-6:
        return int(value * 2**9)
    return (exponent + 6) << 3 | int(mantissa * 16) & 7


@dataclass(frozen=True)
class Fp8Tiles(PrefillTiles):
    """As `PrefillTiles`, with stages of 128 of K.

    Attributes:
        promote: stages between promotions to totals; 0: never, sums stay in the tensor core.
    """

    pass_tokens: int = 128
    stages13: int = 5
    stages2: int = 5
    step: int = 16
    promote: int = 8


@dataclass(frozen=True)
class Fp8Sizes(LayerSizes):
    """As the kernels see a layer whose weights come in stages."""

    @property
    def block_bytes(self) -> int:
        """Of 16 rows over 128 of K: two blocks."""
        return 2 * super().block_bytes

    @property
    def chunks13(self) -> int:
        """Of 128 of K."""
        return -(-self.k_blocks13 // 2)

    @property
    def chunks2(self) -> int:
        return -(-self.k_blocks2 // 2)


def fp8_sizes(sizes: LayerSizes) -> Fp8Sizes:
    return Fp8Sizes(**{name: getattr(sizes, name) for name in sizes.__dataclass_fields__})


@dataclass(frozen=True)
class Fp8Plan(PrefillPlan):
    """Of one layer; a launch takes any number of tokens."""

    sizes: Fp8Sizes
    tiles: Fp8Tiles

    @property
    def codes_bytes(self) -> int:
        """Of a pass's rows between FC1 and FC2 as E4M3, in whole stages."""
        return self.sizes.chunks2 * self.token_bytes

    def half_exponent(self, chunks: int) -> int:
        """Totals are float16 times 2 to this."""
        return max(0, math.ceil(math.log2(LARGEST_PRODUCT * STAGE_K * chunks / LARGEST_HALF)))

    @property
    def note_bytes(self) -> int:
        """What FC2 needs of a pass's rows: pairs, weights, weights times scales."""
        return 12 * self.tiles.pass_tokens

    @cached_property
    def offsets13(self) -> dict[str, int]:
        return self._with_tables(super().offsets13)

    @cached_property
    def offsets2(self) -> dict[str, int]:
        return self._with_tables(super().offsets2)

    def _with_tables(self, offsets: dict[str, int]) -> dict[str, int]:
        """And E4M3's table."""
        table = offsets["end"]
        return {**offsets, "table": table, "end": table + TABLE_BYTES}


def check_fp8(plan: Fp8Plan) -> Fp8Plan:
    """The plan, if it can be built. Raises PlanError."""
    check_prefill(plan)
    t = plan.tiles
    if t.promote < 0:
        raise PlanError(f"{plan}: promote {t.promote}, 0 or more stages")
    if t.blocks13 != 1 or t.blocks2 != 1:
        raise PlanError(f"{plan}: stages of 128 of K")
    return plan
