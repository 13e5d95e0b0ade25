"""FP4 experts whose codes stay what they are: NVFP4 that is folded, any that only gets other names.

The writer copies the codes unread; scales alone become values. That names, dtypes and shapes are
what the dialect wants was checked when the plan was made, by the rules of loading.
"""

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from rubin_moe.convert.options import Options
from rubin_moe.convert.output import Piece, Shape, Span, encode, keeps
from rubin_moe.convert.plan import ExpertGroup, Group
from rubin_moe.convert.recode_rules import fold_mode
from rubin_moe.convert.source import Source
from rubin_moe.convert.tally import Tally
from rubin_moe.errors import ConvertError
from rubin_moe.formats.scales import CODECS
from rubin_moe.formats.spec import MXFP4
from rubin_moe.loader import validate
from rubin_moe.loader.checkpoint import TensorEntry
from rubin_moe.loader.dialect import Dialect, Part, Reading
from rubin_moe.loader.fold import FoldedScales, fold_entry, fold_scales, refuse_loss
from rubin_moe.loader.fold_report import FoldEntry, FoldReport
from rubin_moe.loader.names import slot_of
from rubin_moe.loader.validate import Repairs, ScaleChecks

_Stored: TypeAlias = dict[Part, tuple[TensorEntry, Reading]]


def keeps_codes(group: Group, options: Options) -> bool:
    """Whether every byte of an expert's codes stays, in a tensor of its own as before."""
    if not isinstance(group, ExpertGroup):
        return False
    job = group.job
    if job.spec is None or job.fmt is None or job.stacked is not None:
        return False
    if MXFP4 in (job.spec.fmt, job.fmt):
        if job.spec.fmt != job.fmt:
            return False
    elif fold_mode(job.spec.fmt, job.fmt, options) == "full+requantize":
        return False
    slots = [slot_of(e.name) for e in group.entries]
    return all(s.expert is not None and s.projection != "gate_up" for s in slots)


def rescale(
    source: Source, group: ExpertGroup, options: Options, tally: Tally
) -> Iterator[Piece | Span]:
    """One expert of which `keeps_codes` is true.

    Raises:
        CheckpointError, FoldError: as loading and folding do.
    """
    job = group.job
    assert job.spec is not None
    assert job.fmt is not None
    assert job.dialect is not None
    stored = _by_projection(group, job.spec.dialect)
    renamed = job.spec.fmt == job.fmt and options.fold in (None, "none")
    mode = "none" if renamed else fold_mode(job.spec.fmt, job.fmt, options)
    lines: list[FoldEntry] = []
    for name, shape in group.shapes.items():
        tensors, where = stored[name], f"{job.module} expert {group.expert} {name}"
        yield Span(f"{shape.path}.{job.dialect.leaf('qdata')}", tensors["qdata"][0])
        sf, g = _scales(source, tensors, job.spec.dialect, where)
        folded = FoldedScales(sf, 0, g)
        if not renamed:
            folded = fold_scales(sf, g, job.spec.fmt, job.fmt, mode, where)
        lines.append(fold_entry(group.expert, name, g, folded))
        parts = _parts(source, tensors, shape, folded)
        tally.moved += shape.dec and not keeps(job.dialect, parts["dec"])
        for out, tensor in encode(job.dialect, shape, parts):
            yield Piece(out, 0, tensor)
        if not shape.dec and folded.alpha != 1:
            raise ConvertError(f"{where}: a global scale {folded.alpha} remains")
    report = FoldReport(job.module, mode, job.spec.fmt.name, job.fmt.name, tuple(lines))
    if mode == "full" and not options.force:
        refuse_loss(report)
    tally.folded(report)


def _by_projection(group: ExpertGroup, dialect: Dialect) -> Mapping[str, _Stored]:
    found: dict[str, _Stored] = {}
    for entry in group.entries:
        slot = slot_of(entry.name)
        reading = dialect.read(slot.leaf)
        if isinstance(reading, Reading):
            found.setdefault(slot.projection, {})[reading.part] = entry, reading
    return found


def _scales(source: Source, tensors: _Stored, dialect: Dialect, where: str) -> tuple[Tensor, float]:
    """uint8 ``[N, K / vec]`` block scales of one matrix and its global scale, both checked."""
    fmt, checks = dialect.fmt, ScaleChecks()
    entry, _ = tensors["sf"]
    sf = source.tensor(entry).view(torch.uint8)
    largest = int(sf.max())
    if largest > CODECS[fmt.scale].max_code:  # what is wrong is told with the block it is on
        codes = source.tensor(tensors["qdata"][0]).view(torch.uint8)
        validate.check_block_scales(sf, codes, fmt, entry.name, checks, Repairs())
    g = 1.0
    if "dec" in tensors:
        entry, reading = tensors["dec"]
        value = source.tensor(entry).item()
        validate.check_stored_global(value, dialect, entry.name)
        g = _multiplier(value, reading)
        validate.check_global(g, entry.name)
    validate.check_largest(float(CODECS[fmt.scale].table[largest]) * g, where, checks)
    return sf, g


def _multiplier(value: float, reading: Reading) -> float:
    """A scalar as stored -> float32 that multiplies."""
    return float(np.float32(1 / value)) if reading.reciprocal and value else value


def _parts(
    source: Source, tensors: _Stored, shape: Shape, folded: FoldedScales
) -> dict[Part, Tensor]:
    """All but the codes."""
    parts: dict[Part, Tensor] = {"sf": folded.sf, "dec": torch.tensor(folded.alpha)}
    if shape.bias is not None:
        parts["bias"] = source.tensor(tensors["bias"][0])
    if shape.inputs:
        entry, reading = tensors["input_dec"]
        parts["input_dec"] = torch.tensor(_multiplier(source.tensor(entry).item(), reading))
    return parts
