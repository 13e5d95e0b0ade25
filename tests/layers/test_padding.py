"""Expert widths that kernels must pad: each half for itself, codes, scales and bias alike."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rubin_moe.errors import LayoutError
from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.layers.experts import problem_of
from rubin_moe.layouts.gate_up import pad_intermediate
from tests.layers import backends
from tests.oracles import problems

KINDS = {"silu": {}, "swigluoai": {"limit": 7.0, "bias": True}, "relu2": {"bias": True}}


def run(weights: ExpertWeights, layer, case, x, ids, topk_weights) -> torch.Tensor:
    activation = backends.Activation(layer.kind, layer.limit, layer.alpha, layer.beta)
    problem = problem_of(weights, 2, activation, torch.float32, activation_format=case.act)
    return backends.call(backends.made(weights, problem, case), case, x, ids, topk_weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "multiple", "padded"), [(352, 128, 384), (96, 64, 128)])
@pytest.mark.parametrize("case", backends.cases())
def test_padded_experts_compute_the_same(case, width, multiple, padded, kind):
    """Field report 36: I = 352 (Gemma-4 at TP 2) becomes 384."""
    layer = problems.layer(40, case.fmt, 2, 64, width, kind, **KINDS[kind])
    layer = backends.with_case(layer, case)
    weights = backends.weights_of(layer)
    grown = pad_intermediate(weights, multiple)
    assert (grown.intermediate, grown.w13.qdata.shape[1]) == (padded, grown.halves * padded)
    x = backends.tokens(1, 4)
    ids, topk_weights = problems.routing(2, "uniform", 4, 2, 2)
    out = run(grown, layer, case, x, ids, topk_weights)
    backends.assert_close(layer, x, ids, topk_weights, out)


@pytest.mark.parametrize("case", backends.one_a_backend())
def test_padding_behind_both_halves_is_far_outside_the_bound(case):
    """The mistake of the report: [gate; up; 0] moves the boundary between the halves."""
    layer = backends.with_case(problems.layer(41, case.fmt, 2, 64, 352), case)
    right = pad_intermediate(backends.weights_of(layer), 128)
    wrong13 = {
        name: torch.nn.functional.pad(tensor, (0, 0, 0, 64))
        for name, tensor in backends.weights_of(layer).w13.tensors().items()
        if name in ("qdata", "sf")
    }
    wrong = replace(right, w13=replace(right.w13, **wrong13))
    x = backends.tokens(3, 4)
    ids, topk_weights = problems.routing(4, "uniform", 4, 2, 2)
    with pytest.raises(AssertionError, match="outside"):
        backends.assert_close(
            layer, x, ids, topk_weights, run(wrong, layer, case, x, ids, topk_weights)
        )


@pytest.mark.parametrize("fmt", ["nvfp4-ue4m3", "mxfp4"])
def test_what_padding_writes(fmt):
    layer = problems.layer(42, fmt, 2, 64, 96, bias=True)
    weights = backends.weights_of(layer)
    grown = pad_intermediate(weights, 64)
    for name in ("qdata", "sf", "bias"):
        old = getattr(weights.w13, name).unflatten(1, (2, 96))
        new = getattr(grown.w13, name).unflatten(1, (2, 128))
        assert torch.equal(new[:, :, :96], old)
        assert new[:, :, 96:].eq(0).all()
    assert torch.equal(grown.w2.qdata[..., :48], weights.w2.qdata)
    assert grown.w2.qdata[..., 48:].eq(0).all()
    assert grown.w2.sf.shape[-1] * weights.fmt.sf_vec_size == 128
    assert grown.w2.bias is weights.w2.bias
    assert np.array_equal(grown.w13.dec.numpy(), layer.w13.dec)


def test_a_width_that_fits_comes_back_and_half_blocks_are_refused():
    weights = backends.weights_of(problems.layer(43, "mxfp4", 2, 64, 64))
    assert pad_intermediate(weights, 32) is weights
    with pytest.raises(LayoutError, match=r"48 is no multiple of 32 \(mxfp4\)"):
        pad_intermediate(weights, 48)
