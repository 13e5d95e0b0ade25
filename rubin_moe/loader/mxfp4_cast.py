"""MXFP4 experts as NVFP4: the codes stay, a block of 32 becomes two of 16, the scale is recoded.

``2^k`` is a UE5M3 scale for k in [-17, 16] and a UE4M3 scale for k in [-9, 8]; a power of two left
in ``dec`` moves that window. A block of nothing but zeros fits whatever its scale. The way back
does not exist: `fold` says why NVFP4 stays NVFP4.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rubin_moe.errors import FoldError
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.minifloat import Minifloat
from rubin_moe.formats.scales import CODECS
from rubin_moe.formats.spec import MXFP4, BlockFormat, ScaleType
from rubin_moe.formats.ue8m0 import UE8M0
from rubin_moe.loader.fold import TARGETS, FoldBuilder, Slot, slots
from rubin_moe.loader.fold_report import FoldReport

_HALVED = BlockFormat("mxfp4", "e2m1", "ue8m0", 16, has_global=False)


def mxfp4_to_nvfp4(
    weights: ExpertWeights,
    target_scale: ScaleType = "ue5m3",
    alpha: bool = False,
    force: bool = False,
) -> tuple[ExpertWeights, FoldReport]:
    """The same experts with UE5M3 or UE4M3 scales, exact wherever the range allows it.

    Args:
        alpha: let a power of two remain in ``dec`` where an expert's scales do not fit without;
            gate and up share it if they can. UE4M3 has a global scale by definition, so always may.
        force: round what does not fit (flushed or saturated, and reported) instead of refusing.

    Raises:
        FoldError: not MXFP4, or a scale outside the range (names the expert and its exponents).
    """
    if weights.fmt != MXFP4:
        raise FoldError(f"{weights.name}: {weights.fmt} is not mxfp4")
    if target_scale not in TARGETS:
        raise FoldError(f"{weights.name}: NVFP4 has ue4m3 or ue5m3 scales, not {target_scale}")
    halved = replace(weights, fmt=_HALVED, w13=_split(weights.w13), w2=_split(weights.w2))
    window = exact_exponents(target_scale)
    out = FoldBuilder(halved, TARGETS[target_scale])
    misfits: list[str] = []
    moving = alpha or target_scale == "ue4m3"
    for group in _groups(halved):
        spans = [_span(halved, slot) for slot in group]
        for slot, shift in zip(group, _shifts(spans, window, moving), strict=True):
            low, high = _span(halved, slot)
            if low - shift < window[0] or high - shift > window[1]:
                misfits.append(f"{out.where(slot)} 2^{low}..2^{high}")
            out.rescale(slot, 2.0**-shift, -shift, alpha=2.0**shift)
    if misfits and not force:
        raise FoldError(
            f"{weights.name}: {target_scale} block scales are exact for 2^{window[0]} to "
            f"2^{window[1]}{', moved by one alpha an expert' if moving else ''}; outside in "
            f"{len(misfits)} parts: {'; '.join(misfits[:4])}"
        )
    return out.weights(), replace(out.report("mxfp4_to_nvfp4"), source=MXFP4.name)


def exact_exponents(scale: ScaleType) -> tuple[int, int]:
    """Least and greatest k for which ``2^k`` is a scale of that type."""
    codec = CODECS[scale]
    assert isinstance(codec, Minifloat)
    return round(math.log2(codec.min_subnormal)), math.floor(math.log2(codec.max))


def _split(proj: ProjectionWeights) -> ProjectionWeights:
    """Scales a 16-block; a block of zeros takes the largest scale of its slot's living ones."""
    sf = proj.sf.repeat_interleave(2, dim=-1)
    zero = (proj.qdata & 0x77).reshape(*sf.shape, 8).eq(0).all(-1)
    per_slot = (*proj.dec.shape, -1)
    living = torch.where(zero, 0, sf).reshape(per_slot).amax(-1, keepdim=True)
    dead = zero.reshape(per_slot).all(-1, keepdim=True)
    fill = torch.where(dead, UE8M0.bias, living).to(torch.uint8)
    filled = torch.where(zero.reshape(per_slot), fill, sf.reshape(per_slot))
    return replace(proj, sf=filled.reshape(sf.shape))


def _groups(weights: ExpertWeights) -> list[list[Slot]]:
    """Slots that should share one alpha: gate and up of an expert."""
    groups: dict[tuple[int, str], list[Slot]] = {}
    for slot in slots(weights):
        groups.setdefault((slot.expert, slot.proj), []).append(slot)
    return list(groups.values())


def _span(weights: ExpertWeights, slot: Slot) -> tuple[int, int]:
    """Least and greatest exponent of a slot's scales."""
    codes: Tensor = slot.of(slot.projection(weights).sf)
    return int(codes.min()) - UE8M0.bias, int(codes.max()) - UE8M0.bias


def _shifts(spans: Sequence[tuple[int, int]], window: tuple[int, int], moving: bool) -> list[int]:
    """Exponent of the alpha of each slot; one for all if they fit together."""
    if not moving:
        return [0] * len(spans)
    low, high = min(s[0] for s in spans), max(s[1] for s in spans)
    if high - low <= window[1] - window[0] or len(spans) == 1:
        return [_shift(low, high, window)] * len(spans)
    return [_shift(*span, window) for span in spans]


def _shift(low: int, high: int, window: tuple[int, int]) -> int:
    """0 if the span fits as it is, else its greatest exponent on the window's upper end."""
    return 0 if window[0] <= low and high <= window[1] else high - window[1]
