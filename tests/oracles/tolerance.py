"""How far a right backend may be from the oracle, from the formats alone."""

import numpy as np

from .moe import Layer, act_dec, activate, quantized
from .quant import rounding_envelope

UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}


def relative_l2(actual: np.ndarray, expected: np.ndarray) -> float:
    """``||actual - expected|| / ||expected||``; any NaN or infinity gives infinity."""
    if actual.size == 0:
        return 0.0
    if not np.isfinite(actual).all():
        return float("inf")
    norm = float(np.linalg.norm(expected))
    return float(np.linalg.norm(actual - expected)) / norm if norm else float(np.abs(actual).max())


def bound(
    layer: Layer,
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    dtype: str,
    dropped: float = 0.0,
) -> np.ndarray:
    """Elementwise ``[M, H]`` bound: fp32 accumulation, ``dtype`` in and out.

    Running-error analysis: a K-term fp32 dot product errs by at most ``K u32 sum|a w|``; rounding
    the activations between the GEMMs and the output adds ``u`` of each, and FC1's error passes the
    activation with a factor of at most ``1.13`` a side (largest slope of silu; the gated product
    adds the other factor). Doubled, for second order terms and for summing the experts in fp32.

    With quantized activations (``layer.act_fmt``) nothing is rounded to ``dtype`` between the
    GEMMs (but for ``fp8-e4m3``, whose scale is known at the end of a row only); instead an input of
    FC2 that lies close to a rounding boundary may fall to the other side, which moves it by what
    `rounding_envelope` says. ``dropped``: what FP8 tensor cores lose of a GEMM's sum, relative to
    the sum of magnitudes.
    """
    u, u32 = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF["float32"]
    between = u if layer.act_fmt in (None, "fp8-e4m3") else u32
    w13, w2 = layer.w13.dense(layer.fmt), layer.w2.dense(layer.fmt)
    out = np.zeros((x.shape[0], w2.shape[1]))
    for token, row in enumerate(x.astype(np.float64)):
        for expert, weight in zip(
            ids[token], np.abs(weights[token].astype(np.float64)), strict=True
        ):
            if expert < 0:
                continue
            a = row * weight if layer.weight_on_input else row
            da = np.abs(a) * (between if layer.weight_on_input else 0.0)
            a, da = _seen_by_gemm(layer, a, da, 0, expert)
            b13 = 0 if layer.w13.bias is None else layer.w13.bias[expert].astype(np.float64)
            b2 = 0 if layer.w2.bias is None else layer.w2.bias[expert].astype(np.float64)
            h = a @ w13[expert].T + b13
            terms = np.abs(a) @ np.abs(w13[expert]).T + np.abs(b13)
            dh = terms * (a.size * u32 + dropped) + da @ np.abs(w13[expert]).T
            # a backend may round FC1's result before the activation
            dh = dh + np.abs(h) * between
            act = activate(layer, h)
            da = _activation_error(layer, h, dh) + np.abs(act) * (2 * between)
            act, da = _seen_by_gemm(layer, act, da, 1, expert)
            y = np.abs(act) @ np.abs(w2[expert]).T + np.abs(b2)
            dy = da @ np.abs(w2[expert]).T + y * (act.size * u32 + dropped)
            # and FC2's result before the weighted sum
            out[token] += (1.0 if layer.weight_on_input else weight) * (dy + y * u)
    return 2 * out + 2.0**-126


def _seen_by_gemm(
    layer: Layer, a: np.ndarray, da: np.ndarray, gemm: int, expert: int
) -> tuple[np.ndarray, np.ndarray]:
    """A GEMM's input after quantization, and how far it may be off."""
    if layer.act_fmt is None:
        return a, da
    dec = act_dec(layer, gemm, expert)
    return quantized(layer, a, gemm, expert), rounding_envelope(a, da, layer.act_fmt, dec)


def _activation_error(layer: Layer, h: np.ndarray, dh: np.ndarray) -> np.ndarray:
    if layer.kind == "relu2":
        return 2 * np.abs(h) * dh + dh**2
    gate, up = np.split(h, 2, axis=-1)
    dgate, dup = np.split(dh, 2, axis=-1)
    slope = 1.13 if layer.kind != "swigluoai" else 1.2
    beta = layer.beta if layer.kind == "swigluoai" else 0.0
    if layer.limit is not None:
        up, gate = np.clip(up, -layer.limit, layer.limit), np.minimum(gate, layer.limit)
    return (np.abs(up) + abs(beta)) * slope * dgate + np.abs(gate) * dup + slope * dgate * dup
