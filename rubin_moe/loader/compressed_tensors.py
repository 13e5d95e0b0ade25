"""FP4 as compressed-tensors packs it: ``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized``.

NVFP4 value = ``e2m1(weight_packed) * ue4m3(weight_scale) / weight_global_scale``: both global
scales are divisors, about ``448 * 6 / amax``. MXFP4 has E8M0 scales and no globals.
"""

from rubin_moe.formats.spec import MXFP4, NVFP4_UE4M3
from rubin_moe.loader.dialect import FLOAT_DTYPES, Dialect, Ignored, Reading

_SHAPE = Ignored("the shape is that of weight_packed")

COMPRESSED_NVFP4 = Dialect(
    "compressed-tensors-nvfp4",
    NVFP4_UE4M3,
    {
        "weight_packed": Reading("qdata", ("U8",)),
        "weight_scale": Reading("sf", ("F8_E4M3",)),
        "weight_global_scale": Reading("dec", FLOAT_DTYPES, reciprocal=True),
        "input_global_scale": Reading("input_dec", FLOAT_DTYPES, reciprocal=True),
        "bias": Reading("bias", FLOAT_DTYPES),
        "weight_shape": _SHAPE,
    },
    needs_dec=True,
    global_range=(1.0, float("inf")),
    looks_like="a multiplier, as ModelOpt stores it",
)
COMPRESSED_MXFP4 = Dialect(
    "compressed-tensors-mxfp4",
    MXFP4,
    {
        "weight_packed": Reading("qdata", ("U8",)),
        "weight_scale": Reading("sf", ("U8", "F8_E8M0")),
        "bias": Reading("bias", FLOAT_DTYPES),
        "weight_shape": _SHAPE,
    },
    needs_dec=False,
)
