"""Every dialect loads to the oracle's weights, bit for bit."""

import numpy as np
import pytest

from rubin_moe.errors import CheckpointError
from rubin_moe.loader.load import ModelCheckpoint, load_experts

from .checkpoints import W123, Style, assert_same, folder, input_scales, layer

STYLES = {
    "modelopt": Style(),
    "modelopt w1 w2 w3": Style(
        projections=W123, module="model.layers.{L}.block_sparse_moe.experts"
    ),
    "modelopt index last": Style(index_last=True),
    "compressed nvfp4": Style("compressed_nvfp4"),
    "compressed mxfp4": Style("compressed_mxfp4"),
    "deepseek v4": Style("deepseek_v4", module="layers.{L}.ffn.experts", projections=W123),
    "rubin ue5m3": Style("rubin_ue5m3"),
    "gpt-oss": Style("gpt_oss"),
    "gpt-oss nvfp4": Style("modelopt_stacked"),
}
MODEL_TYPES = {"gpt-oss": "gpt_oss", "gpt-oss nvfp4": "gpt_oss"}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", STYLES)
def test_loads_the_oracles_weights(tmp_path, name, shards):
    style = STYLES[name]
    source = layer(style.fmt, bias=name.startswith("gpt-oss"))
    made = folder(source, style, model_type=MODEL_TYPES.get(name, "qwen3_moe"))
    made.shards = shards
    with ModelCheckpoint(made.write(tmp_path)) as checkpoint:
        assert_same(load_experts(checkpoint, 0), source)


@pytest.mark.parametrize("name", ["modelopt", "compressed nvfp4", "gpt-oss nvfp4"])
def test_input_scales_come_as_multipliers(tmp_path, name):
    source = layer("nvfp4-ue4m3")
    made = folder(source, STYLES[name], model_type=MODEL_TYPES.get(name, "qwen3_moe"))
    weights = load_experts(ModelCheckpoint(made.write(tmp_path)), 0)
    np.testing.assert_array_equal(weights.w13.input_dec.numpy(), input_scales(4, 2, 0))
    np.testing.assert_array_equal(weights.w2.input_dec.numpy(), input_scales(4, 1, 1))


def test_ue5m3_keeps_a_residual_factor_where_there_is_one(tmp_path):
    source = layer("nvfp4-ue5m3")
    source.w13.dec[2, 1] = 1.5
    made = folder(source, STYLES["rubin ue5m3"])
    assert sum("weight_scale_2" in name for name in made.tensors) == 1
    assert_same(load_experts(ModelCheckpoint(made.write(tmp_path)), 0), source)


def test_u8_scales_without_the_key_are_refused(tmp_path):
    made = folder(layer("nvfp4-ue5m3"), STYLES["rubin ue5m3"])
    del made.config["quantization_config"]["scale_format"]
    with pytest.raises(CheckpointError, match=r"block scales are U8, .* no scale_format"):
        load_experts(ModelCheckpoint(made.write(tmp_path)), 0)


def test_e4m3_scales_are_never_read_as_ue5m3(tmp_path):
    """The key says ue5m3, the tensors are F8_E4M3: they are what their dtype says."""
    source = layer("nvfp4-ue4m3")
    made = folder(source, Style())
    made.config["quantization_config"]["scale_format"] = "ue5m3"
    with ModelCheckpoint(made.write(tmp_path)) as checkpoint:
        assert_same(load_experts(checkpoint, 0), source)
