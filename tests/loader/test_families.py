"""Every family with an FP4 release loads to the oracle's weights or is refused with the reason."""

from copy import deepcopy

import pytest
import torch

from rubin_moe.errors import CheckpointError
from rubin_moe.loader.load import ModelCheckpoint, load_experts
from rubin_moe.loader.names import parse

from .checkpoints import Folder, assert_same, expert_tensors, layer
from .families import RELEASES

DTYPES = {
    "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F32": torch.float32,
    "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


def build(release):
    source = layer(release.style.fmt, kind=release.kind, bias=release.bias)
    made = Folder(
        expert_tensors(source, release.style, release.layer),
        deepcopy(release.config),
        deepcopy(release.json),
        shards=2,
        stem=release.stem,
    )
    for leaf in release.missing:
        del made.tensors[f"{release.style.module.format(L=release.layer)}.{leaf}"]
    for name, (dtype, shape) in release.extra.items():
        made.tensors[name] = torch.zeros(shape).to(DTYPES[dtype])
    return source, made


@pytest.mark.parametrize("name", RELEASES)
def test_release(tmp_path, name):
    release = RELEASES[name]
    source, made = build(release)
    path = made.write(tmp_path)
    # released folders hold files that the index does not name and that repeat its tensors
    (path / "extra.safetensors").write_bytes((path / f"{made.stem}-00001-of-00002.safetensors")
                                             .read_bytes())  # fmt: skip
    with ModelCheckpoint(path) as checkpoint:
        module = release.style.module.format(L=release.layer)
        where = parse(f"{module}.x").layer
        layer_id = where.index if where.branch == "layers" else str(where)
        assert checkpoint.module(layer_id) == module
        spec = checkpoint.spec(layer_id)
        assert spec.scheme == release.scheme
        policy = "ignore" if release.missing else None
        weights = load_experts(checkpoint, layer_id, input_scales=policy)
        assert_same(weights, source)
        assert weights.gated is (release.kind != "relu2")
        assert (weights.w13.input_dec is not None) is (spec.scheme == "w4a4" and not policy)
        for other, reason in release.refused.items():
            with pytest.raises(CheckpointError, match=reason):
                load_experts(checkpoint, other)


def test_missing_input_scales_of_minimax_are_named(tmp_path):
    _, made = build(RELEASES["MiniMax-M2.7"])
    with pytest.raises(CheckpointError, match=r"gate of experts \[2\]; up of experts \[2\]"):
        load_experts(ModelCheckpoint(made.write(tmp_path)), 61)


def test_a_config_that_names_the_layer_wrongly_is_a_contradiction(tmp_path):
    _, made = build(RELEASES["Kimi-K3"])
    made.config["quantization_config"]["quantized_layers"][
        "language_model.model.layers.1.block_sparse_moe.experts"
    ] = {"quant_algo": "MXFP4"}
    with pytest.raises(ValueError, match=r"says MXFP4 of .*, on disk is nvfp4-ue4m3"):
        load_experts(ModelCheckpoint(made.write(tmp_path)), 1)


def test_a_config_with_another_group_size_is_an_error(tmp_path):
    _, made = build(RELEASES["DeepSeek-R1"])
    made.json["hf_quant_config.json"]["quantization"] = {"quant_algo": "NVFP4", "group_size": 32}
    with pytest.raises(ValueError, match="group_size 32, nvfp4-ue4m3 has 16"):
        load_experts(ModelCheckpoint(made.write(tmp_path)), 3)


def test_a_general_statement_loses_against_the_disk_and_is_noted(tmp_path):
    _, made = build(RELEASES["DeepSeek-V4-Flash-NVFP4 mtp"])
    with ModelCheckpoint(made.write(tmp_path)) as checkpoint:
        notes = checkpoint.spec("mtp.0").notes
    assert "excludes it (mtp.*), deepseek-v4-mxfp4 on disk: read as stored" in notes[0]


@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size", "num_experts"])
def test_absurd_sizes_are_refused_before_allocation(tmp_path, key):
    _, made = build(RELEASES["Qwen3-30B-A3B modelopt"])
    made.config[key] = 1 << 16
    with pytest.raises(ValueError, match=r"config.json declares .* bytes, on disk are"):
        load_experts(ModelCheckpoint(made.write(tmp_path)), 0)


def test_renamed_experts_are_missed_with_the_nearest_names(tmp_path):
    _, made = build(RELEASES["Qwen3-30B-A3B modelopt"])
    made.tensors = {n.replace("experts", "xperts"): t for n, t in made.tensors.items()}
    with pytest.raises(CheckpointError, match=r"none on disk; nearest: model.layers.0.mlp.xperts"):
        load_experts(ModelCheckpoint(made.write(tmp_path)), 0)


def test_some_experts_in_another_precision_are_an_error(tmp_path):
    _, made = build(RELEASES["Qwen3-30B-A3B modelopt"])
    made.tensors["model.layers.0.mlp.experts.1.up_proj.weight"] = torch.zeros(32, 64).bfloat16()
    with pytest.raises(CheckpointError, match="stored in several ways: weight BF16, weight U8"):
        load_experts(ModelCheckpoint(made.write(tmp_path)), 0)


def test_two_towers_with_experts_must_be_told_apart(tmp_path):
    source, made = build(RELEASES["Qwen3-30B-A3B modelopt"])
    towers = {f"{tower}.{n}": t for tower in ("talker", "thinker") for n, t in made.tensors.items()}
    made.tensors = {n: t.clone() for n, t in towers.items()}
    with ModelCheckpoint(made.write(tmp_path)) as checkpoint:
        with pytest.raises(CheckpointError, match=r"experts under .*: name one"):
            load_experts(checkpoint, 0)
        assert_same(load_experts(checkpoint, "thinker.model.layers.0.mlp.experts"), source)
