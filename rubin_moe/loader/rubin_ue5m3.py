"""NVFP4 with UE5M3 block scales, as this project's converter writes it.

``weight`` as in ModelOpt; ``weight_scale`` U8 ``[N, K/16]``, UE5M3 codes (no dtype of any
framework has them); ``weight_scale_2`` only where a residual factor remains. config.json must say
``"scale_format": "ue5m3"``: byte 0x80 is 2.0 here and -0 in E4M3, so that U8 scales without the
key are refused.
"""

from rubin_moe.formats.spec import NVFP4_UE5M3
from rubin_moe.loader import modelopt
from rubin_moe.loader.dialect import Dialect, Reading

RUBIN_UE5M3 = Dialect(
    "rubin-ue5m3",
    NVFP4_UE5M3,
    {**modelopt.LEAVES, "weight_scale": Reading("sf", ("U8",))},
    needs_dec=False,
)
