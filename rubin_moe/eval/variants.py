"""Every way in which a checkpoint's experts can be held: scale type and fold mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rubin_moe.errors import FoldError
from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.formats.spec import MXFP4, NVFP4_UE4M3, BlockFormat, ScaleType
from rubin_moe.loader.fold import FOLD_MODES, FoldMode, fold
from rubin_moe.loader.fold_report import FoldReport
from rubin_moe.loader.load import ModelCheckpoint, load_experts
from rubin_moe.loader.mxfp4_cast import mxfp4_to_nvfp4


@dataclass(frozen=True)
class Variant:
    """One form of a checkpoint's experts.

    Attributes:
        fold: mode of `loader.fold.fold`; ``none`` for a format without global scales.
        scale: block scale type computed with.
    """

    fold: FoldMode
    scale: ScaleType


@dataclass(frozen=True, eq=False)
class HeldExperts:
    """All layers of one variant.

    Attributes:
        layers: ``experts`` module name -> weights.
        reports: one a layer; forced: `fold` refused the loss and was overruled.
    """

    layers: dict[str, ExpertWeights]
    reports: tuple[FoldReport, ...]
    forced: bool

    @property
    def fmt(self) -> BlockFormat:
        return next(iter(self.layers.values())).fmt

    def losses(self) -> dict[str, float | int]:
        """Of the fold, over all layers: mean relative error, blocks flushed and saturated."""
        blocks = sum(r.total("blocks") for r in self.reports)
        mean = sum(r.mean_rel_err * r.total("blocks") for r in self.reports)
        return {
            "fold_mean_rel_err": round(mean / blocks, 6) if blocks else 0.0,
            "flushed": sum(r.total("flushed") for r in self.reports),
            "saturated": sum(r.total("saturated") for r in self.reports),
        }


def variants(stored: BlockFormat) -> Iterator[Variant]:
    """What can be made of a stored format; NVFP4 stays NVFP4."""
    if stored == MXFP4:
        yield Variant("none", "ue8m0")
        yield Variant("exact", "ue5m3")  # blocks of 32 as two of 16
        return
    if stored == NVFP4_UE4M3:
        yield from (Variant(mode, "ue4m3") for mode in FOLD_MODES)
        yield from (Variant(mode, "ue5m3") for mode in FOLD_MODES)
        return
    yield Variant("none", "ue5m3")


def hold(checkpoint: ModelCheckpoint, variant: Variant) -> HeldExperts:
    """Loads and folds every layer; a loss that `fold` refuses is forced, and said so."""
    layers: dict[str, ExpertWeights] = {}
    reports: list[FoldReport] = []
    forced = False
    for module in checkpoint.experts():
        stored = load_experts(checkpoint, module)
        try:
            held, report = _convert(stored, variant, force=False)
        except FoldError:
            held, report = _convert(stored, variant, force=True)
            forced = True
        layers[module] = held
        reports.append(report)
    return HeldExperts(layers, tuple(reports), forced)


def _convert(
    stored: ExpertWeights, variant: Variant, force: bool
) -> tuple[ExpertWeights, FoldReport]:
    if stored.fmt == MXFP4 and variant.scale != "ue8m0":
        return mxfp4_to_nvfp4(stored, variant.scale, alpha=True, force=force)
    return fold(stored, variant.fold, variant.scale, force=force)
