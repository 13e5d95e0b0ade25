"""The activation between FC1 and FC2, in float32. Device code."""

import triton
import triton.language as tl

GELU_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): gelu_tanh(x) = x sigmoid(2 u)
GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def activate(
    gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr
):
    """`rubin_moe.kernels.activation.Activation` of real units; ``gate`` is unused by relu2, LIMIT
    0 means none."""
    if KIND == "relu2":
        positive = tl.maximum(up, 0.0)
        return positive * positive
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.maximum(tl.minimum(up, LIMIT), -LIMIT)
    if KIND == "swigluoai":
        return (up + BETA) * (gate * tl.sigmoid(gate * ALPHA))
    if KIND == "gelu_tanh":
        inner = gate * (1.0 + gate * gate * GELU_CUBIC) * GELU_SCALE
        return up * (gate * tl.sigmoid(inner))
    return up * (gate * tl.sigmoid(gate))
