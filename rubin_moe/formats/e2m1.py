"""E2M1 elements: codes 0..7 are 0 .5 1 1.5 2 3 4 6, bit 3 is the sign (-0 exists), no specials.

Two codes a byte, the element with the even K index in the low nibble.
"""

from functools import cache

import torch
from torch import Tensor

from rubin_moe.errors import FormatError
from rubin_moe.formats.table import look_up

MAX = 6.0
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def _table(dtype: torch.dtype) -> Tensor:
    positive = torch.tensor(VALUES, dtype=dtype)
    return torch.cat([positive, -positive])


@cache
def _pairs() -> Tensor:
    """``[256]`` int64 whose bytes are the two float32 values of a packed byte."""
    byte = torch.arange(256)
    values = _table(torch.float32)
    return torch.stack([values[byte & 15], values[byte >> 4]], -1).view(torch.int64).view(-1)


def encode(values: Tensor) -> Tensor:
    """Floats of any shape -> uint8 codes 0..15: nearest with ties to even, saturating at 6.

    The sign of zero is kept. NaN has no code and becomes a zero: whoever may meet it (a quantizer)
    marks the block by its scale.
    """
    sign = 4 - torch.copysign(values.new_tensor(4.0), values)  # 8 where it is set
    return _magnitude_codes(values).add_(sign).to(torch.uint8)


def nearest(values: Tensor) -> Tensor:
    """``decode(encode(values))`` in the dtype of ``values``, without the codes in between."""
    codes = _magnitude_codes(values)
    magnitude = torch.maximum(codes * 0.5, codes - 2)  # 0 to 2 in halves, then 3 and 4
    return torch.copysign(torch.maximum(magnitude, codes.mul_(4).sub_(22)), values)  # and 6


def _magnitude_codes(values: Tensor) -> Tensor:
    """Codes 0..7 as floats. Steps are 0.5 up to 2, 1 up to 4, 2 up to 6: the code is the least of
    three roundings."""
    magnitude = values.abs().nan_to_num_(0.0, posinf=8.0)
    codes = torch.round(magnitude * 2)
    torch.minimum(codes, torch.round(magnitude).add_(2), out=codes)
    torch.minimum(codes, magnitude.mul_(0.5).round_().add_(4), out=codes)
    return codes.clamp_(max=7)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 codes 0..15 of any shape -> values of ``dtype``."""
    return look_up(_table(dtype), codes)


def pack(codes: Tensor) -> Tensor:
    """uint8 codes ``[..., K]``, K even -> uint8 ``[..., K / 2]``."""
    if codes.shape[-1] % 2:
        raise FormatError(f"e2m1: K = {codes.shape[-1]} is odd, and two codes share a byte")
    both = codes.contiguous().view(torch.int16)  # low byte: even element (little endian)
    return (both | (both >> 4)).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """uint8 ``[..., K / 2]`` -> codes uint8 ``[..., K]``."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def decode_packed(packed: Tensor) -> Tensor:
    """uint8 ``[..., K / 2]`` -> float32 ``[..., K]``."""
    return look_up(_pairs(), packed).view(torch.float32)
