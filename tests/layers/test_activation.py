"""Model config fields -> Activation, and the formulas by hand."""

import pytest
import torch

from rubin_moe.errors import ConfigError
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.epilogue import activate
from rubin_moe.layers.activation import activation_from_config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen3_moe", "hidden_act": "silu"}, Activation("silu")),
        ({"hidden_act": "swish"}, Activation("silu")),
        ({"hidden_activation": "gelu_pytorch_tanh"}, Activation("gelu_tanh")),
        ({"mlp_hidden_act": "relu2", "hidden_act": "silu"}, Activation("relu2")),
        ({"hidden_act": "silu", "swiglu_limit": 10.0}, Activation("silu", limit=10.0)),
        (
            {"model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0},
            Activation("swigluoai", limit=7.0, alpha=1.702, beta=1.0),
        ),
        ({"model_type": "gpt_oss"}, Activation("swigluoai", limit=7.0)),
        ({"dim": 64, "moe": {"num_experts": 8}}, Activation("silu")),
        ({"dim": 64, "moe": {"num_experts": 8}, "activation": "relu2"}, Activation("relu2")),
        (
            {"hidden_act": "swigluoai", "swiglu_alpha": 1.5, "swiglu_limit": 6.0, "swiglu_beta": 0},
            Activation("swigluoai", limit=6.0, alpha=1.5, beta=0.0),
        ),
        (
            {"model_type": "llama4", "text_config": {"hidden_act": "silu"}},
            Activation("silu"),
        ),
        (
            {"text_config": {"hidden_activation": "gelu_pytorch_tanh"}, "hidden_act": None},
            Activation("gelu_tanh"),
        ),
    ],
)
def test_fields(config, expected):
    """Field report 66: gpt-oss says silu and means the clamped formula; others mean silu."""
    assert activation_from_config(config) == expected


def test_limits_by_layer():
    """Field report 67: layer 0 none, layer 1 limit 4; the shared experts' list is not ours."""
    config = {
        "hidden_act": "silu",
        "expert_swiglu_limit_list": [0, 4.0, None],
        "share_expert_swiglu_limit_list": [9.0, 9.0, 9.0],
    }
    assert activation_from_config(config, 0) == Activation("silu")
    assert activation_from_config(config, 1) == Activation("silu", limit=4.0)
    assert activation_from_config(config, 2) == Activation("silu")
    with pytest.raises(ConfigError, match="3 entries, none for layer 3"):
        activation_from_config(config, 3)
    with pytest.raises(ConfigError, match="a layer index is needed"):
        activation_from_config(config)


@pytest.mark.parametrize("name", ["gelu", "situ", "relu", "swiglustep", "unknown"])
def test_unknown_activations_are_refused(name):
    """Field report 70: refused, never computed as silu."""
    with pytest.raises(ConfigError, match=f"activation '{name}' is unknown; known: gelu_pytorch"):
        activation_from_config({"hidden_act": name})
    with pytest.raises(ConfigError, match="is unknown"):
        activation_from_config({"hidden_act": name, "model_type": "gpt_oss"})


def test_missing_and_contradictory_fields():
    with pytest.raises(ConfigError, match="names no activation; looked for mlp_hidden_act"):
        activation_from_config({"model_type": "qwen3_moe"})
    with pytest.raises(ConfigError, match=r"swiglu_alpha = 1.702 and activation 'silu'"):
        activation_from_config({"hidden_act": "silu", "swiglu_alpha": 1.702})
    with pytest.raises(ConfigError, match="no gate to clamp"):
        activation_from_config({"hidden_act": "relu2", "swiglu_limit": 7.0})


@pytest.mark.parametrize(
    ("gate", "up", "silu", "oai"),
    [(1, 1, 0.7310586, 1.6915), (10, 9, 89.99591, 56.0), (2, -1, -1.761594, 0.0)],
)
def test_formulas_by_hand(gate, up, silu, oai):
    """Field report 66's values."""
    h = torch.tensor([[float(gate), float(up)]])
    assert activate(Activation("silu"), h).item() == pytest.approx(silu, rel=1e-4)
    clamped = Activation("swigluoai", limit=7.0)
    assert activate(clamped, h).item() == pytest.approx(oai, rel=1e-4, abs=1e-4)


def test_the_clamp_is_one_sided_for_the_gate_and_two_sided_for_up():
    h = torch.tensor([[-20.0, 3.0, -9.0, 9.0]])
    got = activate(Activation("silu", limit=4.0), h[:, [0, 1, 2, 3]])
    gate, up = torch.tensor([-20.0, 3.0]), torch.tensor([-4.0, 4.0])
    assert torch.allclose(got, up * gate * torch.sigmoid(gate))
    assert activate(Activation("relu2"), torch.tensor([-3.0, 2.0])).tolist() == [0.0, 4.0]
