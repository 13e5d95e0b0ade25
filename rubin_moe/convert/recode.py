"""FP4 experts -> other FP4 experts: fold, cast, or only other names.

| from | to | how |
|---|---|---|
| MXFP4 | NVFP4 | codes stay, scales become powers of two of the new type, if they fit |
| NVFP4 | NVFP4 | `loader.fold` in the mode asked for |
| a format | itself, mode ``none`` | as stored |
| NVFP4 | MXFP4 | refused, always |
"""

from rubin_moe.convert.options import Options
from rubin_moe.convert.recode_rules import fold_mode, why_not
from rubin_moe.errors import ConvertError
from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.formats.spec import MXFP4, BlockFormat
from rubin_moe.loader.fold import FoldedScales, fold, fold_entry, slots
from rubin_moe.loader.fold_report import FoldEntry, FoldReport
from rubin_moe.loader.mxfp4_cast import mxfp4_to_nvfp4


def recode(
    weights: ExpertWeights, target: BlockFormat, options: Options
) -> tuple[ExpertWeights, FoldReport]:
    """Experts in the target format, and what that lost.

    Raises:
        ConvertError: a direction that does not exist. FoldError: it would lose more than allowed.
    """
    reason = why_not(weights.fmt, target)
    if reason is not None:
        raise ConvertError(f"{weights.name}: {reason}")
    if weights.fmt == MXFP4 and target == MXFP4:
        return weights, FoldReport(
            weights.name, "none", MXFP4.name, MXFP4.name, _as_stored(weights)
        )
    if weights.fmt == MXFP4:
        return mxfp4_to_nvfp4(weights, target.scale, force=options.force)
    mode = fold_mode(weights.fmt, target, options)
    return fold(weights, mode, target.scale, force=options.force)


def _as_stored(weights: ExpertWeights) -> tuple[FoldEntry, ...]:
    return tuple(
        fold_entry(weights.expert_ids[s.expert], s.part, 1.0, FoldedScales(sf, 0, 1.0))
        for s in slots(weights)
        for sf in [s.of(s.projection(weights).sf)]
    )
