"""Which FP4 format becomes which other, decided without torch: planning asks."""

from typing import Literal

from rubin_moe.convert.options import Options
from rubin_moe.formats.spec import MXFP4, BlockFormat, is_nvfp4

FoldMode = Literal["none", "exact", "full", "full+requantize"]


def why_not(source: BlockFormat, target: BlockFormat) -> str | None:
    """None if one becomes the other, else the reason."""
    if is_nvfp4(source) and not is_nvfp4(target):
        return (
            f"{source} experts are not converted to {target}: blocks of 16 would be merged into "
            "32 and their scales lose the mantissa, which the activations of a W4A4 model were "
            "never calibrated for; serve NVFP4 as it is, or quantize the 16-bit original"
        )
    return None


def fold_mode(source: BlockFormat, target: BlockFormat, options: Options) -> FoldMode:
    """The mode asked for, or the one that loses nothing."""
    return options.fold or ("none" if source == target else "exact")


def keeps_dec(source: BlockFormat, target: BlockFormat, has_dec: bool, options: Options) -> bool:
    """Whether a global scale remains beside scales of a type that needs none; from headers."""
    if source == MXFP4 or not has_dec:
        return False
    return fold_mode(source, target, options) in ("none", "exact")
