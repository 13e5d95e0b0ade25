"""16-bit and FP8 matrices -> NVFP4 or MXFP4.

NVFP4 with UE4M3 scales has a global scale ``amax / (6 * 448)``; matrices that servers multiply as
one (gate and up; query, key and value) share the larger amax, because kernels take one scale for
both. UE5M3 and MXFP4 have none.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rubin_moe.convert.options import Options
from rubin_moe.convert.output import reciprocal
from rubin_moe.convert.source import DenseExpert
from rubin_moe.errors import CheckpointError
from rubin_moe.formats import quantize as blockquant
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.spec import BlockFormat


def shared_dec(matrices: Mapping[str, Tensor], fmt: BlockFormat, divisor: bool) -> Tensor:
    """float32 scalar that maps the largest element of all matrices on the format's largest.

    Args:
        divisor: it will be stored as its reciprocal: the value is one that survives that.
    """
    amax = torch.stack([m.abs().max().float() for m in matrices.values()]).max()
    dec = blockquant.global_dec(amax, fmt)
    return reciprocal(reciprocal(dec)) if divisor else dec


def quantize_matrix(
    matrix: Tensor, fmt: BlockFormat, dec: Tensor, options: Options
) -> blockquant.QuantizedBlocks:
    """One matrix ``[N, K]`` under a given global scale."""
    return blockquant.quantize(
        matrix,
        fmt,
        dec if fmt.has_global else None,
        mx_rule=options.mx_rule,
        search=options.search,
    )


def quantize_expert(
    expert: DenseExpert, module: str, index: int, fmt: BlockFormat, divisor: bool, options: Options
) -> ExpertWeights:
    """One expert; gate and up share their global scale."""
    gated = "gate" in expert.matrices
    names = ("gate", "up") if gated else ("up",)
    hidden, intermediate = expert.matrices["down"].shape
    for name in names:
        if tuple(expert.matrices[name].shape) != (intermediate, hidden):
            raise CheckpointError(
                f"{module}.{index}.{name}: {list(expert.matrices[name].shape)}, expected "
                f"{[intermediate, hidden]} beside a down projection of {[hidden, intermediate]}"
            )
    parts = []
    for group in (names, ("down",)):
        matrices = {n: expert.matrices[n] for n in group}
        dec = shared_dec(matrices, fmt, divisor)
        blocks = [quantize_matrix(m, fmt, dec, options) for m in matrices.values()]
        biases = [expert.biases[n].float() for n in group if n in expert.biases]
        parts.append(
            ProjectionWeights(
                qdata=torch.cat([b.qdata for b in blocks]).unsqueeze(0),
                sf=torch.cat([b.sf for b in blocks]).unsqueeze(0),
                dec=dec.expand(1, len(group)).contiguous(),
                bias=torch.cat(biases).unsqueeze(0) if biases else None,
            )
        )
    return ExpertWeights(fmt, hidden, intermediate, gated, parts[0], parts[1], (index,), module)
