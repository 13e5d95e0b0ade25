"""Checks of loaded scales: a wrong one is an error that names tensor, expert and value.

Nothing is mended unless asked for by name (`Repair`), and a repair is counted. Scales are read as
bytes: NaN codes, sign bits and zeros are facts about codes, not about a framework's casts.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rubin_moe.errors import CheckpointError
from rubin_moe.formats.scales import CODECS
from rubin_moe.formats.spec import BlockFormat
from rubin_moe.loader.accounting import no_input_scales
from rubin_moe.loader.dialect import Dialect

Repair: TypeAlias = Literal["zero_blocks", "saturate_nan", "input_scales"]
"""``zero_blocks``: a NaN scale of a block of zeros becomes zero. ``saturate_nan``: any other NaN
scale becomes the largest finite one (a float32 cast to E4M3 without a clamp gives NaN above 464,
Model-Optimizer PR 1397). ``input_scales``: a missing, zero or subnormal one becomes the largest of
the layer's."""

SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class ScaleChecks:
    """How strict loading is.

    Attributes:
        repair: what may be mended.
        max_spread: an expert whose largest weight scale (block times global) is further than this
            factor from the median of its peers is refused; infinity turns the check off.
        max_scale: largest scale of any weight block, global included; a weight of 6 times that
            does not occur in a model.
    """

    repair: Set[Repair] = frozenset()
    max_spread: float = 1000.0
    max_scale: float = 1e5


@dataclass
class Repairs:
    """What was mended, for the log: kind -> how many values."""

    counts: dict[Repair, int] = field(default_factory=dict)

    def add(self, kind: Repair, count: int) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count


def check_block_scales(
    sf: Tensor, qdata: Tensor, fmt: BlockFormat, where: str, checks: ScaleChecks, repairs: Repairs
) -> None:
    """One expert's block scales uint8 ``[N, K / vec]`` against its codes ``[N, K / 2]``.

    Mends ``sf`` in place where asked; it is the loader's own tensor.

    Raises:
        CheckpointError: names the first bad scale's row, column and code.
    """
    last = CODECS[fmt.scale].max_code  # above: NaN and, for UE4M3, a sign bit
    if not sf.numel() or int(sf.max()) <= last:
        return
    nan = sf == 0xFF if fmt.scale != "ue4m3" else (sf & 0x7F) == 0x7F
    negative = (sf >= 0x80) & ~nan if fmt.scale == "ue4m3" else torch.zeros_like(nan)
    if negative.any():
        row, col, code = _first(negative, sf)
        raise CheckpointError(
            f"{where}: block scale [{row}, {col}] is {code:#04x}, negative; "
            f"{int(negative.sum())} such scales"
        )
    blocks = qdata.reshape(*sf.shape, -1)
    zeros = ((blocks & 0x77) == 0).all(-1)
    for kind, where_nan, code in (
        ("zero_blocks", nan & zeros, 0),
        ("saturate_nan", nan & ~zeros, last),
    ):
        if not where_nan.any():
            continue
        if kind not in checks.repair:
            row, col, bad = _first(where_nan, sf)
            what = "a block of zeros" if kind == "zero_blocks" else "a block that is not zero"
            raise CheckpointError(
                f"{where}: block scale [{row}, {col}] is {bad:#04x}, NaN, on {what}; "
                f"{int(nan.sum())} NaN scales; ScaleChecks(repair={{{kind!r}}}) mends this kind"
            )
        repairs.add(kind, int(where_nan.sum()))  # type: ignore[arg-type]
        sf.masked_fill_(where_nan, code)


def _first(mask: Tensor, sf: Tensor) -> tuple[int, int, int]:
    row, col = (int(i) for i in mask.nonzero()[0])
    return row, col, int(sf[row, col])


def check_stored_global(stored: float, dialect: Dialect, where: str) -> None:
    """A global scale as its producer stores it: one that divides does not look like one that
    multiplies."""
    low, high = dialect.global_range
    if stored > 0 and not low <= stored <= high:
        raise CheckpointError(
            f"{where}: {stored:.6g} looks like {dialect.looks_like}; {dialect} stores values "
            f"within [{low:g}, {high:g}]"
        )


def check_global(value: float, where: str) -> None:
    """A global scale that multiplies must be a positive, finite, normal float32."""
    if not SMALLEST_NORMAL <= value < float("inf"):
        raise CheckpointError(f"{where}: global scale {value!r} is not positive and finite")


def largest_scales(sf: Tensor, dec: Tensor, fmt: BlockFormat) -> Tensor:
    """float64 ``[E, halves]``: largest block scale times global, of uint8 ``[E, N, S]``; codes are
    in ascending order of value."""
    e, halves = dec.shape
    codes = sf.reshape(e, halves, -1).amax(-1)
    return CODECS[fmt.scale].decode(codes, torch.float64) * dec.double()


def check_largest(value: float, where: str, checks: ScaleChecks) -> None:
    """An expert's largest weight scale, global included, against what occurs in a model."""
    if value > checks.max_scale:
        raise CheckpointError(
            f"{where}: largest weight scale {value:.3g} exceeds {checks.max_scale:.3g}"
        )


def check_spread(
    sf: Tensor,
    dec: Tensor,
    fmt: BlockFormat,
    where: Sequence[Sequence[str]],
    checks: ScaleChecks,
) -> None:
    """Experts whose scales are out of all proportion to their peers', or to any model's.

    Args:
        where: for messages, per expert and half.
    """
    if not sf.numel():
        return
    top = largest_scales(sf, dec, fmt)
    for half in range(top.shape[1]):
        values = top[:, half]
        alive = values[values > 0]
        if not alive.numel():
            continue
        middle = float(alive.median())
        for expert, value in enumerate(values.tolist()):
            check_largest(value, where[expert][half], checks)
            if value > 0 and not 1 / checks.max_spread <= value / middle <= checks.max_spread:
                raise CheckpointError(
                    f"{where[expert][half]}: largest weight scale {value:.3g} is "
                    f"{value / middle:.3g} times the median {middle:.3g} of the layer's experts"
                )


def settle_input_scales(
    dec: Tensor,
    expert_ids: Sequence[int],
    halves: Sequence[str],
    where: str,
    checks: ScaleChecks,
    repairs: Repairs,
) -> None:
    """Input scales float32 ``[E, halves]`` that something will read: each positive and normal.

    Raises:
        CheckpointError: names every expert without a usable one.
    """
    usable = torch.isfinite(dec) & (dec >= SMALLEST_NORMAL)
    if usable.all():
        return
    if "input_scales" in checks.repair:
        for half, name in enumerate(halves):
            good = usable[:, half]
            if not good.any():
                raise CheckpointError(f"{where}: no expert has a usable input scale of {name}")
            repairs.add("input_scales", int((~good).sum()))
            dec[~good, half] = dec[good, half].max()
        return
    bad = {
        name: [expert_ids[i] for i in torch.nonzero(~usable[:, half]).flatten().tolist()]
        for half, name in enumerate(halves)
    }
    raise CheckpointError(no_input_scales(where, bad))
