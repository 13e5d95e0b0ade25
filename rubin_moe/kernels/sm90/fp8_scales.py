"""MXFP4 block scales as what the FP8 kernel adds to an element's exponent, losslessly.

E2M1 times ``2^n`` is an E4M3 number for n from -8 (0.5 is the least subnormal) to 6 (6 becomes
384): 15 exponents. A row's largest block scale goes to the upper end and what it is off by into the
row's alpha; a row whose blocks spread over more is refused. Blocks of zeros fit any scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rubin_moe.errors import FormatError
from rubin_moe.formats.spec import MXFP4
from rubin_moe.formats.ue8m0 import UE8M0
from rubin_moe.kernels.sm90.fp8_plan import ENTRY, EXPONENTS, MOST


@dataclass(frozen=True, eq=False)
class Fp8Scales:
    """Of one projection of one expert.

    Attributes:
        entries: uint8 ``[N, K / 32]``, byte offsets into the kernel's table. alpha: float32
        ``[N]``, powers of two.
    """

    entries: Tensor
    alpha: Tensor


def fp8_scales(qdata: Tensor, sf: Tensor, name: str) -> Fp8Scales:
    """Codes uint8 ``[N, K / 2]`` and UE8M0 scales ``[N, K / 32]`` of one expert.

    Raises:
        FormatError: NaN scales, or a row over more exponents than there are.
    """
    if bool((sf == UE8M0.nan_code).any()):
        raise FormatError(f"{name}: NaN among the ue8m0 block scales")
    if sf.numel() == 0:
        return Fp8Scales(sf.clone(), torch.ones(len(sf), device=sf.device))
    used = ((qdata & 0x77) != 0).view(*sf.shape, MXFP4.sf_vec_size // 2).any(-1)
    exponent = sf.int()
    high = torch.where(used, exponent, -1).amax(-1, keepdim=True)
    high = torch.where(high < 0, UE8M0.bias, high)  # a row of zeros
    entry = torch.where(used, exponent - high + EXPONENTS - 1, 0)
    if bool((entry < 0).any()):
        row = int((entry < 0).any(-1).nonzero()[0])
        low = int(torch.where(used[row], exponent[row], 255).min()) - UE8M0.bias
        raise FormatError(
            f"{name}: row {row} has block scales from 2^{low} to "
            f"2^{int(high[row]) - UE8M0.bias}; E4M3 products hold {EXPONENTS} exponents of a row; "
            "16bit activations take these weights"
        )
    alpha = torch.exp2((high[:, 0] - UE8M0.bias - MOST).double()).float()
    return Fp8Scales((entry * ENTRY).to(torch.uint8), alpha)
