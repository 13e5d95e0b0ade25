"""Stored weights -> weights that one instruction multiplies with an activation format.

A tcgen05 instruction has one scale type for both operands: NVFP4 activations with UE5M3 scales want
UE5M3 weights, which NVFP4 (UE4M3) and MXFP4 checkpoints become without loss. FP8 activations on
Hopper want MXFP4: an element times a power of two is exact in E4M3, times an NVFP4 scale it is not.
16-bit and int8 activations take any weights as they are stored.
"""

from typing import TYPE_CHECKING

from rubin_moe.errors import FoldError
from rubin_moe.formats.spec import MXFP4, NVFP4_UE4M3, NVFP4_UE5M3, BlockFormat, is_nvfp4
from rubin_moe.loader.spec import Scheme

if TYPE_CHECKING:
    from rubin_moe.formats.experts import ExpertWeights
    from rubin_moe.loader.fold import FoldMode
    from rubin_moe.loader.fold_report import FoldReport

FIRST_WITHOUT_16_BIT = (10, 0)
"""tcgen05, from sm_100a on, has no 16-bit x FP4 instruction."""

_ANY = ("16bit", "int8")
_WANTED = {
    "nvfp4-ue4m3": NVFP4_UE4M3,
    "nvfp4-ue5m3": NVFP4_UE5M3,
    "mxfp8": MXFP4,
    "fp8-e4m3": MXFP4,
}


def default_activations(
    stored: BlockFormat, scheme: Scheme, capability: tuple[int, int] | None
) -> str:
    """The activation format of a checkpoint on a machine where nobody named one.

    A CPU and GPUs before Blackwell compute in the model's own dtype. With tcgen05, MXFP4 experts
    get MXFP8 activations (gpt-oss) and W4A4 checkpoints the format that their scales were
    calibrated for, or UE5M3 where they are dynamic. Weight-only NVFP4 stays ``16bit``: no tcgen05
    backend takes it until the user names a format.
    """
    if capability is None or capability < FIRST_WITHOUT_16_BIT or capability >= (12, 0):
        return "16bit"
    if stored == MXFP4:
        return "mxfp8"
    if scheme == "w4a16":
        return "16bit"
    return stored.name if scheme == "w4a4" else NVFP4_UE5M3.name


def weight_format_for(stored: BlockFormat, activation_format: str) -> BlockFormat:
    """The format that `fit` brings ``stored`` weights to; needs no weights, so a backend can be
    selected before anything is loaded.

    Raises:
        FoldError: no such activation format, or none that these weights may become.
    """
    if activation_format in _ANY:
        return stored
    if activation_format not in _WANTED:
        known = ", ".join((*_ANY, *_WANTED))
        raise FoldError(f"activation format {activation_format!r} is unknown; known: {known}")
    wanted = _WANTED[activation_format]
    if stored == wanted or wanted == NVFP4_UE5M3:
        return wanted
    if is_nvfp4(stored) and wanted == MXFP4:
        raise FoldError(
            f"{stored} experts stay NVFP4, and {activation_format} activations are multiplied with "
            "MXFP4 only; 16bit activations take them, on tcgen05 nvfp4-ue5m3 without calibration"
        )
    raise FoldError(
        f"{activation_format} activations want {wanted} weights with calibrated input scales, and "
        f"these are {stored}; nvfp4-ue5m3 activations need neither"
    )


def fit(
    weights: "ExpertWeights", activation_format: str, mode: "FoldMode" = "exact"
) -> "tuple[ExpertWeights, FoldReport]":
    """``weights`` in `weight_format_for`, with their global scales folded by ``mode``.

    MXFP4 has no global scale: its cast to UE5M3 is exact, with a power of two left in ``dec`` where
    an expert's range asks for it.
    """
    from rubin_moe.loader.fold import fold
    from rubin_moe.loader.mxfp4_cast import mxfp4_to_nvfp4

    target = weight_format_for(weights.fmt, activation_format)
    if weights.fmt == MXFP4 and target == NVFP4_UE5M3:
        return mxfp4_to_nvfp4(weights, alpha=True)
    return fold(weights, mode, target.scale)
