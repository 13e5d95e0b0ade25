"""Greedy tokens of vLLM with our experts equal those of transformers on the decoded weights."""

from pathlib import Path
from typing import Any

import pytest

from . import serving, stored, tiny_models

pytestmark = pytest.mark.serve
NUM_TOKENS = 32

_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
_UE5M3 = {
    "quant_method": "rubin_moe",
    "format": "nvfp4",
    "scale_format": "ue5m3",
    "group_size": 16,
}
_GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def _compressed(form: str, group_size: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": group_size}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    }


CASES = {
    "qwen3-nvfp4-modelopt": ("qwen3_moe", "nvfp4-ue4m3", stored.modelopt, _MODELOPT),
    "qwen3-nvfp4-compressed": (
        "qwen3_moe",
        "nvfp4-ue4m3",
        stored.compressed_nvfp4,
        _compressed("nvfp4-pack-quantized", 16),
    ),
    "qwen3-nvfp4-ue5m3": ("qwen3_moe", "nvfp4-ue5m3", stored.ue5m3, _UE5M3),
    "qwen3-mxfp4-compressed": (
        "qwen3_moe",
        "mxfp4",
        stored.compressed_mxfp4,
        _compressed("mxfp4-pack-quantized", 32),
    ),
    "glm4-nvfp4-modelopt": ("glm4_moe", "nvfp4-ue4m3", stored.modelopt, _MODELOPT),
    "gpt-oss-mxfp4": ("gpt_oss", "mxfp4", stored.gpt_oss_mxfp4, _GPT_OSS),
    "gpt-oss-nvfp4-modelopt": ("gpt_oss", "nvfp4-ue4m3", stored.gpt_oss_modelopt, _MODELOPT),
    "gpt-oss-nvfp4-ue5m3": ("gpt_oss", "nvfp4-ue5m3", stored.gpt_oss_ue5m3, _UE5M3),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    arch, fmt, write, config = CASES[case]
    model = tiny_models.build(tmp_path, arch, fmt, write, config, seed=len(case))
    expected = [model.greedy(p, NUM_TOKENS) for p in tiny_models.PROMPTS]
    assert len({tuple(t) for t in expected}) == len(expected)  # a stuck model would prove nothing
    # A checkpoint that names rubin_moe is served by it without being asked.
    asked = None if config["quant_method"] == "rubin_moe" else "rubin_moe"
    with serving.engine(model.path, quantization=asked) as llm:
        assert serving.greedy(llm, tiny_models.PROMPTS, NUM_TOKENS) == expected


@pytest.mark.long
def test_a_compiled_model_generates_the_same(tmp_path: Path) -> None:
    """With torch.compile around the layers: the experts are one opaque operator."""
    arch, fmt, write, config = CASES["qwen3-nvfp4-modelopt"]
    model = tiny_models.build(tmp_path, arch, fmt, write, config, seed=5)
    expected = [model.greedy(p, NUM_TOKENS) for p in tiny_models.PROMPTS]
    with serving.engine(model.path, enforce_eager=False) as llm:
        assert serving.greedy(llm, tiny_models.PROMPTS, NUM_TOKENS) == expected
