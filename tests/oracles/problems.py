"""Random layers on the format grid, and routings of every awkward kind."""

import numpy as np

from .moe import Layer, Projection
from .quant import BLOCK

ROUTINGS = ("uniform", "one_expert", "none", "some_missing", "power_law")


def projection(
    rng: np.random.Generator,
    fmt: str,
    shape: tuple[int, int, int],
    halves: int = 1,
    bias: bool = False,
) -> Projection:
    """Random codes and scales of a usual checkpoint's spread, ``shape`` = (E, N, K)."""
    e, n, k = shape
    qdata = rng.integers(0, 256, (e, n, k // 2), dtype=np.uint8)
    low, high = {"nvfp4-ue4m3": (0x48, 0x7E), "nvfp4-ue5m3": (0x38, 0x58), "mxfp4": (117, 123)}[fmt]
    sf = rng.integers(low, high + 1, (e, n, k // BLOCK[fmt]), dtype=np.uint8)
    dec = rng.uniform(0.5, 2, (e, halves)) * (2.0**-12 if fmt == "nvfp4-ue4m3" else 1.0)
    if fmt == "mxfp4":
        dec = np.ones((e, halves))
    b = rng.normal(0, 0.3, (e, n)).astype(np.float32) if bias else None
    return Projection(qdata, sf, dec.astype(np.float32), b)


def layer(
    seed: int,
    fmt: str,
    num_experts: int = 4,
    hidden: int = 64,
    intermediate: int = 32,
    kind: str = "silu",
    bias: bool = False,
    **fields: object,
) -> Layer:
    """A whole layer with random weights; extra fields go to `Layer`."""
    rng = np.random.default_rng(seed)
    halves = 1 if kind == "relu2" else 2
    w13 = projection(rng, fmt, (num_experts, halves * intermediate, hidden), halves, bias)
    w2 = projection(rng, fmt, (num_experts, hidden, intermediate), 1, bias)
    return Layer(fmt, w13, w2, kind=kind, **fields)  # type: ignore[arg-type]


def routing(
    seed: int, kind: str, num_tokens: int, num_experts: int, top_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids a row, int64 ``[M, k]``, and weights float32 ``[M, k]`` that sum to 1."""
    rng = np.random.default_rng(seed)
    bias = np.zeros(num_experts)
    if kind == "one_expert":
        bias[num_experts // 2] = 50
    if kind == "power_law":
        bias = -2.0 * np.log(np.arange(1, num_experts + 1))
    scores = bias + rng.gumbel(size=(num_tokens, num_experts))
    ids = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int64)
    weights = rng.dirichlet(np.ones(top_k), num_tokens).astype(np.float32)
    if kind == "none":
        ids[:] = -1
    if kind == "some_missing":
        ids[rng.random(ids.shape) < 0.3] = -1
    return ids, weights
