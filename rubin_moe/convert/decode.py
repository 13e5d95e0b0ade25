"""FP4 experts -> 16-bit matrices."""

import torch
from torch import Tensor

from rubin_moe.convert.source import DenseExpert
from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.formats.quantize import dequantize


def decode_expert(weights: ExpertWeights, dtype: torch.dtype = torch.bfloat16) -> DenseExpert:
    """The values of one expert as `dequantize` has them: float64 is exact, a 16-bit ``dtype`` the
    float32 value rounded."""
    names = ("gate", "up") if weights.gated else ("up",)
    matrices: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    for parts, proj in ((names, weights.w13), (("down",), weights.w2)):
        rows = proj.qdata.shape[1] // len(parts)
        for half, name in enumerate(parts):
            cut = slice(half * rows, (half + 1) * rows)
            matrices[name] = dequantize(
                proj.qdata[0, cut], proj.sf[0, cut], weights.fmt, proj.dec[0, half], dtype
            )
            if proj.bias is not None:
                biases[name] = proj.bias[0, cut]
    return DenseExpert(matrices, biases)
