"""Whole layers at the edges: most experts, odd sizes, no tokens, ranks, poison everywhere."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.spec import FORMATS
from rubin_moe.kernels.cpu_tcgen05.host import Tcgen05Kernel
from rubin_moe.kernels.sm107.host import Sm107Kernel
from rubin_moe.kernels.sm107.rules import MAX_EXPERTS, MAX_TOP_K
from rubin_moe.layouts.sm107_tiles import ROWS, Sm107Tiles
from tests.oracles import moe

from .layers import Case
from .test_emulated import kernel

ODD = [
    Case("nvfp4-ue4m3", 2, 2, 2880, 352),
    Case("nvfp4-ue5m3", 3, 2, 352, 1600),
    Case("nvfp4-ue4m3", 1, 2, 1600, 2880),
    Case("mxfp4", 2, 2, 352, 352, kind="swigluoai"),
]


def assert_close(case: Case, got: torch.Tensor) -> None:
    """Within fp32 accumulation of the oracle; codes between the GEMMs may differ by a rounding."""
    x, ids, weights = case.batch()
    expected = moe.moe(case.layer(), x.numpy(), ids.numpy(), weights.numpy())
    error = np.abs(got.numpy() - expected)
    assert error.max() <= 1e-3 * np.abs(expected).max()
    assert (error > 1e-5 * np.abs(expected).max()).mean() < 0.02


@pytest.mark.parametrize("case", ODD, ids=str)
def test_sizes_that_fill_no_tile(case):
    k = kernel(case)
    assert_close(case, k.run(k.prepare(case.weights()), *case.batch()))


def test_most_experts_and_choices():
    case = Case("nvfp4-ue4m3", 3, MAX_EXPERTS, 64, 32, top_k=MAX_TOP_K)
    k = kernel(case)
    assert_close(case, k.run(k.prepare(case.weights()), *case.batch()))


@pytest.mark.parametrize("deterministic", [True, False])
def test_no_tokens_and_no_experts(deterministic):
    case = Case("nvfp4-ue5m3", 5, 4, 64, 32)
    k = kernel(case, deterministic=deterministic)
    prepared = k.prepare(case.weights())
    x, ids, weights = case.batch()
    assert k.run(prepared, x[:0], ids[:0], weights[:0]).shape == (0, 64)
    assert not k.run(prepared, x, torch.full_like(ids, -1), weights).any()


@pytest.mark.parametrize("fmt", ["nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4"])
def test_a_servers_default_dtype_and_device_are_not_for_these(fmt):
    """vLLM sets both while it loads; a kernel reads float32 at an address whatever is there."""
    case = Case(fmt, 3, 4, 64, 32)
    k, weights, batch = kernel(case), case.weights(), case.batch()
    expected = k.prepare(weights).tensors()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            prepared = k.prepare(weights)
            got = k.run(prepared, *batch)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in expected.items():
        assert tensor.dtype in (torch.uint8, torch.float32)
        assert prepared.tensors()[name].dtype == tensor.dtype
        assert torch.equal(prepared.tensors()[name], tensor), name
    assert torch.equal(got, k.run(k.prepare(weights), *batch))


@pytest.mark.parametrize("fmt", ["nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4"])
def test_a_nan_of_a_token_is_its_result_and_nobody_elses(fmt):
    """The block scale carries it through both GEMMs: E2M1 has no NaN, and would make it a 6."""
    case = Case(fmt, 4, 2, 64, 32)
    k = kernel(case)
    prepared, (x, ids, weights) = k.prepare(case.weights()), case.batch()
    clean = k.run(prepared, x, ids, weights)
    x[1, 5] = torch.nan
    got = k.run(prepared, x, ids, weights)
    assert got[1].isnan().all()
    keep = [0, 2, 3]
    assert torch.equal(got[keep], clean[keep])


def test_views_of_other_memory():
    """Strided, and from an address on that 16 bytes do not divide."""
    case = Case("nvfp4-ue5m3", 5, 3, 48, 48)
    k = kernel(case)
    prepared, (x, ids, weights) = k.prepare(case.weights()), case.batch()
    expected = k.run(prepared, x, ids, weights)
    view = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    assert view.data_ptr() % 16
    out = torch.empty(5, 96)[:, ::2]
    k.run(prepared, view, *(t.T.contiguous().T for t in (ids.int(), weights)), out=out)
    assert torch.equal(out, expected)


def unequal(case: Case) -> ExpertWeights:
    """Input scales of the experts up to twice the smallest."""
    weights = case.weights()
    each = 0.011 * (1 + torch.arange(case.experts) / case.experts)[:, None]
    w13 = replace(weights.w13, input_dec=each.expand_as(weights.w13.input_dec).contiguous())
    return replace(weights, w13=w13)


def part(weights: ExpertWeights, ids: list[int], largest: float) -> ExpertWeights:
    """Some of a layer's experts, as a rank of expert parallelism loads them."""

    def of(w: ProjectionWeights) -> ProjectionWeights:
        return ProjectionWeights(**{n: t[ids] for n, t in w.tensors().items()})

    w13, w2 = of(weights.w13), of(weights.w2)
    return replace(weights, w13=w13, w2=w2, expert_ids=tuple(ids), layer_input_dec=largest)


@pytest.mark.parametrize("kind", ["sm107", "cpu-tcgen05"])
def test_two_ranks_add_up_to_the_whole_layer(kind):
    """Bit for bit, though the layer's largest input scale is an expert's of one rank only."""
    case = Case("nvfp4-ue4m3", 9, 4, 128, 64)
    x, ids, weights = case.batch()
    layer, k = unequal(case), kernel(case)
    whole = k if kind == "sm107" else Tcgen05Kernel(k.problem)
    expected = whole.run(whole.prepare(layer), x, ids, weights)
    largest = float(layer.w13.input_dec.max())
    total = torch.zeros_like(expected)
    problem = replace(k.problem, num_experts=2, global_num_experts=4)
    for experts in ([0, 3], [1, 2]):
        expert_map = torch.full((4,), -1, dtype=torch.int32)
        expert_map[experts] = torch.arange(2, dtype=torch.int32)
        rank = Sm107Kernel(problem, k._launch, 3) if kind == "sm107" else Tcgen05Kernel(problem)
        mine = rank.prepare(part(layer, experts, largest))
        total += rank.run(mine, x, ids, weights, expert_map)
    assert torch.equal(total, expected)


def test_router_weights_on_the_input():
    """Top-1: the row is scaled before it is quantized, and the sum takes it as it is."""
    case = Case("nvfp4-ue5m3", 6, 4, 128, 64, top_k=1)
    k = kernel(case)
    k.problem = replace(k.problem, router_weight_on_input=True)
    x, ids, _ = case.batch()
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) + 0.1
    weights[3] = -0.7
    slow = Tcgen05Kernel(k.problem)
    expected = slow.run(slow.prepare(case.weights()), x, ids, weights)
    got = k.run(k.prepare(case.weights()), x, ids, weights)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def poisoned(make):
    """``torch.empty`` whose memory holds NaN bit patterns, in every dtype that is one's."""

    def empty(*size, **options):
        found = make(*size, **options)
        found.view(torch.uint8).fill_(0xFF)
        return found

    return empty


@pytest.mark.parametrize(
    "case",
    [
        Case("nvfp4-ue4m3", 5, 4, 352, 96),
        Case("nvfp4-ue5m3", 3, 2, 352, 1600),
        Case("mxfp4", 5, 4, 352, 96, kind="swigluoai"),
    ],
    ids=str,
)
def test_poison_in_padding_and_fresh_memory_never_reaches_an_output(case, monkeypatch):
    """NaN patterns in all memory that is allocated, in weight rows past the last feature, in
    experts that nobody asks for, in the rows and weights of choices without an expert."""
    k = kernel(case)
    x, ids, weights = case.batch()
    ids[ids == 1] = -1
    prepared = k.prepare(case.weights())
    clean = k.run(prepared, x, ids, weights)
    assert clean.isfinite().all()
    layout, vec = Sm107Tiles(FORMATS[case.fmt]), FORMATS[case.fmt].sf_vec_size
    _, row_tiles, k_tiles, _ = prepared.w2.shape
    padded = (case.experts, row_tiles * ROWS, k_tiles * layout.tile_k)
    codes, scales = layout.unpack(prepared.w2, padded)
    assert not codes[:, :, case.intermediate // 2 :].any()  # K: zero times whatever is there
    assert not scales[:, :, case.intermediate // vec :].any()
    codes[:, case.hidden :], scales[:, case.hidden :] = 0xFF, 0xFF
    dirty = replace(prepared, w2=layout.pack(codes, scales))
    dirty.w13[1], dirty.w2[1] = 0xFF, 0xFF
    for name in ("alpha13", "alpha2", "bias13", "bias2", "norm"):
        getattr(dirty, name)[1] = torch.nan
    dirty.bias2[:, case.hidden :] = torch.nan
    weights[ids < 0] = torch.nan
    alone = (ids < 0).all(1)
    x[alone] = torch.nan
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", poisoned(torch.empty))
        out = torch.full_like(x, torch.nan)
        got = k.run(dirty, x, ids, weights, out=out)
    assert torch.equal(got, clean)
