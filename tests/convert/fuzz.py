"""Damaged checkpoints: what is drawn, and what must hold of each.

A case changes a sound checkpoint in one to three places: a header's field, a tensor's bytes, a
config's value, the index. Reading it must give an error of this package, or exactly the values
that the oracle decodes from the bytes that are there; nothing else may come out, in any time that
a file of this size takes.
"""

import copy
import json
import struct
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert
from rubin_moe.errors import CheckpointError, RubinMoeError
from rubin_moe.loader.load import ModelCheckpoint, load_experts
from rubin_moe.loader.summary import summarize
from tests.loader.checkpoints import Style, folder, layer
from tests.oracles import moe

from .sources import of_layer, others

DIALECTS = ("modelopt", "compressed_nvfp4", "compressed_mxfp4", "gpt_oss", "rubin_ue5m3")
TARGETS = ("nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4", "bf16")


@dataclass
class Damaged:
    """A checkpoint in memory.

    Attributes:
        header: of its one file; data: the bytes after it; config, index: JSON, or raw bytes.
        source: the oracle's layer, with the changes that were made to its bytes.
    """

    header: dict[str, Any]
    data: bytearray
    config: Any
    source: moe.Layer
    index: Any = None
    raw: dict[str, bytes] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.header).encode()
        whole = struct.pack("<Q", len(text)) + text + bytes(self.data)
        (path / "model.safetensors").write_bytes(self.raw.get("weights", whole))
        (path / "config.json").write_bytes(self.raw.get("config", json.dumps(self.config).encode()))
        listed = path / "model.safetensors.index.json"
        listed.unlink(missing_ok=True)
        if self.index is not None:
            listed.write_text(json.dumps(self.index))
        return path


@cache
def _sound(dialect: str) -> tuple[Any, moe.Layer]:
    source = layer(Style(dialect).fmt)
    kind = "gpt_oss" if dialect == "gpt_oss" else "qwen3_moe"
    made = folder(source, Style(dialect), model_type=kind)
    made.tensors |= others()
    return made, source


def sound(dialect: str) -> Damaged:
    """A fresh copy, tensors in the order of their names."""
    made, source = _sound(dialect)
    header, data = {}, bytearray()
    codes = {
        torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32",
        torch.bfloat16: "BF16",
    }  # fmt: skip
    for name, tensor in sorted(made.tensors.items()):
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": codes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return Damaged(header, data, copy.deepcopy(dict(made.config)), copy.deepcopy(source))


# -- what is drawn ---------------------------------------------------------------------------------

JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 70), st.integers(-(2**70), 2**70),
    st.text(max_size=3), st.floats(), st.lists(st.integers(-1, 70), max_size=4), st.builds(dict),
    st.sampled_from(["U8", "I8", "F8_E4M3", "F32", "BF16", "F64", "nvfp4", "ue5m3", "NVFP4", "*"]),
)  # fmt: skip


@st.composite
def damaged_headers(draw: st.DrawFn) -> Damaged:
    """Fields of the header and of the index, names, and the file's own bytes."""
    case = sound(draw(st.sampled_from(DIALECTS)))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(case.header)))
        entry = case.header[name]
        match draw(st.integers(0, 9)):
            case 0:
                del case.header[name]
            case 1:
                new = name + draw(st.sampled_from(["x", ".x", "_scale", ".0", "é", "\0"]))
                case.header[new] = case.header.pop(name)
            case 2 | 3 if isinstance(entry, dict):
                entry[draw(st.sampled_from(["dtype", "shape", "data_offsets"]))] = draw(JUNK)
            case 4 if isinstance(entry, dict) and isinstance(entry.get("shape"), list):
                entry["shape"] = draw(st.sampled_from(_reshaped(entry["shape"])))
            case 5:
                case.header[name] = draw(JUNK)
            case 6:
                del case.data[draw(st.integers(0, len(case.data))) :]
            case 7:
                case.raw["weights"] = draw(st.binary(max_size=40))
            case 8:
                file = draw(st.sampled_from(
                    ["../model.safetensors", "/etc/passwd", "a/../../b.safetensors", "x.bin",
                     "model.safetensors", "missing.safetensors", "", "a\0.safetensors"]
                ))  # fmt: skip
                case.index = {"weight_map": dict.fromkeys(sorted(case.header), file)}
            case _:
                case.index = draw(JUNK | st.fixed_dictionaries({"weight_map": JUNK}))
    return case


def _reshaped(shape: list[int]) -> list[list[int]]:
    """Other shapes, some of the same size."""
    found: list[list[int]] = [shape[::-1], [1, *shape], [*shape, 1], [], [0], [2**40, 2**40]]
    if shape and isinstance(shape[0], int):
        found += [[shape[0] * 2, *shape[1:]], [2**62, *shape[1:]]]
    return found


CONFIG_KEYS = (
    "hidden_size", "moe_intermediate_size", "num_experts", "num_hidden_layers", "hidden_act",
    "model_type", "quantization_config", "text_config", "num_local_experts", "n_routed_experts",
)  # fmt: skip
QUANT_KEYS = (
    "quant_method", "quant_algo", "group_size", "scale_format", "format", "ignore",
    "config_groups", "exclude_modules", "quantized_layers", "moe_quant_algo", "activations",
)  # fmt: skip


@st.composite
def damaged_configs(draw: st.DrawFn) -> Damaged:
    """Values of config.json and of its quantization config."""
    case = sound(draw(st.sampled_from(DIALECTS)))
    for _ in range(draw(st.integers(1, 3))):
        quant = case.config.get("quantization_config")
        if isinstance(quant, dict) and draw(st.booleans()):
            key = draw(st.sampled_from(QUANT_KEYS))
            quant[key] = draw(JUNK)
        elif draw(st.integers(0, 15)) == 0:
            case.raw["config"] = draw(st.binary(max_size=30) | st.just(b"[" * 100_000))
        else:
            case.config[draw(st.sampled_from(CONFIG_KEYS))] = draw(JUNK)
    return case


@st.composite
def damaged_scales(draw: st.DrawFn) -> Damaged:
    """Bytes of block scales and of codes, and globals, changed in the oracle's layer as well."""
    dialect = draw(st.sampled_from(DIALECTS))
    case = sound(dialect)
    proj = draw(st.sampled_from([case.source.w13, case.source.w2]))
    kind = draw(st.sampled_from(["sf", "qdata", "dec"]))
    array = getattr(proj, kind)
    if kind == "dec":
        if Style(dialect).fmt != "nvfp4-ue4m3":
            kind, array = "sf", proj.sf
        else:
            value = draw(st.floats(width=32) | st.sampled_from([0.0, -1.0, 1e-40, 1e30]))
            array[draw(st.integers(0, 3)), 0] = value
    if kind != "dec":
        flat = array.reshape(-1)
        for _ in range(draw(st.integers(1, 4))):
            flat[draw(st.integers(0, flat.size - 1))] = draw(st.integers(0, 255))
    model = "gpt_oss" if dialect == "gpt_oss" else "qwen3_moe"
    with np.errstate(all="ignore"):
        made = folder(case.source, Style(dialect), model_type=model)
    fresh = {n: t for n, t in made.tensors.items() if n in case.header}
    for name, tensor in fresh.items():
        start, stop = case.header[name]["data_offsets"]
        case.data[start:stop] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return case


# -- what must hold --------------------------------------------------------------------------------


def check_reading(case: Damaged, path: Path) -> bool:
    """Opens, summarizes and loads; whether it could be loaded."""
    case.write(path)
    try:
        with ModelCheckpoint(path) as checkpoint:
            summary = summarize(checkpoint)
            weights = load_experts(checkpoint, 0, input_scales="ignore")
    except RubinMoeError:
        return False
    assert not any(x.faults for x in summary.layers), "a summary's fault was no fault"
    want = of_layer(case.source)
    for part, names in ((weights.w13, ("gate", "up")), (weights.w2, ("down",))):
        loaded = moe.Projection(part.qdata.numpy(), part.sf.numpy(), part.dec.numpy())
        dense = loaded.dense(weights.fmt.name)
        assert np.isfinite(dense).all()
        rows = dense.shape[1] // len(names)
        for half, name in enumerate(names):
            for e in range(len(dense)):
                got = dense[e, half * rows : (half + 1) * rows]
                close = np.array_equal(got, want[e, name])
                # 1 / (1 / dec) of a changed dec may be a unit in the last place off
                assert close or np.allclose(got, want[e, name], rtol=2**-22, atol=0), (e, name)
    return True


def check_conversion(case: Damaged, target: str, path: Path, out: Path) -> bool:
    """Converts; whether it could. The result loads, or nothing is there.

    What only shows among all experts of a layer, a conversion does not see: it holds one. Then
    source and result are refused alike.
    """
    case.write(path)
    try:
        convert(path, out, Options(target), jobs=1)  # type: ignore[arg-type]
    except RubinMoeError:
        assert not out.exists()
        return False
    if target != "bf16":
        with ModelCheckpoint(out) as checkpoint:
            assert summarize(checkpoint).loads
        unlike = unlike_peers(out)
        assert not unlike or unlike_peers(path)
    return True


def unlike_peers(path: Path) -> bool:
    """Whether loading refuses an expert for scales far from those of the others."""
    with ModelCheckpoint(path) as checkpoint:
        try:
            load_experts(checkpoint, 0, input_scales="ignore")
        except CheckpointError as e:
            if "times the median" not in str(e):
                raise
            return True
    return False
