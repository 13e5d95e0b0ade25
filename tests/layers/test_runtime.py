"""Empty batches, missing experts, maps, padding, determinism: what a server does to a layer."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rubin_moe.errors import ConfigError, UnsupportedError
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import Target
from rubin_moe.layers.experts import MoEExperts, problem_of
from tests.layers import backends
from tests.layers.backends import call, experts_of, one_a_backend, tokens, with_case
from tests.oracles import problems


def layer_for(case, seed=20, num_experts=8, **fields):
    return with_case(problems.layer(seed, case.fmt, num_experts, **fields), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", one_a_backend())
def test_no_tokens(case, dtype, monkeypatch):
    """Field report 85: no kernel is even started, so none has to bear a null pointer."""
    experts = experts_of(layer_for(case), case, dtype=dtype)
    monkeypatch.setattr(experts, "_kernel", None)
    ids, weights = np.zeros((0, 2), dtype=np.int32), np.zeros((0, 2), dtype=np.float32)
    out = call(experts, case, tokens(0, 0, dtype=dtype), ids, weights)
    assert out.shape == (0, 64)
    assert out.dtype == dtype


@pytest.mark.parametrize("case", one_a_backend())
def test_all_tokens_to_one_expert_and_one_token(case):
    """Field reports 86, 91 and 92: every other expert has none."""
    layer = layer_for(case)
    experts = experts_of(layer, case, top_k=1)
    for num_tokens in (33, 1):
        x = tokens(1, num_tokens)
        ids = np.full((num_tokens, 1), 5, dtype=np.int64)
        weights = np.ones((num_tokens, 1), dtype=np.float32)
        out = call(experts, case, x, ids, weights)
        backends.assert_close(layer, x, ids, weights, out)


@pytest.mark.parametrize("case", one_a_backend())
def test_int32_and_int64_ids_agree_and_others_are_refused(case):
    """Field report 79."""
    experts = experts_of(layer_for(case), case)
    x = tokens(2, 9)
    ids, weights = problems.routing(3, "some_missing", 9, 8, 2)
    out = call(experts, case, x, ids, weights)
    assert torch.equal(call(experts, case, x, ids.astype(np.int32), weights), out)
    for dtype in (np.int16, np.uint8, np.float32):
        with pytest.raises(ConfigError, match=r"topk_ids is \[9, 2\] .*expected .*int32 or int64"):
            call(experts, case, x, ids.astype(dtype), weights)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("case", one_a_backend())
def test_padding_rows_leak_nothing(case, garbage):
    """Field reports 39 and 98: rows of garbage with ids -1, weights of garbage too."""
    layer = layer_for(case)
    experts = experts_of(layer, case)
    x = tokens(4, 33)
    ids, weights = problems.routing(5, "uniform", 33, 8, 2)
    pad = np.arange(33) % 3 == 1
    clean = call(experts, case, x[~torch.from_numpy(pad)], ids[~pad], weights[~pad])
    x[torch.from_numpy(pad)] = garbage
    ids[pad], weights[pad] = -1, garbage
    out = call(experts, case, x, ids, weights)
    assert torch.equal(out[torch.from_numpy(~pad)], clean)
    assert out[torch.from_numpy(pad)].eq(0).all()


@pytest.mark.parametrize("num_tokens", range(1, 34, 4))
@pytest.mark.parametrize("case", one_a_backend())
def test_stale_memory_in_tile_padding_does_not_matter(case, num_tokens):
    """Field report 39: allocator memory full of 0x7F bytes, odd numbers of tokens an expert."""
    layer = layer_for(case, num_experts=2)
    experts = experts_of(layer, case, top_k=1)
    stale = [torch.full((1 << 16,), 0x7F, dtype=torch.uint8) for _ in range(8)]
    del stale
    x = tokens(6, num_tokens)
    ids = np.zeros((num_tokens, 1), dtype=np.int64)
    weights = np.ones((num_tokens, 1), dtype=np.float32)
    backends.assert_close(layer, x, ids, weights, call(experts, case, x, ids, weights))


@pytest.mark.parametrize("local", [(0, 1), (2, 3), (6, 7), (1, 3, 5, 7), (7, 0, 4)])
@pytest.mark.parametrize("given", [True, False], ids=["map", "own-ids"])
@pytest.mark.parametrize("case", one_a_backend())
def test_a_rank_computes_its_own_experts(case, local, given):
    """Field report 82: ids are global; ranks beyond the first, and round-robin maps too."""
    layer = layer_for(case)
    experts = experts_of(layer, case, top_k=3, expert_ids=local)
    x = tokens(7, 12)
    ids, weights = problems.routing(8, "uniform", 12, 8, 3)
    expert_map = None
    if given:
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[list(local)] = torch.arange(len(local), dtype=torch.int32)
    out = call(experts, case, x, ids, weights, expert_map)
    if expert_map is not None:
        assert torch.equal(call(experts, case, x, ids, weights, expert_map.long()), out)
    mine = np.where(np.isin(ids, local), ids, -1)
    backends.assert_close(layer, x, mine, weights, out)


@pytest.mark.parametrize("case", one_a_backend())
def test_ranks_add_up_to_the_whole_layer(case):
    layer = layer_for(case)
    x = tokens(9, 6)
    ids = np.array([[2, 3], [0, 5], [2, 7], [1, 6], [4, 0], [7, 1]])
    weights = np.random.default_rng(0).uniform(0.1, 1, ids.shape).astype(np.float32)
    parts = [
        call(experts_of(layer, case, expert_ids=rank), case, x, ids, weights)
        for rank in ((0, 1), (2, 3), (4, 5), (6, 7))
    ]
    whole = call(experts_of(layer, case), case, x, ids, weights)
    backends.assert_close(layer, x, ids, weights, torch.stack(parts).sum(0))
    backends.assert_close(layer, x, ids, weights, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", backends.cases())
def test_bit_equal_runs_and_rows_independent_of_their_batch(case, dtype):
    """Field report 95: twenty runs; each row alone and in a batch of 33."""
    layer = layer_for(case, hidden=96, intermediate=64)
    experts = experts_of(layer, case, dtype=dtype)
    x = tokens(10, 33, 96, dtype)
    ids, weights = problems.routing(11, "power_law", 33, 8, 2)
    out = call(experts, case, x, ids, weights)
    for _ in range(19):
        assert torch.equal(call(experts, case, x, ids, weights), out)
    for row in (0, 1, 16, 32):
        part = slice(row, row + 1)
        alone = call(experts, case, x[part], ids[part], weights[part])
        assert torch.equal(alone[0], out[row])
    order = np.random.default_rng(0).permutation(33)
    assert torch.equal(call(experts, case, x[order], ids[order], weights[order]), out[order])


@pytest.mark.parametrize("case", one_a_backend())
def test_an_expert_that_appears_twice_in_a_row_counts_twice(case):
    layer = layer_for(case)
    x = tokens(12, 3)
    ids = np.array([[4, 4], [4, 1], [0, 0]])
    weights = np.array([[0.25, 0.5], [0.75, 0.25], [0.5, 0.5]], dtype=np.float32)
    out = call(experts_of(layer, case), case, x, ids, weights)
    backends.assert_close(layer, x, ids, weights, out)


@pytest.mark.parametrize("case", one_a_backend())
def test_the_output_is_never_all_zero(case):
    """Field report 71: a grid of top_k, experts and tokens."""
    for num_experts in (1, 4, 8):
        layer = layer_for(case, num_experts=num_experts)
        for top_k in (1, num_experts):
            experts = experts_of(layer, case, top_k=top_k)
            for num_tokens in (1, 16, 31):
                x = tokens(13, num_tokens)
                ids, weights = problems.routing(14, "uniform", num_tokens, num_experts, top_k)
                out = call(experts, case, x, ids, weights)
                assert out.abs().amax(dim=1).gt(0).all()


@pytest.mark.parametrize("case", one_a_backend())
def test_a_given_output_is_written_and_returned(case):
    experts = experts_of(layer_for(case), case)
    x, device = tokens(15, 5), case.backend.device
    ids, weights = (torch.from_numpy(t) for t in problems.routing(16, "some_missing", 5, 8, 2))
    out = torch.full_like(x, torch.nan).to(device)
    args = (x.to(device), ids.to(device), weights.to(device))
    assert experts(*args, out=out) is out
    assert torch.equal(out, experts(*args))


@pytest.mark.parametrize("case", one_a_backend())
def test_arguments_are_left_alone_and_may_be_views(case):
    experts = experts_of(layer_for(case), case)
    wide = tokens(17, 10, 128)
    ids, weights = problems.routing(18, "some_missing", 10, 8, 2)
    strided = np.repeat(ids, 2, axis=1)[:, ::2]
    before = wide.clone()
    out = call(experts, case, wide[:, 32:96], strided, weights)
    assert torch.equal(out, call(experts, case, wide[:, 32:96].contiguous(), ids, weights))
    assert torch.equal(wide, before)


@pytest.mark.parametrize("case", one_a_backend())
def test_a_reload_gives_the_bytes_of_a_fresh_layer_in_the_same_storage(case):
    first, second = layer_for(case, seed=21), layer_for(case, seed=22)
    experts, fresh = experts_of(first, case), experts_of(second, case)
    places = {n: t.data_ptr() for n, t in experts.tensors().items()}
    for _ in range(2):
        experts.reload(backends.weights_of(second))
        assert {n: t.data_ptr() for n, t in experts.tensors().items()} == places
        for name, tensor in fresh.tensors().items():
            assert torch.equal(experts.tensors()[name], tensor)
    x = tokens(19, 4)
    ids, weights = problems.routing(20, "uniform", 4, 8, 2)
    assert torch.equal(call(experts, case, x, ids, weights), call(fresh, case, x, ids, weights))


@pytest.mark.parametrize("case", one_a_backend())
def test_experts_may_move_between_ranks_on_reload(case):
    """Field report 21: the map, the scales and the input scales move with the codes."""
    layer = layer_for(case)
    experts = experts_of(layer, case, expert_ids=(0, 1, 2, 3))
    experts.reload(backends.weights_of(layer, (3, 6, 0, 5)))
    x = tokens(23, 9)
    ids, weights = problems.routing(24, "uniform", 9, 8, 2)
    out = call(experts, case, x, ids, weights)
    mine = np.where(np.isin(ids, (3, 6, 0, 5)), ids, -1)
    backends.assert_close(layer, x, mine, weights, out)


def test_bad_calls_name_the_argument():
    case = one_a_backend()[0].values[0]
    experts = experts_of(layer_for(case), case)
    x, ids, weights = tokens(0, 2), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2)
    bad = {
        r"x is \[2, 32\]": (x[:, :32], ids, weights),
        "x is .*bfloat16, expected .*float32": (x.bfloat16(), ids, weights),
        r"topk_ids is \[2, 1\]": (x, ids[:, :1], weights),
        "topk_weights is .*float64": (x, ids, weights.double()),
        r"expert_map is \[4\]": (x, ids, weights, torch.zeros(4, dtype=torch.int32)),
        "topk_ids hold 8, and the model has 8 experts": (x, ids + 8, weights),
        "topk_ids hold -2, and the model has 8 experts": (x, ids - 2, weights),
        "expert_map hold 9, and this rank has 8 experts": (
            *(x, ids, weights),
            torch.full((8,), 9, dtype=torch.int32),
        ),
        "x is on meta, the layer's weights on cpu": (x.to("meta"), ids, weights),
        "topk_ids is on meta, the layer's weights on cpu": (x, ids.to("meta"), weights),
    }
    for message, args in bad.items():
        with pytest.raises(ConfigError, match=message):
            experts(*args)


def test_weights_and_problem_must_agree():
    case = one_a_backend()[0].values[0]
    weights = backends.weights_of(layer_for(case))
    problem = problem_of(weights, 2, Activation(), torch.float32)
    for change, message in (
        ({"hidden": 32}, "hidden of the weights 64, of the problem 32"),
        ({"activation": Activation("relu2")}, "gated of the weights True"),
        ({"global_num_experts": 4}, "holds expert 7 of a model of 4"),
        ({"router_weight_on_input": True}, "top-1 only, not top-2"),
        ({"batch_invariant": True, "deterministic": False}, "asks for deterministic runs"),
    ):
        with pytest.raises(ConfigError, match=message):
            MoEExperts(weights, replace(problem, **change), Target("cpu"))


def test_a_problem_of_nothing_names_the_layer():
    case = one_a_backend()[0].values[0]
    weights = backends.weights_of(layer_for(case))
    with pytest.raises(ConfigError, match=f"{weights.name}: top_k 0: expected 1 or more"):
        problem_of(weights, 0, Activation(), torch.float32)


def test_an_activation_format_chooses_the_slow_mode_and_nobody_gets_it_unasked():
    case = one_a_backend()[0].values[0]
    weights = backends.weights_of(layer_for(case))
    plain = MoEExperts(weights, problem_of(weights, 2, Activation()), Target("cpu"))
    assert plain.selection.backend == "cpu"
    assert "16bit activations" in plain.selection.reasons["cpu-tcgen05"]
    mixed = problem_of(weights, 2, Activation(), activation_format="mxfp8")
    with pytest.raises(UnsupportedError, match="no tcgen05 instruction; mxfp8 goes with mxfp4"):
        MoEExperts(weights, mixed, Target("cpu"))
