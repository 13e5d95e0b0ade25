"""E4M3 activations with one scale a row (a token), as Hopper's FP8 MMA reads them.

The rule is MXFP8's with the whole row as its block: the scale is ``amax / 448`` rounded up to a
power of two, so that dividing by it is exact and an element is rounded once, to nearest with ties
to even. Compared with ``amax / 448`` itself, only elements below ``2^-14 amax`` lose a bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rubin_moe.formats import e4m3
from rubin_moe.formats.ue8m0 import UE8M0

NAME = "fp8-e4m3"


@dataclass(frozen=True, eq=False)
class Fp8Rows:
    """A tensor ``[..., K]``.

    Attributes:
        codes: uint8 ``[..., K]`` E4M3. scale: float32 ``[...]``, powers of two; NaN where the row
        holds a NaN, 2^-127 for a row of zeros.
    """

    codes: Tensor
    scale: Tensor


def quantize_rows(x: Tensor) -> Fp8Rows:
    """Any float dtype; computed in float32, or float64 where ``x`` is."""
    rows = x if x.dtype == torch.float64 else x.float()
    amax = rows.abs().amax(-1) if x.shape[-1] else rows.new_zeros(x.shape[:-1])
    scale = UE8M0.decode(UE8M0.encode(amax.double() / e4m3.MAX, "rp"), torch.float64)
    safe = scale.nan_to_num(1.0)[..., None]
    codes = e4m3.encode((rows.double() / safe).float())
    return Fp8Rows(codes, scale.float())


def dequantize_rows(rows: Fp8Rows) -> Tensor:
    """float32 ``[..., K]``, exact."""
    return e4m3.decode(rows.codes) * rows.scale[..., None]
