"""MXFP4 scales that NVFP4 cannot hold, found before anything is written.

Reads the scales, 1/17 of the bytes; an expert that looks out of range is read whole, since a block
of zeros fits whatever its scale.
"""

from typing import TYPE_CHECKING

from rubin_moe.convert.plan import ExpertGroup, Plan
from rubin_moe.errors import ConvertError, FoldError
from rubin_moe.formats.spec import MXFP4
from rubin_moe.loader.dialect import Reading
from rubin_moe.loader.load import ModelCheckpoint
from rubin_moe.loader.names import parse

if TYPE_CHECKING:
    from rubin_moe.convert.source import Source

UE8M0_BIAS = 127
_SHOWN = 12
_WINDOWS = {"nvfp4-ue5m3": (-17, 16), "nvfp4-ue4m3": (-9, 8)}


def refuse_misfits(checkpoint: ModelCheckpoint, plan: Plan) -> None:
    """Raises ConvertError that lists every expert whose scales do not fit."""
    groups = [g for s in plan.shards for g in s.groups if isinstance(g, ExpertGroup)]
    groups = [g for g in groups if g.job.spec is not None and g.job.spec.fmt == MXFP4]
    if not groups:
        return
    from rubin_moe.convert.recode import recode
    from rubin_moe.convert.source import Source

    source = Source(checkpoint)
    misfits = []
    try:
        for group in groups:
            if not _suspect(source, group, plan.options.target):
                continue
            spec = group.job.spec
            assert spec is not None
            assert group.job.fmt is not None
            stored = source.quantized(spec, group.job.module, group.expert, group.entries)
            try:
                recode(stored, group.job.fmt, plan.options)
            except FoldError as e:
                misfits.append(str(e))
    finally:
        source.close()
    if misfits:
        raise ConvertError(
            f"{len(misfits)} of {len(groups)} experts do not fit {plan.options.target} exactly; "
            "`force` rounds them and reports it:\n  " + "\n  ".join(misfits[:_SHOWN])
        )


def _suspect(source: "Source", group: ExpertGroup, target: str) -> bool:
    """Whether some scale of an expert lies outside the target's range, or its spread does."""
    import torch

    spec = group.job.spec
    assert spec is not None
    low, high = _WINDOWS[target]
    for entry in group.entries:
        parsed = parse(entry.name)
        slot = None if parsed is None else parsed.slot
        reading = None if slot is None else spec.dialect.read(slot.leaf)
        if slot is None or not isinstance(reading, Reading) or reading.part != "sf":
            continue
        codes = source.tensor(entry, group.expert if slot.expert is None else None)
        codes = codes.view(torch.uint8)
        least, most = (int(c) - UE8M0_BIAS for c in (codes.min(), codes.max()))
        spread = target == "nvfp4-ue4m3" and most - least <= high - low
        if not (spread or low <= least <= most <= high) or most > UE8M0_BIAS:
            return True
    return False
