"""Quantized matrices outside the experts: copied and told, renamed, or decoded."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert
from rubin_moe.errors import CheckpointError, ConvertError
from rubin_moe.loader.load import ModelCheckpoint
from tests.loader.checkpoints import Style, folder, layer
from tests.oracles import quant

from .sources import decoded, of_layer, write_dense, write_fp4

ATTENTION = "model.layers.0.self_attn.q_proj"
OTHER = "model.layers.0.self_attn.k_proj"


def run(source, out, target, **options):
    return convert(source, out, Options(target, **options), jobs=1)


def add(path, tensors):
    """More tensors in a folder's one file, in place of others of their modules."""
    modules = {n.rpartition(".")[0] for n in tensors}
    kept = load_file(path / "model.safetensors")
    kept = {n: t for n, t in kept.items() if n.rpartition(".")[0] not in modules}
    save_file({**kept, **tensors}, path / "model.safetensors")
    return path


def raw(tensor):
    """Bytes of a tensor of any shape."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def nvfp4_linear(seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (64, 32), dtype=np.uint8)
    scales = rng.integers(0x38, 0x60, (64, 4), dtype=np.uint8)
    tensors = {
        f"{ATTENTION}.weight": torch.from_numpy(codes),
        f"{ATTENTION}.weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
        f"{ATTENTION}.weight_scale_2": torch.tensor(2.0**-9),
        f"{ATTENTION}.input_scale": torch.tensor(0.01),
    }
    return tensors, quant.dequantize(codes, scales, "nvfp4-ue4m3") * 2.0**-9


def fp8_linear():
    rng = torch.Generator().manual_seed(3)
    codes = torch.randn((64, 64), generator=rng).to(torch.float8_e4m3fn)
    scale = torch.rand((4, 4), generator=rng)
    wide = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
    tensors = {f"{ATTENTION}.weight": codes, f"{ATTENTION}.weight_scale_inv": scale}
    return tensors, codes.float() * wide


def test_nvfp4_linears_stay_and_the_config_names_them(tmp_path):
    source, layer = write_fp4(tmp_path / "a", "modelopt")
    tensors, _ = nvfp4_linear()
    run(add(source, tensors), tmp_path / "b", "nvfp4-ue5m3")
    written = load_file(tmp_path / "b" / "model.safetensors")
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype
        assert raw(written[name]) == raw(tensor)
    with ModelCheckpoint(tmp_path / "b") as checkpoint:
        assert checkpoint.quant.declared(ATTENTION).algo == "NVFP4"
        assert checkpoint.quant.declared("model.layers.0.mlp.experts").format == "nvfp4"
        assert checkpoint.quant.declared(OTHER) is None
    for key, values in of_layer(layer).items():
        np.testing.assert_array_equal(decoded(tmp_path / "b")[key], values)


def test_fp8_linears_beside_nvfp4_experts_are_mixed_precision(tmp_path):
    source = write_dense(tmp_path / "a", "fp8")
    tensors, _ = fp8_linear()
    run(add(source, tensors), tmp_path / "b", "nvfp4-ue4m3")
    config = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "MIXED_PRECISION"
    assert config["quantized_layers"][ATTENTION] == {"quant_algo": "FP8_PB_WO"}
    with ModelCheckpoint(tmp_path / "b") as checkpoint:
        assert checkpoint.spec(0).fmt.name == "nvfp4-ue4m3"
        assert checkpoint.quant.declared(ATTENTION).algo == "FP8_PB_WO"


def test_what_a_config_cannot_say_is_refused(tmp_path):
    source = write_dense(tmp_path / "a", "fp8")
    add(source, fp8_linear()[0])
    with pytest.raises(ConvertError, match=r"q_proj: FP8_PB_WO.*no words"):
        run(source, tmp_path / "b", "nvfp4-ue4m3", names="compressed-tensors")
    assert not (tmp_path / "b.partial").exists()


@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
def test_bfloat16_decodes_them(tmp_path, kind):
    if kind == "fp8":
        source = write_dense(tmp_path / "a", "fp8")
        tensors, values = fp8_linear()
    else:
        source, _ = write_fp4(tmp_path / "a", "modelopt")
        tensors, values = nvfp4_linear()
    run(add(source, tensors), tmp_path / "b", "bf16")
    written = load_file(tmp_path / "b" / "model.safetensors")
    want = torch.as_tensor(values).float().to(torch.bfloat16)
    assert torch.equal(written[f"{ATTENTION}.weight"], want)
    assert not [n for n in written if "scale" in n]


def test_names_of_linears_follow_those_of_experts(tmp_path):
    source, _ = write_fp4(tmp_path / "a", "modelopt")
    tensors, _ = nvfp4_linear()
    run(add(source, tensors), tmp_path / "b", "nvfp4-ue4m3", names="compressed-tensors")
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert torch.equal(written[f"{ATTENTION}.weight_packed"], tensors[f"{ATTENTION}.weight"])
    assert written[f"{ATTENTION}.weight_global_scale"].tolist() == [512.0]
    assert written[f"{ATTENTION}.input_global_scale"].tolist() == pytest.approx([100.0])
    run(tmp_path / "b", tmp_path / "c", "nvfp4-ue4m3", names="modelopt")
    back = load_file(tmp_path / "c" / "model.safetensors")
    for name, tensor in tensors.items():
        assert raw(back[name]) == raw(tensor), name


def test_exclusions_are_copied(tmp_path):
    source = write_dense(tmp_path / "a", "bf16", layers=2)
    run(source, tmp_path / "b", "nvfp4-ue4m3", exclude=("model.layers.1.*",))
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert written["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.bfloat16
    assert written["model.layers.0.mlp.experts.0.up_proj.weight"].dtype == torch.uint8
    with ModelCheckpoint(tmp_path / "b") as checkpoint:
        assert checkpoint.quant.excluded("model.layers.1.mlp.experts")
        assert not checkpoint.quant.excluded("model.layers.0.mlp.experts")


@pytest.mark.parametrize("target", ["bf16", "nvfp4-ue4m3"])
def test_an_incomplete_matrix_outside_the_experts_is_named(tmp_path, target):
    """Half of one cannot be decoded, and under other names it would look whole."""
    made = folder(layer("nvfp4-ue4m3"), Style())
    made.tensors["model.layers.0.mlp.shared_expert.up_proj.weight"] = torch.zeros(32, 32).byte()
    options = Options(target, names="auto" if target == "bf16" else "compressed-tensors")
    with pytest.raises(
        CheckpointError,
        match=r"shared_expert.up_proj: modelopt without weight_scale and weight_scale_2",
    ):
        convert(made.write(tmp_path / "a"), tmp_path / "b", options, jobs=1)


def test_deepseek_v4_spells_its_fp8_scales_shortly(tmp_path):
    """``scale``, E8M0, one a block of 128."""
    path, _ = write_fp4(tmp_path / "a", "deepseek_v4")
    tensors = load_file(path / "model.safetensors")
    rng = torch.Generator().manual_seed(0)
    codes = torch.randn(256, 128, generator=rng).to(torch.float8_e4m3fn)
    name = "layers.0.ffn.shared_experts.w1"
    tensors[f"{name}.weight"] = codes
    tensors[f"{name}.scale"] = torch.tensor([[0.25], [8.0]]).to(torch.float8_e8m0fnu)
    save_file(tensors, path / "model.safetensors")
    convert(path, tmp_path / "b", Options("bf16"), jobs=1)
    after = load_file(tmp_path / "b" / "model.safetensors")
    wanted = codes.float() * torch.tensor([0.25, 8.0]).repeat_interleave(128)[:, None]
    assert torch.equal(after[f"{name}.weight"].float(), wanted.to(torch.bfloat16).float())
    assert f"{name}.scale" not in after
