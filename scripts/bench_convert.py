"""How fast checkpoints are converted, against a plain copy of the same bytes in the same run.

    python scripts/bench_convert.py

Writes a checkpoint of random experts (16-bit, and NVFP4 made from it) into a temporary folder,
converts it, verification and fsync included, and writes docs/results/convert.json. Rates are of
input bytes; those a CPU second count the time of all processes, and stay what they are on a busy
machine.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert
from rubin_moe.provenance import provenance, write_result

ROOT = Path(__file__).parents[1]
MB = 1e6
HIDDEN, WIDTH = 2048, 768  # of Qwen3-30B-A3B
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": WIDTH,
    "num_experts_per_tok": 8,
    "hidden_act": "silu",
}


def write_source(path: Path, layers: int, experts: int) -> Path:
    """Random bfloat16 experts, one file a layer."""
    path.mkdir()
    rng, weight_map = torch.Generator().manual_seed(0), {}
    for layer in range(layers):
        tensors = {}
        for expert in range(experts):
            for name, shape in (
                ("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH)),
            ):  # fmt: skip
                matrix = 0.02 * torch.randn(shape, generator=rng)
                module = f"model.layers.{layer}.mlp.experts.{expert}"
                tensors[f"{module}.{name}_proj.weight"] = matrix.to(torch.bfloat16)
        file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(tensors, path / file)
        weight_map |= dict.fromkeys(tensors, file)
    config = {**CONFIG, "num_experts": experts, "num_hidden_layers": layers}
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def plain_copy(source: Path, out: Path) -> None:
    """Every file, in the kernel where it can, and on disk at the end."""
    shutil.copytree(source, out)
    for path in out.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def timed(run: Callable[[], Any], out: Path) -> tuple[float, float]:
    """Wall and CPU seconds, those of ended child processes included."""
    before, begin = os.times(), time.perf_counter()
    run()
    seconds, after = time.perf_counter() - begin, os.times()
    shutil.rmtree(out)
    return seconds, sum(after[:4]) - sum(before[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "convert.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="rubin_moe_bench_") as name:
        rows = measure(Path(name), args.layers, args.experts, args.rounds)
    head = provenance(("torch", "numpy"))
    head["load"] = round(load, 1)  # processes that others ran when it began
    head["cores"] = len(os.sched_getaffinity(0))
    head["what"] = (
        f"{args.layers} layers of {args.experts} experts {HIDDEN} x {WIDTH}; least of "
        f"{args.rounds} rounds; written, synced to disk and read back"
    )
    write_result(args.out, head, rows)
    for row in rows:
        print(row)


def measure(folder: Path, layers: int, experts: int, rounds: int) -> list[dict[str, Any]]:
    bf16 = write_source(folder / "bf16", layers, experts)
    convert(bf16, folder / "nvfp4", Options("nvfp4-ue4m3"), jobs=1)
    nvfp4, out = folder / "nvfp4", folder / "out"
    cores = len(os.sched_getaffinity(0))
    wanted = [
        (nvfp4, Options("nvfp4-ue5m3"), 1),
        (nvfp4, Options("nvfp4-ue5m3"), cores),
        (nvfp4, Options("nvfp4-ue4m3", names="compressed-tensors"), cores),
        (nvfp4, Options("bf16"), 1),
        (bf16, Options("nvfp4-ue4m3"), 1),
        (bf16, Options("nvfp4-ue4m3"), cores),
        (bf16, Options("nvfp4-ue5m3"), 1),
        (bf16, Options("mxfp4"), 1),
    ]
    return [row(source, out, options, jobs, rounds) for source, options, jobs in wanted]


def row(source: Path, out: Path, options: Options, jobs: int, rounds: int) -> dict[str, Any]:
    """One conversion; copies alternate with it."""
    wall, cpu, copy = [], [], []
    for _ in range(rounds):
        copy.append(timed(lambda: plain_copy(source, out), out)[0])
        seconds = timed(lambda: convert(source, out, options, jobs=jobs), out)
        wall.append(seconds[0])
        cpu.append(seconds[1])
    nbytes = size(source)
    return {
        "from": "bf16" if source.name == "bf16" else "nvfp4-ue4m3 (modelopt)",
        "to": options.target + (f" ({options.names})" if options.names != "auto" else ""),
        "processes": jobs,
        "bytes": nbytes,
        "mb_per_second": round(nbytes / min(wall) / MB, 1),
        "mb_per_cpu_second": round(nbytes / min(cpu) / MB, 1),
        "copy_mb_per_second": round(nbytes / min(copy) / MB, 1),
        "of_copy": round(min(copy) / min(wall), 3),
    }


if __name__ == "__main__":
    main()
