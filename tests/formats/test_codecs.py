"""Bit codecs, exhaustively: against ml_dtypes where it has the type, and against the oracle."""

import ml_dtypes
import numpy as np
import pytest
import torch

from rubin_moe.errors import FormatError
from rubin_moe.formats import e2m1, e4m3
from rubin_moe.formats.scales import CODECS
from rubin_moe.formats.ue4m3 import UE4M3
from rubin_moe.formats.ue5m3 import UE5M3
from rubin_moe.formats.ue8m0 import UE8M0
from tests.oracles import quant

ALL = torch.arange(256, dtype=torch.uint8)
MINIFLOATS = [UE4M3, UE5M3]
DTYPES = [torch.float32, torch.float64]


def ids(codec):
    return codec.name


def midpoints_and_neighbours(codec, dtype):
    """Every value, every midpoint, and the next float to both sides of each."""
    finite = codec.table[: codec.max_code + 1].to(dtype)
    points = torch.cat([finite, (finite[1:] + finite[:-1]) / 2])
    up = torch.full_like(points, torch.inf)
    return torch.cat([points, torch.nextafter(points, up), torch.nextafter(points, -up).abs()])


# -- decoding: all 256 codes ---------------------------------------------------------------------


def test_ue4m3_table_is_the_half_of_e4m3_without_sign():
    """Field report 8: subnormal codes too (0x01 is 2^-9); 0x80 is -0 in E4M3 and no scale."""
    theirs = ALL.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(UE4M3.table[:128].numpy(), theirs[:128])
    assert UE4M3.table[127:].isnan().all()
    assert UE4M3.table[1] == 2.0**-9
    assert UE4M3.max == 448


def test_ue5m3_table_from_its_definition():
    """Field report 10: bias 15, max 114688, NaN 0xFF alone, no infinity."""
    for code in range(255):
        e, m = code >> 3, code & 7
        value = m * 2.0**-17 if e == 0 else (1 + m / 8) * 2.0 ** (e - 15)
        assert float(UE5M3.table[code]) == value
    assert UE5M3.table[255].isnan()
    assert UE5M3.table.isnan().sum() == 1
    assert UE5M3.max == 114688
    assert UE5M3.min_subnormal == 2.0**-17


def test_ue8m0_table_equals_ml_dtypes():
    """Field report 9: byte 0 is 2^-127 and not zero, 255 is NaN and not infinity."""
    theirs = ALL.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(UE8M0.table.numpy(), theirs)
    for byte in (0, 1, 103, 112, 127, 254):
        assert float(UE8M0.decode(torch.tensor(byte, dtype=torch.uint8))) == 2.0 ** (byte - 127)


def test_element_tables_equal_ml_dtypes():
    ours = e2m1.decode(torch.arange(16, dtype=torch.uint8))
    theirs = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(ours.numpy(), theirs)
    assert np.signbit(ours[8].item())
    theirs = ALL.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(e4m3.decode(ALL).numpy(), theirs)


@pytest.mark.parametrize("codec", [UE4M3, UE5M3, UE8M0], ids=ids)
def test_tables_equal_the_oracles(codec):
    np.testing.assert_array_equal(codec.table.numpy(), quant.SCALES[codec.name])
    assert CODECS[codec.name] is codec


def test_decode_keeps_shape_and_dtype():
    codes = torch.tensor([[0x38, 0x3C]], dtype=torch.uint8)
    assert torch.equal(UE4M3.decode(codes, torch.bfloat16), torch.tensor([[1, 1.5]]).bfloat16())


# -- encoding: values, midpoints, neighbours -----------------------------------------------------


@pytest.mark.parametrize("codec", MINIFLOATS, ids=ids)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nearest_at_every_value_midpoint_and_neighbour(codec, dtype):
    values = midpoints_and_neighbours(codec, dtype)
    expected = quant.nearest_even(
        values.double().numpy(), quant.SCALES[codec.name][: codec.nan_code]
    )
    np.testing.assert_array_equal(codec.encode(values).numpy(), expected)


@pytest.mark.parametrize("codec", MINIFLOATS, ids=ids)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ["rp", "rz"])
def test_directed_rounding_at_every_value_midpoint_and_neighbour(codec, dtype, rounding):
    values = midpoints_and_neighbours(codec, dtype)
    table = quant.SCALES[codec.name][: codec.nan_code]
    if rounding == "rp":
        expected = quant.round_up(values.double().numpy(), table)
    else:
        expected = np.searchsorted(table, values.double().numpy(), side="right") - 1
    np.testing.assert_array_equal(codec.encode(values, rounding).numpy(), expected)


def test_ue4m3_nearest_equals_ml_dtypes_below_saturation():
    values = midpoints_and_neighbours(UE4M3, torch.float32)
    values = values[values <= 448]
    theirs = values.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(UE4M3.encode(values).numpy(), theirs)


@pytest.mark.parametrize("codec", MINIFLOATS, ids=ids)
@pytest.mark.parametrize("rounding", ["rn", "rp", "rz"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_saturation_nan_zero_and_float_subnormals(codec, rounding, dtype):
    """Field report 11: what is above the maximum saturates; it never becomes the NaN byte."""
    above = torch.tensor([codec.max * 1.04, codec.max * 8, 3e38, torch.inf], dtype=dtype)
    assert codec.encode(above, rounding).eq(codec.max_code).all()
    assert int(codec.encode(torch.tensor([torch.nan], dtype=dtype), rounding)) == codec.nan_code
    tiny = torch.tensor([0.0, 1e-40, codec.min_subnormal / 4], dtype=dtype)
    assert codec.encode(tiny, rounding).tolist() == ([0, 1, 1] if rounding == "rp" else [0, 0, 0])


@pytest.mark.parametrize("codec", [UE4M3, UE5M3, UE8M0], ids=ids)
def test_every_code_survives_a_round_trip(codec):
    codes = ALL[: codec.max_code + 1]
    for rounding in ("rp", "rz") if codec is UE8M0 else ("rn", "rp", "rz"):
        assert torch.equal(codec.encode(codec.decode(codes), rounding), codes)


def test_ue8m0_rounds_up_or_down_to_a_power_of_two_at_every_power():
    for k in range(-126, 127):
        power = torch.tensor(2.0**k, dtype=torch.float64)
        above, below = power * (1 + 2.0**-52), power * (1 - 2.0**-53)
        values = torch.stack([power, above, below])
        assert UE8M0.encode(values, "rp").tolist() == [k + 127, k + 128, k + 127]
        assert UE8M0.encode(values, "rz").tolist() == [k + 127, k + 127, k + 126]
    ends = torch.tensor([0.0, 1e-45, 3.4e38, torch.inf, torch.nan])
    assert UE8M0.encode(ends, "rp").tolist() == [0, 0, 254, 254, 255]


def test_e2m1_ties_go_to_the_even_code():
    """Field report 28: exactly these seven values, both signs, and their neighbours."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    expected = torch.tensor([0.0, 1, 1, 2, 2, 4, 4])
    for sign in (1, -1):
        assert torch.equal(e2m1.decode(e2m1.encode(sign * ties)), sign * expected)
    for direction, wanted in (
        (torch.inf, [0.5, 1, 1.5, 2, 3, 4, 6]),
        (0.0, [0, 0.5, 1, 1.5, 2, 3, 4]),
    ):
        near = torch.nextafter(ties, torch.full_like(ties, direction))
        assert e2m1.decode(e2m1.encode(near)).tolist() == wanted


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_e2m1_encode_equals_ml_dtypes_on_a_fine_grid(dtype):
    values = (torch.arange(-1100, 1101).double() / 128).to(dtype)
    theirs = values.double().numpy().clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(e2m1.encode(values).numpy(), theirs)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_nearest_is_decode_of_encode(dtype):
    values = (torch.arange(-1100, 1101).double() / 128).to(dtype)
    values = torch.cat([values, torch.tensor([torch.inf, -torch.inf, -0.0], dtype=dtype)])
    assert torch.equal(e2m1.nearest(values), e2m1.decode(e2m1.encode(values), dtype))
    assert e2m1.nearest(values)[-1].signbit()
    if dtype != torch.bfloat16:
        assert torch.equal(e4m3.nearest(values * 60), e4m3.decode(e4m3.encode(values * 60), dtype))


def test_e2m1_specials():
    values = torch.tensor([torch.inf, -torch.inf, 100.0, -0.0, torch.nan])
    assert e2m1.encode(values).tolist() == [7, 15, 7, 8, 0]


def test_e4m3_encode_equals_ml_dtypes_and_saturates():
    magnitudes = midpoints_and_neighbours(UE4M3, torch.float32)
    values = torch.cat([magnitudes, -magnitudes])
    theirs = values.numpy().clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(e4m3.encode(values).numpy(), theirs)
    assert e4m3.encode(torch.tensor([1e30, -torch.inf])).tolist() == [0x7E, 0xFE]


def test_packing_puts_the_even_element_in_the_low_nibble():
    """A published export: byte 0x21 is 0.5, 1.0."""
    codes = torch.tensor([1, 2, 15, 0], dtype=torch.uint8)
    assert e2m1.pack(codes).tolist() == [0x21, 0x0F]
    assert e2m1.decode_packed(torch.tensor([0x21], dtype=torch.uint8)).tolist() == [0.5, 1.0]
    assert torch.equal(e2m1.pack(e2m1.unpack(ALL)), ALL)
    assert torch.equal(e2m1.decode_packed(ALL), e2m1.decode(e2m1.unpack(ALL)))


def test_what_a_codec_refuses():
    with pytest.raises(FormatError, match="float32 or float64, got"):
        UE5M3.encode(torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(FormatError, match="not to nearest"):
        UE8M0.encode(torch.ones(1), "rn")
    with pytest.raises(FormatError, match="K = 3 is odd"):
        e2m1.pack(torch.zeros(3, dtype=torch.uint8))
