"""Code for fp32 <-> hidden state dtypes and for the activation between FC1 and FC2."""

from __future__ import annotations

import math

from rubin_moe.kernels.cpu.decode import F32V, I32V
from rubin_moe.kernels.cpu.ir import F16, I16, Function, Value, vec
from rubin_moe.kernels.cpu.isa import LANES

I16V = vec(I16, LANES)
F16V = vec(F16, LANES)
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def load_f32(f: Function, dtype: str, ptr: Value, nbytes: Value) -> Value:
    """16 elements of ``dtype`` as fp32."""
    if dtype == "float32":
        return f.load(ptr, F32V, nbytes)
    if dtype == "float16":
        return f.cast("fpext", f.load(ptr, F16V, nbytes), F32V)
    return _widen(f, f.load(ptr, I16V, nbytes))


def store_rounded(f: Function, dtype: str, value: Value, ptr: Value, nbytes: Value) -> None:
    """16 elements rounded to ``dtype``."""
    if dtype == "bfloat16":
        value = bf16_bits(f, value)
    elif dtype == "float16":
        value = f.cast("fptrunc", value, F16V)
    f.store(value, ptr, nbytes)


def rounded(f: Function, dtype: str, value: Value) -> Value:
    """fp32 values that ``dtype`` has."""
    if dtype == "float16":
        return f.cast("fpext", f.cast("fptrunc", value, F16V), F32V)
    return _widen(f, bf16_bits(f, value)) if dtype == "bfloat16" else value


def bf16_bits(f: Function, value: Value) -> Value:
    """To nearest, ties to even, infinity above the largest; NaN stays NaN."""
    bits = f.cast("bitcast", value, I32V)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return f.cast("trunc", f.select(value.is_nan(), quiet, nearest), I16V)


def _widen(f: Function, bits: Value) -> Value:
    return f.cast("bitcast", f.cast("zext", bits, I32V) << 16, F32V)


def exp(f: Function, z: Value) -> Value:
    """e^z, relative error below 2^-22 for z in [-87, 88]; clamped outside, NaN stays NaN.

    z = n ln 2 + r with |r| <= 0.35; e^r by its Taylor polynomial, 2^n through the exponent bits.
    """
    z = f.select(z < -87.0, f.const(F32V, -87.0), z)
    z = f.select(z > 88.0, f.const(F32V, 88.0), z)
    magic = f.const(F32V, 1.5 * 2.0**23)  # adding it rounds to an integer in the low bits
    shifted = f.fma(z, f.const(F32V, 1 / math.log(2)), magic)
    n = shifted - magic
    high = f.const(F32V, -0.693359375)
    low = f.const(F32V, 2.12194440054690581e-4)
    r = f.fma(n, low, f.fma(n, high, z))
    p = f.const(F32V, 1 / math.factorial(7))
    for order in range(6, -1, -1):
        p = f.fma(p, r, f.const(F32V, 1 / math.factorial(order)))
    power = (f.cast("bitcast", shifted, I32V) << 23) + (127 << 23)
    return p * f.cast("bitcast", power, F32V)


def gated(f: Function, kind: str, gate: Value, up: Value, alpha: Value, beta: Value) -> Value:
    """``up``, ``gate`` after clamping. All three are a sigmoid: 1 + tanh(u) = 2 sigmoid(2 u)."""
    if kind == "gelu_tanh":
        c = 2 * math.sqrt(2 / math.pi)
        slope = f.fma(gate * gate, f.const(F32V, c * 0.044715), f.const(F32V, c))
        s = gate * slope
    elif kind == "swigluoai":
        s, up = gate * f.splat(alpha, LANES), up + f.splat(beta, LANES)
    else:
        s = gate
    return up * (gate / (exp(f, s * -1.0) + 1.0))


def clamped(f: Function, gate: Value, up: Value, limit: Value) -> tuple[Value, Value]:
    """gate from above, up to both sides; NaN passes."""
    top = f.splat(limit, LANES)
    bottom = top * -1.0
    gate = f.select(gate > top, top, gate)
    up = f.select(up > top, top, up)
    return gate, f.select(up < bottom, bottom, up)


def squared_relu(f: Function, up: Value) -> Value:
    positive = f.select(up < 0.0, f.const(F32V, 0.0), up)
    return positive * positive
