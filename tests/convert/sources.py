"""Checkpoints to convert, with the real numbers they hold: 16-bit, FP8 and every FP4 dialect."""

from pathlib import Path

import numpy as np
import torch

from rubin_moe.formats.experts import ProjectionWeights
from rubin_moe.loader.load import ModelCheckpoint, load_experts
from tests.loader.checkpoints import MODEL_CONFIG, Folder, Style, folder, layer
from tests.oracles import moe

MODULE = "model.layers.{L}.mlp.experts"
HIDDEN, WIDTH, EXPERTS = 64, 32, 4

FP4 = {
    "modelopt": Style(),
    "modelopt_stacked": Style("modelopt_stacked", stacking=(True, True)),
    "compressed_nvfp4": Style("compressed_nvfp4"),
    "compressed_mxfp4": Style("compressed_mxfp4"),
    "gpt_oss": Style("gpt_oss"),
    "deepseek_v4": Style("deepseek_v4", module="layers.{L}.ffn.experts"),
    "rubin_ue5m3": Style("rubin_ue5m3"),
}


def write_fp4(path: Path, name: str, bias: bool = False, shards: int = 1) -> tuple[Path, moe.Layer]:
    """A one-layer checkpoint of an FP4 dialect and the oracle's layer behind it."""
    style = FP4[name]
    source = layer(style.fmt, bias=bias)
    kind = {"modelopt_stacked": "gpt_oss", "gpt_oss": "gpt_oss"}.get(name, "qwen3_moe")
    made = folder(source, style, model_type=kind)
    made.tensors |= others()
    made.shards = shards
    return made.write(path), source


def others() -> dict[str, torch.Tensor]:
    """What is copied: a head, a router, a norm, an attention matrix."""
    rng = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(torch.bfloat16)

    return {
        "model.embed_tokens.weight": normal(96, HIDDEN),
        "model.norm.weight": normal(HIDDEN),
        "model.layers.0.mlp.gate.weight": normal(EXPERTS, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": normal(HIDDEN, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": normal(32, HIDDEN),
        "lm_head.weight": normal(96, HIDDEN),
    }


def matrices(seed: int = 0) -> dict[tuple[int, str], torch.Tensor]:
    """(expert, projection) -> float32 ``[N, K]`` on the bfloat16 grid, of different magnitudes."""
    rng = torch.Generator().manual_seed(seed)
    found = {}
    for e in range(EXPERTS):
        for p, shape in (("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)),
                         ("down", (HIDDEN, WIDTH))):  # fmt: skip
            matrix = torch.randn(shape, generator=rng) * 0.02 * (1 + e) * (2 if p == "up" else 1)
            found[e, p] = matrix.to(torch.bfloat16).float()
    return found


def write_dense(path: Path, kind: str, layers: int = 1, shards: int = 1) -> Path:
    """``bf16``, ``fp16`` or ``fp32``; ``stacked`` (as Qwen3.5) or ``gpt_oss`` (transposed,
    alternating); ``fp8``: blocks of 16 x 16 with ``weight_scale_inv``."""
    tensors: dict[str, torch.Tensor] = {}
    config = {**MODEL_CONFIG, "num_hidden_layers": layers}
    for index in range(layers):
        values, module = matrices(index), MODULE.format(L=index)
        if kind in ("stacked", "gpt_oss"):
            config["model_type"] = "gpt_oss" if kind == "gpt_oss" else "qwen3_5_moe"
            tensors |= {f"{module}.{n}": t for n, t in _stacked(values, kind).items()}
            continue
        for (e, p), matrix in values.items():
            path_ = f"{module}.{e}.{p}_proj"
            if kind == "fp8":
                tensors |= {f"{path_}.{n}": t for n, t in _fp8(matrix).items()}
            else:
                dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
                tensors[f"{path_}.weight"] = matrix.to(dtype)
    if kind == "fp8":
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    return Folder({**tensors, **others()}, config, shards=shards).write(path)


def _stacked(values: dict[tuple[int, str], torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    found = {}
    for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        rows = []
        for e in range(EXPERTS):
            both = [values[e, p] for p in parts]
            whole = torch.stack(both, 1).flatten(0, 1) if kind == "gpt_oss" else torch.cat(both)
            rows.append(whole.T if kind == "gpt_oss" else whole)
        found[name] = torch.stack(rows).to(torch.bfloat16).contiguous()
    if kind == "gpt_oss":
        found["gate_up_proj_bias"] = torch.arange(EXPERTS * 2.0 * WIDTH).reshape(EXPERTS, -1)
        found["down_proj_bias"] = torch.ones(EXPERTS, HIDDEN)
        found |= {n: t.to(torch.bfloat16) for n, t in found.items()}
    return found


def _fp8(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    n, k = matrix.shape
    blocks = matrix.reshape(n // 16, 16, k // 16, 16)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scale).to(torch.float8_e4m3fn).reshape(n, k)
    return {"weight": codes, "weight_scale_inv": scale.reshape(n // 16, k // 16)}


def fp8_values(seed: int = 0) -> dict[tuple[int, str], torch.Tensor]:
    """What the FP8 checkpoint decodes to."""
    found = {}
    for key, matrix in matrices(seed).items():
        stored = _fp8(matrix)
        wide = stored["weight_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
        found[key] = stored["weight"].float() * wide
    return found


def decoded(path: Path, index: int | str = 0) -> dict[tuple[int, str], np.ndarray]:
    """(expert, projection) -> float64 values of an FP4 checkpoint, loaded by the loader and
    decoded by the oracle."""
    with ModelCheckpoint(path) as checkpoint:
        weights = load_experts(checkpoint, index, input_scales="ignore")
    w13, w2 = (_dense(p, weights.fmt.name) for p in (weights.w13, weights.w2))
    half = w13.shape[1] // 2
    found = {}
    for e in range(len(w13)):
        found |= {(e, "gate"): w13[e, :half], (e, "up"): w13[e, half:], (e, "down"): w2[e]}
    return found


def _dense(part: ProjectionWeights, fmt: str) -> np.ndarray:
    return moe.Projection(part.qdata.numpy(), part.sf.numpy(), part.dec.numpy()).dense(fmt)


def of_layer(source: moe.Layer) -> dict[tuple[int, str], np.ndarray]:
    """The same of an oracle layer."""
    w13, w2 = source.w13.dense(source.fmt), source.w2.dense(source.fmt)
    half = w13.shape[1] // 2
    found = {}
    for e in range(len(w13)):
        found |= {(e, "gate"): w13[e, :half], (e, "up"): w13[e, half:], (e, "down"): w2[e]}
    return found
