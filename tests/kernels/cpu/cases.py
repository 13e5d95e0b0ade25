"""The oracle's layers as this package's containers, and one call that compares the two."""

import numpy as np
import torch

from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.spec import FORMATS
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.cpu import isa
from rubin_moe.kernels.cpu.host import CpuKernel
from tests.oracles import moe, tolerance

FORMAT_NAMES = ("nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4")
KINDS = ("silu", "swigluoai", "relu2", "gelu_tanh")
DTYPES = ("bfloat16", "float16", "float32")


def projection(p):
    bias = None if p.bias is None else torch.from_numpy(p.bias)
    return ProjectionWeights(
        torch.from_numpy(p.qdata), torch.from_numpy(p.sf), torch.from_numpy(p.dec), bias
    )


def experts(layer):
    e, hidden, packed = layer.w2.qdata.shape
    w13, w2 = projection(layer.w13), projection(layer.w2)
    gated = layer.kind != "relu2"
    fmt = FORMATS[layer.fmt]
    return ExpertWeights(fmt, hidden, packed * 2, gated, w13, w2, tuple(range(e)), "layer.experts")


def problem(layer, dtype="bfloat16", top_k=2, num_global=None, activation_format="16bit"):
    w = experts(layer)
    return MoEProblem(
        num_experts=w.num_experts,
        global_num_experts=num_global or w.num_experts,
        top_k=top_k,
        hidden=w.hidden,
        intermediate=w.intermediate,
        weight_format=w.fmt,
        activation=Activation(layer.kind, layer.limit, layer.alpha, layer.beta),
        activation_format=activation_format,
        dtype=dtype,
        has_bias=w.has_bias,
        router_weight_on_input=layer.weight_on_input,
    )


class Case:
    """A kernel with its prepared weights, and the oracle's layer."""

    def __init__(self, layer, dtype="bfloat16", top_k=2, target=None, **fields):
        self.layer, self.dtype, self.top_k = layer, dtype, top_k
        named = None if target is None else isa.detect(target)
        self.kernel = CpuKernel(problem(layer, dtype, top_k, **fields), named)
        self.prepared = self.kernel.prepare(experts(layer))

    def inputs(self, num_tokens, seed=0, scale=1.0):
        g = torch.Generator().manual_seed(seed)
        hidden = self.kernel.problem.hidden
        x = scale * torch.randn(num_tokens, hidden, generator=g)
        return x.to(getattr(torch, self.dtype))

    def run(self, x, ids, weights, **more):
        if isinstance(ids, np.ndarray):
            ids, weights = torch.from_numpy(ids), torch.from_numpy(weights)
        return self.kernel.run(self.prepared, x, ids, weights, **more)

    def check(self, x, ids, weights, out=None):
        """The backend's result is within the formats' bound of the oracle's."""
        got = self.run(x, ids, weights) if out is None else out
        exact = x.double().numpy()
        expected = moe.moe(self.layer, exact, ids, weights)
        bound = tolerance.bound(self.layer, exact, ids, weights, self.dtype)
        excess = np.abs(got.double().numpy() - expected) / bound
        assert got.dtype == x.dtype
        assert not np.isnan(excess).any()
        assert excess.max(initial=0) <= 1, f"{excess.max():.2f} times the bound"


def same_bits(a, b):
    """Equal in every bit: -0 is not 0, NaN equals itself."""
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )
