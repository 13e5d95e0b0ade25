"""What callers hand over: ids, maps, empty batches, outputs, and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch

from rubin_moe.errors import ConfigError, FormatError, PlanError
from rubin_moe.kernels.cpu import isa, rules
from rubin_moe.kernels.cpu.host import CODES, SCALES, CpuKernel
from tests.oracles import problems

from .cases import Case, experts, problem, same_bits


@pytest.fixture(scope="module")
def case():
    return Case(problems.layer(7, "mxfp4", 4, 64, 32))


@pytest.fixture
def inputs(case):
    ids, weights = problems.routing(3, "some_missing", 9, 4, 2)
    return case.inputs(9), torch.from_numpy(ids), torch.from_numpy(weights)


def test_int32_and_int64_ids(case, inputs):
    x, ids, weights = inputs
    assert same_bits(case.run(x, ids.int(), weights), case.run(x, ids, weights))


def test_no_tokens(case, inputs):
    x, ids, weights = inputs
    assert case.run(x[:0], ids[:0], weights[:0]).shape == (0, 64)


def test_no_experts_at_all_gives_zero(case, inputs):
    x, ids, weights = inputs
    assert (case.run(x, torch.full_like(ids, -1), weights) == 0).all()


def test_rows_of_nan_without_an_expert_never_leak(case, inputs):
    x, ids, weights = inputs
    ids, weights, x = ids.clone(), weights.clone(), x.clone()
    expected = case.run(x, ids, weights)
    ids[[2, 5]] = -1
    x[[2, 5]], weights[[2, 5]] = float("nan"), float("nan")
    out = case.run(x, ids, weights)
    others = [i for i in range(9) if i not in (2, 5)]
    assert same_bits(out[others], expected[others])
    assert (out[[2, 5]] == 0).all()


def test_nan_of_a_token_with_experts_stays_nan(case, inputs):
    x, ids, weights = inputs
    ids, x = ids.clone(), x.clone()
    ids[4], x[4, 3] = torch.tensor([0, 1]), float("nan")
    out = case.run(x, ids, weights)
    assert out[4].isnan().all()
    assert out[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize(
    "place", [[2, 0, -1, 3, -1, 1], [-1, -1, 0, 1, 2, 3], [3, 2, 1, 0, -1, -1]]
)
def test_expert_maps_place_global_experts_anywhere(place):
    """Ranks see global ids; what is elsewhere adds nothing."""
    case = Case(problems.layer(7, "nvfp4-ue4m3", 4, 64, 32), num_global=6)
    ids, weights = problems.routing(3, "uniform", 9, 6, 2)
    local = np.where(ids >= 0, np.array(place)[ids], -1)
    expert_map = torch.tensor(place, dtype=torch.int32)
    x = case.inputs(9)
    for dtype in (np.int32, np.int64):
        out = case.run(x, ids.astype(dtype), weights, expert_map=expert_map)
        case.check(x, local, weights, out)


@pytest.mark.parametrize("bad", [4, -2, 2**31 - 1])
def test_an_id_that_is_no_expert_is_an_error(case, inputs, bad):
    x, ids, weights = inputs
    ids = ids.clone()
    ids[3, 1] = bad
    with pytest.raises(ValueError, match=f"such as {bad}"):
        case.run(x, ids, weights)


def test_outputs_of_any_stride(case, inputs):
    expected = case.run(*inputs)
    out = torch.full((9, 64), float("nan"), dtype=torch.bfloat16)
    assert case.run(*inputs, out=out) is out
    assert same_bits(out, expected)
    wide = torch.full((9, 128), float("nan"), dtype=torch.bfloat16)
    case.run(*inputs, out=wide[:, ::2])
    assert same_bits(wide[:, ::2], expected)
    assert wide[:, 1::2].isnan().all()


def test_inputs_of_any_stride(case, inputs):
    x, ids, weights = inputs
    wide = torch.zeros(9, 128, dtype=torch.bfloat16)
    wide[:, ::2] = x
    turned = ids.T.contiguous().T
    assert same_bits(case.run(wide[:, ::2], turned, weights), case.run(*inputs))


def test_the_output_may_be_the_input(case, inputs):
    x, ids, weights = inputs
    expected = case.run(x, ids, weights)
    x = x.clone()
    assert same_bits(case.run(x, ids, weights, out=x), expected)


def test_wrong_inputs_are_named(case, inputs):
    x, ids, weights = inputs
    with pytest.raises(ValueError, match="hidden states"):
        case.run(x.float(), ids, weights)
    with pytest.raises(ValueError, match="topk_ids"):
        case.run(x, ids.to(torch.uint8), weights)
    with pytest.raises(ValueError, match="topk_weights"):
        case.run(x, ids, weights[:, :1])
    with pytest.raises(ValueError, match="expert_map"):
        case.run(x, ids, weights, expert_map=torch.zeros(3, dtype=torch.int32))


def test_preparing_twice_gives_the_same_bytes_and_leaves_the_weights(case):
    weights = experts(case.layer)
    before = {n: t.clone() for n, t in weights.w13.tensors().items()}
    again = case.kernel.prepare(weights)
    for name in ("w13", "w2"):
        a, b = getattr(again, name), getattr(case.prepared, name)
        assert same_bits(a.codes, b.codes)
        assert same_bits(a.scales, b.scales)
        assert same_bits(a.dec, b.dec)
    assert all(same_bits(t, before[n]) for n, t in weights.w13.tensors().items())


def test_prepared_weights_are_the_stored_ones_in_another_order(case):
    w = experts(case.layer)
    for stored, tiles in ((w.w13, case.prepared.w13), (w.w2, case.prepared.w2)):
        assert same_bits(CODES.unpack(tiles.codes, tuple(stored.qdata.shape)), stored.qdata)
        assert same_bits(SCALES.unpack(tiles.scales, tuple(stored.sf.shape)), stored.sf)
    assert case.prepared.nbytes() == w.nbytes()


@pytest.mark.parametrize(
    ("fmt", "code"), [("nvfp4-ue4m3", 0x7F), ("nvfp4-ue4m3", 0x80), ("mxfp4", 0xFF)]
)
def test_a_scale_that_is_no_number_names_its_expert(fmt, code):
    layer = problems.layer(7, fmt, 4, 64, 32)
    kernel = CpuKernel(problem(layer))
    layer.w2.sf[2, 3, 0] = code
    with pytest.raises(FormatError, match=r"layer.experts.w2: expert 2 .*0x"):
        kernel.prepare(experts(layer))


def test_weights_of_another_problem_are_refused(case):
    other = experts(problems.layer(7, "mxfp4", 4, 64, 64))
    with pytest.raises(FormatError, match="built for"):
        case.kernel.prepare(other)
    other = experts(problems.layer(7, "nvfp4-ue5m3", 4, 64, 32))
    with pytest.raises(FormatError, match="nvfp4-ue5m3 weights for mxfp4"):
        case.kernel.prepare(other)


def test_an_instruction_set_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match="this CPU has no sve"):
        isa.detect("sve")


@pytest.mark.long
def test_more_than_two_to_the_31_results():
    """56 k tokens x 8 x 7168: only the last ones have an expert."""
    layer = problems.layer(7, "mxfp4", 8, 7168, 32)
    case = Case(layer, top_k=8)
    m = 40_000
    x = torch.zeros(m, 7168, dtype=torch.bfloat16)
    x[-3:] = case.inputs(3)
    ids = torch.full((m, 8), -1)
    weights = torch.full((m, 8), 0.125)
    last, _ = problems.routing(3, "uniform", 3, 8, 8)
    ids[-3:] = torch.from_numpy(last)
    out = case.run(x, ids, weights)
    case.check(x[-3:], last, weights[-3:].numpy(), out[-3:])
    assert (out[:-3] == 0).all()


def test_a_problem_of_another_dtype_is_another_kernel(case):
    p = dataclasses.replace(case.kernel.problem, dtype="float32")
    assert CpuKernel(p).variant != case.kernel.variant


def test_the_plan_states_the_workspace():
    """Field report 89."""
    p = dataclasses.replace(
        problem(problems.layer(7, "mxfp4", 4, 64, 32)), hidden=7168, intermediate=2048, top_k=8
    )
    plan = rules.plan(p, 100_000)
    assert plan.fields["workspace_bytes"] <= rules.WORKSPACE_BYTES
    assert 100 < plan.fields["chunk_tokens"] < 1000
    assert rules.plan(p, 3).fields["chunk_tokens"] == 3
    with pytest.raises(PlanError, match="intermediate = 40"):
        rules.plan(dataclasses.replace(p, intermediate=40), 1)


def test_work_is_cut_into_a_few_items_a_thread():
    assert rules.tiles_per_item(2048, active_experts=8, threads=2) == 42
    assert rules.tiles_per_item(2048, active_experts=8, threads=64) == 1
    assert rules.tiles_per_item(16, active_experts=0, threads=1) == 1
