"""The CPU backend against the float64 oracle."""

import numpy as np
import pytest
import torch

from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.spec import FORMATS
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.cpu import host
from tests.oracles import moe, problems, tolerance


def projection(p):
    bias = None if p.bias is None else torch.from_numpy(p.bias)
    return ProjectionWeights(
        torch.from_numpy(p.qdata), torch.from_numpy(p.sf), torch.from_numpy(p.dec), bias
    )


def experts(layer):
    """The oracle's layer as the package's container."""
    e, hidden, packed = layer.w2.qdata.shape
    gated = layer.kind != "relu2"
    return ExpertWeights(
        FORMATS[layer.fmt], hidden, packed * 2, gated, projection(layer.w13), projection(layer.w2),
        tuple(range(e)),
    )  # fmt: skip


def problem(layer, dtype, top_k):
    w = experts(layer)
    return MoEProblem(
        w.num_experts, w.num_experts, top_k, w.hidden, w.intermediate, w.fmt,
        Activation(layer.kind, layer.limit, layer.alpha, layer.beta), dtype=dtype,
        has_bias=w.has_bias, router_weight_on_input=layer.weight_on_input,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["silu", "swigluoai", "relu2", "gelu_tanh"])
@pytest.mark.parametrize("fmt", ["nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4"])
def test_every_format_activation_and_dtype(fmt, kind, dtype):
    limit = 7.0 if kind == "swigluoai" else None
    layer = problems.layer(
        7,
        fmt,
        4,
        64,
        32,
        kind,
        bias=kind == "swigluoai",
        limit=limit,
    )
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    ids, weights = problems.routing(3, "some_missing", 9, 4, 2)
    kernel = host.build(problem(layer, dtype, 2))
    out = kernel.run(
        kernel.prepare(experts(layer)), x, torch.from_numpy(ids), torch.from_numpy(weights)
    )
    expected = moe.moe(layer, x.double().numpy(), ids, weights)
    bound = tolerance.bound(layer, x.double().numpy(), ids, weights, dtype)
    assert (np.abs(out.double().numpy() - expected) <= bound).all()
