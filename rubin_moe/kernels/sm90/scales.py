"""Block scales as the kernel's bytes, losslessly, and the factor that the kernel is off by.

The kernel turns a byte into a bfloat16 with a shift and an addition: E5M3 without subnormals,
exponent field ``e + 223`` (NVFP4), or the exponent field itself (MXFP4). UE4M3 spans 18 exponents.
UE5M3 and UE8M0 span more than fits; each half of an expert gets an offset of its own, in alpha.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rubin_moe.errors import FormatError
from rubin_moe.formats.spec import MXFP4, BlockFormat
from rubin_moe.formats.ue4m3 import UE4M3
from rubin_moe.formats.ue5m3 import UE5M3

_CODECS = {"ue4m3": UE4M3, "ue5m3": UE5M3}
E5M3_EXPONENTS = 32
CODE_BIAS = 126  # a code's bits as a bfloat16 are 2^-126 times its value
E5M3_FIELD = 223
USUAL_SHIFT = 119  # of UE8M0 codes 10 to 135
LOWEST_FIELD, HIGHEST_FIELD = 129, 254  # products stay normal; the scale stays finite


@dataclass(frozen=True)
class KernelScales:
    """One half of one expert.

    Attributes:
        scale_bytes: uint8, shape of the codes. zero: bool, blocks whose scale is 0: the kernel has
            no such byte, so their elements must be zero. factor: power of two for alpha.
    """

    scale_bytes: Tensor
    zero: Tensor | None
    factor: float


def kernel_scales(sf: Tensor, fmt: BlockFormat, name: str) -> KernelScales:
    """uint8 codes of any shape -> the kernel's.

    Raises:
        FormatError: NaN codes, or more exponents than a byte of the kernel's holds.
    """
    if fmt == MXFP4:
        return _exponents(sf, name)
    table = _CODECS[fmt.scale].table.to(sf.device)
    mantissa, exponent = torch.frexp(table)
    if sf.numel() == 0:
        return KernelScales(sf.clone(), None, 1.0)
    present = torch.bincount(sf.flatten().int(), minlength=256) > 0
    if bool((present & table.isnan()).any()):
        raise FormatError(f"{name}: NaN among the {fmt.scale} block scales")
    used = exponent[present & (table > 0)] - 1
    high, low = (int(used.max()), int(used.min())) if used.numel() else (0, 0)
    base = -9 if fmt.scale == "ue4m3" else max(-17, high - (E5M3_EXPONENTS - 1))
    if low < base:
        raise FormatError(
            f"{name}: block scales from 2^{low} to 2^{high}; sm_90a kernels hold "
            f"{E5M3_EXPONENTS} exponents in each half of an expert"
        )
    code = (exponent - 1 - base) * 8 + ((mantissa * 2 - 1) * 8).nan_to_num().int()
    code = torch.where(table > 0, code, 0).to(torch.uint8)
    zero = table[sf.int()] == 0 if bool(present[0]) else None
    return KernelScales(code[sf.int()], zero, 2.0 ** (base + CODE_BIAS + 127 - E5M3_FIELD))


def _exponents(sf: Tensor, name: str) -> KernelScales:
    high, low = (int(sf.max()), int(sf.min())) if sf.numel() else (127, 127)
    if high == 255:
        raise FormatError(f"{name}: NaN among the ue8m0 block scales")
    shift = USUAL_SHIFT
    if high + shift > HIGHEST_FIELD:
        shift = HIGHEST_FIELD - high
    elif low + shift < LOWEST_FIELD:
        shift = LOWEST_FIELD - low
    if high + shift > HIGHEST_FIELD or low + shift < LOWEST_FIELD:
        raise FormatError(
            f"{name}: block scales from 2^{low - 127} to 2^{high - 127}; sm_90a kernels hold "
            f"{HIGHEST_FIELD - LOWEST_FIELD + 1} exponents in each half of an expert"
        )
    return KernelScales((sf.int() + shift).to(torch.uint8), None, 2.0 ** (CODE_BIAS - shift))
