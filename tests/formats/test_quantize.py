"""Block quantizers: bit-equal to the oracle, the rule of each format, and scale search."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rubin_moe.errors import FormatError
from rubin_moe.formats.quantize import MX_RULES, dequantize, global_dec, quantize
from rubin_moe.formats.spec import FORMATS, MXFP4, MXFP8, NVFP4_UE4M3, NVFP4_UE5M3
from rubin_moe.formats.ue4m3 import UE4M3
from rubin_moe.formats.ue5m3 import UE5M3
from rubin_moe.formats.ue8m0 import UE8M0
from tests.oracles import quant


def spread(seed: int, rows: int, k: int, decades: float = 3.0) -> torch.Tensor:
    """Normal values whose rows span many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(decades * torch.randn(rows, 1, generator=generator))
    return torch.randn(rows, k, generator=generator) * scale


def assert_equals_oracle(x, fmt, dec=None):
    number = 1.0 if dec is None else dec
    q = quantize(x, fmt, dec)
    wide = x.double().numpy()
    np.testing.assert_array_equal(q.sf.numpy(), quant.block_scales(wide, fmt.name, number))
    decoded = dequantize(q.qdata, q.sf, fmt, number, torch.float64)
    np.testing.assert_array_equal(
        decoded.numpy(), quant.quantize_dequantize(wide, fmt.name, number)
    )


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bit_equal_to_the_oracle(fmt, dtype):
    assert_equals_oracle(spread(1, 64, 256).to(dtype), fmt)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from(list(FORMATS.values())))
def test_bit_equal_to_the_oracle_where_ties_are_common(seed, fmt):
    """Short mantissas: amax / 6 and the elements fall on midpoints all the time."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-64, 65, (8, 64)) * 2.0 ** rng.integers(-20, 20, (8, 1))
    assert_equals_oracle(torch.from_numpy(x).float(), fmt)


def test_bit_equal_to_the_oracle_with_a_global_scale():
    x = spread(2, 64, 256, decades=1.0)
    for dec in (float(np.float32(3.72e-5)), 2.0**-10, float(np.float32(0.37))):
        assert_equals_oracle(x, NVFP4_UE4M3, dec)


def test_division_is_true_division_by_the_rounded_scale():
    """Field report 27: 0x07 and v just below 1.75 scales: code 3; a reciprocal says 4."""
    v, scale = torch.tensor(0.02392577938735485), UE4M3.table[0x07].float()
    assert float(v * (1 / scale)) == 1.75  # what a reciprocal multiply would round, to 2
    x = torch.zeros(16)
    x[0], x[1] = 6 * scale, v
    q = quantize(x, NVFP4_UE4M3)
    assert q.sf.tolist() == [0x07]
    assert int(q.qdata[0]) >> 4 == 3


@pytest.mark.parametrize(
    ("rule", "amax", "scale"),
    [
        ("floor", 7.0, 1.0),  # 7 -> 6: clipped
        ("even", 7.0, 2.0),
        ("ceil", 7.0, 2.0),
        ("floor", 6.5, 1.0),
        ("even", 6.5, 1.0),  # rounds to 6 and does not saturate
        ("ceil", 6.5, 2.0),
        ("floor", 6.0, 1.0),
        ("even", 6.0, 1.0),
        ("ceil", 6.0, 1.0),
        ("floor", 4.0, 1.0),
        ("even", 4.0, 1.0),
        ("ceil", 3.5, 1.0),
        ("even", 3.5, 1.0),
        ("even", 3.0, 0.5),
        ("floor", 3.9, 0.5),
    ],
)
def test_mxfp4_scale_rules(rule, amax, scale):
    """Field report 29: the rule is an option, and floor clips the largest element."""
    x = torch.zeros(32)
    x[5] = -amax
    q = quantize(x, MXFP4, mx_rule=rule)
    assert UE8M0.decode(q.sf).tolist() == [scale]


def test_an_unknown_rule_and_a_broken_block_are_refused():
    with pytest.raises(FormatError, match="known: floor, even, ceil"):
        quantize(torch.zeros(32), MXFP4, mx_rule="round")
    with pytest.raises(FormatError, match="K = 48 is no multiple of 32"):
        quantize(torch.zeros(48), MXFP4)


@pytest.mark.parametrize("rule", MX_RULES)
def test_mxfp4_scales_at_both_ends(rule):
    x = torch.zeros(3, 32)
    x[1], x[2] = 3e38, 1e-44
    q = quantize(x, MXFP4, mx_rule=rule)
    assert q.sf[0] == 0
    assert q.sf[1] in (252, 253)  # 2^125 or 2^126
    assert q.sf[2] == 0
    assert dequantize(q.qdata, q.sf, MXFP4)[0].eq(0).all()


def test_no_block_is_clipped_by_ue5m3_and_an_uncalibrated_ue4m3_clips():
    """Field report 19: an activation of 5000 without a global scale."""
    x = torch.zeros(16)
    x[3] = 5000.0
    clipped = quantize(x, NVFP4_UE4M3)
    assert float(dequantize(clipped.qdata, clipped.sf, NVFP4_UE4M3)[3]) == 2688
    kept = quantize(x, NVFP4_UE5M3)
    assert abs(float(dequantize(kept.qdata, kept.sf, NVFP4_UE5M3)[3]) - 5000) / 5000 < 1 / 8


def test_a_tiny_global_scale_stays_finite():
    """Field report 15: input scale 1e-40."""
    q = quantize(torch.tensor([[0.0] * 16, [1.0] * 16]), NVFP4_UE4M3, 1e-40)
    assert torch.isfinite(dequantize(q.qdata, q.sf, NVFP4_UE4M3, 1e-40)).all()
    assert q.sf.tolist() == [[0], [0x7E]]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_zero_blocks_nan_blocks_and_infinities(fmt):
    x = torch.ones(3, fmt.sf_vec_size)
    x[0], x[1, 2], x[2, 3] = 0.0, torch.nan, torch.inf
    q = quantize(x, fmt)
    decoded = dequantize(q.qdata, q.sf, fmt)
    assert decoded[0].eq(0).all()
    assert decoded[1].isnan().all()
    largest = {"ue4m3": UE4M3.max, "ue5m3": UE5M3.max, "ue8m0": 2.0**127}[fmt.scale]
    assert q.sf[2].tolist() == [{"ue4m3": 0x7E, "ue5m3": 0xFE, "ue8m0": 254}[fmt.scale]]
    assert decoded[2, 3] >= largest  # saturated, the sign kept


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_what_is_decoded_in_float32_or_16_bits_is_the_exact_value_rounded(fmt):
    """Every element under every scale: as float64 rounded to float32, and that to 16 bits."""
    codes = torch.arange(256, dtype=torch.uint8)
    k = 512 if fmt.element == "e2m1" else 256
    qdata = codes.expand(256, 256)
    sf = codes[:, None].expand(256, k // fmt.sf_vec_size)
    own = (float(np.float32(1.37e-5)), float(np.float32(3e-41)), 2.0**-126)
    for dec in (None, 1.0, *(own if fmt.scale != "ue8m0" else ())):
        exact = dequantize(qdata, sf, fmt, dec, torch.float64).float()
        finite = exact.isfinite()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            decoded = dequantize(qdata, sf, fmt, dec, dtype)
            assert torch.equal(decoded[finite], exact.to(dtype)[finite])


def test_a_global_scale_per_row_and_an_empty_tensor():
    x = spread(3, 4, 32, decades=1.0)
    dec = torch.tensor([1e-3, 2e-3, 1.0, 0.5])
    whole = quantize(x, NVFP4_UE4M3, dec)
    for row in range(4):
        one = quantize(x[row], NVFP4_UE4M3, float(dec[row]))
        assert torch.equal(whole.qdata[row], one.qdata)
        assert torch.equal(whole.sf[row], one.sf)
    empty = quantize(torch.zeros(0, 64), MXFP8)
    assert empty.qdata.shape == (0, 64)
    assert dequantize(empty.qdata, empty.sf, MXFP8).shape == (0, 64)


def test_chunking_changes_nothing(monkeypatch):
    x = spread(4, 40, 64)
    whole = quantize(x.view(5, 8, 64), NVFP4_UE5M3)
    for size in ("_CHUNK", "_DECODED"):
        monkeypatch.setattr(f"rubin_moe.formats.quantize.{size}", 100)
    parts = quantize(x.view(5, 8, 64), NVFP4_UE5M3)
    assert torch.equal(whole.qdata, parts.qdata)
    assert torch.equal(whole.sf, parts.sf)
    decoded = dequantize(parts.qdata, parts.sf, NVFP4_UE5M3)
    assert decoded.shape == (5, 8, 64)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_a_search_never_has_the_larger_error_in_any_block(fmt):
    x = spread(5, 128, 256, decades=0.5)
    dec = global_dec(x.abs().max(), fmt) if fmt.has_global else None

    def errors(search):
        q = quantize(x, fmt, dec, search=search)
        e = (dequantize(q.qdata, q.sf, fmt, dec, torch.float64) - x.double()).square()
        return e.reshape(128, -1, fmt.sf_vec_size).sum(-1)

    plain, searched = errors(False), errors(True)
    assert (searched <= plain * (1 + 1e-5)).all()
    if fmt.element == "e2m1":
        assert searched.sum() < 0.97 * plain.sum()


def test_the_global_scale_maps_the_maximum_on_the_largest_value():
    dec = global_dec(torch.tensor([0.1, 0.0, 2688.0]), NVFP4_UE4M3)
    assert dec.tolist() == [float(np.float32(0.1 / 2688)), 1.0, 1.0]
    assert global_dec(torch.tensor([0.1]), NVFP4_UE5M3).tolist() == [1.0]
