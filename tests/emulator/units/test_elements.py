"""Every code of every format, against ml_dtypes and against the definition of UE5M3."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from rubin_moe.emulator.isa.elements import (
    ELEMENT_VALUES,
    SCALE_VALUES,
    Element,
    ScaleFormat,
    decode_codes,
)

REFERENCE = {
    Element.E4M3: ml_dtypes.float8_e4m3fn,
    Element.E5M2: ml_dtypes.float8_e5m2,
    Element.E2M3: ml_dtypes.float6_e2m3fn,
    Element.E3M2: ml_dtypes.float6_e3m2fn,
    Element.E2M1: ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("element", REFERENCE, ids=lambda e: e.label)
def test_element_codes(element: Element) -> None:
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    expected = codes.view(REFERENCE[element]).astype(np.float32)
    values = ELEMENT_VALUES[element]
    np.testing.assert_array_equal(values, expected)
    assert (np.signbit(values) == (codes >> (element.bits - 1) == 1))[~np.isnan(values)].all()


def test_ue8m0_codes() -> None:
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(SCALE_VALUES[ScaleFormat.UE8M0], expected)
    assert SCALE_VALUES[ScaleFormat.UE8M0][0] == 2.0**-127


def test_ue4m3_codes() -> None:
    table = SCALE_VALUES[ScaleFormat.UE4M3]
    expected = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(table[:128], expected)
    assert np.isnan(table[128:]).all()


def test_ue5m3_codes() -> None:
    table = SCALE_VALUES[ScaleFormat.UE5M3]
    for code in range(255):
        exponent, mantissa = divmod(code, 8)
        expected = (1 + mantissa / 8) * 2.0 ** (exponent - 15) if exponent else mantissa * 2.0**-17
        assert table[code] == expected
    assert np.isnan(table[255])
    assert table[254] == 114688
    assert table[1] == 2.0**-17
    assert table[0x80] == 2.0


def test_sixteen_bit_and_tf32_codes() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    half = decode_codes(codes, Element.F16)
    np.testing.assert_array_equal(half, codes.view(np.float16).astype(np.float32))
    brain = decode_codes(codes, Element.BF16)
    np.testing.assert_array_equal(brain, codes.view(ml_dtypes.bfloat16).astype(np.float32))
    word = np.array([0x3F801FFF, 0x3F802000, 0xBF803FFF], np.uint32)
    assert decode_codes(word, Element.TF32).tolist() == [1.0, 1 + 2.0**-10, -(1 + 2.0**-10)]
    assert decode_codes(np.array([127, 128, 255]), Element.S8).tolist() == [127, -128, -1]
