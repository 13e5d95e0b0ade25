"""Conversions against ml_dtypes and against rounding done in float64."""

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.engine.harness import elementwise

E2M1 = ml_dtypes.float4_e2m1fn
DECODED = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
}
CODES = {"e4m3": 256, "e5m2": 256, "e2m3": 64, "e3m2": 64}


def decode(name: str, codes: np.ndarray) -> np.ndarray:
    if name == "ue5m3":
        e, m = codes >> 3, codes & 7
        value = np.where(e == 0, m * 2.0**-17, (1 + m / 8) * 2.0 ** (e - 15.0))
        return np.where(codes == 255, np.nan, value)
    if name == "ue8m0":
        return np.where(codes == 255, np.nan, 2.0 ** (codes.astype(float) - 127))
    if name == "e2m1":
        return codes.astype(np.uint8).view(E2M1).astype(np.float64)
    return codes.astype(np.uint8).view(DECODED[name]).astype(np.float64)


def ties_and_neighbours(values: np.ndarray) -> np.ndarray:
    """float32 at every code, every midpoint, and one step around each."""
    points = np.unique(values[np.isfinite(values)])
    middles = (points[1:] + points[:-1]) / 2
    base = np.concatenate([points, middles, [0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30]])
    base = base.astype(np.float32)
    around = [np.nextafter(base, np.float32(s)) for s in (np.inf, -np.inf)]
    random = np.random.default_rng(0).integers(0, 1 << 32, 2000, dtype=np.uint32).view(np.float32)
    return np.concatenate([base, *around, random]).astype(np.float32)


def nearest(values: np.ndarray, grid: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Codes of the nearest grid point, ties to the even code; clamps to the ends (float64)."""
    x = np.clip(values.astype(np.float64), grid[0], grid[-1])
    high = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    low = high - 1
    down, up = x - grid[low], grid[high] - x
    even_low = codes[low] % 2 == 0
    pick_low = (down < up) | ((down == up) & even_low)
    return np.where(pick_low, codes[low], codes[high])


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "ue5m3"])
def test_round_to_nearest_saturating(name: str) -> None:
    unsigned = name == "ue5m3"
    count = {"e2m1": 8, "ue5m3": 255}.get(name, CODES.get(name, 0) // 2)
    codes = np.arange(count)
    values = decode(name, codes)
    codes = codes[np.isfinite(values)]
    values = values[np.isfinite(values)]
    x = ties_and_neighbours(np.concatenate([-values, values]))
    sign = np.signbit(x)
    expected = nearest(np.abs(x), values, codes)
    width = {"e2m1": 3, "e2m3": 5, "e3m2": 5}.get(name, 7)
    expected = np.where(sign, 0 if unsigned else expected | 1 << width, expected)
    nan = {"e4m3": 0x7F, "e5m2": 0x7F, "ue5m3": 0xFF}.get(name, codes[-1])
    expected = np.where(np.isnan(x), nan, expected)
    half = np.roll(x, 1)
    dest, bits = ("%c15", 4) if name == "e2m1" else ("%h31", 8)
    convert = f"cvt.rn.satfinite.{name}x2.f32"
    if name == "e2m1":
        body = f" {{ .reg .b8 b; {convert} b, %r1, %r0; mov.b32 %r63, {{b, b, b, b}}; }}"
        packed = elementwise(body, [x, half], np.uint32)
    else:
        packed = elementwise(f" {convert} {dest}, %r1, %r0;", [x, half], np.uint16)
    mask = (1 << bits) - 1
    np.testing.assert_array_equal(packed & mask, expected)
    np.testing.assert_array_equal(packed >> bits & mask, np.roll(expected, 1))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_agrees_with_ml_dtypes_inside_the_range(name: str) -> None:
    dtype = DECODED[name]
    largest = float(ml_dtypes.finfo(dtype).max)
    x = ties_and_neighbours(decode(name, np.arange(256)))
    x = x[np.abs(x) <= largest]
    ours = elementwise(f" cvt.rn.satfinite.{name}x2.f32 %h31, %r0, %r0;", [x], np.uint16) & 0xFF
    np.testing.assert_array_equal(ours, x.astype(dtype).view(np.uint8))


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m3", "e3m2", "ue5m3"])
def test_every_code_decodes(name: str) -> None:
    codes = np.arange(CODES.get(name, 256), dtype=np.uint16)
    pair = codes | np.roll(codes, 1) << 8
    halves = elementwise(f" cvt.rn.f16x2.{name}x2 %r63, %h0;", [pair], np.uint32)
    low = (halves & 0xFFFF).astype(np.uint16).view(np.float16)
    with np.errstate(over="ignore"):
        expected = decode(name, codes.astype(np.int64)).astype(np.float16)
    np.testing.assert_array_equal(low, expected)
    high = (halves >> 16).astype(np.uint16).view(np.float16)
    np.testing.assert_array_equal(high, np.roll(expected, 1))


def test_e2m1_decodes() -> None:
    codes = np.arange(256, dtype=np.uint32)
    body = """ { .reg .b8 b, c, d, e; mov.b32 {b, c, d, e}, %r0;
     cvt.rn.f16x2.e2m1x2 %r63, b; }"""
    halves = elementwise(body, [codes], np.uint32)
    low = (halves & 0xFFFF).astype(np.uint16).view(np.float16)
    high = (halves >> 16).astype(np.uint16).view(np.float16)
    np.testing.assert_array_equal(low, decode("e2m1", codes & 15))
    np.testing.assert_array_equal(high, decode("e2m1", codes >> 4))


def test_ue8m0_decodes_to_bf16() -> None:
    codes = np.arange(256, dtype=np.uint16)
    halves = elementwise(" cvt.rn.bf16x2.ue8m0x2 %r63, %h0;", [codes], np.uint32)
    ours = (halves & 0xFFFF).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(ours, decode("ue8m0", codes.astype(np.int64)))


@pytest.mark.parametrize("source", ["f32", "bf16x2"])
def test_ue8m0_rounds_up_to_a_power_of_two(source: str) -> None:
    x = ties_and_neighbours(decode("ue8m0", np.arange(1, 255)))
    if source == "bf16x2":
        x = x.astype(ml_dtypes.bfloat16).astype(np.float32)
        pair = np.ascontiguousarray(x.view(np.uint32) >> 16)
        body = " cvt.rp.satfinite.ue8m0x2.bf16x2 %h31, %r0;"
        ours = elementwise(body, [pair], np.uint16) & 0xFF
    else:
        body = " cvt.rp.satfinite.ue8m0x2.f32 %h31, %r0, %r0;"
        ours = elementwise(body, [x], np.uint16) & 0xFF
    magnitude = np.abs(x.astype(np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.clip(np.ceil(np.log2(magnitude)), -127, 127)
    expected = np.where(magnitude == 0, 0, exponent + 127)
    expected = np.where(np.isnan(x), 255, expected)
    np.testing.assert_array_equal(ours, expected)


def test_ue5m3_rounds_up() -> None:
    codes = np.arange(255)
    values = decode("ue5m3", codes)
    x = ties_and_neighbours(values)
    x = x[(x >= 0) & (x <= values[-1])]
    ours = elementwise(" cvt.rp.satfinite.ue5m3x2.f32 %h31, %r0, %r0;", [x], np.uint16) & 0xFF
    np.testing.assert_array_equal(ours, np.searchsorted(values, x.astype(np.float64)))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_scaled_conversion_divides_by_the_scale(name: str) -> None:
    x = ties_and_neighbours(decode(name, np.arange(256)))
    scale = np.random.default_rng(1).integers(0, 256, len(x), dtype=np.uint32)
    body = f""" {{ .reg .b8 s; cvt.u8.u32 s, %r1;
     cvt.rn.satfinite.scaled::n1::ue8m0.{name}x2.f32 %h31, %r0, %r0, s; }}"""
    ours = elementwise(body, [x, scale], np.uint16) & 0xFF
    flushed = np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x).astype(np.float64)
    with np.errstate(over="ignore"):
        value = flushed * 2.0 ** (127.0 - scale)
    magnitudes = decode(name, np.arange(128))
    codes = np.arange(128)[np.isfinite(magnitudes)]
    expected = nearest(np.abs(value), magnitudes[codes], codes) | np.signbit(value) << 7
    expected = np.where(np.isnan(x) | (scale == 255), 0x7F, expected)
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_sixteen_bit_floats(name: str, dtype: type) -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    wide = elementwise(f" cvt.f32.{name} %r63, %h0;", [codes], np.float32)
    values = codes.view(dtype).astype(np.float32)
    np.testing.assert_array_equal(wide, values)
    nans = np.isnan(values)
    expected_nans = codes[nans].astype(np.uint32) << 16 if name == "bf16" else 0x7FFFFFFF
    np.testing.assert_array_equal(wide.view(np.uint32)[nans], expected_nans)
    finite = np.unique(values[np.isfinite(values)])
    x = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2, [np.inf, -np.inf]])
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf))]).astype(np.float32)
    with np.errstate(over="ignore"):
        expected = x.astype(dtype).view(np.uint16)
    for rounding in ("rn", "rz"):
        ours = elementwise(f" cvt.{rounding}.{name}.f32 %h31, %r0;", [x], np.uint16)
        if rounding == "rn":
            np.testing.assert_array_equal(ours, expected)
        else:
            assert (np.abs(ours.view(dtype).astype(np.float64)) <= np.abs(x)).all()
            exact = x == x.astype(dtype).astype(np.float32)
            np.testing.assert_array_equal(ours[exact], expected[exact])
    packed = elementwise(f" cvt.rn.{name}x2.f32 %r63, %r0, %r1;", [x, np.roll(x, 3)], np.uint32)
    np.testing.assert_array_equal(packed >> 16, expected)
    np.testing.assert_array_equal(packed & 0xFFFF, np.roll(expected, 3))


def test_float_to_integer_clamps() -> None:
    x = np.array(
        [0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, 5e9, np.nan, np.inf, 0.49999997], np.float32
    )
    cases = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    for mode, function in cases.items():
        signed = elementwise(f" cvt.{mode}.s32.f32 %r63, %r0;", [x], np.int32)
        with np.errstate(invalid="ignore"):
            whole = np.nan_to_num(function(x.astype(np.float64)), nan=0.0, posinf=1e20)
        np.testing.assert_array_equal(signed, np.clip(whole, -(2**31), 2**31 - 1).astype(np.int64))
        unsigned = elementwise(f" cvt.{mode}.u32.f32 %r63, %r0;", [x], np.uint32)
        np.testing.assert_array_equal(unsigned, np.clip(whole, 0, 2**32 - 1).astype(np.int64))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_integer_to_float_rounds(mode: str) -> None:
    x = np.random.default_rng(2).integers(-(2**31), 2**31, 1000).astype(np.int32)
    ours = elementwise(f" cvt.{mode}.f32.s32 %r63, %r0;", [x], np.float32).astype(np.float64)
    if mode == "rn":
        np.testing.assert_array_equal(ours, x.astype(np.float32))
    elif mode == "rz":
        assert (np.abs(ours) <= np.abs(x.astype(np.float64))).all()
    else:
        wrong = ours > x if mode == "rm" else ours < x
        assert not wrong.any()
    assert (np.abs(ours - x) < 256).all()


def test_integer_widths() -> None:
    x = np.random.default_rng(3).integers(0, 1 << 32, 500, dtype=np.uint32)
    sign = elementwise(" cvt.s32.s8 %r63, %r0;", [x], np.int32)
    np.testing.assert_array_equal(sign, x.astype(np.uint8).view(np.int8))
    wide = elementwise(" cvt.s64.s32 %d31, %r0;", [x], np.int64)
    np.testing.assert_array_equal(wide, x.view(np.int32))
    clamped = elementwise(" cvt.sat.s8.s32 %r63, %r0;", [x], np.int32)
    np.testing.assert_array_equal(clamped, np.clip(x.view(np.int32), -128, 127))
    both = elementwise(" cvt.pack.sat.s16.s32 %r63, %r0, %r1;", [x, np.roll(x, 1)], np.uint32)
    low = np.clip(np.roll(x, 1).view(np.int32), -(1 << 15), (1 << 15) - 1) & 0xFFFF
    high = np.clip(x.view(np.int32), -(1 << 15), (1 << 15) - 1) & 0xFFFF
    np.testing.assert_array_equal(both, high.astype(np.uint32) << 16 | low.astype(np.uint32))
