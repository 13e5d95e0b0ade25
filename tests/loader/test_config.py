"""Precision of each module: precedence, exclude lists, per-layer algorithms, activations."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubin_moe.errors import ConfigError
from rubin_moe.loader.config import QuantConfig, find_config
from rubin_moe.loader.load import resolve_scheme
from rubin_moe.loader.model import moe_sizes
from rubin_moe.loader.patterns import Patterns

from .checkpoints import QUANT_CONFIGS

EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("entry", "module", "named"),
    [
        ("model.layers.1.*", "model.layers.1.mlp.experts", True),
        ("model.layers.1.*", "model.layers.10.mlp.experts", False),
        ("model.layers.1*", "model.layers.1.mlp.experts", True),
        ("model.layers.1*", "model.layers.10.mlp.experts", False),
        ("model.layers.1", "model.layers.1.mlp.experts", True),
        ("model.layers.1", "model.layers.11.mlp.experts", False),
        ("layers.1.", "model.layers.11.mlp.experts", False),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("re:.*gate$", "layers.0.gate", True),
        ("re:.*gate$", "model.layers.0.mlp.experts.0.gate_proj", False),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate", True),
        ("model.layers.*.self_attn", "model.layers.7.self_attn.q_proj", True),
        ("model.layers.*.mlp.router", "model.layers.7.mlp.experts", False),
        ("*router*", "language_model.model.layers.7.feed_forward.router", True),
        ("mtp*", "mtp.layers.0.mlp.experts", True),
        ("mtp.layers.0*", "model.layers.0.mlp.experts", False),
        ("layers.0.mlp.experts", "mtp.layers.0.mlp.experts", True),
        ("model.layers.0.mlp.experts", "mtp.layers.0.mlp.experts", False),
        ("lm_head", "lm_head", True),
        ("head", "lm_head", False),
        # one module, other prefixes
        ("model.layers.3.mlp.experts", "model.language_model.layers.3.mlp.experts", True),
        ("language_model.layers.3.mlp*", "language_model.model.layers.3.mlp.experts", True),
        ("model.layers.3.mlp.experts", "layers.3.mlp.experts", True),
        ("model.layers.0.mlp.experts.2.down_proj", "model.layers.0.mlp.experts.2.down_proj", True),
        ("model.layers.0.mlp.experts.2.down_proj", "model.layers.0.mlp.experts", False),
        ("[", "model", False),
    ],
)
def test_patterns_name_whole_modules(entry, module, named):
    assert (Patterns([entry]).match(module) is not None) is named


@pytest.mark.parametrize("entry", ["re:(", 5, None])
def test_malformed_patterns_are_named(entry):
    with pytest.raises(ConfigError, match="module pattern"):
        Patterns([entry])


@pytest.mark.parametrize("name", QUANT_CONFIGS)
def test_what_each_producer_declares(name):
    declared = QuantConfig.parse(QUANT_CONFIGS[name]).declared(EXPERTS)
    expected = {
        "modelopt": ("nvfp4", "static", 16),
        "modelopt_stacked": ("nvfp4", "static", 16),
        "compressed_nvfp4": ("nvfp4", "static", 16),
        "compressed_mxfp4": ("mxfp4", "none", 32),
        "gpt_oss": ("mxfp4", "none", 32),
        "rubin_ue5m3": ("nvfp4", "static", 16),
    }
    got = None if declared is None else (declared.format, declared.activations, declared.group_size)
    assert got == expected.get(name)


def test_hf_quant_config_alone_is_enough_and_config_json_comes_first():
    hf = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
    }
    alone = find_config({"model_type": "nemotron_h"}, hf)
    assert alone.declared(EXPERTS).algo == "NVFP4"
    assert alone.excluded("lm_head") == "lm_head"
    both = find_config({"quantization_config": {**QUANT_CONFIGS["modelopt"], "ignore": ["a"]}}, hf)
    assert both.source.startswith("config.json")
    assert both.excluded("lm_head") is None
    nested = find_config({"text_config": {"quantization_config": QUANT_CONFIGS["modelopt"]}})
    assert nested.declared(EXPERTS).algo == "NVFP4"
    assert find_config({"model_type": "x"}) is None


def test_two_places_that_contradict_are_an_error():
    hf = {"quantization": {"quant_algo": "FP8"}}
    with pytest.raises(ConfigError, match="contradiction"):
        find_config(
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, hf
        )


MIXED = {
    "quant_algo": "MIXED_PRECISION",
    "quant_method": "modelopt",
    "quantized_layers": {
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.mlp.experts": {"quant_algo": "FP8_BLOCK_SCALES"},
        "model.layers.2.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.layers.0.mlp.shared_experts": {"quant_algo": "FP8"},
        **{f"model.layers.3.mlp.experts.{e}.{p}_proj": {"quant_algo": "NVFP4", "group_size": 16}
           for e in range(2) for p in ("up", "down")},
    },
}  # fmt: skip


@pytest.mark.parametrize("nest", [0, 1, 2])
def test_mixed_precision_is_per_layer(nest):
    raw = dict(MIXED)
    for _ in range(nest):
        raw["quantized_layers"] = {"quantized_layers": raw["quantized_layers"]}
    config = QuantConfig.parse({"quantization": raw} if nest == 2 else raw)
    kinds = [config.declared(f"model.layers.{i}.mlp.experts") for i in range(5)]
    assert [k and k.algo for k in kinds] == [
        "NVFP4", "FP8_BLOCK_SCALES", "W4A16_NVFP4", "NVFP4", None
    ]  # fmt: skip
    assert config.declared("model.layers.0.mlp.shared_experts").format is None


def test_quantized_layers_win_over_groups_that_claim_activations():
    group = {
        "weights": {"num_bits": 4, "type": "float", "group_size": 16},
        "input_activations": {"num_bits": 4, "type": "float", "group_size": 16},
        "targets": ["model.layers.2.mlp.experts"],
    }
    config = QuantConfig.parse({**MIXED, "config_groups": {"group_1": group}})
    assert config.declared("model.layers.2.mlp.experts").activations == "none"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantized_layers": {"a": {"quant_algo": "FOO"}}}, "'FOO' is unknown; known: FP8"),
        ({"quantized_layers": {}}, "does not say which precision"),
        ({"quantized_layers": {"a": {}}}, "no quant_algo"),
        ({"quantized_layers": 3}, "no table"),
        ({"quant_algo": "BAR"}, "'BAR' is unknown"),
        ({"ignore": "lm_head"}, "ignore is no list"),
        ({"config_groups": {"g": 1}}, "malformed"),
        ({"scale_format": "ue9m9"}, "expected ue4m3 or ue5m3"),
    ],
)
def test_malformed_configs_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        QuantConfig.parse({**MIXED, **change})


@pytest.mark.parametrize(
    "target", ["re:.*mlp.experts.*.(gate|up|down)_proj$", "re:.*experts.*", "model.layers.1.mlp*"]
)
def test_groups_and_lists_may_name_the_projections(target):
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": [target],
             "format": "nvfp4-pack-quantized", "input_activations": None}  # fmt: skip
    other = {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}
    raw = {"quant_method": "compressed-tensors", "format": "mixed-precision",
           "config_groups": {"a": other, "b": group}}  # fmt: skip
    assert QuantConfig.parse(raw).declared(EXPERTS).algo == "NVFP4"
    assert QuantConfig.parse({**raw, "ignore": [target]}).excluded(EXPERTS) == target
    assert QuantConfig.parse({**raw, "ignore": ["re:.*up_proj"]}).excluded(EXPERTS) is None


def test_experts_of_two_kinds_in_one_layer_are_an_error():
    layers = {
        "model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4"},
        "model.layers.0.mlp.experts.1.up_proj": {"quant_algo": "FP8"},
    }
    with pytest.raises(ConfigError, match="several kinds"):
        QuantConfig.parse({**MIXED, "quantized_layers": layers}).declared(
            "model.layers.0.mlp.experts"
        )


def test_deepseek_v4_says_fp8_and_means_its_linears():
    native = {"expert_dtype": "fp4", "quantization_config": QUANT_CONFIGS["deepseek_v4"]}
    assert find_config(native).declared("layers.3.ffn.experts").format == "mxfp4"
    nvfp4 = {
        **QUANT_CONFIGS["deepseek_v4"],
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": ["mtp.*", "head"],
        "quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "NVFP4"}},
    }
    config = QuantConfig.parse(nvfp4)
    assert config.declared("layers.0.ffn.experts").activations == "static"
    assert config.declared("mtp.0.ffn.experts") is None


def _declared(**quant):
    return QuantConfig.parse({"quant_method": "modelopt", "quant_algo": "NVFP4", **quant}).declared(
        EXPERTS
    )


@pytest.mark.parametrize(
    ("declared", "present", "scheme"),
    [
        (_declared(), True, "w4a4"),
        (_declared(), False, "w4a16"),
        (_declared(quant_algo="W4A16_NVFP4"), True, "w4a16"),
        (_declared(activation_scheme="dynamic"), False, "w4a4-dynamic"),
        (_declared(activation_scheme="static"), False, "w4a16"),
        (_declared(config_groups={"g": {"targets": ["Linear"], "input_activations": None,
            "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}), False, "w4a16"),
        (None, True, "w4a4"),
        (None, False, "w4a16"),
    ],
)  # fmt: skip
def test_the_scheme_needs_config_and_presence(declared, present, scheme):
    assert resolve_scheme(declared, present) == scheme


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96,
          "num_local_experts": 8, "num_hidden_layers": 2}, (64, 96, 8, True)),
        ({"model_type": "kimi_k25", "text_config": {"hidden_size": 64, "intermediate_size": 512,
          "moe_intermediate_size": 32, "n_routed_experts": 6, "num_hidden_layers": 2}},
         (64, 32, 6, True)),
        ({"hidden_size": 128, "moe_latent_size": 64, "moe_intermediate_size": 32,
          "n_routed_experts": 4, "num_hidden_layers": 2, "mlp_hidden_act": "relu2"},
         (64, 32, 4, False)),
        ({"dim": 64, "n_layers": 1, "moe": {"expert_hidden_dim": 32, "num_experts": 4}},
         (64, 32, 4, True)),
    ],
)  # fmt: skip
def test_sizes_under_every_familys_keys(config, sizes):
    found = moe_sizes(config)
    assert (found.hidden, found.intermediate, found.num_experts, found.gated) == sizes


def test_a_missing_size_is_named():
    with pytest.raises(ConfigError, match="no expert width under any of moe_intermediate_size"):
        moe_sizes({"hidden_size": 64, "num_experts": 4, "num_hidden_layers": 1})


KEYS = st.sampled_from(
    ["quant_method", "quant_algo", "moe_quant_algo", "expert_dtype", "config_groups", "weights",
     "targets", "input_activations", "quantized_layers", "ignore", "exclude_modules", "group_size",
     "scale_format", "quantization", "format", "activation_scheme", "stacking", "num_bits", "type",
     "quantization_config", "text_config", "model.layers.1.mlp.experts", "group_0", "activations"]
)  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    | st.sampled_from(["NVFP4", "MIXED_PRECISION", "re:(", "*", "Linear", "fp4", "mxfp4"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=4), inner),
    max_leaves=12,
)  # fmt: skip
configs = st.dictionaries(KEYS, json_values, max_size=5)


@settings(max_examples=200, deadline=None)
@given(config=configs, hf_quant=st.none() | configs)
def test_any_config_is_read_or_refused_by_name(config, hf_quant):
    try:
        found = find_config(config, hf_quant)
        declared = None if found is None else found.declared(EXPERTS)
    except ConfigError:
        return
    assert declared is None or declared.format in ("nvfp4", "mxfp4", None)


@settings(max_examples=100, deadline=None)
@given(
    config=st.dictionaries(
        st.sampled_from(
            [
                "hidden_size",
                "moe_intermediate_size",
                "num_experts",
                "num_hidden_layers",
                "hidden_act",
                "model_type",
                "text_config",
                "moe",
            ]
        ),
        json_values,
    )
)
def test_any_model_config_is_read_or_refused_by_name(config):
    try:
        found = moe_sizes(config)
    except ConfigError:
        return
    assert min(found.hidden, found.intermediate, found.num_experts, found.num_layers) > 0
