"""UE8M0 block scales: ``2^(code - 127)``. Byte 0 is 2^-127 and not zero; 0xFF is NaN."""

from functools import cached_property

import torch
from torch import Tensor

from rubin_moe.errors import FormatError
from rubin_moe.formats.minifloat import Rounding
from rubin_moe.formats.table import look_up


class PowerOfTwo:
    """The codec of UE8M0, with the methods of `Minifloat`."""

    name = "ue8m0"
    max_code = 254
    nan_code = 255
    bias = 127

    @cached_property
    def table(self) -> Tensor:
        """float64 ``[256]``: value of each code, NaN for 255."""
        values = torch.exp2(torch.arange(256).double() - self.bias)
        values[self.nan_code] = torch.nan
        return values

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """uint8 codes of any shape -> values of ``dtype``; float16 has not the range."""
        return look_up(self.table.to(dtype), codes)

    def encode(self, values: Tensor, rounding: Rounding = "rp") -> Tensor:
        """Magnitudes of any shape -> uint8 codes; saturates at both ends, zero becomes code 0.

        Raises:
            FormatError: rounding ``rn``: the hardware's conversion has only ``rp`` and ``rz``.
        """
        if rounding == "rn":
            raise FormatError("ue8m0: rounds up (rp) or towards zero (rz), not to nearest")
        magnitude = values.double().abs()  # float32 subnormals are normal here
        bits = magnitude.view(torch.int64)
        exponent = bits >> 52
        if rounding == "rp":
            exponent = exponent + ((bits & ((1 << 52) - 1)) != 0)
        codes = (exponent - (1023 - self.bias)).clamp(0, self.max_code)
        return torch.where(magnitude.isnan(), self.nan_code, codes).to(torch.uint8)


UE8M0 = PowerOfTwo()
