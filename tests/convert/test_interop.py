"""What transformers, compressed-tensors and vLLM make of converted checkpoints."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert
from tests.oracles import quant

from .sources import decoded, write_dense

KJV = Path(__file__).parents[2] / "models" / "kjv"
LAYERS = 6


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """(target, names) -> the shipped 16-bit model in that form."""
    folder, made = tmp_path_factory.mktemp("interop"), {}

    def make(target, names="auto", source="bf16"):
        key = f"{source}-{target}-{names}"
        if key not in made:
            made[key] = convert(
                KJV / source, folder / key, Options(target, names=names), jobs=1
            ).folder
        return made[key]

    return make


def transformers_experts(path, **options):
    """Every layer's fused matrices as transformers loads them."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, output_loading_info=True, **options
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return [(x.mlp.experts.gate_up_proj, x.mlp.experts.down_proj) for x in model.model.layers]


def assert_experts(loaded, path):
    for index, (gate_up, down) in enumerate(loaded):
        for (expert, part), values in decoded(path, index).items():
            want = torch.from_numpy(values).to(torch.bfloat16)
            rows = gate_up.shape[1] // 2
            matrix = {"gate": gate_up[expert, :rows], "up": gate_up[expert, rows:]}
            assert torch.equal(matrix.get(part, down[expert]), want), (index, expert, part)


def test_transformers_decodes_our_mxfp4(converted):
    from transformers import CompressedTensorsConfig

    path = converted("mxfp4")
    loaded = transformers_experts(
        path, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    assert_experts(loaded, path)


def test_transformers_loads_our_bfloat16(converted):
    """Decoded from the shipped NVFP4 and MXFP4 checkpoints."""
    for source in ("nvfp4-ue5m3", "mxfp4"):
        loaded = transformers_experts(converted("bf16", source=source))
        assert_experts(loaded, KJV / source)


def test_compressed_tensors_decodes_our_nvfp4(tmp_path):
    """By its own code, tensor by tensor. (transformers 5 drops ``weight_global_scale`` of experts
    when it fuses them, with a warning: its models of NVFP4 experts are wrong, whoever wrote them.)
    """
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig

    source = write_dense(tmp_path / "a", "bf16")
    convert(source, tmp_path / "b", Options("nvfp4-ue4m3", names="compressed-tensors"), jobs=1)
    quant = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(quant).config_groups["group_0"]
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    for (expert, part), values in decoded(tmp_path / "b").items():
        path = f"model.layers.0.mlp.experts.{expert}.{part}_proj."
        leaves = {n.removeprefix(path): t for n, t in tensors.items() if n.startswith(path)}
        theirs = NVFP4PackedCompressor.decompress(leaves, scheme)["weight"].double().numpy()
        np.testing.assert_allclose(theirs, values, rtol=2**-7)


def test_transformers_decompresses_our_nvfp4_matrices(tmp_path):
    """Attention projections, every value; experts are left out for the reason above."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    options = Options(
        "nvfp4-ue4m3", names="compressed-tensors", linears=True, exclude=("*.experts",)
    )
    path = convert(KJV / "bf16", tmp_path / "b", options, jobs=1).folder
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    tensors = load_file(path / "model.safetensors")
    stored = [n.removesuffix(".weight_packed") for n in tensors if n.endswith(".weight_packed")]
    assert len(stored) == 4 * LAYERS
    for name in stored:
        codes, scales, divisor = (
            tensors[f"{name}.weight_{leaf}"] for leaf in ("packed", "scale", "global_scale")
        )
        values = quant.dequantize(codes.numpy(), scales.view(torch.uint8).numpy(), "nvfp4-ue4m3")
        want = torch.from_numpy(values / divisor.double().numpy()).to(torch.bfloat16)
        assert torch.equal(model.get_submodule(name).weight, want), name


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("nvfp4-ue4m3", "modelopt"),
        ("nvfp4-ue4m3", "compressed-tensors"),
        ("mxfp4", "compressed-tensors"),
    ],
)
def test_vllm_reads_our_configs(converted, target, names):
    """Its own parsers, before any plugin: format, group and what is left alone."""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    quant = json.loads((converted(target, names) / "config.json").read_text())
    quant = quant["quantization_config"]
    if names == "modelopt":
        found = ModelOptNvFp4Config.from_config(quant)
        assert (found.quant_method, found.group_size) == ("W4A16_NVFP4", 16)
        assert found.is_layer_excluded("model.layers.0.self_attn.q_proj")
        assert not found.is_layer_excluded("model.layers.0.mlp.experts")
        return
    found = compressed_tensors.CompressedTensorsConfig.from_config(quant)
    weights = found.target_scheme_map["Linear"]["weights"]
    assert (weights.num_bits, weights.group_size) == (4, 32 if target == "mxfp4" else 16)
    assert found.target_scheme_map["Linear"]["input_activations"] is None
    assert "model.layers.0.mlp.gate" in found.ignore


@pytest.mark.parametrize("target", ["nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4"])
def test_the_section_says_what_was_done(converted, target):
    config = json.loads((converted(target) / "config.json").read_text())
    section = config["quantization_config"]["rubin_moe"]
    assert section["source"] == ["bf16"]
    assert (section["target"], section["layers"]) == (target, LAYERS)
    assert set(section) >= {"version", "scale_search"}
