"""Formats from their bit definitions, in float64 NumPy: decode tables and exact quantizers."""

import numpy as np

NVFP4_BLOCK = 16
MX_BLOCK = 32


def _minifloat(code: int, ebits: int, mbits: int, bias: int) -> float:
    """Value of an unsigned minifloat with subnormals and no infinity."""
    e, m = code >> mbits, code & ((1 << mbits) - 1)
    if e == 0:
        return float(m * 2.0 ** (1 - bias - mbits))
    return float((1 + m / (1 << mbits)) * 2.0 ** (e - bias))


def _table_ue4m3() -> np.ndarray:
    t = np.array([_minifloat(c & 0x7F, 4, 3, 7) for c in range(256)])
    t[0x7F] = np.nan
    t[0x80:] = np.nan  # a scale's sign bit must be 0; -0 and below are not scales
    return t


def _table_ue5m3() -> np.ndarray:
    t = np.array([_minifloat(c, 5, 3, 15) for c in range(256)])
    t[0xFF] = np.nan
    return t


def _table_ue8m0() -> np.ndarray:
    t = np.array([2.0 ** (c - 127) for c in range(256)])
    t[0xFF] = np.nan
    return t


def _table_e4m3() -> np.ndarray:
    mag = np.array([_minifloat(c, 4, 3, 7) for c in range(128)])
    mag[0x7F] = np.nan
    return np.concatenate([mag, -mag])


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = _table_e4m3()
SCALES = {"ue4m3": _table_ue4m3(), "ue5m3": _table_ue5m3(), "ue8m0": _table_ue8m0()}
SCALE_TYPE = {"nvfp4-ue4m3": "ue4m3", "nvfp4-ue5m3": "ue5m3"}
SCALE_TYPE |= {"mxfp4": "ue8m0", "mxfp8": "ue8m0", "fp8-e4m3": "ue8m0"}  # the last: one a row
BLOCK = {"nvfp4-ue4m3": 16, "nvfp4-ue5m3": 16, "mxfp4": 32, "mxfp8": 32}
E4M3_ELEMENTS = ("mxfp8", "fp8-e4m3")


def unpack_e2m1(packed: np.ndarray) -> np.ndarray:
    """uint8 ``[..., K/2]`` -> float64 ``[..., K]``; the even element is in the low nibble."""
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return E2M1[both].reshape(*packed.shape[:-1], -1)


def pack_e2m1(codes: np.ndarray) -> np.ndarray:
    """4-bit codes ``[..., K]`` -> uint8 ``[..., K/2]``."""
    c = codes.astype(np.uint8)
    return c[..., 0::2] | (c[..., 1::2] << 4)


def dequantize(packed: np.ndarray, sf: np.ndarray, fmt: str) -> np.ndarray:
    """``e2m1(q) * scale(sf)``: uint8 ``[..., K/2]``, ``[..., K/block]`` -> float64 ``[..., K]``."""
    scale = SCALES[SCALE_TYPE[fmt]][sf]
    return unpack_e2m1(packed) * np.repeat(scale, BLOCK[fmt], axis=-1)


def nearest_even(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the nearest entry of an ascending table, ties to the even index, saturating.

    Exact in float64 for the tables here: every midpoint is representable.
    """
    finite = table[np.isfinite(table)]
    mid = (finite[1:] + finite[:-1]) / 2
    low = np.searchsorted(mid, values, side="left")  # a tie stays below
    tie = (low < mid.size) & (values == mid[np.minimum(low, mid.size - 1)])
    return np.where(tie & (low % 2 == 1), low + 1, low)


def round_up(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the smallest entry of an ascending table that is not below, saturating."""
    finite = table[np.isfinite(table)]
    return np.minimum(np.searchsorted(finite, values, side="left"), finite.size - 1)


def encode_e2m1(values: np.ndarray) -> np.ndarray:
    """4-bit codes, nearest with ties to even, saturating at 6; the sign of zero is kept."""
    return nearest_even(np.abs(values), E2M1[:8]) | (np.signbit(values).astype(np.int64) << 3)


def encode_e4m3(values: np.ndarray) -> np.ndarray:
    """E4M3 codes, nearest with ties to even, saturating at 448."""
    return nearest_even(np.abs(values), E4M3[:127]) | (np.signbit(values).astype(np.int64) << 7)


def _blocks(x: np.ndarray, fmt: str) -> np.ndarray:
    """``[..., K]`` -> ``[..., scales, elements of one scale]``."""
    return x.reshape(*x.shape[:-1], -1, BLOCK.get(fmt, x.shape[-1]))


def block_scales(x: np.ndarray, fmt: str, dec: float = 1.0) -> np.ndarray:
    """Scale codes of an activation quantizer (design rule of each format), float64 ``[..., K]``."""
    amax = np.abs(_blocks(x, fmt)).max(-1)
    if fmt == "nvfp4-ue4m3":
        return nearest_even(amax / 6 / dec, SCALES["ue4m3"][:127])
    if fmt == "nvfp4-ue5m3":
        return round_up(amax / 6, SCALES["ue5m3"][:255])
    top = 448.0 if fmt in E4M3_ELEMENTS else 6.0
    return round_up(amax / top, SCALES["ue8m0"][:255])


def quantize_dequantize(x: np.ndarray, fmt: str, dec: float = 1.0) -> np.ndarray:
    """What an activation becomes in ``fmt``: elements divided by the *rounded* block scale.

    A block whose rounded scale is zero becomes zero.
    """
    return with_scales(x, block_scales(x, fmt, dec), fmt, dec)


def with_scales(x: np.ndarray, codes: np.ndarray, fmt: str, dec: float = 1.0) -> np.ndarray:
    """``x [..., K]`` rounded under given scale codes ``[..., K / block]``."""
    scale = SCALES[SCALE_TYPE[fmt]][codes] * dec
    blocks = _blocks(x, fmt)
    safe = np.where(scale == 0, 1.0, scale)[..., None]
    if fmt in E4M3_ELEMENTS:
        q = E4M3[encode_e4m3(blocks / safe)]
    else:
        q = E2M1[encode_e2m1(blocks / safe)]
    return np.where(scale[..., None] == 0, 0.0, q * scale[..., None]).reshape(x.shape)


def rounding_envelope(x: np.ndarray, dx: np.ndarray, fmt: str, dec: float = 1.0) -> np.ndarray:
    """How far the rounded ``x`` may move when x is only known to ``+-dx``, elementwise.

    The block scale is a monotone function of the largest magnitude, and with the scale fixed so is
    rounding: the extremes are at the ends, under every scale code in between.
    """
    centre = quantize_dequantize(x, fmt, dec)
    low = block_scales(np.maximum(np.abs(x) - dx, 0), fmt, dec).astype(np.int64)
    high = block_scales(np.abs(x) + dx, fmt, dec).astype(np.int64)
    worst = np.zeros_like(x)
    for step in range(int((high - low).max(initial=0)) + 1):
        codes = np.minimum(low + step, high)
        for end in (x - dx, x + dx):
            worst = np.maximum(worst, np.abs(with_scales(end, codes, fmt, dec) - centre))
    return worst
