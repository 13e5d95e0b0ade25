"""Quantized matrices outside the experts: vLLM multiplies none on a CPU, ours are decoded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.oracles.moe import Projection

from . import serving, stored, tiny_models

CONFIG = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        **{
            f"model.layers.{i}.self_attn.{p}_proj": {"quant_algo": "FP8"}
            for i in range(tiny_models.LAYERS)
            for p in "qkv"
        },
        **{
            f"model.layers.{i}.{m}": {"quant_algo": "NVFP4", "group_size": 16}
            for i in range(tiny_models.LAYERS)
            for m in ("self_attn.o_proj", "mlp.experts")
        },
        "lm_head": {"quant_algo": "NVFP4", "group_size": 16},
    },
}


def quantize(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """q, k, v in FP8 with a scale each, o and the head in NVFP4, and scales of an FP8 cache, which
    a cache in the model's dtype does not use."""
    rng = np.random.default_rng(7)
    out = dict(tensors)
    for name in tensors:
        module = name.removesuffix(".weight")
        if module.endswith((".q_proj", ".k_proj", ".v_proj")):
            weight = out[name]
            scale = weight.abs().max() / 448
            codes = (weight / scale).to(torch.float8_e4m3fn)
            out |= {name: codes, f"{module}.weight_scale": scale}
            out[f"{module}.input_scale"] = torch.tensor(0.02)
            model.get_submodule(module).weight.data.copy_(codes.float() * scale)
            if module[-6] in "kv":
                out[f"{module}.{module[-6]}_scale"] = torch.tensor(0.5)
        elif module.endswith(".o_proj") or module == "lm_head":
            shape = (1, *out[name].shape)
            matrix = tiny_models.projection(rng, "nvfp4-ue4m3", shape, 1, gpt_oss=False)
            out |= _modelopt(module, matrix)
            dense = torch.from_numpy(matrix.dense("nvfp4-ue4m3")[0])
            model.get_submodule(module).weight.data.copy_(dense)
    return out


def _modelopt(module: str, w: Projection) -> dict[str, Tensor]:
    return {
        f"{module}.weight": torch.from_numpy(w.qdata[0]),
        f"{module}.weight_scale": torch.from_numpy(w.sf[0]).view(torch.float8_e4m3fn),
        f"{module}.weight_scale_2": torch.tensor(float(w.dec[0, 0])),
        f"{module}.input_scale": torch.tensor(0.02),
    }


@pytest.mark.serve
def test_tokens_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build(
        tmp_path, "qwen3_moe", "nvfp4-ue4m3", stored.modelopt, CONFIG, 11, quantize=quantize
    )
    expected = [model.greedy(p, 32) for p in tiny_models.PROMPTS]
    from rubin_moe.adapters.vllm import report
    from rubin_moe.layers.experts import MoEExperts

    said: list[str] = []
    warm: list[int] = []
    monkeypatch.setattr(MoEExperts, "warm_up", lambda _, num_tokens: warm.append(num_tokens))
    monkeypatch.setattr(report._logger, "info", lambda text, *args: said.append(text % args))
    with serving.engine(model.path) as llm:
        assert serving.greedy(llm, tiny_models.PROMPTS, 32) == expected
        most = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    assert warm == [most] * tiny_models.LAYERS
    (summary,) = said
    assert "2 layers of nvfp4-ue4m3 experts" in summary
    assert "backend cpu" in summary
    assert "2 fp8 linear layers decoded at load" in summary
    assert "3 nvfp4-ue4m3 linear layers decoded at load" in summary
