"""MXFP4 as OpenAI's gpt-oss releases store it.

All experts in one tensor: ``*_blocks`` ``[E, N, K/32, 16]``, ``*_scales`` (E8M0 bytes)
``[E, N, K/32]``, ``*_bias`` ``[E, N]``; rows of ``gate_up_proj`` alternate gate, up.
"""

from rubin_moe.formats.spec import MXFP4
from rubin_moe.loader.dialect import FLOAT_DTYPES, Dialect, Reading, Stacking

GPT_OSS = Dialect(
    "gpt-oss-mxfp4",
    MXFP4,
    {
        "blocks": Reading("qdata", ("U8",), last_axes=2),
        "scales": Reading("sf", ("U8",)),
        "bias": Reading("bias", FLOAT_DTYPES),
    },
    needs_dec=False,
    stacking=Stacking(transposed=False, interleaved=True),
)
