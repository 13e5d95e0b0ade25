"""One group of a plan -> the bytes it writes, and what that lost."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rubin_moe.convert.decode import decode_expert
from rubin_moe.convert.options import Options
from rubin_moe.convert.output import (
    Piece,
    Span,
    encode,
    expert_parts,
    keeps,
    reciprocal,
    stores_divisor,
)
from rubin_moe.convert.plan import CopyGroup, ExpertGroup, Group, LinearGroup
from rubin_moe.convert.quantize import quantize_expert, quantize_matrix, shared_dec
from rubin_moe.convert.recode import recode
from rubin_moe.convert.rescale import keeps_codes, rescale
from rubin_moe.convert.source import TORCH_DTYPES, DenseExpert, Source
from rubin_moe.convert.tally import Tally
from rubin_moe.errors import ConvertError
from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.formats.scales import CODECS
from rubin_moe.formats.spec import BlockFormat
from rubin_moe.loader.dialect import Part


def execute(source: Source, group: Group, options: Options, tally: Tally) -> Iterator[Piece | Span]:
    """Pieces in any order; ``tally`` is filled on the way.

    Raises:
        ConvertError, FoldError, CheckpointError: names the tensor or expert.
    """
    if isinstance(group, CopyGroup):
        yield from _copy(source, group)
    elif isinstance(group, LinearGroup):
        yield from _linear(source, group, options)
    elif keeps_codes(group, options):
        yield from rescale(source, group, options, tally)
    else:
        yield from _expert(source, group, options, tally)


def _copy(source: Source, group: CopyGroup) -> Iterator[Piece | Span]:
    entry, out = group.entry, group.out
    if entry.dtype == out.dtype and not group.reciprocal:
        yield Span(out.name, entry)
        return
    value = source.tensor(entry).float().reshape(())
    value = reciprocal(value) if group.reciprocal else value
    yield Piece(out.name, 0, value.reshape(out.shape))


def _linear(source: Source, group: LinearGroup, options: Options) -> Iterator[Piece]:
    matrices = {m: source.linear(group.dialect, e) for m, e in group.entries.items()}
    if group.target is None:
        for module, matrix in matrices.items():
            yield Piece(f"{module}.weight", 0, _finite_bf16(matrix, module))
        return
    fmt = group.target.fmt
    dec = shared_dec(matrices, fmt, stores_divisor(group.target))
    for module, matrix in matrices.items():
        blocks = quantize_matrix(matrix, fmt, dec, options)
        parts: dict[Part, Tensor] = {"qdata": blocks.qdata, "sf": blocks.sf, "dec": dec}
        for name, tensor in encode(group.target, group.shapes[module], parts):
            yield Piece(name, 0, tensor)


def _expert(source: Source, group: ExpertGroup, options: Options, tally: Tally) -> Iterator[Piece]:
    job = group.job
    converted = _convert(source, group, options, tally)
    if job.stacked is not None:
        yield from job.stacked.pieces(job.module, group.expert, converted, group.shapes)
        return
    for name, shape in group.shapes.items():
        if isinstance(converted, DenseExpert):
            yield Piece(f"{shape.path}.weight", 0, converted.matrices[name])
            if shape.bias is not None:
                bias = converted.biases[name].to(TORCH_DTYPES[shape.bias])
                yield Piece(f"{shape.path}.bias", 0, bias)
            continue
        assert job.dialect is not None
        parts = expert_parts(converted, name)
        if group.inputs:
            parts["input_dec"] = torch.tensor(group.inputs[name])
        if not shape.dec and "dec" in parts and float(parts["dec"]) != 1:
            raise ConvertError(f"{group}.{name}: a global scale {float(parts['dec'])} remains")
        tally.moved += shape.dec and not keeps(job.dialect, parts["dec"])
        for out, tensor in encode(job.dialect, shape, parts):
            yield Piece(out, 0, tensor)


def _convert(
    source: Source, group: ExpertGroup, options: Options, tally: Tally
) -> ExpertWeights | DenseExpert:
    job = group.job
    if job.spec is None:
        dense = source.unquantized(job.module, group.expert, group.entries, job.lie)
        if job.fmt is None:
            tally.experts += 1
            matrices = {n: _finite_bf16(m, f"{group}.{n}") for n, m in dense.matrices.items()}
            return DenseExpert(matrices, dense.biases)
        weights = quantize_expert(
            dense, job.module, group.expert, job.fmt, stores_divisor(job.dialect), options
        )
        tally.quantized(dense, weights)
    else:
        stored = source.quantized(job.spec, job.module, group.expert, group.entries)
        if job.fmt is None:
            tally.experts += 1
            return decode_expert(stored)
        weights, report = recode(stored, job.fmt, options)
        tally.folded(report)
    _check_codes(weights, str(group))
    return weights


def _finite_bf16(matrix: Tensor, name: str) -> Tensor:
    made = matrix.to(torch.bfloat16)
    if not bool(torch.isfinite(made).all()):
        raise ConvertError(f"{name}: a value exceeds the range of bfloat16")
    return made


def _check_codes(weights: ExpertWeights, where: str) -> None:
    fmt: BlockFormat = weights.fmt
    last = CODECS[fmt.scale].max_code
    for proj in (weights.w13, weights.w2):
        if proj.sf.numel() and int(proj.sf.max()) > last:
            raise ConvertError(f"{where}: a block scale is NaN after conversion")
        if not bool((torch.isfinite(proj.dec) & (proj.dec > 0)).all()):
            raise ConvertError(f"{where}: global scale {proj.dec.tolist()}")
