"""Tensors that hold all experts: orientation and row order are known or refused, never guessed."""

import numpy as np
import pytest
import torch

from rubin_moe.errors import CheckpointError
from rubin_moe.loader.assemble import ExpertAssembler
from rubin_moe.loader.dialect import Stacking
from rubin_moe.loader.gpt_oss import GPT_OSS
from rubin_moe.loader.load import ModelCheckpoint, load_experts
from rubin_moe.loader.modelopt import MODELOPT
from rubin_moe.loader.spec import ExpertsSpec

from .checkpoints import Style, assert_same, expert_tensors, folder, layer

NAME = "model.layers.0.mlp.experts"


def load(path, made, **options):
    with ModelCheckpoint(made.write(path)) as checkpoint:
        return load_experts(checkpoint, 0, **options)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_every_stacking_loads_to_the_same_weights(tmp_path, transposed, interleaved, kind):
    source = layer("nvfp4-ue4m3", bias=True, kind=kind)
    made = folder(source, Style("modelopt_stacked", stacking=(transposed, interleaved)))
    if kind == "relu2":
        made.tensors = {k.replace("gate_up_proj", "up_proj"): t for k, t in made.tensors.items()}
    assert_same(load(tmp_path, made, stacking=Stacking(transposed, interleaved)), source)


@pytest.mark.parametrize(
    ("model_type", "stacking"),
    [("gpt_oss", (True, True)), ("llama4_text", (True, False)), ("motif3", (False, False)),
     ("qwen3_vl_moe_text", (True, False)), ("qwen3_5_moe_text", (False, False))],
)  # fmt: skip
def test_known_families_need_no_flag(tmp_path, model_type, stacking):
    source = layer("nvfp4-ue4m3")
    made = folder(source, Style("modelopt_stacked", stacking=stacking), model_type=model_type)
    assert_same(load(tmp_path, made), source)


@pytest.mark.parametrize("hidden", [64, 128])
def test_what_shapes_do_not_tell_is_refused(tmp_path, hidden):
    """hidden 128 and expert width 32: 64 bytes by 64 rows, square."""
    source = layer("nvfp4-ue4m3", hidden=hidden)
    made = folder(source, Style("modelopt_stacked"), model_type="unheard_of")
    with pytest.raises(CheckpointError, match="does not tell how a stacked tensor lies"):
        load(tmp_path, made)
    made.config["quantization_config"]["stacking"] = {"transposed": True, "interleaved": True}
    assert_same(load(tmp_path, made), source)


def test_a_square_transposed_file_is_read_as_the_family_stores_it(tmp_path):
    source = layer("nvfp4-ue4m3", hidden=128)
    made = folder(source, Style("modelopt_stacked", stacking=(True, False)), model_type="llama4")
    assert_same(load(tmp_path, made), source)


def test_the_other_orientation_is_refused_where_the_shape_shows_it(tmp_path):
    made = folder(layer("nvfp4-ue4m3"), Style("modelopt_stacked", stacking=(False, True)),
                  model_type="gpt_oss")  # fmt: skip
    with pytest.raises(CheckpointError, match=r"shape \[4, 64, (\d+)\], expected \[4, \1, 64\]"):
        load(tmp_path, made)


@pytest.mark.parametrize("form", ["scalar", "expert", "half"])
def test_global_scales_of_every_form(tmp_path, form):
    source = layer("nvfp4-ue4m3")
    made = folder(source, Style("modelopt_stacked", global_form=form), model_type="gpt_oss")
    dec = load(tmp_path, made).w13.dec.numpy()
    expected = {
        "scalar": np.broadcast_to(source.w13.dec[:1, :1], (4, 2)),
        "expert": np.broadcast_to(source.w13.dec[:, :1], (4, 2)),
        "half": source.w13.dec,
    }[form]
    np.testing.assert_array_equal(dec, expected)


@pytest.mark.parametrize("shape", [(3,), (2, 4), (4, 3), (4, 2, 1)])
def test_global_scales_of_any_other_form_are_refused(shape):
    spec = ExpertsSpec(MODELOPT, 64, 32, 4, stacking=Stacking(True, True))
    assembler = ExpertAssembler(spec, None, NAME)
    with pytest.raises(CheckpointError, match="a global scale of shape"):
        assembler.add(f"{NAME}.gate_up_proj_weight_scale_2", torch.full(shape, 1e-4))


def test_interleaved_rows_are_gate_then_up_in_weight_scale_and_bias(tmp_path):
    """Rows 0, 2, 4 hold gate: code 1.0, scale 2, bias 0.25; rows 1, 3, 5 up: -1.0, 4, -0.5."""
    tensors = {f"{NAME}.{n}": t for n, t in {
        "gate_up_proj": torch.tensor([0x22, 0xAA], dtype=torch.uint8).repeat(32).expand(2, 32, 64),
        "gate_up_proj_weight_scale": torch.tensor([2.0, 4.0]).repeat(32).expand(2, 4, 64).to(
            torch.float8_e4m3fn),
        "gate_up_proj_weight_scale_2": torch.tensor(0.5),
        "gate_up_proj_bias": torch.tensor([0.25, -0.5]).repeat(32).expand(2, 64).bfloat16(),
        "down_proj": torch.zeros(2, 16, 64, dtype=torch.uint8),
        "down_proj_weight_scale": torch.ones(2, 2, 64).to(torch.float8_e4m3fn),
        "down_proj_weight_scale_2": torch.tensor(0.5),
        "down_proj_bias": torch.zeros(2, 64).bfloat16(),
    }.items()}  # fmt: skip
    spec = ExpertsSpec(MODELOPT, 64, 32, 2, has_bias=True, stacking=Stacking(True, True))
    assembler = ExpertAssembler(spec, None, NAME)
    for name, tensor in tensors.items():
        assembler.add(name, tensor)
    w = assembler.finish().w13
    halves = ((slice(0, 32), 0x22, 0x40, 0.25), (slice(32, 64), 0xAA, 0x48, -0.5))
    for rows, code, scale, bias in halves:
        assert (w.qdata[:, rows] == code).all()
        assert (w.sf[:, rows] == scale).all()
        assert (w.bias[:, rows] == bias).all()


def test_gpt_oss_blocks_may_come_flattened():
    source = layer("mxfp4", bias=True)
    found = expert_tensors(source, Style("gpt_oss"))
    assembler = ExpertAssembler(ExpertsSpec(GPT_OSS, 64, 32, 4, has_bias=True), None, NAME)
    for name, tensor in found.items():
        assembler.add(name, tensor.flatten(2) if name.endswith("blocks") else tensor)
    assert_same(assembler.finish(), source)


def test_stacked_and_single_tensors_of_one_slot_are_one_too_many():
    source = layer("nvfp4-ue4m3")
    spec = ExpertsSpec(MODELOPT, 64, 32, 4, stacking=Stacking(True, True))
    assembler = ExpertAssembler(spec, None, NAME)
    for name, tensor in expert_tensors(source, Style("modelopt_stacked")).items():
        assembler.add(name, tensor)
    again = next(iter(expert_tensors(source, Style()).items()))
    with pytest.raises(CheckpointError, match="gate qdata of expert 0 came twice"):
        assembler.add(*again)


@pytest.mark.parametrize("stacking", [{"transposed": True}, "transposed", {"a": 1, "b": 2}])
def test_a_malformed_stacking_key_is_named(tmp_path, stacking):
    made = folder(layer("nvfp4-ue4m3"), Style("modelopt_stacked"))
    made.config["quantization_config"]["stacking"] = stacking
    with pytest.raises(ValueError, match="stacking needs transposed and interleaved"):
        load(tmp_path, made)
