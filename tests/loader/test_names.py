"""One slot for every producer's spelling; the mapping may be applied again without harm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubin_moe.loader.names import ExpertSlot, LayerKey, canonical, parse, parse_slot

SPELLINGS = {
    "model.layers.93.mlp.experts.0.gate_proj.weight_scale_2":
        "layers.93.experts.0.gate.weight_scale_2",
    "model.language_model.layers.3.mlp.experts.255.up_proj.weight":
        "layers.3.experts.255.up.weight",
    "language_model.model.layers.3.block_sparse_moe.experts.0.w1.weight":
        "layers.3.experts.0.gate.weight",
    "language_model.layers.1.mlp.experts.0.down_proj.input_scale":
        "layers.1.experts.0.down.input_scale",
    "model.layers.61.block_sparse_moe.experts.255.w3.weight_scale":
        "layers.61.experts.255.up.weight_scale",
    "backbone.layers.1.mixer.experts.511.down_proj.weight": "layers.1.experts.511.down.weight",
    "layers.3.ffn.experts.0.w2.scale": "layers.3.experts.0.down.scale",
    "mtp.0.ffn.experts.0.w1.weight": "mtp.0.experts.0.gate.weight",
    "mtp.layers.0.mlp.experts.7.down_proj.weight": "mtp.0.experts.7.down.weight",
    "model.mtp.layers.2.mlp.experts.7.down_proj.weight": "mtp.2.experts.7.down.weight",
    "mtp.layers.0.mlp.experts.gate_up_proj": "mtp.0.experts.gate_up.weight",
    "model.layers.0.mlp.experts.gate_up_proj_blocks": "layers.0.experts.gate_up.blocks",
    "model.layers.0.mlp.experts.down_proj_bias": "layers.0.experts.down.bias",
    "model.layers.0.mlp.experts.gate_up_proj_weight_scale_2":
        "layers.0.experts.gate_up.weight_scale_2",
    "language_model.model.layers.1.feed_forward.experts.down_proj": "layers.1.experts.down.weight",
    "model.language_model.layers.0.moe.experts.127.gate_proj.weight":
        "layers.0.experts.127.gate.weight",
    "model.language_model.layers.0.experts.0.down_proj.weight_packed":
        "layers.0.experts.0.down.weight_packed",
    "layers.17.experts.127.w1.weight_global_scale":
        "layers.17.experts.127.gate.weight_global_scale",
    "model.layers.4.mlp.experts.gate_proj.9.weight": "layers.4.experts.9.gate.weight",
    "model.layers.4.mlp.experts.w2.9.weight": "layers.4.experts.9.down.weight",
    "thinker.model.layers.4.mlp.experts.9.up_proj.weight": "layers.4.experts.9.up.weight",
}  # fmt: skip

OTHERS = (
    "model.layers.3.mlp.shared_expert.down_proj.weight",
    "layers.17.shared_experts.w2.input_global_scale",
    "model.layers.3.mlp.shared_experts.gate_proj.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.xperts.3.up_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "lm_head.weight_scale",
    "model.experts.0.gate_proj.weight",
    "layers.17.gate.weight",
    "",
)


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_family_maps_to_one_spelling(name):
    assert canonical(name) == SPELLINGS[name]
    assert canonical(canonical(name)) == canonical(name)


@pytest.mark.parametrize("name", OTHERS)
def test_other_tensors_are_left_alone(name):
    assert parse(name) is None
    assert canonical(name) == name


def test_unknown_projections_are_below_the_module_but_no_slot():
    found = parse("model.layers.2.mlp.experts.0.middle_proj.weight")
    assert found is not None
    assert (found.layer, found.module) == (LayerKey("layers", 2), "model.layers.2.mlp.experts")
    assert found.slot is None


def test_gate_and_up_are_never_confused():
    assert parse_slot("gate_up_proj_scales") == ExpertSlot("gate_up", "scales")
    assert parse_slot("3.gate_proj.weight") == ExpertSlot("gate", "weight", 3)
    assert parse_slot("gate_proj") == ExpertSlot("gate", "weight")
    assert parse_slot("gate_upper.weight") is None


@given(
    st.lists(
        st.sampled_from(
            [
                "model",
                "layers",
                "mtp",
                "experts",
                "0",
                "12",
                "mlp",
                "gate_proj",
                "gate_up_proj",
                "w2",
                "weight",
                "weight_scale",
                "gate_up_proj_bias",
                "moe",
                "",
            ]
        ),
        max_size=9,
    )
)
def test_mapping_twice_is_mapping_once(parts):
    name = ".".join(parts)
    assert canonical(canonical(name)) == canonical(name)
