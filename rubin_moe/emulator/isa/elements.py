"""Value tables of the element and scale formats that tensor-core operands use.

Every table is built from the definition of its format (sign, exponent, mantissa widths, bias,
specials), indexed by the code, and read-only. Element tables are float32, scale tables float64:
products of two scales leave float32's range.

Formats (PTX ISA, "Alternate floating-point data formats"; UE5M3 from its definition, bias 15, all
eight bits used, 0xFF NaN, smallest subnormal 2^-17):

========  ====================  ====  ==========  =======================
E2M1      s1 e2 m1              1     6           no specials
E2M3      s1 e2 m3              1     7.5         no specials
E3M2      s1 e3 m2              3     28          no specials
E4M3      s1 e4 m3              7     448         0x7F/0xFF NaN
E5M2      s1 e5 m2              15    57344       IEEE infinities and NaN
UE4M3     e4 m3, bit 7 clear    7     448         0x7F NaN; bit 7 set: NaN
UE5M3     e5 m3                 15    114688      0xFF NaN
UE8M0     e8                    127   2^127       0xFF NaN, 0 is 2^-127
========  ====================  ====  ==========  =======================

A UE4M3 byte with bit 7 set has no meaning in the ISA; it decodes to NaN so that it is seen.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Element(enum.Enum):
    """Element formats of multiplicands; ``bits`` is the width of one code."""

    F16 = ("f16", 16)
    BF16 = ("bf16", 16)
    TF32 = ("tf32", 32)
    E4M3 = ("e4m3", 8)
    E5M2 = ("e5m2", 8)
    E2M3 = ("e2m3", 6)
    E3M2 = ("e3m2", 6)
    E2M1 = ("e2m1", 4)
    U8 = ("u8", 8)
    S8 = ("s8", 8)

    def __init__(self, label: str, bits: int) -> None:
        self.label = label
        self.bits = bits


class ScaleFormat(enum.Enum):
    """Block-scale formats; the value is the code in bits 23-24 of the instruction descriptor."""

    UE4M3 = 0
    UE8M0 = 1
    UE5M3 = 2


def _minifloat(exponent: int, mantissa: int, bias: int) -> NDArray[np.float64]:
    """Values of all unsigned codes of a format without specials."""
    codes = np.arange(1 << (exponent + mantissa))
    e, m = codes >> mantissa, codes & ((1 << mantissa) - 1)
    step = 2.0**-mantissa
    subnormal = m * step * 2.0 ** (1 - bias)
    normal = (1 + m * step) * 2.0 ** (e - bias).astype(np.float64)
    return np.where(e == 0, subnormal, normal)


def _signed(magnitude: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([magnitude, -magnitude])


def _frozen(values: NDArray[np.float64], dtype: type) -> NDArray[np.generic]:
    table: NDArray[Any] = values.astype(dtype)
    table.flags.writeable = False
    return table


def _element_tables() -> dict[Element, NDArray[np.float32]]:
    e4m3 = _minifloat(4, 3, 7)
    e4m3[0x7F] = np.nan
    e5m2 = _minifloat(5, 2, 15)
    e5m2[0x7C] = np.inf
    e5m2[0x7D:] = np.nan
    byte = np.arange(256, dtype=np.float64)
    tables = {
        Element.E2M1: _signed(_minifloat(2, 1, 1)),
        Element.E2M3: _signed(_minifloat(2, 3, 1)),
        Element.E3M2: _signed(_minifloat(3, 2, 3)),
        Element.E4M3: _signed(e4m3),
        Element.E5M2: _signed(e5m2),
        Element.U8: byte,
        Element.S8: np.where(byte < 128, byte, byte - 256),
    }
    return {key: _frozen(table, np.float32) for key, table in tables.items()}  # type: ignore[misc]


def _scale_tables() -> dict[ScaleFormat, NDArray[np.float64]]:
    ue4m3 = np.full(256, np.nan)
    ue4m3[:0x7F] = _minifloat(4, 3, 7)[:0x7F]
    ue5m3 = _minifloat(5, 3, 15)
    ue5m3[0xFF] = np.nan
    ue8m0 = 2.0 ** (np.arange(256) - 127.0)
    ue8m0[0xFF] = np.nan
    tables = {ScaleFormat.UE4M3: ue4m3, ScaleFormat.UE8M0: ue8m0, ScaleFormat.UE5M3: ue5m3}
    return {key: _frozen(table, np.float64) for key, table in tables.items()}  # type: ignore[misc]


ELEMENT_VALUES = _element_tables()
"""Element -> float32[2**bits] for the formats of at most eight bits."""

SCALE_VALUES = _scale_tables()
"""ScaleFormat -> float64[256]."""


def decode_codes(codes: NDArray[np.generic], element: Element) -> NDArray[np.float32]:
    """Values of ``codes`` (any shape, unsigned dtype as wide as the element) as float32.

    TF32 operands keep float32's sign, exponent and upper ten mantissa bits; the lower thirteen
    bits are ignored (PTX ISA, tf32 operands "are read as .b32").
    """
    if element is Element.F16:
        return codes.astype(np.uint16).view(np.float16).astype(np.float32)
    if element is Element.BF16:
        return (codes.astype(np.uint32) << 16).view(np.float32)
    if element is Element.TF32:
        return (codes.astype(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.asarray(ELEMENT_VALUES[element][codes])
