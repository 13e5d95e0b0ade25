"""FP4 as compressed-tensors packs it: ``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized``.

NVFP4 value = ``e2m1(weight_packed) * ue4m3(weight_scale) / weight_global_scale``: both global
scales are divisors, about ``448 * 6 / amax``. MXFP4 has E8M0 scales and no globals.
"""

from rubin_moe.formats.spec import MXFP4, NVFP4_UE4M3
from rubin_moe.loader.dialect import FLOAT_DTYPES, Dialect, Ignored, Reading


def read_nvfp4(leaf: str) -> Reading | Ignored | None:
    """What ``nvfp4-pack-quantized`` means by a leaf name."""
    match leaf:
        case "weight_packed":
            return Reading("qdata", ("U8",))
        case "weight_scale":
            return Reading("sf", ("F8_E4M3",))
        case "weight_global_scale":
            return Reading("dec", FLOAT_DTYPES, reciprocal=True)
        case "input_global_scale":
            return Reading("input_dec", FLOAT_DTYPES, reciprocal=True)
        case "bias":
            return Reading("bias", FLOAT_DTYPES)
        case "weight_shape":
            return Ignored("the shape is that of weight_packed")
        case _:
            return None


def read_mxfp4(leaf: str) -> Reading | Ignored | None:
    """What ``mxfp4-pack-quantized`` means by a leaf name."""
    match leaf:
        case "weight_packed":
            return Reading("qdata", ("U8",))
        case "weight_scale":
            return Reading("sf", ("U8", "F8_E8M0"))
        case "bias":
            return Reading("bias", FLOAT_DTYPES)
        case "weight_shape":
            return Ignored("the shape is that of weight_packed")
        case _:
            return None


COMPRESSED_NVFP4 = Dialect(
    "compressed-tensors-nvfp4",
    NVFP4_UE4M3,
    read_nvfp4,
    needs_dec=True,
    global_range=(1.0, float("inf")),
    looks_like="a multiplier, as ModelOpt stores it",
)
COMPRESSED_MXFP4 = Dialect("compressed-tensors-mxfp4", MXFP4, read_mxfp4, needs_dec=False)
