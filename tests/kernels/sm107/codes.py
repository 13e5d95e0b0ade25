"""Quantized blocks against the recipe on float64 values: equal, or at a rounding boundary."""

import numpy as np

from tests.emulator.peers.case import Comparison
from tests.oracles.quant import (
    BLOCK,
    E2M1,
    E4M3,
    SCALE_TYPE,
    SCALES,
    encode_e2m1,
    encode_e4m3,
    nearest_even,
    round_up,
)


def compare_codes(
    qdata: np.ndarray,
    sf: np.ndarray,
    want: np.ndarray,
    fmt: str,
    bound: float,
    slack: np.ndarray | None = None,
) -> Comparison:
    """Codes ``[rows, bytes]`` and scales of ``want`` float64 ``[rows, n]`` (over the global scale).

    ``slack``: float64 ``[rows, n]``, what an element may be off beside ``bound``, where a sum
    cancels.

    ``max_error``: the largest relative distance to the boundary that a differing scale or element
    (judged with the scale that the kernel chose) would have to be at. ``bound``: what that may be.
    """
    table = SCALES[SCALE_TYPE[fmt]]
    blocks = want.reshape(want.shape[0], -1, BLOCK[fmt])
    free = (np.zeros_like(want) if slack is None else slack).reshape(blocks.shape)
    top = 448 if fmt == "mxfp8" else 6
    amax = np.abs(blocks).max(axis=-1) / top
    if fmt == "nvfp4-ue4m3":
        want_sf, edges = nearest_even(amax, table[:127]), _midpoints(table[:127])
    else:
        want_sf, edges = round_up(amax, table[:255]), np.append(-np.inf, table[:255])
    value = blocks / table[sf][..., None]
    if fmt == "mxfp8":
        codes, magnitudes, sign = qdata.reshape(value.shape), E4M3[:127], 0x80
        want_codes = encode_e4m3(value)
    else:
        codes = np.stack([qdata & 15, qdata >> 4], axis=-1).reshape(value.shape)
        magnitudes, sign, want_codes = E2M1[:8], 8, encode_e2m1(value)
    errors = _outside(
        np.abs(value), codes & (sign - 1), _midpoints(magnitudes), free / table[sf][..., None]
    )
    wrong_sign = ((codes ^ want_codes) & sign != 0) & (codes & (sign - 1) != 0)
    errors[wrong_sign] = np.inf
    return Comparison(
        codes.size + sf.size,
        int((codes == want_codes).sum() + (sf == want_sf).sum()),
        float(max(_outside(amax, sf, edges, free.max(axis=-1) / top).max(), errors.max())),
        bound,
        f"codes and scales of {fmt}; error: relative distance past a rounding boundary",
    )


def _midpoints(table: np.ndarray) -> np.ndarray:
    return np.concatenate([[-np.inf], (table[1:] + table[:-1]) / 2, [np.inf]])


def _outside(
    value: np.ndarray, code: np.ndarray, edges: np.ndarray, free: np.ndarray
) -> np.ndarray:
    """How far beyond ``free`` ``value`` lies outside [edges[code], edges[code + 1]], relative to
    it."""
    index = code.astype(np.int64)
    known = np.minimum(index, edges.size - 2)
    outside = np.maximum(edges[known] - value, value - edges[known + 1])
    error = np.maximum(outside - free, 0) / np.maximum(np.abs(value), 2.0**-100)
    return np.where(index < edges.size - 1, error, np.inf)
