"""Checkpoints of published layer shapes with random weights, and what must be generated from them.

A few layers of Qwen3-30B-A3B (NVFP4, ModelOpt's names) and gpt-oss-120b (MXFP4). The reference is
transformers with the experts on this project's CPU backend, in float32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from h200_layer import OAI, SHAPES, Shape, random_weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.target import detect
from rubin_moe.layers.experts import MoEExperts, problem_of
from rubin_moe.layouts.gate_up import GateUpRows
from rubin_moe.loader.load import ModelCheckpoint, load_experts

VOCABULARY = 2048
RMS_ELEMENT = 2.93  # of E2M1 codes that are all equally likely
LAYERS = {"qwen3": 16, "gptoss": 10}
ACTIVATIONS = {"qwen3_moe": Activation(), "gpt_oss": OAI}


def config_of(name: str) -> Any:
    """The transformers config, with published sizes but for the layers and the vocabulary."""
    import transformers

    shape = SHAPES[name]
    sizes = {
        "hidden_size": shape.hidden, "num_experts_per_tok": shape.top_k, "vocab_size": VOCABULARY,
        "num_hidden_layers": LAYERS[name], "max_position_embeddings": 4096, "dtype": "bfloat16",
        "tie_word_embeddings": False, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    if name == "gptoss":
        config = transformers.GptOssConfig(
            intermediate_size=shape.intermediate, num_local_experts=shape.num_experts,
            num_attention_heads=64, num_key_value_heads=8, head_dim=64,
            **{**sizes, "max_position_embeddings": 131072},
        )  # fmt: skip
        config.architectures = ["GptOssForCausalLM"]
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
        config.quantization_config = {
            "quant_method": "mxfp4", "modules_to_not_convert": [*kept, "lm_head"],
        }  # fmt: skip
        return config
    config = transformers.Qwen3MoeConfig(
        moe_intermediate_size=shape.intermediate, intermediate_size=6144, norm_topk_prob=True,
        num_experts=shape.num_experts, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        **sizes,
    )  # fmt: skip
    config.architectures = ["Qwen3MoeForCausalLM"]
    ignored = ["lm_head", "*self_attn*", "*mlp.gate"]
    config.quantization_config = {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ignored,
        "exclude_modules": ignored, "kv_cache_quant_algo": None, "config_groups": {},
    }  # fmt: skip
    return config


def empty_model(config: Any) -> Any:
    """The transformers model without storage."""
    from transformers import AutoModelForCausalLM

    plain = type(config)(**{k: v for k, v in config.to_dict().items() if "quant" not in k})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(plain, dtype=torch.float32)


def make(name: str, folder: Path, device: str = "cuda") -> None:
    """Writes the checkpoint: everything random; an expert's output is a third of what it reads, so
    that all layers have a say and none multiplies the rounding of those before."""
    config = config_of(name)
    generator = torch.Generator(device).manual_seed(11)
    tensors: dict[str, Tensor] = {}
    for key, like in empty_model(config).state_dict().items():
        if ".experts." in key:
            continue
        if like.dim() == 1:
            value = torch.ones(like.shape, device=device)
            if key.endswith(("bias", "sinks")):
                value = 0.1 * torch.randn(like.shape, device=device, generator=generator)
        else:
            value = torch.randn(like.shape, device=device, generator=generator)
            # a router that is sure of its choice: rounding must not choose other experts
            value *= 1.0 if "embed" in key else like.shape[1] ** -0.5
            value *= 4.0 if key.endswith(("mlp.gate.weight", "mlp.router.weight")) else 1.0
        tensors[key] = value.bfloat16().cpu()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model-rest.safetensors", metadata={"format": "pt"})
    files = dict.fromkeys(tensors, "model-rest.safetensors")
    for layer in range(LAYERS[name]):
        prefix, file = f"model.layers.{layer}.mlp.experts", f"model-{layer:02d}.safetensors"
        stored = experts_of(name, prefix, layer, device)
        save_file(stored, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(stored, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    facts = config.to_dict() | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(facts, indent=1))


def experts_of(name: str, prefix: str, layer: int, device: str) -> dict[str, Tensor]:
    """One layer's experts under the checkpoint's names."""
    shape: Shape = replace(SHAPES[name], bias=name == "gptoss")
    weights = random_weights(shape, 100 + layer, device)
    out: dict[str, Tensor] = {}
    if name == "gptoss":
        turns = GateUpRows(stripe=1)
        for proj, w, rows in (
            ("gate_up_proj", weights.w13, turns),
            ("down_proj", weights.w2, None),
        ):
            codes, scales = w.qdata, w.sf % 3 + 116  # 2^-10 or so at K = 2880
            bias = 0.1 * w.bias if w.bias is not None else torch.zeros(0)
            if rows is not None:
                codes, scales = rows.pack(codes), rows.pack(scales)
                bias = GateUpRows(stripe=1, axis=-1).pack(bias)
            e, n, packed = codes.shape
            out[f"{prefix}.{proj}_blocks"] = codes.reshape(e, n, packed // 16, 16).cpu()
            out[f"{prefix}.{proj}_scales"] = scales.contiguous().cpu()
            out[f"{prefix}.{proj}_bias"] = bias.bfloat16().cpu()
        return out
    q13, s13, q2, s2 = (
        t.cpu() for w in (weights.w13, weights.w2) for t in (w.qdata, w.sf)
    )  # fmt: skip
    half = shape.intermediate
    for e in range(shape.num_experts):
        for proj, codes, scales, k in (
            ("gate_proj", q13[e, :half], s13[e, :half], shape.hidden),
            ("up_proj", q13[e, half:], s13[e, half:], shape.hidden),
            ("down_proj", q2[e], s2[e], shape.intermediate),
        ):
            at = f"{prefix}.{e}.{proj}"
            out[f"{at}.weight"] = codes.clone()
            out[f"{at}.weight_scale"] = scales.clone().view(torch.float8_e4m3fn)
            out[f"{at}.weight_scale_2"] = torch.tensor(0.3 * k**-0.5 / RMS_ELEMENT)
            out[f"{at}.input_scale"] = torch.tensor(1.0)
    return out


def problem_of_shape(name: str) -> MoEProblem:
    """Of the layers that `make` writes."""
    return replace(SHAPES[name], bias=name == "gptoss").problem()


def problems_of(model: Path) -> set[MoEProblem]:
    """What a checkpoint's layers ask of the kernels, for filling their cache."""
    checkpoint = ModelCheckpoint(model)
    config = checkpoint.config
    return {
        MoEProblem(
            spec.num_experts, spec.num_experts, config["num_experts_per_tok"], spec.hidden,
            spec.intermediate, spec.fmt, ACTIVATIONS[config["model_type"]], has_bias=spec.has_bias,
        )
        for spec in map(checkpoint.spec, range(config["num_hidden_layers"]))
    }  # fmt: skip


class Experts(torch.nn.Module):
    """One layer on the CPU backend in the place of transformers' own."""

    def __init__(self, layer: MoEExperts) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.layer(x.contiguous(), ids, weights.float())


def reference_model(folder: Path) -> Any:
    """transformers in float32 on the CPU; the experts are the CPU backend's."""
    from transformers import AutoModelForCausalLM

    whole = folder.parent / "bf16"  # the shipped model's other layers are those of its original
    if whole.is_dir():
        model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval()
    else:
        model = _without_experts(folder)
    checkpoint, config = ModelCheckpoint(folder), model.config
    for index, block in enumerate(model.model.layers):
        weights: ExpertWeights = load_experts(checkpoint, index)
        activation = ACTIVATIONS[config.model_type]
        problem = problem_of(weights, config.num_experts_per_tok, activation, torch.float32)
        block.mlp.experts = Experts(MoEExperts(weights, problem, detect("cpu"), "cpu"))
    return model


def _without_experts(folder: Path) -> Any:
    from transformers import AutoConfig

    model = empty_model(AutoConfig.from_pretrained(folder))
    rest = {n: t.float() for n, t in load_file(folder / "model-rest.safetensors").items()}
    model.load_state_dict(rest, strict=False, assign=True)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config)  # its frequencies are not stored
    return model.eval()


@torch.inference_mode()
def gaps(model: Any, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[float]:
    """How far each generated token's logit is below the reference's largest, 0 where it is that
    one, in standard deviations of the position's logits. Prompts of one length, and answers."""
    ids = torch.tensor([[*p, *a] for p, a in zip(prompts, answers, strict=True)])
    logits = model(ids).logits[:, len(prompts[0]) - 1 : -1].double()
    chosen = logits.gather(-1, torch.tensor(answers)[:, :, None])[:, :, 0]
    out: list[float] = ((logits.max(-1).values - chosen) / logits.std(-1)).flatten().tolist()
    return out
