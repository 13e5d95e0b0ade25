"""MXFP4 as OpenAI's gpt-oss releases store it.

All experts in one tensor: ``*_blocks`` ``[E, N, K/32, 16]``, ``*_scales`` (E8M0 bytes)
``[E, N, K/32]``, ``*_bias`` ``[E, N]``; rows of ``gate_up_proj`` alternate gate, up.
"""

from rubin_moe.formats.spec import MXFP4
from rubin_moe.loader.dialect import FLOAT_DTYPES, Dialect, Ignored, Reading, Stacking


def read(leaf: str) -> Reading | Ignored | None:
    """What gpt-oss means by a leaf name."""
    match leaf:
        case "blocks":
            return Reading("qdata", ("U8",), last_axes=2)
        case "scales":
            return Reading("sf", ("U8",))
        case "bias":
            return Reading("bias", FLOAT_DTYPES)
        case _:
            return None


GPT_OSS = Dialect(
    "gpt-oss-mxfp4",
    MXFP4,
    read,
    needs_dec=False,
    stacking=Stacking(transposed=False, interleaved=True),
)
