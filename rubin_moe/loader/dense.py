"""Quantized matrices outside the experts, decoded: for machines that cannot multiply them.

Experts stay as they are stored; this is for the attention and head matrices of the same checkpoint
(FP4 in the dialects of `dialects`, FP8 per tensor, per channel or per block).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rubin_moe.errors import CheckpointError
from rubin_moe.formats.quantize import dequantize
from rubin_moe.loader.dense_leaves import FP8_SCALES
from rubin_moe.loader.dialect import Dialect, Ignored


def dense(dialect: Dialect | None, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """float32 ``[N, K]`` of one matrix.

    Args:
        dialect: None for FP8. tensors: leaf -> stored tensor, those of `needed_leaves`.
        name: for messages.

    Raises:
        CheckpointError: shapes that do not go together, a scale that is not finite.
    """
    return _fp8(tensors, name) if dialect is None else _fp4(dialect, tensors, name)


def _fp4(dialect: Dialect, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    parts: dict[str, Tensor] = {}
    for leaf, tensor in tensors.items():
        reading = dialect.read(leaf)
        if reading is None or isinstance(reading, Ignored):
            continue
        if reading.part == "dec":
            value = tensor.float().reshape(())
            parts["dec"] = value.reciprocal() if reading.reciprocal else value
        else:
            parts[reading.part] = tensor.view(torch.uint8)
    q, sf = parts["qdata"], parts["sf"]
    if q.dim() != 2 or sf.shape != (q.shape[0], 2 * q.shape[1] // dialect.fmt.sf_vec_size):
        raise CheckpointError(
            f"{name}: codes {list(q.shape)} and block scales {list(sf.shape)} do not go together; "
            f"{dialect} has one scale for {dialect.fmt.sf_vec_size} elements"
        )
    dec = parts.get("dec")
    return _checked(dequantize(q, sf, dialect.fmt, None if dec is None else float(dec)), name)


def _fp8(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    weight = tensors["weight"].float()
    scale = next(tensors[leaf] for leaf in FP8_SCALES if leaf in tensors).float()
    if scale.numel() == 1:
        return _checked(weight * scale.reshape(()), name)
    if scale.dim() == 1:
        scale = scale.unsqueeze(1)
    if scale.shape == (weight.shape[0], 1):
        return _checked(weight * scale, name)
    steps = [-(-n // s) for n, s in zip(weight.shape, scale.shape, strict=True)]
    blocks = [-(-n // b) for n, b in zip(weight.shape, steps, strict=True)]
    if blocks != list(scale.shape) or len(set(steps)) != 1:
        raise CheckpointError(
            f"{name}: scales {list(scale.shape)} of an FP8 weight {list(weight.shape)} are neither "
            "per tensor, per row nor per square block"
        )
    wide = scale.repeat_interleave(steps[0], 0).repeat_interleave(steps[1], 1)
    return _checked(weight * wide[: weight.shape[0], : weight.shape[1]], name)


def _checked(weight: Tensor, name: str) -> Tensor:
    # `isfinite` makes tensors of this size; a NaN is both the least and the largest.
    if weight.numel() and not all(m.isfinite() for m in torch.aminmax(weight)):
        raise CheckpointError(f"{name}: NaN or infinity among its decoded values")
    return weight
