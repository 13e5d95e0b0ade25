"""Block scales as the kernel's bytes, losslessly, and the factor that the kernel is off by.

The kernel turns a byte into a bfloat16 or float16 with a shift (and an addition): exponent and
three bits of mantissa for NVFP4, without subnormals, an exponent for MXFP4. UE4M3 spans 18
exponents and always fits. UE5M3 and UE8M0 may span more than there are; each half of an expert gets
an offset of its own, in alpha.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rubin_moe.errors import FormatError
from rubin_moe.formats.minifloat import Minifloat
from rubin_moe.formats.spec import BlockFormat
from rubin_moe.formats.ue4m3 import UE4M3
from rubin_moe.formats.ue5m3 import UE5M3
from rubin_moe.formats.ue8m0 import UE8M0, PowerOfTwo

_CODECS: dict[str, Minifloat | PowerOfTwo] = {"ue4m3": UE4M3, "ue5m3": UE5M3, "ue8m0": UE8M0}
LEAST_FACTOR = -64  # exponent; keeps alpha far from float32's subnormals where that is possible


@dataclass(frozen=True)
class ByteForm:
    """What the kernel makes of a byte.

    Attributes:
        lowest, highest: exponents a byte may hold; with them all products are exact and finite.
        offset: exponent ``e`` means ``2^(e + offset)``. code_bias: a code's bits are
            ``2^-code_bias`` times its value. mantissa_bits: below the exponent.
    """

    lowest: int
    highest: int
    offset: int
    code_bias: int
    mantissa_bits: int


FORMS = {
    ("bf16", 3): ByteForm(0, 31, 96, 126, 3),
    ("bf16", 0): ByteForm(129, 254, -127, 126, 0),
    ("f16", 3): ByteForm(9, 30, -15, 14, 3),
    ("f16", 0): ByteForm(6, 30, -15, 14, 0),
}


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


def kernel_scales(sf: Tensor, fmt: BlockFormat, kind: str, name: str) -> KernelScales:
    """uint8 codes of any shape -> the kernel's, for ``bf16`` or ``f16`` products.

    Raises:
        FormatError: NaN codes, or more exponents than the kernel's bytes hold.
    """
    form = FORMS[kind, 0 if fmt.scale == "ue8m0" else 3]
    if sf.numel() == 0:
        return KernelScales(sf.clone(), None, 1.0)
    table = _CODECS[fmt.scale].table.to(sf.device)
    present = torch.bincount(sf.flatten().int(), minlength=256) > 0
    if bool((present & table.isnan()).any()):
        raise FormatError(f"{name}: NaN among the {fmt.scale} block scales")
    mantissa, exponent = torch.frexp(table)
    exponent = exponent - 1  # mantissa in [1, 2) below
    used = exponent[present & (table > 0)]
    high, low = (int(used.max()), int(used.min())) if used.numel() else (0, 0)
    base = max(high - form.highest, LEAST_FACTOR - form.code_bias + form.offset)
    base = min(base, low - form.lowest)
    if high - base > form.highest:
        raise FormatError(
            f"{name}: block scales from 2^{low} to 2^{high}; sm_90a kernels hold "
            f"{form.highest - form.lowest + 1} exponents in each half of an expert"
        )
    steps = 1 << form.mantissa_bits
    code = (exponent - base) * steps + ((mantissa * 2 - 1) * steps).nan_to_num().int()
    code = torch.where(table > 0, code, 0).to(torch.uint8)
    zero = table[sf.int()] == 0 if bool((present & (table == 0)).any()) else None
    return KernelScales(code[sf.int()], zero, 2.0 ** (base + form.code_bias - form.offset))
