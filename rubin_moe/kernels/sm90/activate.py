"""The activation between FC1 and FC2, of one feature in registers. Device code."""

from cutlass import Float32

from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.cute import ptx

LOG2E = 1.4426950408889634
GELU_SCALE = 1.5957691216057308  # 2 sqrt(2 / pi): gelu_tanh(x) = x sigmoid(2 u)
GELU_CUBIC = 0.044715


def sigmoid(x) -> Float32:
    return ptx.rcp_approx(Float32(1.0) + ptx.exp2_approx(x * Float32(-LOG2E)))


def activate(activation: Activation, gate, up) -> Float32:
    """`rubin_moe.kernels.activation.Activation` of real units; ``gate`` is unused by relu2."""
    if activation.kind == "relu2":
        positive = ptx.maximum(up, Float32(0.0))
        return positive * positive
    if activation.limit is not None:
        limit = Float32(activation.limit)
        gate = ptx.minimum(gate, limit)
        up = ptx.maximum(ptx.minimum(up, limit), -limit)
    if activation.kind == "swigluoai":
        linear = up + Float32(activation.beta)
        return linear * (gate * sigmoid(gate * Float32(activation.alpha)))
    if activation.kind == "gelu_tanh":
        inner = gate * (Float32(1.0) + gate * gate * Float32(GELU_CUBIC)) * Float32(GELU_SCALE)
        return up * (gate * sigmoid(inner))
    return up * (gate * sigmoid(gate))
