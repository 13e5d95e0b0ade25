"""Routing against the float64 oracle, and the published pitfalls by hand."""

import numpy as np
import pytest
import torch

from rubin_moe.errors import ConfigError
from rubin_moe.layers.routing import Routing, route
from tests.oracles import routing as oracle

FAMILIES = {
    "qwen3": Routing(8, renormalize=True),
    "qwen2-moe": Routing(4),
    "gpt-oss": Routing(4, score_after_topk=True),
    "llama4": Routing(1, "sigmoid", score_after_topk=True),
    "deepseek-v2": Routing(6, num_groups=8, top_groups=3, group_score="max", scaling_factor=16.0),
    "deepseek-v3": Routing(
        8, "sigmoid", renormalize=True, scaling_factor=2.5, num_groups=8, top_groups=4
    ),
    "deepseek-v4": Routing(6, "sqrtsoftplus", renormalize=True, scaling_factor=1.5),
    "ernie": Routing(6, "softmax", renormalize=True),
}


def in_oracle(r: Routing) -> oracle.Router:
    return oracle.Router(
        r.top_k,
        r.scoring,
        r.score_after_topk,
        r.renormalize,
        r.scaling_factor,
        r.num_groups,
        r.top_groups,
        r.group_score,
    )


def check(routing, logits, bias=None, expert_scale=None):
    def numpy(t):
        return None if t is None else t.double().numpy()

    weights, ids = route(logits, routing, bias, expert_scale)
    expected, chosen = oracle.route(
        in_oracle(routing), logits.double().numpy(), numpy(bias), numpy(expert_scale)
    )
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    np.testing.assert_array_equal(ids.numpy(), chosen)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=2e-6, atol=1e-30)
    return weights, ids


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_families_against_the_oracle(name, with_bias):
    generator = torch.Generator().manual_seed(0)
    # multiples of 1/64: distinct in float32 after any scoring, and some ties
    logits = torch.randint(-256, 256, (40, 64), generator=generator) / 64
    with_bias = with_bias and not FAMILIES[name].score_after_topk
    bias = torch.randint(-64, 64, (64,), generator=generator) / 256 if with_bias else None
    check(FAMILIES[name], logits, bias)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_the_scaling_factor_counts_exactly_once(scoring, factor, renormalize):
    """Field reports 72 and 76: with and without renormalizing; never the raw logits."""
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0, 0.0, 3.0]])
    weights, ids = check(Routing(2, scoring, False, renormalize, factor), logits)
    assert ids.tolist() == [[5, 0]]
    plain = {
        "softmax": logits.softmax(-1),
        "sigmoid": logits.sigmoid(),
        "sqrtsoftplus": torch.log1p(logits.exp()).sqrt(),
    }[scoring][0, [5, 0]]
    expected = (plain / plain.sum() if renormalize else plain) * factor
    assert torch.allclose(weights[0], expected, rtol=1e-6)


def test_bias_selects_and_does_not_weigh():
    """Field report 73."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    bias = torch.tensor([5.0, 0.0, 0.0, 4.0])
    weights, ids = check(Routing(2, "sigmoid"), logits, bias)
    assert ids.tolist() == [[0, 3]]
    assert torch.allclose(weights, torch.tensor([[0.5, torch.sigmoid(torch.tensor(-1.0))]]))


def test_masked_groups_are_minus_infinity_and_a_group_scores_by_its_two_best():
    """Field report 73: biases of -2 make every choice negative; a mask of 0 would win."""
    logits = torch.tensor([[3.0, 2.9, -9.0, 9.0, 1.0, 1.1, -9.0, -9.0]])
    bias = torch.full((8,), -2.0)
    routing = Routing(4, "sigmoid", num_groups=4, top_groups=2)
    _, ids = check(routing, logits, bias)
    # group 0: 0.953 + 0.948; group 1: 0.0001 + 0.9999; group 2: 0.731 + 0.750; group 3: ~0
    assert set(ids[0].tolist()) == {0, 1, 4, 5}
    _, by_best = check(Routing(2, "sigmoid", num_groups=4, top_groups=1, group_score="max"), logits)
    assert set(by_best[0].tolist()) == {2, 3}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_that_are_all_negative(name):
    """Field report 75: -50 to -60. A softmax still sums to one; sigmoids reach DeepSeek's 1e-20."""
    logits = -50 - torch.randint(0, 640, (20, 64), generator=torch.Generator().manual_seed(1)) / 64
    weights, _ = check(FAMILIES[name], logits)
    assert torch.isfinite(weights).all()
    if FAMILIES[name].scoring == "softmax" and FAMILIES[name].renormalize:
        assert torch.allclose(weights.sum(-1), torch.ones(20), rtol=1e-5)


def test_ties_go_to_the_lower_id():
    weights, ids = route(torch.zeros(3, 16), Routing(4, renormalize=True))
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert weights.eq(0.25).all()


def test_llama4_takes_one_expert_and_its_sigmoid():
    logits = torch.tensor([[-1.0, 0.5, 0.25]])
    weights, ids = check(FAMILIES["llama4"], logits)
    assert ids.tolist() == [[1]]
    assert weights.item() == pytest.approx(1 / (1 + np.exp(-0.5)))


def test_a_scale_for_each_expert_comes_last():
    """Gemma-4."""
    logits = torch.tensor([[2.0, 0.0, 1.0]])
    scale = torch.tensor([3.0, 5.0, 0.5])
    weights, _ = check(Routing(2, renormalize=True), logits, expert_scale=scale)
    plain, _ = route(logits, Routing(2, renormalize=True))
    assert torch.allclose(weights, plain * torch.tensor([3.0, 0.5]))


def test_no_tokens_and_half_precision():
    weights, ids = route(torch.zeros(0, 8, dtype=torch.bfloat16), Routing(2))
    assert weights.shape == ids.shape == (0, 2)
    logits = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.bfloat16)
    half, _ = route(logits, Routing(2))
    assert torch.equal(half, route(logits.float(), Routing(2))[0])


def test_bad_parameters_are_named():
    for fields, message in (
        ({"top_k": 2, "scoring": "tanh"}, "scoring 'tanh' is unknown; known: softmax"),
        ({"top_k": 2, "num_groups": 2, "top_groups": 3}, "top 3 of 2 expert groups"),
        ({"top_k": 0}, "top-0 routing"),
    ):
        with pytest.raises(ConfigError, match=message):
            Routing(**fields)
    for routing, message in (
        (Routing(2, num_groups=3), "8 experts in 3 equal groups"),
        (Routing(3, num_groups=4), "top-3 of 2 experts in the chosen groups"),
        (Routing(9), "top-9 of 8 experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            route(torch.zeros(1, 8), routing)
    with pytest.raises(ConfigError, match=r"router bias is \[4\], expected \[8\]"):
        route(torch.zeros(1, 8), Routing(2), bias=torch.zeros(4))
