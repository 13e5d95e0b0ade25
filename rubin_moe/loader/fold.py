"""Folding global scales into block scales: all the scale algebra, pure.

With ``g = 2^k r``, ``1 <= r < 2``, per expert and half of ``w13``:

| mode | stored scale | ``dec`` left for the kernel (alpha) | error |
|---|---|---|---|
| ``none`` | the checkpoint's value, in the target's code | ``g`` | none |
| ``exact`` | ``sf 2^j``, j nearest to k that keeps every block exact | ``g 2^-j`` | none |
| ``full`` | ``round(sf g)`` | 1 | reported; refused above a loss unless forced |
| ``full+requantize`` | new scales and codes of least squared error | 1 | reported |

A fold reads the stored weights and returns new ones, so folding twice from the same checkpoint
gives the same bytes. NVFP4 stays NVFP4: group 16 with UE4M3 or UE5M3 scales.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rubin_moe.errors import FoldError, FormatError
from rubin_moe.formats import quantize as blockquant
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.minifloat import Minifloat
from rubin_moe.formats.scales import CODECS
from rubin_moe.formats.spec import NVFP4_UE4M3, NVFP4_UE5M3, BlockFormat, ScaleType, is_nvfp4
from rubin_moe.loader.fold_report import FoldEntry, FoldReport

PerCode: TypeAlias = NDArray[Any]
"""An array ``[256]`` over the codes of a scale type."""
FoldMode = Literal["none", "exact", "full", "full+requantize"]
FOLD_MODES: tuple[FoldMode, ...] = ("none", "exact", "full", "full+requantize")
MAX_MEAN_ERROR = 0.04
"""Mean relative error of an expert's block scales above which a fold refuses: rounding a 3-bit
mantissa once more costs about 0.021 on average, so more than this means scales that underflow."""
TARGETS: dict[ScaleType, BlockFormat] = {"ue4m3": NVFP4_UE4M3, "ue5m3": NVFP4_UE5M3}


@dataclass(frozen=True)
class Slot:
    """Rows of one local expert that share a global scale.

    Attributes:
        proj: attribute of `ExpertWeights`; half: column of its ``dec``; rows: of its tensors.
        part: ``gate``, ``up`` or ``down``.
    """

    proj: Literal["w13", "w2"]
    expert: int
    half: int
    rows: slice
    part: str

    def of(self, tensor: Tensor) -> Tensor:
        """This slot's rows of ``[E, N, ...]``; a view."""
        return tensor[self.expert, self.rows]

    def projection(self, weights: ExpertWeights) -> ProjectionWeights:
        return weights.w13 if self.proj == "w13" else weights.w2


def slots(weights: ExpertWeights) -> Iterator[Slot]:
    """Every expert, projection and half, in order."""
    names = ("gate", "up") if weights.gated else ("up",)
    for expert in range(weights.num_experts):
        for half, part in enumerate(names):
            rows = slice(half * weights.intermediate, (half + 1) * weights.intermediate)
            yield Slot("w13", expert, half, rows, part)
        yield Slot("w2", expert, 0, slice(None), "down")


def fold(
    weights: ExpertWeights,
    mode: FoldMode = "exact",
    target_scale: ScaleType | None = None,
    max_mean_error: float = MAX_MEAN_ERROR,
    force: bool = False,
) -> tuple[ExpertWeights, FoldReport]:
    """Experts with their global scales folded into the block scales.

    Args:
        target_scale: ``ue4m3`` or ``ue5m3``; default the weights' own. MXFP4 has no global scale
            and comes back as it is.
        max_mean_error: of mode ``full``, where a saturated block is refused as well.
        force: let ``full`` lose more than that.

    Returns:
        New weights, whose ``dec`` is the alpha that remains (ones after ``full``), and the report.

    Raises:
        FoldError: a mode or target that does not exist for this format, a loss above the limit, or
            a target whose range cannot hold the scales exactly.
        FormatError: a block scale that is no number, a global scale that is not positive.
    """
    target = _target(weights, mode, target_scale)
    if not is_nvfp4(target):
        return weights, FoldReport(weights.name, mode, weights.fmt.name, target.name, ())
    out = FoldBuilder(weights, target)
    for slot in slots(weights):
        if mode == "full+requantize":
            out.requantize(slot)
            continue
        g, sf = out.global_scale(slot), slot.of(slot.projection(weights).sf)
        out.take(slot, fold_scales(sf, g, weights.fmt, target, mode, out.where(slot)))
    report = out.report(mode)
    if mode == "full" and not force:
        refuse_loss(report, max_mean_error)
    return out.weights(), report


@dataclass(frozen=True)
class FoldedScales:
    """Block scales of one matrix after a fold.

    Attributes:
        sf: uint8, as the source's; shift, alpha: see `fold_report.FoldEntry`; losses: its counts
            and errors by name, none if nothing was lost.
    """

    sf: Tensor
    shift: int
    alpha: float
    losses: Mapping[str, int | float] = field(default_factory=dict)


def fold_scales(
    sf: Tensor, g: float, source: BlockFormat, target: BlockFormat, mode: FoldMode, where: str
) -> FoldedScales:
    """One matrix under one global scale, in any mode but ``full+requantize``, which needs codes.

    Args:
        sf: uint8 scale codes of any shape; g: positive. where: for messages.

    Raises:
        FoldError, FormatError: as `fold`.
    """
    k = _split(g)[0] if mode == "exact" else 0
    if mode != "full" and _all_exact(sf, source.scale, target.scale, k):
        made = _rescaled(source.scale, target.scale, 2.0**k)
        return FoldedScales(_translated(sf, made), k, g * 2.0**-k)
    counts = _counts(sf, source.scale, where)
    if mode == "full":
        new, losses = _rescale(sf, counts, source.scale, target.scale, g)
        return FoldedScales(new, 0, 1.0, losses)
    shift = 0
    if mode == "exact":
        shift = _nearest_exact(counts, source.scale, target.scale, k, where)
    new, losses = _rescale(sf, counts, source.scale, target.scale, 2.0**shift)
    if losses:
        raise FoldError(
            f"{where}: {losses['rerounded']} block scales have no exact {target.scale} value; mode "
            "'full' rounds them and says by how much"
        )
    return FoldedScales(new, shift, g * 2.0**-shift)


def share_alpha(
    weights: ExpertWeights, max_mean_error: float = MAX_MEAN_ERROR, force: bool = False
) -> tuple[ExpertWeights, FoldReport]:
    """Gate and up of every expert brought to one global scale, for a kernel with a single alpha.

    The larger scale is kept and the other half's block scales shrink by the ratio (the smaller is
    kept where only that is exact). A ratio that is a power of two is exact within the format's
    range; any other re-rounds that half and is reported.

    Raises:
        FoldError: not NVFP4, or a loss above ``max_mean_error`` without ``force``.
    """
    if not is_nvfp4(weights.fmt):
        raise FoldError(f"{weights.name}: {weights.fmt} has no global scales to bring together")
    out = FoldBuilder(weights, weights.fmt)
    for slot in slots(weights):
        both = [float(d) for d in slot.projection(weights).dec[slot.expert]]
        g = out.global_scale(slot)
        shared = min(both) if _only_smaller_is_exact(weights, slot.expert, both) else max(both)
        shared = shared if slot.proj == "w13" else g
        out.rescale(slot, g / shared, shift=0, alpha=shared)
    report = out.report("share_alpha")
    if not force:
        refuse_loss(report, max_mean_error)
    return out.weights(), report


class FoldBuilder:
    """New scales under construction; the source is only read."""

    def __init__(self, source: ExpertWeights, target: BlockFormat) -> None:
        self.source, self.target = source, target
        codec = CODECS[target.scale]
        assert isinstance(codec, Minifloat)
        self.codec = codec
        self.values = CODECS[source.fmt.scale].table
        self._new = {"w13": _own_scales(source.w13), "w2": _own_scales(source.w2)}
        self._entries: list[FoldEntry] = []

    def where(self, slot: Slot) -> str:
        return f"{self.source.name} expert {self.source.expert_ids[slot.expert]} {slot.part}"

    def global_scale(self, slot: Slot) -> float:
        g = float(slot.projection(self.source).dec[slot.expert, slot.half])
        if not (math.isfinite(g) and g > 0):
            raise FormatError(f"{self.where(slot)}: global scale {g}, expected a positive number")
        return g

    def rescale(self, slot: Slot, factor: float, shift: int, alpha: float) -> None:
        """Stores ``round(sf * factor)``; a new code depends on the old one alone."""
        codes = slot.of(slot.projection(self.source).sf)
        source, target = self.source.fmt.scale, self.target.scale
        counts = _counts(codes, source, self.where(slot))
        new, losses = _rescale(codes, counts, source, target, factor)
        self.take(slot, FoldedScales(new, shift, alpha, losses))

    def take(self, slot: Slot, folded: FoldedScales) -> None:
        """Stores what `fold_scales` made of a slot."""
        slot.of(self._new[slot.proj].sf)[...] = folded.sf
        self._new[slot.proj].dec[slot.expert, slot.half] = folded.alpha
        expert, g = self.source.expert_ids[slot.expert], self.global_scale(slot)
        self._entries.append(fold_entry(expert, slot.part, g, folded))

    def requantize(self, slot: Slot) -> None:
        """Stores the scales and codes nearest to the decoded weights, alpha 1.

        Per block the better of a fresh search and of the old codes under the re-rounded scale.
        """
        fmt, g, proj = self.source.fmt, self.global_scale(slot), slot.projection(self.source)
        sf, qdata = slot.of(proj.sf), slot.of(proj.qdata)
        _counts(sf, fmt.scale, self.where(slot))
        stored = blockquant.dequantize(qdata, sf, fmt, g)
        fresh = blockquant.quantize(stored, self.target, search=True)
        kept = self.codec.encode(self.values.nan_to_num(0.0) * g)[sf.int()]
        new = blockquant.dequantize(fresh.qdata, fresh.sf, self.target)
        old = blockquant.dequantize(qdata, kept, self.target)
        better = _block_error(old, stored, self.target) < _block_error(new, stored, self.target)
        new_sf = torch.where(better, kept, fresh.sf)
        wide = better.repeat_interleave(self.target.packed_k(self.target.sf_vec_size), -1)
        self._codes(slot.proj)[slot.expert, slot.rows] = torch.where(wide, qdata, fresh.qdata)
        elements = better.repeat_interleave(self.target.sf_vec_size, -1)
        error = (torch.where(elements, old, new) - stored).abs() / stored.abs()
        error = error[stored != 0]
        kept_value = self.codec.decode(new_sf, torch.float64) == self.values[sf.int()] * g
        losses = {
            "rerounded": int((~kept_value).sum()),
            "flushed": int(((new_sf == 0) & (sf != 0)).sum()),
            "saturated": int((new_sf == self.codec.max_code).sum()),
            "max_rel_err": float(error.max()) if error.numel() else 0.0,
            "mean_rel_err": float(error.double().mean()) if error.numel() else 0.0,
        }
        self.take(slot, FoldedScales(new_sf, 0, 1.0, losses))

    def weights(self) -> ExpertWeights:
        return replace(self.source, fmt=self.target, w13=self._new["w13"], w2=self._new["w2"])

    def report(self, mode: str) -> FoldReport:
        source, target = self.source.fmt.name, self.target.name
        return FoldReport(self.source.name, mode, source, target, tuple(self._entries))

    def _codes(self, proj: str) -> Tensor:
        """The projection's own copy of its codes, made when first written."""
        new, old = self._new[proj], getattr(self.source, proj)
        if new.qdata is old.qdata:
            self._new[proj] = replace(new, qdata=old.qdata.clone())
        return self._new[proj].qdata


def refuse_loss(report: FoldReport, max_mean_error: float = MAX_MEAN_ERROR) -> None:
    """Raises FoldError if an expert lost more than ``max_mean_error`` or has a saturated block."""
    bad = [e for e in report.entries if e.mean_rel_err > max_mean_error or e.saturated]
    if not bad:
        return
    worst = max(bad, key=lambda e: (e.mean_rel_err, e.saturated))
    raise FoldError(
        f"{report.name}: folding to {report.target} ({report.mode}) loses too much in {len(bad)} "
        f"of {len(report.entries)} parts; worst: expert {worst.expert} {worst.part} (2^{worst.k} * "
        f"{worst.r:.4g}): mean relative error {worst.mean_rel_err:.3g} (allowed {max_mean_error}), "
        f"max {worst.max_rel_err:.3g}, {worst.flushed} of {worst.blocks} blocks flushed to zero, "
        f"{worst.saturated} saturated; fold 'exact' loses nothing, 'full+requantize' chooses new "
        "codes, force accepts the loss"
    )


def fold_entry(expert: int, part: str, g: float, folded: FoldedScales) -> FoldEntry:
    """One line of a report. ``expert``: global id; ``g``: before the fold."""
    k, r = _split(g)
    return FoldEntry(
        expert,
        part,
        k,
        r,
        folded.shift,
        folded.alpha,
        folded.sf.numel(),
        **folded.losses,  # type: ignore[arg-type]
    )


def _target(weights: ExpertWeights, mode: str, scale: ScaleType | None) -> BlockFormat:
    if mode not in FOLD_MODES:
        raise FoldError(f"fold mode {mode!r} is unknown; known: {', '.join(FOLD_MODES)}")
    scale = scale or weights.fmt.scale
    if is_nvfp4(weights.fmt):
        if scale not in TARGETS:
            raise FoldError(
                f"{weights.name}: NVFP4 experts stay NVFP4 (group 16, UE4M3 or UE5M3 scales); "
                f"{scale} would merge blocks of 16 into 32 and drop the scales' mantissas"
            )
        return TARGETS[scale]
    if scale != weights.fmt.scale:
        raise FoldError(
            f"{weights.name}: {weights.fmt} has no global scale to fold; "
            f"mxfp4_to_nvfp4 gives its blocks {scale} scales"
        )
    return weights.fmt


def _split(g: float) -> tuple[int, float]:
    """``k, r`` with ``g = 2^k r`` and ``1 <= r < 2``."""
    mantissa, exponent = math.frexp(g)
    return exponent - 1, 2 * mantissa


def _own_scales(proj: ProjectionWeights) -> ProjectionWeights:
    return replace(proj, sf=torch.empty_like(proj.sf), dec=torch.empty_like(proj.dec))


@dataclass(frozen=True)
class _Rescaled:
    """What becomes of each of the 256 codes of a scale type; all arrays ``[256]``.

    Attributes:
        codes: new code; rel_err: float64, of the new value.
        alive: the old value is positive; changed: the new one is another than wanted;
            saturated: wanted was above the target's largest.
    """

    codes: bytes
    rel_err: PerCode
    alive: PerCode
    changed: PerCode
    saturated: PerCode


@lru_cache(maxsize=256)  # experts are few powers of two apart
def _rescaled(source: ScaleType, target: ScaleType, factor: float) -> _Rescaled:
    codec = CODECS[target]
    assert isinstance(codec, Minifloat)
    wanted = CODECS[source].table.nan_to_num(0.0) * factor
    codes = codec.encode(wanted)
    got = codec.decode(codes, torch.float64)
    return _Rescaled(
        codes=codes.numpy().tobytes(),
        rel_err=((got - wanted).abs() / wanted).nan_to_num(0.0).numpy(),
        alive=(wanted > 0).numpy(),
        changed=(got != wanted).numpy(),
        saturated=(wanted > codec.max).numpy(),
    )


def _counts(sf: Tensor, scale: ScaleType, where: str) -> PerCode:
    """int64 ``[256]``: how often each code occurs. Raises FormatError on one without a value."""
    counts: PerCode = torch.bincount(sf.reshape(-1), minlength=256).numpy()
    bad = int(counts[CODECS[scale].max_code + 1 :].sum())
    if bad:
        raise FormatError(
            f"{where}: {bad} of {sf.numel()} block scales are no {scale} value (NaN or a set sign "
            "bit)"
        )
    return counts


def _rescale(
    sf: Tensor, counts: PerCode, source: ScaleType, target: ScaleType, factor: float
) -> tuple[Tensor, dict[str, int | float]]:
    """Codes of ``round(sf * factor)``, and what that lost, empty if nothing."""
    made = _rescaled(source, target, factor)
    codes = _translated(sf, made)
    rerounded = int(counts[made.changed].sum())
    if not rerounded:
        return codes, {}
    seen = counts * made.alive
    zero = np.frombuffer(made.codes, np.uint8) == 0
    return codes, {
        "rerounded": rerounded,
        "flushed": int(seen[zero].sum()),
        "saturated": int(seen[made.saturated].sum()),
        "max_rel_err": float(made.rel_err[seen > 0].max()),
        "mean_rel_err": float((made.rel_err * seen).sum()) / int(seen.sum()),
    }


def _translated(sf: Tensor, made: _Rescaled) -> Tensor:
    """``made.codes[sf]``; twice as fast as indexing."""
    new = bytearray(sf.numpy()).translate(made.codes)
    return torch.from_numpy(np.frombuffer(new, np.uint8)).view(sf.shape)


def _all_exact(sf: Tensor, source: ScaleType, target: ScaleType, k: int) -> bool:
    """Whether ``2^k`` is exact for every code from the least to the greatest in ``sf``: enough to
    know, without counting, that it is for all that are there."""
    if not sf.numel():
        return False
    least, most = (int(c) for c in torch.aminmax(sf))
    changed = _rescaled(source, target, 2.0**k).changed
    return most <= CODECS[source].max_code and not changed[least : most + 1].any()


def _nearest_exact(
    counts: PerCode, source: ScaleType, target: ScaleType, k: int, where: str
) -> int:
    """The exponent nearest to k that keeps every block exact."""
    values, lowest_bit = _code_values(source)
    codec = CODECS[target]
    assert isinstance(codec, Minifloat)
    present: list[int] = [c for c in counts.nonzero()[0].tolist() if values[c] > 0]
    if not present:
        return k
    smallest, largest = values[present[0]], values[present[-1]]
    least = round(math.log2(codec.min_subnormal)) - min(lowest_bit[c] for c in present)
    most = math.floor(math.log2(codec.max / largest))
    if least > most:
        raise FoldError(
            f"{where}: no power of two brings its block scales, {smallest:.3g} to {largest:.3g}, "
            f"into {target} exactly; mode 'full' rounds them and says by how much"
        )
    return min(max(k, least), most)


@cache
def _code_values(scale: ScaleType) -> tuple[list[float], list[int]]:
    """Of each code: its value, 0 for NaN; the exponent of the value's lowest set bit."""
    table = CODECS[scale].table.nan_to_num(0.0)
    mantissa, exponent = torch.frexp(table)
    odd = (mantissa * 16).long()  # at most four significant bits
    lowest = exponent - 4 + torch.log2((odd & -odd).clamp(min=1).double()).long()
    return table.tolist(), lowest.tolist()


def _only_smaller_is_exact(weights: ExpertWeights, expert: int, both: list[float]) -> bool:
    if len(set(both)) == 1:
        return False
    exact = {}
    for shared in (max(both), min(both)):
        trial = FoldBuilder(weights, weights.fmt)
        for slot in slots(weights):
            if slot.expert == expert and slot.proj == "w13":
                trial.rescale(slot, both[slot.half] / shared, 0, shared)
        exact[shared] = trial.report("").lossless
    return exact[min(both)] and not exact[max(both)]


def _block_error(decoded: Tensor, stored: Tensor, fmt: BlockFormat) -> Tensor:
    """Squared error of each block."""
    return (decoded - stored).square().reshape(*stored.shape[:-1], -1, fmt.sf_vec_size).sum(-1)
