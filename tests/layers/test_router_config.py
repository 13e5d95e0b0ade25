"""Router fields of real configs, and routing against transformers' own routers."""

from types import SimpleNamespace

import pytest
import torch

from rubin_moe.errors import ConfigError
from rubin_moe.layers.router_config import router_weight_on_input, routing_from_config
from rubin_moe.layers.routing import Routing, route

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
CONFIGS = [
    (DEEPSEEK, Routing(8, "sigmoid", False, True, 2.5, 8, 4)),
    (
        {**DEEPSEEK, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1},
        Routing(8, "sigmoid", False, True, 2.5),
    ),
    (
        {"model_type": "qwen3_moe", "num_experts_per_tok": 8, "norm_topk_prob": True},
        Routing(8, renormalize=True),
    ),
    (
        {"model_type": "qwen2_moe", "num_experts_per_tok": 4, "norm_topk_prob": False},
        Routing(4),
    ),
    (
        {
            "model_type": "qwen3_5_moe",
            "text_config": {"model_type": "qwen3_5_moe_text", "num_experts_per_tok": 8},
        },
        Routing(8, renormalize=True),
    ),
    ({"model_type": "mixtral", "num_experts_per_tok": 2}, Routing(2, renormalize=True)),
    ({"model_type": "gpt_oss", "num_experts_per_tok": 4}, Routing(4, score_after_topk=True)),
    (
        {
            "model_type": "llama4",
            "text_config": {"model_type": "llama4_text", "num_experts_per_tok": 1},
        },
        Routing(1, "sigmoid", score_after_topk=True),
    ),
    (
        {"model_type": "deepseek_v4", "num_experts_per_tok": 6, "routed_scaling_factor": 1.5},
        Routing(6, "sqrtsoftplus", renormalize=True, scaling_factor=1.5),
    ),
    (
        {
            "model_type": "kimi_linear",
            "num_experts_per_token": 16,
            "moe_router_activation_func": "sigmoid",
            "moe_renormalize": True,
            "num_expert_group": 1,
            "topk_group": 1,
        },
        Routing(16, "sigmoid", renormalize=True),
    ),
    ({"model_type": "gemma4_text", "top_k_experts": 8}, Routing(8, renormalize=True)),
    ({"model_type": "ernie4_5_moe", "moe_k": 6}, Routing(6, renormalize=True)),
    (
        {"model_type": "minimax_m2", "num_experts_per_tok": 8, "scoring_func": "sigmoid"},
        Routing(8, "sigmoid", renormalize=True),
    ),
    (
        {
            "model_type": "nemotron_h",
            "num_experts_per_tok": 6,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
        },
        Routing(6, "sigmoid", renormalize=True, scaling_factor=2.5),
    ),
]


@pytest.mark.parametrize(("config", "expected"), CONFIGS, ids=[c["model_type"] for c, _ in CONFIGS])
def test_fields_of_families(config, expected):
    assert routing_from_config(config) == expected
    assert router_weight_on_input(config) == config["model_type"].startswith("llama4")


def test_what_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="model_type 'new_moe' is unknown; known: deepseek_v3"):
        routing_from_config({"model_type": "new_moe", "num_experts_per_tok": 2})
    with pytest.raises(ConfigError, match="qwen3_moe has no norm_topk_prob"):
        routing_from_config({"model_type": "qwen3_moe", "num_experts_per_tok": 8})
    with pytest.raises(ConfigError, match="no number of experts a token"):
        routing_from_config({"model_type": "mixtral"})
    with pytest.raises(ConfigError, match="scoring 'tanh' is unknown"):
        routing_from_config({**DEEPSEEK, "scoring_func": "tanh"})
    greedy = routing_from_config({**DEEPSEEK, "topk_method": "group_limited_greedy"})
    assert greedy.group_score == "max"


# -- golden: routers written by somebody else ----------------------------------------------------

ROUTERS = {
    "deepseek_v3": ("deepseek_v3.modeling_deepseek_v3", "DeepseekV3TopkRouter", DEEPSEEK),
    "qwen3_moe": ("qwen3_moe.modeling_qwen3_moe", "Qwen3MoeTopKRouter", CONFIGS[2][0]),
    "gpt_oss": ("gpt_oss.modeling_gpt_oss", "GptOssTopKRouter", CONFIGS[6][0]),
    "deepseek_v4": ("deepseek_v4.modeling_deepseek_v4", "DeepseekV4TopKRouter", CONFIGS[8][0]),
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("offset", [0.0, -3.0])
def test_equal_to_the_routers_of_transformers(name, offset):
    """Field report 58: a third party's code, so that a mistake shared with our oracle shows."""
    module, cls, config = ROUTERS[name]
    imported = pytest.importorskip(f"transformers.models.{module}")
    fields = {"hidden_size": 64, "num_experts": 64, "num_local_experts": 64, **config}
    fields.setdefault("scoring_func", "sqrtsoftplus")
    router = getattr(imported, cls)(SimpleNamespace(**fields))
    generator = torch.Generator().manual_seed(3)
    router.weight.data = torch.eye(64)
    logits = torch.randn(24, 64, generator=generator) + offset
    bias = None
    if hasattr(router, "e_score_correction_bias"):
        bias = torch.randn(64, generator=generator) * 0.2 + offset
        router.e_score_correction_bias = bias
    with torch.no_grad():
        _, weights, ids = router(logits)
    order = weights.argsort(dim=-1, descending=True, stable=True)
    ours, our_ids = route(logits, routing_from_config(config), bias)
    mine = ours.argsort(dim=-1, descending=True, stable=True)
    assert torch.equal(our_ids.long().gather(1, mine), ids.gather(1, order))
    torch.testing.assert_close(ours.gather(1, mine), weights.gather(1, order))


def test_mistrals_own_file():
    """Its readers score by softmax and renormalize; of several groups nobody says how."""
    moe = {"num_experts": 8, "num_experts_per_tok": 4, "routed_scale": 2.0}
    groups = {"num_expert_groups": 1, "num_expert_groups_per_tok": 1}
    params = {"dim": 64, "moe": {**moe, **groups}}
    assert routing_from_config(params) == Routing(4, renormalize=True, scaling_factor=2.0)
    assert not router_weight_on_input(params)
    with pytest.raises(ConfigError, match="how it scores them is unknown"):
        routing_from_config({"dim": 64, "moe": {**moe, "num_expert_groups": 4}})
