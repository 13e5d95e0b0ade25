"""Operands on the format grid, chosen so that a GEMM over them is exact in float32.

Every element and every scale factor is a small multiple of a power of two; `Operand.check_exact`
confirms for a given pair that no sum of magnitudes exceeds 24 bits. Then any order of accumulation
gives the same float32, and a kernel's output has to equal the float64 product bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.oracles.quant import E2M1, E4M3, SCALES, pack_e2m1

#: Half-open ranges of the scale codes drawn for (element, scale): full mantissas over two to six
#: binades around one where K is short, over one to three where it is long.
_SHORT = 768
_SCALE_CODES = {
    ("e2m1", "ue4m3"): ((48, 64), (56, 64)),
    ("e2m1", "ue5m3"): ((112, 128), (120, 128)),
    ("e2m1", "ue8m0"): ((125, 131), (126, 129)),
    ("e4m3", "ue8m0"): ((125, 129), (126, 128)),
}


@dataclass(frozen=True)
class Format:
    """Element ("e2m1" or "e4m3"), scale ("ue4m3", "ue5m3", "ue8m0") and block length along K."""

    element: str
    scale: str
    block: int


NVFP4 = Format("e2m1", "ue4m3", 16)
NVFP4_UE5M3 = Format("e2m1", "ue5m3", 16)
MXFP4 = Format("e2m1", "ue8m0", 32)
MXFP8 = Format("e4m3", "ue8m0", 32)


#: CuTe DSL names of element and scale types.
DSL_TYPE = {
    "e2m1": "Float4E2M1FN",
    "e4m3": "Float8E4M3FN",
    "ue4m3": "Float8E4M3FN",
    "ue5m3": "FloatNV8E5M3FNU",
    "ue8m0": "Float8E8M0FNU",
}


def describe(fmt: Format) -> str:
    return f"{fmt.element.upper()}/{fmt.scale.upper()}/{fmt.block}"


@dataclass(frozen=True)
class Operand:
    """A quantized matrix.

    qdata: uint8 [rows, k / 2] for e2m1 (low nibble first) or [rows, k] for e4m3.
    sf: uint8 [rows, k / block]. values: float64 [rows, k], `element * scale`.
    """

    format: Format
    qdata: np.ndarray
    sf: np.ndarray
    values: np.ndarray

    def swizzled_sf(self) -> np.ndarray:
        """`sf` in the 128 x 4 order that the tensor cores copy: uint8, rows padded to 128."""
        return swizzle_128x4(self.sf)


def draw(rng: np.random.Generator, rows: int, k: int, fmt: Format) -> Operand:
    """A random operand [rows, k]; k a multiple of the block length."""
    if fmt.element == "e2m1":
        codes = rng.integers(0, 16, (rows, k), dtype=np.uint8)
        qdata, elements = pack_e2m1(codes), E2M1[codes]
    else:
        # Magnitudes 0.5 to 1.875 with all mantissas, and both zeros.
        codes = rng.integers(48, 64, (rows, k), dtype=np.uint8)
        codes[rng.random((rows, k)) < 0.05] = 0
        codes |= rng.integers(0, 2, (rows, k), dtype=np.uint8) << 7
        qdata, elements = codes, E4M3[codes]
    low, high = _SCALE_CODES[fmt.element, fmt.scale][k > _SHORT]
    sf = rng.integers(low, high, (rows, k // fmt.block), dtype=np.uint8)
    if fmt.scale != "ue8m0":
        sf[rng.random(sf.shape) < 0.02] = 0  # a scale of zero; UE8M0 has none
    scale = SCALES[fmt.scale][sf]
    return Operand(fmt, qdata, sf, elements * np.repeat(scale, fmt.block, axis=1))


def exact_product(a: Operand, b: Operand) -> np.ndarray:
    """A @ B.T in float64 [rows of a, rows of b]; raises if float32 accumulation could round."""
    check_exact(a.values, b.values)
    return a.values @ b.values.T


def check_exact(a: np.ndarray, b: np.ndarray) -> None:
    """Raises ValueError unless every partial sum of a @ b.T, in any order, fits 24 bits."""
    unit = _unit(a) * _unit(b)
    largest = (np.abs(a) @ np.abs(b).T).max()
    if largest / unit > 2.0**24:
        raise ValueError(f"partial sums need {np.log2(largest / unit):.1f} bits, float32 has 24")


def _unit(values: np.ndarray) -> float:
    """The largest power of two of which every value is a multiple."""
    mantissa, exponent = np.frexp(values[values != 0])
    integers = np.ldexp(mantissa, 53).astype(np.int64)
    trailing = np.log2((integers & -integers).astype(np.float64))
    return float(np.exp2((exponent - 53 + trailing).min()))


def swizzle_128x4(sf: np.ndarray) -> np.ndarray:
    """Scale factors [rows, columns] -> uint8 [ceil(rows/128) * ceil(columns/4) * 512].

    Tiles of 128 rows x 4 columns, tile after tile along columns; in a tile, byte
    `(row % 32) * 16 + (row / 32) * 4 + column` (PTX ISA, tcgen05 scale factor layout).
    """
    rows, columns = -(-sf.shape[0] // 128) * 128, -(-sf.shape[1] // 4) * 4
    padded = np.zeros((rows, columns), np.uint8)
    padded[: sf.shape[0], : sf.shape[1]] = sf
    tiles = padded.reshape(rows // 128, 4, 32, columns // 4, 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(-1)


def unswizzle_128x4(flat: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Inverse of `swizzle_128x4`: uint8 [rows, columns]."""
    tiles = flat.reshape(-(-rows // 128), -(-columns // 4), 32, 4, 4)
    full = tiles.transpose(0, 3, 2, 1, 4).reshape(-(-rows // 128) * 128, -1)
    return full[:rows, :columns]
