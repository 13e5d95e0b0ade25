"""One MoE layer in float64, expert by expert and token by token."""

from dataclasses import dataclass

import numpy as np

from .quant import dequantize, quantize_dequantize


@dataclass(frozen=True)
class Projection:
    """uint8 codes ``[E, N, K/2]``, uint8 scales, ``dec [E, halves]``, bias ``[E, N]`` or None."""

    qdata: np.ndarray
    sf: np.ndarray
    dec: np.ndarray
    bias: np.ndarray | None = None

    def dense(self, fmt: str) -> np.ndarray:
        """float64 ``[E, N, K]``."""
        e, n = self.qdata.shape[:2]
        halves = self.dec.shape[1]
        w = dequantize(self.qdata, self.sf, fmt).reshape(e, halves, n // halves, -1)
        return (w * self.dec.astype(np.float64)[:, :, None, None]).reshape(e, n, -1)


@dataclass(frozen=True)
class Layer:
    """Everything that decides the output of one layer.

    ``kind``: silu, swigluoai, relu2 or gelu_tanh. ``act_fmt``: format the inputs of both GEMMs are
    rounded to, or None; ``act_dec``: the activation's global scale for FC1 and FC2, a number each
    or one an expert; ``input_scale``: FC1's is the largest of all experts (layer) or each
    expert's own (expert).
    """

    fmt: str
    w13: Projection
    w2: Projection
    kind: str = "silu"
    limit: float | None = None
    alpha: float = 1.702
    beta: float = 1.0
    act_fmt: str | None = None
    act_dec: tuple[float | np.ndarray, float | np.ndarray] = (1.0, 1.0)
    weight_on_input: bool = False
    input_scale: str = "layer"


def activate(layer: Layer, h: np.ndarray) -> np.ndarray:
    """FC1 result in real units ``[..., N]`` -> ``[..., I]``; gate rows come first."""
    if layer.kind == "relu2":
        return np.maximum(h, 0) ** 2
    gate, up = np.split(h, 2, axis=-1)
    if layer.limit is not None:
        gate, up = np.minimum(gate, layer.limit), np.clip(up, -layer.limit, layer.limit)
    if layer.kind == "silu":
        return up * gate * sigmoid(gate)
    if layer.kind == "swigluoai":
        return (up + layer.beta) * gate * sigmoid(layer.alpha * gate)
    if layer.kind == "gelu_tanh":
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        return up * 0.5 * gate * (1 + np.tanh(inner))
    raise ValueError(layer.kind)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(x / 2))


def moe(layer: Layer, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """``[M, H]``, local ids ``[M, k]`` (-1: none), weights ``[M, k]`` -> float64 ``[M, H]``."""
    w13, w2 = layer.w13.dense(layer.fmt), layer.w2.dense(layer.fmt)
    out = np.zeros((x.shape[0], w2.shape[1]))
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token], weights[token].astype(np.float64), strict=True):
            if expert < 0:
                continue
            a = x[token].astype(np.float64)
            a = a * weight if layer.weight_on_input else a
            h = quantized(layer, a, 0, expert) @ w13[expert].T
            h = h if layer.w13.bias is None else h + layer.w13.bias[expert].astype(np.float64)
            y = quantized(layer, activate(layer, h), 1, expert) @ w2[expert].T
            y = y if layer.w2.bias is None else y + layer.w2.bias[expert].astype(np.float64)
            out[token] += y if layer.weight_on_input else y * weight
    return out


def act_dec(layer: Layer, gemm: int, expert: int) -> float:
    """The activation's global scale for one expert."""
    dec = np.asarray(layer.act_dec[gemm], dtype=np.float64)
    if gemm == 0 and layer.input_scale == "layer":
        return float(dec.max())
    return float(dec if dec.ndim == 0 else dec[expert])


def quantized(layer: Layer, a: np.ndarray, gemm: int, expert: int) -> np.ndarray:
    """The input of FC1 (0) or FC2 (1) as the GEMM sees it."""
    if layer.act_fmt is None:
        return a
    return quantize_dequantize(a, layer.act_fmt, act_dec(layer, gemm, expert))
