"""The 8-bit activation mode: exact integer products, and the error that its rounding has."""

import numpy as np
import pytest

from rubin_moe.kernels.base import Target
from rubin_moe.kernels.cpu import isa, rules
from tests.oracles import moe, problems, tolerance

from .cases import DTYPES, FORMAT_NAMES, KINDS, Case, problem, same_bits

BLOCK = 16


def rounded(a):
    """What 16 elements that share a scale of amax / 127 become; float64 ``[..., K]``."""
    blocks = a.reshape(*a.shape[:-1], -1, BLOCK)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.rint(blocks / np.where(scale == 0, 1, scale)) * scale).reshape(a.shape)


def reference(layer, x, ids, weights):
    """The oracle's layer with both products' activations rounded."""
    w13, w2 = layer.w13.dense(layer.fmt), layer.w2.dense(layer.fmt)
    out = np.zeros((len(x), w2.shape[1]))
    for token, row in enumerate(x.double().numpy()):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            if expert >= 0:
                h = rounded(row) @ w13[expert].T
                h = h if layer.w13.bias is None else h + layer.w13.bias[expert]
                y = rounded(moe.activate(layer, h)) @ w2[expert].T
                out[token] += weight * (y if layer.w2.bias is None else y + layer.w2.bias[expert])
    return out


def case_of(fmt, kind="silu", dtype="float32", target=None, sizes=(4, 64, 32)):
    fields = {"limit": 7.0, "bias": True} if kind == "swigluoai" else {}
    layer = problems.layer(7, fmt, *sizes, kind=kind, **fields)
    return Case(layer, dtype, target=target, activation_format="int8")


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("target", isa.available())
def test_every_instruction_set(target, fmt):
    """A few codes of the second rounding may differ from float64's: hence not exactly equal."""
    case = case_of(fmt, target=target)
    x, (ids, weights) = case.inputs(9), problems.routing(3, "some_missing", 9, 4, 2)
    expected = reference(case.layer, x, ids, weights)
    assert tolerance.relative_l2(case.run(x, ids, weights).double().numpy(), expected) < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_activation_and_dtype(kind, dtype):
    case = case_of("nvfp4-ue4m3", kind, dtype)
    x, (ids, weights) = case.inputs(9), problems.routing(3, "uniform", 9, 4, 2)
    expected = reference(case.layer, x, ids, weights)
    limit = 1e-3 + 2 * tolerance.UNIT_ROUNDOFF[dtype]
    assert tolerance.relative_l2(case.run(x, ids, weights).double().numpy(), expected) < limit


def test_the_error_that_the_documentation_states():
    """About 1 % of the layer's output on normal inputs, beside the exact result."""
    case = case_of("nvfp4-ue4m3", sizes=(4, 512, 256))
    x, (ids, weights) = case.inputs(16), problems.routing(3, "uniform", 16, 4, 2)
    exact = moe.moe(case.layer, x.double().numpy(), ids, weights)
    error = tolerance.relative_l2(case.run(x, ids, weights).double().numpy(), exact)
    assert 0.002 < error < 0.012


def test_integers_are_multiplied_exactly():
    """The largest sums of a block: no saturation on the way."""
    for fmt in FORMAT_NAMES:
        layer = problems.layer(7, fmt, 2, 64, 32, kind="relu2")
        layer.w13.qdata[:] = 0x77  # 6 everywhere
        layer.w13.sf[:], layer.w13.dec[:] = layer.w13.sf[0, 0, 0], 1.0
        for target in isa.available():
            case = Case(layer, "float32", top_k=1, target=target, activation_format="int8")
            for sign in (1.0, -1.0):
                x = case.inputs(1) * 0 + sign
                ids, weights = np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32)
                expected = reference(layer, x, ids, weights)
                got = case.run(x, ids, weights).double().numpy()
                np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_row_alone_equals_the_row_in_a_batch():
    case = case_of("mxfp4", dtype="bfloat16")
    x, (ids, weights) = case.inputs(33), problems.routing(3, "power_law", 33, 4, 2)
    together = case.run(x, ids, weights)
    for row in range(33):
        one = slice(row, row + 1)
        assert same_bits(case.run(x[one], ids[one], weights[one]), together[one])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_not_lost(value):
    case = case_of("nvfp4-ue5m3")
    x, (ids, weights) = case.inputs(3), problems.routing(3, "uniform", 3, 4, 2)
    x[1, 5] = value
    out = case.run(x, ids, weights)
    assert not out[1].isfinite().any()
    assert out[[0, 2]].isfinite().all()


def test_it_is_computed_only_when_asked_for():
    asked = problem(case_of("mxfp4").layer, activation_format="int8")
    assert rules.why_not(asked, Target("cpu")) is None
    other = problem(case_of("mxfp4").layer, activation_format="mxfp8")
    assert "mxfp8" in rules.why_not(other, Target("cpu"))
