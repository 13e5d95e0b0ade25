"""Tiny random models: a transformers model in fp32 and the checkpoint that holds the same weights.

The experts' weights are drawn as codes and decoded by the float64 oracle, so that both sides see
exactly the same numbers; everything else is stored in float32.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.oracles.moe import Projection
from tests.oracles.quant import BLOCK, E2M1, SCALES

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS, VOCAB = 64, 64, 8, 2, 2, 256
PROMPTS = ([3, 141, 59, 26, 53], [58, 97, 93, 23, 84, 62, 64, 33, 83], [17])

Layer = tuple[Projection, Projection]
Writer = Callable[[str, Layer], dict[str, Tensor]]
Quantizer = Callable[[Any, dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint folder and the transformers model it must equal."""

    path: Path
    reference: torch.nn.Module

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Tokens that transformers generates after ``prompt``."""
        ids = torch.tensor([prompt])
        out = self.reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens
        )
        return out[0, len(prompt) :].tolist()


def projection(
    rng: np.random.Generator, fmt: str, shape: tuple[int, int, int], halves: int, gpt_oss: bool
) -> Projection:
    """Random codes of every value; a decode scale of its own per half of each expert.

    gpt-oss has biases (of bfloat16 values) and one decode scale for all experts.
    """
    e, n, k = shape
    qdata = rng.integers(0, 256, (e, n, k // 2), dtype=np.uint8)
    low = {"nvfp4-ue4m3": 0x50, "nvfp4-ue5m3": 0x58, "mxfp4": 122}[fmt]
    high = {"nvfp4-ue4m3": 0x7E, "nvfp4-ue5m3": 0x78, "mxfp4": 124}[fmt]
    sf = rng.integers(low, high + 1, (e, n, k // BLOCK[fmt]), dtype=np.uint8)
    scale_type = {"nvfp4-ue4m3": "ue4m3", "nvfp4-ue5m3": "ue5m3", "mxfp4": "ue8m0"}[fmt]
    spread = float(np.sqrt(np.mean(SCALES[scale_type][sf] ** 2) * np.mean(E2M1**2)))
    wanted = 1.5 / np.sqrt(k)
    dec = (wanted / spread * rng.uniform(0.5, 2, (e, halves))).astype(np.float32)
    if fmt != "nvfp4-ue4m3":
        dec = np.ones((e, halves), np.float32)
    if not gpt_oss:
        return Projection(qdata, sf, dec)
    b = torch.from_numpy(rng.normal(0, 0.3, (e, n))).bfloat16().float().numpy()
    return Projection(qdata, sf, np.full_like(dec, dec.flat[0]), b)


def build(
    path: Path,
    arch: str,
    fmt: str,
    write: Writer,
    quantization_config: dict[str, Any],
    seed: int,
    intermediate: int = INTERMEDIATE,
    quantize: Quantizer | None = None,
) -> TinyModel:
    """Makes the model, fills its experts and writes the checkpoint.

    ``quantize`` stores other matrices in fewer bits, and puts what they decode to into the model.
    """
    rng = np.random.default_rng(seed)
    model = _transformers_model(arch, seed, intermediate)
    gpt_oss = arch == "gpt_oss"
    tensors = {n: t.contiguous() for n, t in model.state_dict().items() if ".experts." not in n}
    routed = [n for n, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    if quantize is not None:
        tensors = quantize(model, tensors)
    for index in routed:
        w13 = projection(rng, fmt, (EXPERTS, 2 * intermediate, HIDDEN), 2, gpt_oss)
        w2 = projection(rng, fmt, (EXPERTS, HIDDEN, intermediate), 1, gpt_oss)
        _fill_experts(model.model.layers[index].mlp.experts, (w13, w2), fmt, gpt_oss)
        tensors |= write(f"model.layers.{index}.mlp.experts", (w13, w2))
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {
        "architectures": [type(model).__name__],
        "torch_dtype": "float32",
        "quantization_config": quantization_config,
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return TinyModel(path, model)


def _transformers_model(arch: str, seed: int, intermediate: int) -> Any:
    import transformers

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": HIDDEN,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "attn_implementation": "eager",
        "initializer_range": 0.2,
    }
    if arch == "gpt_oss":
        # Its rope_parameters stay the default (yarn), as released.
        config = transformers.GptOssConfig(
            intermediate_size=intermediate, num_local_experts=EXPERTS, **sizes
        )
        config.max_position_embeddings = 131072
        model = transformers.GptOssForCausalLM(config)
    elif arch == "glm4_moe":  # a dense layer first, a shared expert, sigmoid scores with a bias
        config = transformers.Glm4MoeConfig(
            moe_intermediate_size=intermediate,
            intermediate_size=2 * intermediate,
            n_routed_experts=EXPERTS,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
            first_k_dense_replace=1,
            **sizes,
        )
        model = transformers.Glm4MoeForCausalLM(config)
        for layer in model.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.data.normal_(0, 0.2)
    else:
        config = transformers.Qwen3MoeConfig(
            moe_intermediate_size=intermediate,
            intermediate_size=intermediate,
            num_experts=EXPERTS,
            norm_topk_prob=True,
            **sizes,
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    return model.float().eval()


def _fill_experts(experts: Any, layer: Layer, fmt: str, gpt_oss: bool) -> None:
    w13, w2 = (torch.from_numpy(w.dense(fmt)).float() for w in layer)
    if gpt_oss:  # [E, H, 2I] with alternating gate and up, [E, I, H]
        experts.gate_up_proj.data.copy_(_interleave(w13).transpose(1, 2))
        experts.down_proj.data.copy_(w2.transpose(1, 2))
        b13, b2 = (torch.from_numpy(w.bias) for w in layer)
        experts.gate_up_proj_bias.data.copy_(_interleave(b13))
        experts.down_proj_bias.data.copy_(b2)
    else:
        experts.gate_up_proj.data.copy_(w13)
        experts.down_proj.data.copy_(w2)


def _interleave(halves: Tensor) -> Tensor:
    """``[E, gate; up, ...]`` -> rows alternate gate, up."""
    gate, up = halves.chunk(2, dim=1)
    return torch.stack([gate, up], dim=2).reshape(halves.shape)
