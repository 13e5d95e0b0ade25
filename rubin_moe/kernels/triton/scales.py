"""Powers of two between a block scale's code and what the kernels multiply with.

A kernel's product (element x scale) must be exact in the operands' type. In bfloat16 and float32
one factor a format does it for every code there is. float16 holds 37 exponents of an element times
a power of two, fewer than UE8M0 has: there each half of an expert is moved by an offset of its own.
All that is taken out comes back in the halves' alphas.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rubin_moe.errors import FormatError
from rubin_moe.formats.spec import BlockFormat, ScaleType

BIAS_UNITS: dict[ScaleType, int] = {"ue4m3": 127 - 7, "ue5m3": 127 - 15, "ue8m0": 0}
"""Exponent of what a code's bits, moved into a float32, have to be multiplied with."""

HALF_LOWEST, HALF_HIGHEST = -23, 13
"""Exponents of a scale whose products with 0.5 and 6 float16 holds."""


def taken_out(scale: ScaleType, dtype: str) -> int:
    """Exponent of the factor between a scale's value and the kernel's; 0 or positive."""
    if scale == "ue8m0":
        return 0 if dtype == "float16" else 2  # 6 x 2^127
    return 4 if scale == "ue5m3" and dtype == "float16" else 0  # 6 x 114688


def unit(scale: ScaleType, dtype: str) -> float:
    """``UNIT`` of `kernels.triton.dequant.scales`."""
    return float(2.0 ** (BIAS_UNITS[scale] - taken_out(scale, dtype)))


def kernel_scales(
    sf: Tensor, codes: Tensor, fmt: BlockFormat, dtype: str, name: str
) -> tuple[Tensor, float]:
    """One half of one expert: the scale codes that the kernel reads, and alpha's factor.

    Args:
        sf: uint8 ``[N, K / sf_vec_size]``; codes: uint8 ``[N, K / 2]``; dtype: of hidden states.

    Raises:
        FormatError: a code that is no number; float16 and scales that it cannot hold at once.
    """
    last = 0x7E if fmt.scale == "ue4m3" else 0xFE
    worst = int(sf.max()) if sf.numel() else 0
    if worst > last:
        raise FormatError(f"{name}: block scale code {worst:#04x} is no {fmt.scale} number")
    if fmt.scale != "ue8m0" or dtype != "float16" or not sf.numel():
        return sf, 2.0 ** taken_out(fmt.scale, dtype)
    # a block of zeros may have any scale
    used = (codes.view(*sf.shape, -1) & 0x77).amax(-1) > 0
    exponents = sf.to(torch.int32) - 127
    found = exponents[used]
    high, low = (int(found.max()), int(found.min())) if found.numel() else (0, 0)
    offset = max(high - HALF_HIGHEST, 0) or min(low - HALF_LOWEST, 0)
    if low - offset < HALF_LOWEST or high - offset > HALF_HIGHEST:
        raise FormatError(
            f"{name}: block scales from 2^{low} to 2^{high}; with float16 activations the Triton "
            f"kernels hold {HALF_HIGHEST - HALF_LOWEST + 1} exponents in each half of an expert"
        )
    moved = (exponents - offset).clamp(HALF_LOWEST, HALF_HIGHEST) + 127
    return moved.to(torch.uint8), 2.0**offset
