"""The CPU backend against the float64 oracle."""

import pytest

from rubin_moe.kernels.cpu import isa
from tests.oracles import problems

from .cases import DTYPES, FORMAT_NAMES, KINDS, Case


def layer_of(kind, fmt, *sizes, **fields):
    if kind == "swigluoai":
        fields |= {"limit": 7.0, "bias": True}
    return problems.layer(7, fmt, *sizes, kind=kind, **fields)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_every_format_activation_and_dtype(fmt, kind, dtype):
    case = Case(layer_of(kind, fmt, 4, 64, 32), dtype)
    case.check(case.inputs(9), *problems.routing(3, "some_missing", 9, 4, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("target", isa.available())
def test_every_instruction_set(target, fmt, dtype):
    case = Case(layer_of("silu", fmt, 4, 64, 32), dtype, target=target)
    case.check(case.inputs(9), *problems.routing(3, "uniform", 9, 4, 2))


@pytest.mark.parametrize("routing", problems.ROUTINGS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 8, 9, 17, 33, 130])
def test_every_routing_and_group_size(routing, num_tokens):
    case = Case(layer_of("swigluoai", "mxfp4", 6, 96, 64), top_k=3)
    case.check(case.inputs(num_tokens), *problems.routing(5, routing, num_tokens, 6, 3))


@pytest.mark.parametrize(
    ("fmt", "hidden", "intermediate"),
    [
        ("nvfp4-ue4m3", 16, 16),
        ("nvfp4-ue4m3", 48, 352),
        ("nvfp4-ue5m3", 336, 80),
        ("mxfp4", 32, 32),
        ("mxfp4", 352, 96),
        ("mxfp4", 2880, 32),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sizes_that_are_no_multiple_of_a_tile(fmt, hidden, intermediate, dtype):
    case = Case(layer_of("silu", fmt, 3, hidden, intermediate), dtype)
    case.check(case.inputs(5), *problems.routing(1, "uniform", 5, 3, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_router_weight_on_input(dtype):
    layer = layer_of("silu", "nvfp4-ue4m3", 4, 64, 32, weight_on_input=True)
    case = Case(layer, dtype, top_k=1)
    ids, weights = problems.routing(2, "uniform", 9, 4, 1)
    weights *= 0.3
    case.check(case.inputs(9), ids, weights)


@pytest.mark.parametrize("kind", ["silu", "swigluoai", "gelu_tanh"])
def test_limits_are_in_real_units(kind):
    """Clamping happens after dec and bias: most of these gates and ups exceed the limit."""
    layer = problems.layer(3, "nvfp4-ue4m3", 4, 64, 32, kind=kind, bias=True, limit=0.5)
    case = Case(layer, "float32")
    case.check(case.inputs(9, scale=10.0), *problems.routing(1, "uniform", 9, 4, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_large_and_tiny_inputs_stay_finite(kind):
    case = Case(layer_of(kind, "nvfp4-ue5m3", 4, 64, 32), "float32")
    for scale in (1e-20, 1e-3, 300.0):
        case.check(case.inputs(5, scale=scale), *problems.routing(1, "uniform", 5, 4, 2))
