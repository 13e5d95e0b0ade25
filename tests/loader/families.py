"""Checkpoints of published model families: names, dtypes and configs real, dimensions cut down.

Every record is one release of one family: its configs, one layer of routed experts in the
release's own spelling, and tensors that ride along. Hidden 64, expert width 32, 4 experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .checkpoints import QUANT_CONFIGS, W123, Style

_GROUP = {"weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
          "input_activations": {"num_bits": 4, "type": "float", "group_size": 16,
                                "dynamic": False}}  # fmt: skip
_CT_GROUP = {
    "format": "nvfp4-pack-quantized", "output_activations": None, "targets": ["Linear"],
    "input_activations": {"actorder": None, "dynamic": "local", "group_size": 16, "num_bits": 4,
                          "strategy": "tensor_group", "symmetric": True, "type": "float"},
    "weights": {"actorder": None, "dynamic": False, "group_size": 16, "num_bits": 4,
                "strategy": "tensor_group", "symmetric": True, "type": "float"},
}  # fmt: skip


def modelopt(ignore: list[str], **more: Any) -> dict[str, Any]:
    group = {"group_0": {**_GROUP, "targets": ["Linear"]}}
    return {"config_groups": group, "ignore": ignore, "quant_algo": "NVFP4",
            "producer": {"name": "modelopt"}, "quant_method": "modelopt", **more}  # fmt: skip


def ct(
    ignore: list[str], name: str = "group_0", top: str = "nvfp4-pack-quantized"
) -> dict[str, Any]:
    return {"config_groups": {name: _CT_GROUP}, "format": top, "ignore": ignore,
            "kv_cache_scheme": None, "quant_method": "compressed-tensors",
            "quantization_status": "compressed", "sparsity_config": {}}  # fmt: skip


def mixed(layers: Mapping[str, str], **more: Any) -> dict[str, Any]:
    sizes = {"NVFP4": {"group_size": 16}, "W4A16_NVFP4": {"group_size": 16}}
    table = {n: {"quant_algo": a, **sizes.get(a, {})} for n, a in layers.items()}
    return {"quant_algo": "MIXED_PRECISION", "quant_method": "modelopt",
            "quantized_layers": table, **more}  # fmt: skip


def sizes(model_type: str, layers: int, width: str = "moe_intermediate_size",
          experts: str = "num_experts", **more: Any) -> dict[str, Any]:  # fmt: skip
    return {"model_type": model_type, "hidden_size": 64, width: 32, experts: 4,
            "num_hidden_layers": layers, "hidden_act": "silu", **more}  # fmt: skip


@dataclass(frozen=True)
class Release:
    """One release. ``layer`` holds the experts; ``extra``: name -> (dtype, shape) beside them;
    ``refused``: layer or module -> why it is not loaded; ``missing``: leaves that are not there."""

    config: Mapping[str, Any] | None
    style: Style
    layer: int
    scheme: str = "w4a4"
    kind: str = "silu"
    bias: bool = False
    json: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stem: str = "model"
    extra: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    refused: Mapping[int | str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


MLP = "model.layers.{L}.mlp.experts"
VL = "model.language_model.layers.{L}.mlp.experts"
BLOCK = "model.layers.{L}.block_sparse_moe.experts"
_LM_HEAD = {"lm_head.weight": ("U8", (96, 32)), "lm_head.weight_scale": ("F8_E4M3", (96, 4)),
            "lm_head.weight_scale_2": ("F32", ()), "lm_head.input_scale": ("F32", ())}  # fmt: skip
_KV = {"model.layers.3.self_attn.k_proj.k_scale": ("F32", ()),
       "model.layers.3.self_attn.v_proj.v_scale": ("F32", ())}  # fmt: skip


def _dense(
    path: str, dtype: str = "BF16", names: tuple[str, ...] = ("gate_proj", "up_proj")
) -> dict:
    """Matrices of a shared expert or a dense layer."""
    return {f"{path}.{n}.weight": (dtype, (32, 64)) for n in names}


_NANO = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": {
    "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": [
        "lm_head", "backbone.layers.4.mixer.in_proj", "backbone.layers.5.mixer.q_proj",
        "backbone.layers.0.mixer.conv1d"]}}  # fmt: skip
_R1 = {"producer": {"name": "modelopt"}, "quantization": {
    "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
    "exclude_modules": ["lm_head", "*self_attn*", "mlp.gate"]}}  # fmt: skip
_V4 = QUANT_CONFIGS["deepseek_v4"]
_V4_NVFP4 = {**_V4, "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16,
             "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
             "quantized_layers": {"layers.3.ffn.experts": {"quant_algo": "NVFP4",
                                                           "group_size": 16}}}  # fmt: skip
_SUPER = {f"backbone.layers.1.mixer.experts.{e}.{p}_proj": "NVFP4"
          for e in range(4) for p in ("up", "down")}  # fmt: skip
_FFN = "layers.{L}.ffn.experts"
_LLAMA4 = {
    "model_type": "llama4",
    "text_config": sizes("llama4_text", 48, "intermediate_size", "num_local_experts"),
    "quantization_config": modelopt(["lm_head", "*router*", "*vision_model*"], group_size=16),
}
_GPT_OSS = sizes("gpt_oss", 24, "intermediate_size", "num_local_experts", swiglu_limit=7.0)
_M3 = sizes("minimax_m3", 60, "intermediate_size", "num_local_experts", hidden_act="swigluoai")


def _q(config: Mapping[str, Any], quant: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, "quantization_config": quant}


def _text(model_type: str, text: Mapping[str, Any], quant: Mapping[str, Any]) -> dict[str, Any]:
    """A composite model that keeps its quantization config at the top."""
    return {"model_type": model_type, "text_config": text, "quantization_config": quant}


_MISTRAL = {
    "dim": 64, "n_layers": 36, "moe": {"num_experts": 4, "expert_hidden_dim": 32,
                                       "num_experts_per_tok": 4, "routed_scale": 1.0},
    "quantization": ct(["model.embed_tokens", "re:patch_merger.*", "re:.*gate$",
                        "re:.*attention.*", "lm_head"], "NVFP4A16"),
}  # fmt: skip

RELEASES: dict[str, Release] = {
    "Qwen3-30B-A3B modelopt": Release(
        _q(sizes("qwen3_moe", 48), modelopt(["lm_head", "model.layers.0.mlp.gate"])),
        Style(module=MLP), 0),
    "Qwen3-30B-A3B compressed-tensors": Release(
        _text("qwen3_vl_moe", sizes("qwen3_vl_moe_text", 48),
              ct(["model.visual.blocks.0.attn.qkv", "model.language_model.layers.47.mlp.gate"])),
        Style("compressed_nvfp4", VL), 47,
        extra={"model.visual.blocks.0.attn.qkv.weight": ("BF16", (64, 64))}),
    "Qwen3-235B-A22B": Release(
        _q(sizes("qwen3_moe", 94), modelopt(["lm_head", "model.layers.93.mlp.gate",
           "model.layers.93.self_attn.k_proj"], kv_cache_scheme={"num_bits": 8})),
        Style(module=MLP), 93, extra=_KV),
    "Qwen3-Next-80B modelopt": Release(
        _q(sizes("qwen3_next", 48), modelopt(["lm_head", "mtp*"])), Style(module=MLP), 3,
        extra={**_dense("model.layers.3.mlp.shared_expert", "U8"),
               "model.layers.3.mlp.shared_expert_gate.weight": ("BF16", (1, 64)),
               "mtp.layers.0.mlp.experts.0.down_proj.weight": ("BF16", (64, 32))},
        refused={"mtp.0": "is BF16, not quantized"}),
    "Qwen3-Coder-Next compressed-tensors": Release(
        _q(sizes("qwen3_next", 48), ct(["model.layers.3.mlp.gate", "lm_head"])),
        Style("compressed_nvfp4", MLP), 3),
    "Qwen3.6-35B modelopt": Release(
        _text("qwen3_5_moe", sizes("qwen3_5_moe_text", 40), mixed(
            {"lm_head": "W4A16_NVFP4", "model.language_model.layers.3.mlp.experts": "W4A16_NVFP4",
             "model.language_model.layers.0.linear_attn.out_proj": "FP8"},
            ignore=["mtp.layers.0*", "mtp*"], config_groups={"group_1": {**_GROUP, "targets": [
                "lm_head", "model.language_model.layers.3.mlp.experts"]}})),
        Style(module=VL), 3, scheme="w4a16",
        extra={**_LM_HEAD, "mtp.layers.0.mlp.experts.gate_up_proj": ("BF16", (4, 64, 64)),
               "mtp.layers.0.mlp.experts.down_proj": ("BF16", (4, 64, 32))},
        refused={"mtp.0": "is BF16, not quantized"}),
    "Qwen3.6-35B compressed-tensors": Release(
        _text("qwen3_5_moe", sizes("qwen3_5_moe_text", 40), ct(["lm_head"])),
        Style("compressed_nvfp4", VL), 3),
    "Mixtral-8x7B": Release(
        _q(sizes("mixtral", 32, "intermediate_size", "num_local_experts"),
           modelopt(["lm_head", "*block_sparse_moe.gate*"])),
        Style(module=BLOCK, projections=W123), 0),
    "DeepSeek-R1": Release(
        sizes("deepseek_v3", 61, experts="n_routed_experts"), Style(module=MLP), 3,
        json={"hf_quant_config.json": _R1},
        extra={**_dense("model.layers.0.mlp", "U8"),
               "model.layers.61.mlp.experts.0.up_proj.weight": ("BF16", (32, 64)),
               "model.layers.3.mlp.gate.e_score_correction_bias": ("F32", (4,))},
        refused={61: "layers.61.mlp.experts: weight is BF16, not quantized",
                 0: "layers.0: config.json declares 4 experts, none on disk"}),
    "DeepSeek-R1 quark MXFP4": Release(
        _q(sizes("deepseek_v3", 61, experts="n_routed_experts"), {"quant_method": "quark"}),
        Style(module="model.layers.{L}.mlp.experts"), 3,
        extra={"model.layers.4.mlp.experts.0.up_proj.weight": ("U8", (32, 32)),
               "model.layers.4.mlp.experts.0.up_proj.weight_scale": ("U8", (32, 2))},
        refused={4: "block scales are U8, and the config has no scale_format"}),
    "DeepSeek-V4-Flash": Release(
        _q(sizes("deepseek_v4", 43, experts="n_routed_experts", expert_dtype="fp4"), _V4),
        Style("deepseek_v4", _FFN, W123), 3, scheme="w4a16",
        extra={"layers.3.ffn.gate.tid2eid": ("I64", (96, 6)),
               "layers.3.ffn.shared_experts.w1.weight": ("F8_E4M3", (32, 64)),
               "layers.3.ffn.shared_experts.w1.scale": ("F8_E8M0", (1, 1))}),
    "DeepSeek-V4-Flash-Base": Release(
        _q(sizes("deepseek_v4", 43, experts="n_routed_experts", expert_dtype="fp4"), _V4),
        Style("deepseek_v4", _FFN, W123), 3, scheme="w4a16",
        extra={"layers.4.ffn.experts.0.w1.weight": ("F8_E4M3", (32, 64)),
               "layers.4.ffn.experts.0.w1.scale": ("F32", (1, 1))},
        refused={4: "weight is F8_E4M3, 8 bits a weight, not FP4"}),
    "DeepSeek-V4-Flash-NVFP4": Release(
        _q(sizes("deepseek_v4", 43, experts="n_routed_experts"), _V4_NVFP4),
        Style("modelopt", _FFN, W123), 3),
    "DeepSeek-V4-Flash-NVFP4 mtp": Release(
        _q(sizes("deepseek_v4", 43, experts="n_routed_experts"), _V4_NVFP4),
        Style("deepseek_v4", "mtp.{L}.ffn.experts", W123), 0, scheme="w4a16"),
    "Kimi-K2.5": Release(
        {"model_type": "kimi_k25", "text_config": {
            **sizes("kimi_k2", 61, experts="n_routed_experts"), "quantization_config": modelopt(
                ["lm_head", "language_model.layers.1.self_attn*"], group_size=16)}},
        Style(module="language_model.layers.{L}.mlp.experts"), 1,
        extra={"language_model.layers.1.mlp.gate.e_score_correction_bias": ("F32", (4,)),
               "language_model.layers.2.mlp.experts.0.up_proj.weight_packed": ("I32", (32, 8)),
               "language_model.layers.2.mlp.experts.0.up_proj.weight_shape": ("I64", (2,))},
        refused={2: "weight_packed is I32, packed integers, not FP4"}),
    "Kimi-K3": Release(
        _text("kimi_k3", {**sizes("kimi_linear", 93), "hidden_size": 128, "hidden_act": "situ",
                          "routed_expert_hidden_size": 64},
              mixed({"language_model.model.layers.1.block_sparse_moe.experts": "NVFP4",
                     "language_model.model.layers.1.self_attn.q_proj": "FP8_PB_WO"})),
        Style(module="language_model.model.layers.{L}.block_sparse_moe.experts",
              projections=W123), 1,
        extra={"language_model.model.layers.1.block_sparse_moe.routed_expert_down_proj.weight":
               ("BF16", (64, 128))}),
    "gpt-oss-20b": Release(
        _q(_GPT_OSS, QUANT_CONFIGS["gpt_oss"]), Style("gpt_oss", MLP), 0, scheme="w4a16",
        bias=True, extra={"model.layers.0.mlp.router.bias": ("BF16", (4,)),
                          "model.layers.0.self_attn.sinks": ("BF16", (8,))}),
    "gpt-oss-20b NVFP4": Release(
        _q(_GPT_OSS, modelopt(["lm_head", "*router*"])),
        Style("modelopt_stacked", MLP, stacking=(True, True)), 0, bias=True),
    "gpt-oss-120b": Release(
        _q({**_GPT_OSS, "num_hidden_layers": 36}, QUANT_CONFIGS["gpt_oss"]),
        Style("gpt_oss", MLP), 35, scheme="w4a16", bias=True),
    "Llama-4-Scout": Release(
        _LLAMA4, Style("modelopt_stacked", "language_model.model.layers.{L}.feed_forward.experts",
                       stacking=(True, False)), 1,
        extra={"language_model.model.layers.1.feed_forward.shared_expert.up_proj.weight":
               ("U8", (32, 32))}),
    "Llama-4-Maverick": Release(
        _LLAMA4, Style("modelopt_stacked", "language_model.model.layers.{L}.feed_forward.experts",
                       stacking=(True, False)), 47,
        extra=_dense("language_model.model.layers.46.feed_forward", "U8"),
        refused={46: "layers.46: config.json declares 4 experts, none on disk"}),
    "GLM-4.5-Air compressed-tensors": Release(
        _q(sizes("glm4_moe", 46, experts="n_routed_experts"), ct(["lm_head", "re:.*mlp.gate$"])),
        Style("compressed_nvfp4", MLP), 1,
        extra={"model.layers.1.mlp.gate.e_score_correction_bias": ("F32", (4,))}),
    "GLM-4.7": Release(
        _q(sizes("glm4_moe", 92, experts="n_routed_experts"), modelopt(["lm_head"])),
        Style(module=MLP), 3,
        extra={"model.layers.92.mlp.experts.0.gate_proj.weight": ("BF16", (32, 64))},
        refused={92: "weight is BF16, not quantized"}),
    "GLM-5": Release(
        _q(sizes("glm_moe_dsa", 78, experts="n_routed_experts"),
           modelopt(["lm_head", "*shared_experts*", "*indexer*"])),
        Style(module=MLP), 3, extra=_dense("model.layers.3.mlp.shared_experts")),
    "GLM-5.3-Flash nvidia": Release(
        _text("glm5_next", sizes("glm5_next_text", 45, experts="n_routed_experts"),
              modelopt(["*shared_experts*", "*mlp.gate", "*self_attn*"])),
        Style(module=VL), 5, extra=_dense("model.language_model.layers.0.mlp", "U8")),
    "GLM-5.3-Flash mixed": Release(
        _text("glm5_next", sizes("glm5_next_text", 45, experts="n_routed_experts"),
              mixed({"model.language_model.layers.5.mlp.experts": "NVFP4"})),
        Style(module=VL), 5),
    "GLM-5.3-Flash compressed-tensors": Release(
        _text("glm5_next", sizes("glm5_next_text", 45, experts="n_routed_experts"),
              ct(["lm_head"], top="mixed-precision")),
        Style("compressed_nvfp4", VL), 3),
    "MiniMax-M2.7": Release(
        _q(sizes("minimax_m2", 62, "intermediate_size", "num_local_experts"),
           modelopt(["lm_head", "model.layers.61.block_sparse_moe.gate",
                     "model.layers.61.self_attn*"])),
        Style(module=BLOCK, projections=W123), 61,
        extra={"model.layers.61.block_sparse_moe.e_score_correction_bias": ("BF16", (4,))},
        refused={}, missing=("2.w1.input_scale", "2.w2.input_scale", "2.w3.input_scale")),
    "MiniMax-M3": Release(
        _text("minimax_m3_vl", _M3, mixed(
            {"language_model.model.layers.3.block_sparse_moe.experts": "NVFP4",
             "language_model.model.layers.3.self_attn.q_proj": "MXFP8"})),
        Style(module="language_model.model.layers.{L}.block_sparse_moe.experts",
              projections=W123), 3,
        extra=_dense("language_model.model.layers.3.block_sparse_moe.shared_experts")),
    "MiniMax-M3 MXFP8": Release(
        _text("minimax_m3_vl", _M3, {"quant_method": "mxfp8"}),
        Style(module="language_model.model.layers.{L}.block_sparse_moe.experts",
              projections=W123), 3,
        extra={"language_model.model.layers.4.block_sparse_moe.experts.0.w1.weight":
               ("F8_E4M3", (32, 64))},
        refused={4: "weight is F8_E4M3, 8 bits a weight, not FP4"}),
    "Nemotron-3-Nano": Release(
        {**sizes("nemotron_h", 52, experts="n_routed_experts"), "mlp_hidden_act": "relu2"},
        Style(module="backbone.layers.{L}.mixer.experts"), 1, kind="relu2",
        json={"hf_quant_config.json": _NANO},
        extra={"backbone.layers.1.mixer.gate.weight": ("F32", (4, 64)),
               "backbone.layers.1.mixer.shared_experts.up_proj.weight": ("U8", (64, 32))}),
    "Nemotron-3-Super": Release(
        _q({**sizes("nemotron_h", 88, experts="n_routed_experts"), "hidden_size": 256,
            "moe_latent_size": 64, "mlp_hidden_act": "relu2"}, mixed(
            {**_SUPER, "backbone.layers.1.mixer.shared_experts.up_proj": "FP8"}, ignore=[])),
        Style(module="backbone.layers.{L}.mixer.experts"), 1, kind="relu2",
        extra={"backbone.layers.1.mixer.fc1_latent_proj.weight": ("F8_E4M3", (64, 256))}),
    "Gemma-4-26B modelopt": Release(
        _text("gemma4", {**sizes("gemma4_text", 30), "hidden_activation": "gelu_pytorch_tanh"},
              modelopt(["lm_head", "model.vision*", "model.language_model.layers.0.router*"])),
        Style(module="model.language_model.layers.{L}.moe.experts", input_scales=False), 0,
        scheme="w4a16",
        extra={"model.language_model.layers.0.router.per_expert_scale": ("BF16", (4,)),
               **_dense("model.language_model.layers.0.mlp", "U8")}),
    "Gemma-4-26B compressed-tensors": Release(
        _text("gemma4", sizes("gemma4_text", 30), ct(["lm_head"])),
        Style("compressed_nvfp4", "model.language_model.layers.{L}.experts"), 0),
    "Mistral-Small-4": Release(
        None, Style("compressed_nvfp4", "layers.{L}.experts", W123), 17, stem="consolidated",
        json={"params.json": _MISTRAL},
        extra={"layers.17.shared_experts.w2.weight_packed": ("U8", (64, 16)),
               "layers.17.shared_experts.w2.input_global_scale": ("BF16", (1,)),
               "layers.17.gate.weight": ("BF16", (4, 64))}),
    "Mistral-Large-3": Release(
        None, Style("compressed_nvfp4", "layers.{L}.experts", W123), 3, stem="consolidated",
        json={"params.json": {**_MISTRAL, "n_layers": 61}},
        extra=_dense("layers.0.feed_forward", names=W123),
        refused={0: "layers.0: params.json declares 4 experts, none on disk"}),
    "ERNIE-4.5 architecture": Release(
        _q(sizes("ernie4_5_moe", 28, experts="moe_num_experts"), modelopt(["lm_head"])),
        Style(module=MLP), 1,
        extra={"model.layers.1.mlp.moe_statics.e_score_correction_bias": ("F32", (1, 4)),
               **_dense("model.layers.1.mlp.shared_experts")}),
}  # fmt: skip
