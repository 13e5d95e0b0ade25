"""Unsigned 8-bit minifloats: subnormals, one NaN, no infinity, codes in ascending order of value.

Rounding is exact for float32 and float64 input (integer arithmetic on the bits, no second
rounding) and saturates; NaN becomes the NaN code. The sign of the input is ignored.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from rubin_moe.errors import FormatError
from rubin_moe.formats.table import look_up

Rounding = Literal["rn", "rp", "rz"]
"""PTX names: to nearest with ties to even, towards plus infinity, towards zero."""

_BITS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}


@dataclass(frozen=True)
class Minifloat:
    """One format.

    Attributes:
        name: ``ue4m3`` or ``ue5m3``.
        mantissa_bits, bias: value is ``2^(e - bias) (1 + m / 2^mantissa_bits)``.
        max_code: largest finite code; the next one is NaN, as is every code above.
    """

    name: str
    mantissa_bits: int
    bias: int
    max_code: int

    @property
    def nan_code(self) -> int:
        return self.max_code + 1

    @property
    def max(self) -> float:
        """Largest finite value."""
        return float(self.table[self.max_code])

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value; every value is a multiple of it."""
        return float(2.0 ** (1 - self.bias - self.mantissa_bits))

    @cached_property
    def table(self) -> Tensor:
        """float64 ``[256]``: value of each code, NaN where a code is no value."""
        code = torch.arange(256)
        exponent = (code >> self.mantissa_bits).double()
        mantissa = (code & ((1 << self.mantissa_bits) - 1)).double() / (1 << self.mantissa_bits)
        normal = torch.exp2(exponent - self.bias) * (1 + mantissa)
        values = torch.where(exponent == 0, 2.0 ** (1 - self.bias) * mantissa, normal)
        values[self.nan_code :] = torch.nan
        return values

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """uint8 codes of any shape -> values of ``dtype`` (exact in float32 and bfloat16)."""
        return look_up(self.table.to(dtype), codes)

    def encode(self, values: Tensor, rounding: Rounding = "rn") -> Tensor:
        """float32 or float64 magnitudes of any shape -> uint8 codes.

        Raises:
            FormatError: another dtype; convert first, so that rounding happens once.
        """
        if values.dtype not in _BITS:
            raise FormatError(f"{self.name}: encode takes float32 or float64, got {values.dtype}")
        nan = values.isnan()
        magnitude = values.abs().clamp(max=self.max)
        codes = torch.where(
            magnitude < 2.0 ** (1 - self.bias),
            self._subnormal(magnitude, rounding),
            self._normal(magnitude, rounding),
        )
        return torch.where(nan, self.nan_code, codes).to(torch.uint8)

    def _subnormal(self, magnitude: Tensor, rounding: Rounding) -> Tensor:
        steps = magnitude * (1 / self.min_subnormal)  # a power of two: exact
        rounded = {"rn": torch.round, "rp": torch.ceil, "rz": torch.floor}[rounding](steps)
        return rounded.nan_to_num_(0.0).to(_BITS[magnitude.dtype][0])

    def _normal(self, magnitude: Tensor, rounding: Rounding) -> Tensor:
        integer, mantissa, bias = _BITS[magnitude.dtype]
        shift = mantissa - self.mantissa_bits
        bits = magnitude.view(integer)
        if rounding == "rn":
            bits = bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)
        elif rounding == "rp":
            bits = bits + ((1 << shift) - 1)
        return (bits >> shift) - ((bias - self.bias) << self.mantissa_bits)
