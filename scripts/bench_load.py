"""How fast one layer of experts loads, beside safetensors reading the same bytes.

``ratio`` is our speed over theirs: opening the file, taking every tensor of the layer and copying
it into memory of its own, which is the least that any loader does. Both read from the page cache;
every measurement has a process of its own, as a server's start has, and the two take turns; the
figures are medians over rounds. ``peak_extra_bytes`` is the most anonymous memory that loading
held beyond the result.

    python scripts/bench_load.py
"""

import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors import safe_open
from safetensors.torch import save_file

from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.loader.load import ModelCheckpoint, load_experts
from rubin_moe.loader.sharding import Shard
from rubin_moe.provenance import provenance, write_result

RESULT = Path(__file__).parents[1] / "docs/results/load.json"
MODULE = "model.layers.0.mlp.experts"
PEER = "safetensors: open, get_tensor, clone, for every tensor of the file"


@dataclass(frozen=True)
class Layer:
    """One layer to write: ``dialect`` modelopt (a tensor per expert) or stacked (gpt-oss NVFP4)."""

    dialect: str
    num_experts: int = 128
    hidden: int = 2048
    intermediate: int = 768

    def __str__(self) -> str:
        return f"{self.dialect} {self.num_experts} x {self.hidden} x {self.intermediate}"

    def tensors(self) -> dict[str, torch.Tensor]:
        made = {}
        projections = {"gate_proj": (self.intermediate, self.hidden)}
        projections |= {"up_proj": (self.intermediate, self.hidden)}
        projections |= {"down_proj": (self.hidden, self.intermediate)}
        if self.dialect == "stacked":
            projections = {"gate_up_proj": (2 * self.intermediate, self.hidden)}
            projections |= {"down_proj": (self.hidden, self.intermediate)}
            for name, (n, k) in projections.items():
                made[f"{MODULE}.{name}"] = _codes(self.num_experts, k // 2, n)
                made[f"{MODULE}.{name}_weight_scale"] = _scales(self.num_experts, k // 16, n)
                made[f"{MODULE}.{name}_weight_scale_2"] = torch.tensor(2.0**-12)
            return made
        for e in range(self.num_experts):
            for name, (n, k) in projections.items():
                made[f"{MODULE}.{e}.{name}.weight"] = _codes(n, k // 2)
                made[f"{MODULE}.{e}.{name}.weight_scale"] = _scales(n, k // 16)
                made[f"{MODULE}.{e}.{name}.weight_scale_2"] = torch.tensor(2.0**-12)
                made[f"{MODULE}.{e}.{name}.input_scale"] = torch.tensor(0.01)
        return made

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "gpt_oss" if self.dialect == "stacked" else "qwen3_moe",
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.intermediate,
            "num_experts": self.num_experts,
            "num_hidden_layers": 1,
            "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        }


def _codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _scales(*shape: int) -> torch.Tensor:
    return torch.randint(0x48, 0x7F, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def peer(folder: Path) -> list[torch.Tensor]:
    with safe_open(str(folder / "model.safetensors"), "pt") as f:
        return [f.get_tensor(name).clone() for name in f.keys()]  # noqa: SIM118


def ours(folder: Path, shard: Shard) -> ExpertWeights:
    with ModelCheckpoint(str(folder)) as checkpoint:
        return load_experts(checkpoint, 0, shard)


def run_once(what: str, folder: Path, shard: Shard) -> dict[str, float]:
    """Seconds of one load and, for ours, its peak of anonymous memory beyond the result."""
    torch.set_num_threads(1)
    before, peak, done = _anonymous(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(1e-3):
            peak = max(peak, _anonymous())

    thread = threading.Thread(target=sample)
    if what == "peak":
        thread.start()
    start = time.perf_counter()
    result = peer(folder) if what == "peer" else ours(folder, shard)
    elapsed = time.perf_counter() - start
    if what != "peak" or not isinstance(result, ExpertWeights):
        return {"seconds": elapsed}
    done.set()
    thread.join()
    return {"extra": max(peak, _anonymous()) - before - result.nbytes()}


def in_process(what: str, folder: Path, shard: Shard) -> dict[str, float]:
    """`run_once` in a fresh interpreter."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run_once, (what, folder, shard))


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status: this script needs Linux")


def measure(layer: Layer, shard: Shard, rounds: int, parent: Path) -> dict[str, Any]:
    folder = parent / layer.dialect
    if not folder.exists():
        folder.mkdir()
        save_file(layer.tensors(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(layer.config()))
    extra = in_process("peak", folder, shard)["extra"]
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(rounds):
        for what, found in times.items():
            found.append(in_process(what, folder, shard)["seconds"])
    file_bytes = (folder / "model.safetensors").stat().st_size
    theirs, mine = (statistics.median(times[k]) for k in ("peer", "ours"))
    return {
        "layer": str(layer),
        "shard": f"TP {shard.tp_size} EP {shard.ep_size}",
        "file_bytes": file_bytes,
        "expert_bytes": file_bytes // layer.num_experts,
        "ours_s": round(mine, 4),
        "peer_s": round(theirs, 4),
        "ratio": round(theirs / mine, 3),
        "peak_extra_bytes": extra,
    }


def main(rounds: Annotated[int, typer.Option(min=1)] = 9) -> None:
    """Measure and write docs/results/load.json."""
    rows = []
    with tempfile.TemporaryDirectory() as parent:
        for layer, shard in (
            (Layer("modelopt"), Shard()),
            (Layer("modelopt"), Shard(tp_size=2)),
            (Layer("modelopt"), Shard(ep_size=8)),
            (Layer("stacked"), Shard()),
        ):
            rows.append(measure(layer, shard, rounds, Path(parent)))
            print(rows[-1])
    head = provenance(["torch", "safetensors", "numpy"])
    write_result(RESULT, {**head, "threads": 1, "rounds": rounds, "peer": PEER}, rows)


if __name__ == "__main__":
    typer.run(main)
