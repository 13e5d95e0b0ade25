"""Tiny real checkpoints in every dialect, written from the oracle's layers.

The writers know the formats' definitions and the producers' spellings, and nothing of
`rubin_moe.loader`. ``expert_tensors`` gives one layer's tensors, ``write`` a folder.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.oracles import moe, problems

HF = ("gate_proj", "up_proj", "down_proj")
W123 = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Style:
    """How a producer spells one layer.

    ``dialect``: modelopt, modelopt_stacked, compressed_nvfp4, compressed_mxfp4, gpt_oss,
    deepseek_v4 or rubin_ue5m3. ``stacking``: (transposed, interleaved) of stacked tensors;
    ``global_form``: scalar, expert or half, for stacked global scales.
    """

    dialect: str = "modelopt"
    module: str = "model.layers.{L}.mlp.experts"
    projections: tuple[str, str, str] = HF
    index_last: bool = False
    input_scales: bool = True
    stacking: tuple[bool, bool] = (True, True)
    global_form: str = "half"

    @property
    def fmt(self) -> str:
        """The oracle's name of the format."""
        if self.dialect in ("compressed_mxfp4", "gpt_oss", "deepseek_v4"):
            return "mxfp4"
        return "nvfp4-ue5m3" if self.dialect == "rubin_ue5m3" else "nvfp4-ue4m3"


def input_scales(num_experts: int, halves: int, fc: int) -> np.ndarray:
    """float32 ``[E, halves]`` of FC1 (0) or FC2 (1): distinct powers-of-two-free values whose
    reciprocals round back to themselves."""
    e, h = np.meshgrid(np.arange(num_experts), np.arange(halves), indexing="ij")
    return round_trip((0.01 * (fc + 1) * (1 + e) * (1 + 0.1 * h)).astype(np.float32))


def round_trip(values: np.ndarray) -> np.ndarray:
    """Nearby float32 values with ``1 / (1 / v) == v``, so that both conventions can store them."""
    values = values.astype(np.float32)
    for _ in range(50):
        back = np.float32(1) / (np.float32(1) / values)
        if (back == values).all():
            return values
        values = back
    raise AssertionError("no fixed point")


def layer(fmt: str, seed: int = 0, **fields: Any) -> moe.Layer:
    """A random oracle layer whose globals both conventions can store."""
    made = problems.layer(seed, fmt, **fields)
    parts = [moe.Projection(p.qdata, p.sf, round_trip(p.dec), p.bias) for p in (made.w13, made.w2)]
    if fmt == "nvfp4-ue5m3":
        parts = [moe.Projection(p.qdata, p.sf, np.ones_like(p.dec), p.bias) for p in parts]
    return moe.Layer(**{**made.__dict__, "w13": parts[0], "w2": parts[1]})


@dataclass(frozen=True)
class _Matrix:
    """One projection of all experts: arrays as in the oracle, dec ``[E, n]``."""

    qdata: np.ndarray
    sf: np.ndarray
    dec: np.ndarray
    input_dec: np.ndarray
    bias: np.ndarray | None


def _matrices(source: moe.Layer, names: Sequence[str]) -> dict[str, _Matrix]:
    e, halves = source.w13.dec.shape
    rows = source.w13.qdata.shape[1] // halves
    ins = input_scales(e, halves, 0), input_scales(e, 1, 1)
    found = {}
    for half, name in enumerate(names[2 - halves : 2]):
        r = slice(half * rows, (half + 1) * rows)
        bias = None if source.w13.bias is None else source.w13.bias[:, r]
        h = slice(half, half + 1)
        found[name] = _Matrix(
            source.w13.qdata[:, r], source.w13.sf[:, r], source.w13.dec[:, h], ins[0][:, h], bias
        )
    w2 = source.w2
    found[names[2]] = _Matrix(w2.qdata, w2.sf, w2.dec, ins[1], w2.bias)
    return found


def expert_tensors(source: moe.Layer, style: Style, index: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of layer ``index``'s routed experts."""
    module = style.module.format(L=index)
    if style.dialect in ("modelopt_stacked", "gpt_oss"):
        return {f"{module}.{n}": t for n, t in _stacked(source, style).items()}
    tensors = {}
    for name, m in _matrices(source, style.projections).items():
        for e in range(m.qdata.shape[0]):
            path = f"{name}.{e}" if style.index_last else f"{e}.{name}"
            for leaf, t in _leaves(style, m, e).items():
                tensors[f"{module}.{path}.{leaf}"] = t
    return tensors


def _leaves(style: Style, m: _Matrix, e: int) -> dict[str, torch.Tensor]:
    qdata, sf = _bytes(m.qdata[e]), _bytes(m.sf[e])
    dec, act = torch.tensor(float(m.dec[e, 0])), torch.tensor(float(m.input_dec[e, 0]))
    match style.dialect:
        case "modelopt":
            found = {"weight": qdata, "weight_scale": sf.view(torch.float8_e4m3fn)}
            found |= {"weight_scale_2": dec, "input_scale": act}
        case "compressed_nvfp4":
            found = {"weight_packed": qdata, "weight_scale": sf.view(torch.float8_e4m3fn)}
            found |= {"weight_global_scale": (1 / dec).reshape(1)}
            found |= {"input_global_scale": (1 / act).reshape(1)}
        case "compressed_mxfp4":
            found = {"weight_packed": qdata, "weight_scale": sf}
        case "deepseek_v4":
            found = {"weight": qdata.view(torch.int8), "scale": sf.view(torch.float8_e8m0fnu)}
        case "rubin_ue5m3":
            found = {"weight": qdata, "weight_scale": sf, "input_scale": act}
            if float(dec) != 1:
                found["weight_scale_2"] = dec
        case _:
            raise ValueError(style.dialect)
    if not style.input_scales:
        found = {k: v for k, v in found.items() if not k.startswith("input_")}
    if m.bias is not None:
        found["bias"] = torch.from_numpy(m.bias[e].copy()).to(torch.bfloat16)
    return found


def _stacked(source: moe.Layer, style: Style) -> dict[str, torch.Tensor]:
    transposed, interleaved = style.stacking if style.dialect != "gpt_oss" else (False, True)
    found = {}
    for name, proj, fc in (("gate_up_proj", source.w13, 0), ("down_proj", source.w2, 1)):
        halves = proj.dec.shape[1]
        order = _order(proj.qdata.shape[1], halves, interleaved)
        q, sf = proj.qdata[:, order], proj.sf[:, order]
        if transposed:
            q, sf = q.swapaxes(1, 2), sf.swapaxes(1, 2)
        if style.dialect == "gpt_oss":
            found[f"{name}_blocks"] = _bytes(q.reshape(*sf.shape, 16))
            found[f"{name}_scales"] = _bytes(sf)
        else:
            found[name] = _bytes(q)
            found[f"{name}_weight_scale"] = _bytes(sf).view(torch.float8_e4m3fn)
            found[f"{name}_weight_scale_2"] = _globals(proj.dec, style.global_form)
            if style.input_scales:
                act = input_scales(proj.dec.shape[0], halves, fc)
                found[f"{name}_input_scale"] = _globals(act, style.global_form)
        if proj.bias is not None:
            bias = torch.from_numpy(proj.bias[:, order].copy())
            found[f"{name}_bias"] = bias.to(torch.bfloat16)
    return found


def _order(rows: int, halves: int, interleaved: bool) -> np.ndarray:
    if halves == 1 or not interleaved:
        return np.arange(rows)
    return np.arange(rows).reshape(2, -1).T.reshape(-1)


def _globals(dec: np.ndarray, form: str) -> torch.Tensor:
    match form:
        case "scalar":
            return torch.tensor(float(dec[0, 0]))
        case "expert":
            return torch.from_numpy(dec[:, 0].copy())
        case _:
            return torch.from_numpy(dec.copy())


def _bytes(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(values, order="C"))  # a copy: tests change it


MODEL_CONFIG: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "norm_topk_prob": True,
    "hidden_act": "silu",
}

_NVFP4_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
    "input_activations": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
}

QUANT_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
                 "config_groups": {"group_0": _NVFP4_GROUP}, "ignore": ["lm_head", "*.mlp.gate"]},
    "modelopt_stacked": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
                         "exclude_modules": ["lm_head", "*router*"]},
    "compressed_nvfp4": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                         "config_groups": {"group_0": {**_NVFP4_GROUP,
                                                       "format": "nvfp4-pack-quantized"}},
                         "ignore": ["lm_head", "re:.*mlp.gate$"]},
    "compressed_mxfp4": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
                         "config_groups": {"group_0": {
                             "targets": ["Linear"], "input_activations": None,
                             "weights": {"num_bits": 4, "type": "float", "group_size": 32}}},
                         "ignore": ["lm_head"]},
    "gpt_oss": {"quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                           "model.embed_tokens", "lm_head"]},
    "deepseek_v4": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                    "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    "rubin_ue5m3": {"quant_method": "rubin_moe", "format": "nvfp4", "scale_format": "ue5m3",
                    "group_size": 16, "ignore": ["lm_head"]},
}  # fmt: skip


@dataclass
class Folder:
    """What goes into a checkpoint folder; change it, then ``write``.

    ``config``: config.json. ``json``: other files by name. ``stem``: of the safetensors files
    (``consolidated`` in Mistral's releases).
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    config: Mapping[str, Any] | None = field(default_factory=dict)
    json: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    shards: int = 1
    stem: str = "model"

    def write(self, path: Path) -> Path:
        """Files of ``shards`` about equal parts, with an index if there are several."""
        path.mkdir(parents=True, exist_ok=True)
        files = dict(self.json)
        if self.config is not None:
            files["config.json"] = self.config
        names, weight_map = list(self.tensors), {}
        for i in range(self.shards):
            file = f"{self.stem}-{i + 1:05d}-of-{self.shards:05d}.safetensors"
            part = {n: self.tensors[n] for n in names[i :: self.shards]}
            save_file(part, path / (file if self.shards > 1 else f"{self.stem}.safetensors"))
            weight_map |= dict.fromkeys(part, file)
        if self.shards > 1:
            index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
            files[f"{self.stem}.safetensors.index.json"] = index
        for name, content in files.items():
            (path / name).write_text(json.dumps(content))
        return path


def folder(source: moe.Layer, style: Style, **config: Any) -> Folder:
    """A one-layer checkpoint of ``source`` with its configs."""
    e, halves = source.w13.dec.shape
    sizes = {
        "hidden_size": source.w2.qdata.shape[1],
        "moe_intermediate_size": source.w13.qdata.shape[1] // halves,
        "num_experts": e,
        "hidden_act": source.kind,
    }
    quant = {"quantization_config": dict(QUANT_CONFIGS[style.dialect])}
    return Folder(expert_tensors(source, style), {**MODEL_CONFIG, **sizes, **quant, **config})


def assert_same(weights: Any, source: moe.Layer) -> None:
    """The loaded `ExpertWeights` hold exactly the oracle's weights, in float64."""
    for got, want in ((weights.w13, source.w13), (weights.w2, source.w2)):
        bias = None if got.bias is None else got.bias.numpy()
        loaded = moe.Projection(got.qdata.numpy(), got.sf.numpy(), got.dec.numpy(), bias)
        np.testing.assert_array_equal(loaded.dense(weights.fmt.name), want.dense(source.fmt))
        if want.bias is None:
            assert bias is None
        else:
            stored = torch.from_numpy(want.bias).to(torch.bfloat16).float().numpy()
            np.testing.assert_array_equal(bias, stored)
