"""E4M3 rows with a scale each: against the oracle's rounding, and at the ends of the range."""

import numpy as np
import pytest
import torch

from rubin_moe.formats import fp8_rows
from rubin_moe.formats.fp8_rows import dequantize_rows, quantize_rows
from tests.oracles import quant


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 31, 96])
def test_equal_to_the_oracle(dtype, k):
    generator = torch.Generator().manual_seed(k)
    wild = torch.exp2(torch.randint(-12, 8, (64, k), generator=generator).double())
    x = (torch.randn(64, k, generator=generator, dtype=torch.float64) * wild).to(dtype)
    expected = quant.quantize_dequantize(x.double().numpy(), fp8_rows.NAME)
    assert np.array_equal(dequantize_rows(quantize_rows(x)).double().numpy(), expected)


def test_the_largest_element_neither_saturates_nor_wastes_an_exponent():
    x = torch.tensor([[448.0, 1.0], [449.0, 1.0], [224.0, 0.1], [3e-5, -1e-5]])
    rows = quantize_rows(x)
    assert rows.scale.tolist()[:3] == [1.0, 2.0, 0.5]
    top = dequantize_rows(rows).abs().amax(-1) / rows.scale
    assert bool(((top > 208) & (top <= 448)).all())  # 449 / 2 rounds to 224
    assert torch.equal(torch.frexp(rows.scale)[0], torch.full((4,), 0.5))


def test_zeros_nan_and_nothing():
    rows = quantize_rows(torch.tensor([[0.0, -0.0], [1.0, torch.nan]]))
    assert rows.codes[0].tolist() == [0, 0x80]
    assert dequantize_rows(rows)[0].eq(0).all()
    assert dequantize_rows(rows)[1].isnan().all()
    assert quantize_rows(torch.zeros(0, 32)).scale.shape == (0,)
    assert quantize_rows(torch.zeros(3, 0)).codes.shape == (3, 0)


def test_a_scale_that_is_no_power_of_two_would_win_little():
    """The module's claim: within a few percent of ``amax / 448`` on normal inputs."""
    x = torch.randn(256, 2880, generator=torch.Generator().manual_seed(0))
    ours = (dequantize_rows(quantize_rows(x)) - x).norm() / x.norm()
    scale = x.abs().amax(-1, keepdim=True) / 448
    theirs = ((x / scale).to(torch.float8_e4m3fn).float() * scale - x).norm() / x.norm()
    assert 0.02 < float(ours) < 1.05 * float(theirs)
