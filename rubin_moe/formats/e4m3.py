"""E4M3 elements (MXFP8): sign and the magnitude codes of UE4M3. NaN is 0x7F and 0xFF, no infinity;
encoding saturates at 448 (PTX ``satfinite``), which torch's own cast to float8_e4m3fn does not.
"""

import torch
from torch import Tensor

from rubin_moe.formats.ue4m3 import UE4M3

MAX = 448.0


def encode(values: Tensor) -> Tensor:
    """float32 or float64 of any shape -> uint8 codes, nearest with ties to even."""
    return UE4M3.encode(values) | (values.signbit().to(torch.uint8) << 7)


def nearest(values: Tensor) -> Tensor:
    """``decode(encode(values))`` in the dtype of ``values``."""
    return decode(encode(values), values.dtype)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 codes of any shape -> values of ``dtype``."""
    magnitude = UE4M3.decode(codes & 0x7F, dtype)
    return torch.where(codes >= 0x80, -magnitude, magnitude)
