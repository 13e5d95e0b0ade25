"""NVFP4 as NVIDIA ModelOpt exports it: Qwen3, DeepSeek, GLM, Kimi, MiniMax, Nemotron.

Value = ``e2m1(weight) * ue4m3(weight_scale) * weight_scale_2``; both global scales multiply.
A tensor per expert and projection, ``[N, K/2]`` and ``[N, K/16]``; stacked exports use the same
leaves (`modelopt_stacked`).
"""

from rubin_moe.formats.spec import NVFP4_UE4M3
from rubin_moe.loader.dialect import FLOAT_DTYPES, Dialect, Reading

LEAVES = {
    "weight": Reading("qdata", ("U8",)),
    "weight_scale": Reading("sf", ("F8_E4M3",)),
    "weight_scale_2": Reading("dec", ("F32",)),
    "input_scale": Reading("input_dec", ("F32",)),
    "bias": Reading("bias", FLOAT_DTYPES),
}

# amax / (6 * 448) of any real weight is far below 1; 1 itself is what weight-only tools write.
MODELOPT = Dialect(
    "modelopt",
    NVFP4_UE4M3,
    LEAVES,
    needs_dec=True,
    global_range=(0.0, 1.0),
    looks_like="a divisor, as compressed-tensors stores it",
)
