"""Quantize the demo model's experts: NVFP4 with UE4M3 and with UE5M3 scales, and MXFP4.

    python scripts/quantize_demo_model.py models/kjv

Reads ``bf16`` and the training text there, writes ``nvfp4-ue4m3`` (ModelOpt's form, input scales
calibrated on the training text), ``nvfp4-ue5m3`` (this project's form) and ``mxfp4``
(compressed-tensors' ``mxfp4-pack-quantized``), and prints their SHA-256 for the model card.
Attention, router, norms and embedding stay bfloat16. Block scales are the ones of least squared
error near each format's own rule (`formats.quantize`, ``search``).
"""

import argparse
import hashlib
import json
import lzma
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rubin_moe.eval.heldout import encode_chapters, log_probs, windows
from rubin_moe.formats.quantize import global_dec, quantize
from rubin_moe.formats.spec import MXFP4, NVFP4_UE4M3, NVFP4_UE5M3

CALIBRATION_TOKENS = 1 << 15
EXPERT = re.compile(r"^(?P<expert>.*\.experts\.\d+)\.(?P<projection>gate|up|down)_proj\.weight$")

InputAmax = dict[tuple[str, str], Tensor]
"""(``...experts.N``, ``gate``, ``up`` or ``down``) -> largest magnitude of that GEMM's input."""


@dataclass
class Calibration:
    """Largest magnitudes per layer and expert, filled by `experts_forward`."""

    fc1: dict[int, Tensor] = field(default_factory=dict)
    fc2: dict[int, Tensor] = field(default_factory=dict)

    def experts_forward(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The experts of one layer, in the model's own numerics, watched."""
        zeros = torch.zeros(module.num_experts)
        fc1 = self.fc1.setdefault(id(module), zeros.clone())
        fc2 = self.fc2.setdefault(id(module), zeros.clone())
        out = torch.zeros_like(x)
        for expert in range(module.num_experts):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            if token.numel() == 0:
                continue
            act = module._apply_gate(x[token] @ module.gate_up_proj[expert].T)
            fc1[expert] = torch.maximum(fc1[expert], x[token].abs().max())
            fc2[expert] = torch.maximum(fc2[expert], act.abs().max())
            y = act @ module.down_proj[expert].T
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


def calibrate(master: Path, text: str) -> InputAmax:
    """Runs the master in float32 over the first tokens of ``text``."""
    seen = Calibration()
    ALL_EXPERTS_FUNCTIONS.register("watched", seen.experts_forward)
    model = AutoModelForCausalLM.from_pretrained(
        master, dtype=torch.float32, experts_implementation="watched"
    ).eval()
    ids = encode_chapters(AutoTokenizer.from_pretrained(master), text)[:CALIBRATION_TOKENS]
    for batch in windows(ids, model.config.max_position_embeddings):
        log_probs(model, batch)
    amax: InputAmax = {}
    for name, module in model.named_modules():
        if id(module) not in seen.fc1:
            continue
        for expert in range(module.num_experts):
            for projection, table in (("gate", seen.fc1), ("up", seen.fc1), ("down", seen.fc2)):
                amax[f"{name}.{expert}", projection] = table[id(module)][expert]
    return amax


def modelopt(expert: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """One expert's tensors by ``projection_proj.leaf``; gate and up share one global scale, as
    kernels with a single one a GEMM want."""
    top = {name: weight.abs().max() for name, weight in expert.items()}
    top["gate"] = top["up"] = torch.maximum(top["gate"], top["up"])
    tensors = {}
    for name, weight in expert.items():
        dec = global_dec(top[name], NVFP4_UE4M3)
        blocks = quantize(weight, NVFP4_UE4M3, dec, search=True)
        tensors[f"{name}_proj.weight"] = blocks.qdata
        tensors[f"{name}_proj.weight_scale"] = blocks.sf.view(torch.float8_e4m3fn)
        tensors[f"{name}_proj.weight_scale_2"] = dec
        tensors[f"{name}_proj.input_scale"] = global_dec(inputs[name], NVFP4_UE4M3)
    return tensors


def rubin_ue5m3(expert: dict[str, Tensor], _inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `modelopt`; UE5M3 scales reach far enough to need no global one."""
    tensors = {}
    for name, weight in expert.items():
        blocks = quantize(weight, NVFP4_UE5M3, search=True)
        tensors[f"{name}_proj.weight"] = blocks.qdata
        tensors[f"{name}_proj.weight_scale"] = blocks.sf
    return tensors


def compressed_mxfp4(expert: dict[str, Tensor], _inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `modelopt`."""
    tensors = {}
    for name, weight in expert.items():
        blocks = quantize(weight, MXFP4, search=True)
        tensors[f"{name}_proj.weight_packed"] = blocks.qdata
        tensors[f"{name}_proj.weight_scale"] = blocks.sf
    return tensors


def _group(group_size: int, inputs: dict[str, Any] | None, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "float", "group_size": group_size, "dynamic": False}
    return {
        "targets": ["Linear"],
        "weights": {**scheme, **weights},
        "input_activations": inputs,
    }


def quantization_configs(layers: int) -> dict[str, dict[str, Any]]:
    """``quantization_config`` of each form, in its producer's own words."""
    exact = ["lm_head"]
    for layer in range(layers):
        block = f"model.layers.{layer}"
        exact += [f"{block}.mlp.gate", *(f"{block}.self_attn.{p}_proj" for p in "kqvo")]
    nvfp4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    return {
        "nvfp4-ue4m3": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": _group(16, nvfp4)},
            "ignore": exact,
            "producer": {"name": "rubin-moe"},
        },
        "nvfp4-ue5m3": {
            "quant_method": "rubin_moe",
            "format": "nvfp4",
            "scale_format": "ue5m3",
            "group_size": 16,
            "activations": "dynamic",
            "ignore": exact,
        },
        "mxfp4": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": _group(
                    32, None, strategy="group", symmetric=True, scale_dtype="torch.uint8"
                )
            },
            "ignore": exact,
        },
    }


Packer = Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]
PACKERS: dict[str, Packer] = {
    "nvfp4-ue4m3": modelopt,
    "nvfp4-ue5m3": rubin_ue5m3,
    "mxfp4": compressed_mxfp4,
}


def convert(master: dict[str, Tensor], pack: Packer, amax: InputAmax) -> dict[str, Tensor]:
    """All tensors of a quantized checkpoint."""
    experts: dict[str, dict[str, Tensor]] = {}
    out: dict[str, Tensor] = {}
    for name, tensor in master.items():
        if found := EXPERT.match(name):
            experts.setdefault(found["expert"], {})[found["projection"]] = tensor.float()
        else:
            out[name] = tensor
    for prefix, expert in experts.items():
        inputs = {projection: amax[prefix, projection] for projection in expert}
        out |= {f"{prefix}.{leaf}": t for leaf, t in pack(expert, inputs).items()}
    return {name: tensor.contiguous() for name, tensor in sorted(out.items())}


def write(folder: Path, master: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A folder that serves by itself: weights, config, tokenizer."""
    folder.mkdir(exist_ok=True)
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(master / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    quant = config["quantization_config"]
    if quant["quant_method"] == "modelopt":
        repeated = {
            "producer": quant["producer"],
            "quantization": {
                "quant_algo": quant["quant_algo"],
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": quant["ignore"],
            },
        }
        text = json.dumps(repeated, indent=2) + "\n"
        (folder / "hf_quant_config.json").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds bf16 and corpus")
    folder = parser.parse_args().folder
    master = folder / "bf16"
    text = lzma.decompress((folder / "corpus" / "train.txt.xz").read_bytes()).decode()
    amax = calibrate(master, text)
    tensors = load_file(master / "model.safetensors")
    config = json.loads((master / "config.json").read_text())
    for form, quant in quantization_configs(config["num_hidden_layers"]).items():
        quantized = convert(tensors, PACKERS[form], amax)
        write(folder / form, master, quantized, {**config, "quantization_config": quant})
    for form in ("bf16", *PACKERS):
        data = (folder / form / "model.safetensors").read_bytes()
        print(f"{hashlib.sha256(data).hexdigest()}  {form}/model.safetensors  {len(data)} bytes")


if __name__ == "__main__":
    main()
