"""The inner product alone: every code, every scale, every place, exactly."""

import ctypes

import numpy as np
import pytest
import torch

from rubin_moe.formats.spec import FORMATS
from rubin_moe.kernels.cpu import decode, isa
from rubin_moe.kernels.cpu.host import CODES, SCALES, code_for
from rubin_moe.kernels.cpu.stages import Variant
from tests.oracles import quant

from .cases import FORMAT_NAMES

PATHS = [(name, "f32") for name in isa.available()]
PATHS += [(name, "bf16") for name in isa.available() if isa.detect(name).bf16_dot]
VALID = {"nvfp4-ue4m3": range(0x7F), "nvfp4-ue5m3": range(0xFF), "mxfp4": range(0xFF)}


def panel(x, product):
    """float32 ``[T, K]`` as the kernel reads it."""
    if product == "f32":
        return x.T.contiguous().numpy().tobytes()
    t, k = x.shape
    pairs = x.bfloat16().view(torch.int16).view(t, k // 8, 2, 4).permute(1, 3, 0, 2)
    return pairs.contiguous().numpy().tobytes()


def product(path, fmt, qdata, sf, x):
    """``dequantize(qdata, sf) @ x.T`` of 16 rows: float32 ``[T, 16]``."""
    target = isa.detect(path[0])
    variant = Variant(target, "float32", "silu", path[1])
    address = code_for(variant, FORMATS[fmt]).gemm_table[len(x) - 1]
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, ctypes.c_int64, *[ctypes.c_void_p] * 2)
    codes, scales = CODES.pack(torch.from_numpy(qdata)), SCALES.pack(torch.from_numpy(sf))
    data, out = panel(x * target.panel_scale, path[1]), torch.full((len(x), 16), float("nan"))
    call(int(address))(codes.data_ptr(), scales.data_ptr(), sf.shape[1], data, out.data_ptr())
    return out.numpy() * decode.scale_factor(target, FORMATS[fmt].scale)


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_every_scale_code(path, fmt):
    """E4M3 subnormals are not normal numbers, and UE8M0 byte 0 is 2^-127, not zero."""
    block = quant.BLOCK[fmt]
    codes = np.array(VALID[fmt], dtype=np.uint8)
    one = np.full((16, block // 2), 0x02, dtype=np.uint8)  # 1.0 in every even place
    one[:, 1:] = 0
    for first in range(0, len(codes), 16):
        sf = np.resize(codes[first : first + 16], (16, 1))
        for magnitude in (1.0, 2.0**100, 2.0**-20):
            x = torch.zeros(1, block)
            x[0, 0] = magnitude
            with np.errstate(over="ignore"):
                exact = quant.SCALES[quant.SCALE_TYPE[fmt]][sf[:, 0]] * magnitude
                expected = exact.astype(np.float32)
            np.testing.assert_array_equal(product(path, fmt, one, sf, x)[0], expected)


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_every_element_code_in_every_place(path, fmt):
    k = 2 * quant.BLOCK[fmt]
    rng = np.random.default_rng(0)
    qdata = rng.integers(0, 256, (16, k // 2), dtype=np.uint8)
    qdata[:, 0] = np.arange(16) * 17
    unit = {"nvfp4-ue4m3": 0x38, "nvfp4-ue5m3": 0x78, "mxfp4": 127}[fmt]
    sf = np.full((16, 2), unit, dtype=np.uint8)
    sf[:, 1] += 8 if fmt != "mxfp4" else 1  # 2.0
    dense = quant.dequantize(qdata, sf, fmt)
    for place in range(k):
        x = torch.zeros(1, k)
        x[0, place] = 1.0
        np.testing.assert_array_equal(product(path, fmt, qdata, sf, x)[0], dense[:, place])


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_rows_that_share_a_call_equal_rows_alone(path):
    rng = np.random.default_rng(1)
    qdata = rng.integers(0, 256, (16, 128), dtype=np.uint8)
    sf = rng.integers(1, 0x7F, (16, 16), dtype=np.uint8)
    x = torch.randn(isa.detect(path[0]).max_tokens, 256).bfloat16().float()
    alone = np.concatenate([product(path, "nvfp4-ue4m3", qdata, sf, row[None]) for row in x])
    for t in range(1, len(x) + 1):
        together = product(path, "nvfp4-ue4m3", qdata, sf, x[:t])
        np.testing.assert_array_equal(together, alone[:t])
