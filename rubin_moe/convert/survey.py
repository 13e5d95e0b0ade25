"""MXFP4 scales that NVFP4 cannot hold, found before anything is written.

Reads the scales, 1/17 of the bytes; an expert that looks out of range is read whole, since a block
of zeros fits whatever its scale.
"""

import torch

from rubin_moe.convert.plan import ExpertGroup, Plan
from rubin_moe.convert.recode import recode
from rubin_moe.convert.source import Source
from rubin_moe.errors import ConvertError, FoldError
from rubin_moe.formats.spec import MXFP4, BlockFormat
from rubin_moe.formats.ue8m0 import UE8M0
from rubin_moe.loader.dialect import Reading
from rubin_moe.loader.load import ModelCheckpoint
from rubin_moe.loader.mxfp4_cast import exact_exponents
from rubin_moe.loader.names import slot_of

_SHOWN = 12


def refuse_misfits(checkpoint: ModelCheckpoint, plan: Plan) -> None:
    """Raises ConvertError that lists every expert whose scales do not fit."""
    groups = [g for s in plan.shards for g in s.groups if isinstance(g, ExpertGroup)]
    groups = [g for g in groups if g.job.spec is not None and g.job.spec.fmt == MXFP4]
    if not groups:
        return
    source = Source(checkpoint)
    misfits = []
    try:
        for group in groups:
            spec, fmt = group.job.spec, group.job.fmt
            assert spec is not None
            assert fmt is not None
            if not _suspect(source, group, fmt):
                continue
            stored = source.quantized(spec, group.job.module, group.expert, group.entries)
            try:
                recode(stored, fmt, plan.options)
            except FoldError as e:
                misfits.append(str(e))
    finally:
        source.close()
    if misfits:
        raise ConvertError(
            f"{len(misfits)} of {len(groups)} experts do not fit {plan.options.target} exactly; "
            "`force` rounds them and reports it:\n  " + "\n  ".join(misfits[:_SHOWN])
        )


def _suspect(source: Source, group: ExpertGroup, target: BlockFormat) -> bool:
    """Whether some scale of an expert lies outside the target's range, or its spread does."""
    spec = group.job.spec
    assert spec is not None
    low, high = exact_exponents(target.scale)
    for entry in group.entries:
        slot = slot_of(entry.name)
        reading = spec.dialect.read(slot.leaf)
        if not isinstance(reading, Reading) or reading.part != "sf":
            continue
        codes = source.tensor(entry, group.expert if slot.expert is None else None)
        codes = codes.view(torch.uint8)
        if int(codes.max()) > UE8M0.max_code:
            return True
        least, most = (int(c) - UE8M0.bias for c in (codes.min(), codes.max()))
        spread = target.has_global and most - least <= high - low
        if not (spread or low <= least <= most <= high):
            return True
    return False
