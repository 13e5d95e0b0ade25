"""How fast checkpoints are converted, against a plain copy of the same bytes in the same run.

    python scripts/bench_convert.py

Writes checkpoints of random experts (16-bit, NVFP4 and MXFP4) into a temporary folder, converts
them, verification and fsync included, and writes docs/results/convert.json. Rates are of input
bytes, the source being in the page cache; those a CPU second count the time of all processes, and
stay what they are on a busy machine. A plain copy in the kernel, file by file by as many threads as
the conversion has processes, takes turns with it and starts from an idle disk as it does. It is
told twice: with an fsync of every file, as a conversion has it, and without. Medians of all rounds.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert
from rubin_moe.provenance import provenance, write_result

ROOT = Path(__file__).parents[1]
MB = 1e6
HIDDEN, WIDTH = 2048, 768  # of Qwen3-30B-A3B
_FROM = {"nvfp4": "nvfp4-ue4m3 (modelopt)", "mxfp4": "mxfp4 (compressed-tensors)"}
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": WIDTH,
    "num_experts_per_tok": 8,
    "hidden_act": "silu",
}


def write_source(path: Path, layers: int, experts: int, kind: str) -> Path:
    """Random experts, one file a layer; ``kind``: ``bf16`` or ``nvfp4`` (ModelOpt's names)."""
    path.mkdir()
    rng = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for layer in range(layers):
        tensors: dict[str, torch.Tensor] = {}
        for expert in range(experts):
            for name, shape in (
                ("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH)),
            ):  # fmt: skip
                module = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
                made = bf16_matrix(shape, rng) if kind == "bf16" else nvfp4_matrix(shape, rng)
                tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in made.items()}
        file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(tensors, path / file)
        weight_map |= dict.fromkeys(tensors, file)
    config = {**CONFIG, "num_experts": experts, "num_hidden_layers": layers}
    if kind == "nvfp4":
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def bf16_matrix(shape: tuple[int, int], rng: torch.Generator) -> dict[str, torch.Tensor]:
    """Normally distributed."""
    return {"weight": (0.02 * torch.randn(shape, generator=rng)).to(torch.bfloat16)}


def nvfp4_matrix(shape: tuple[int, int], rng: torch.Generator) -> dict[str, torch.Tensor]:
    """Any codes, block scales of six binades, and the two scalars of a W4A4 checkpoint."""
    n, k = shape
    scales = torch.randint(0x50, 0x7F, (n, k // 16), generator=rng, dtype=torch.uint8)
    return {
        "weight": torch.randint(0, 256, (n, k // 2), generator=rng, dtype=torch.uint8),
        "weight_scale": scales.view(torch.float8_e4m3fn),
        "weight_scale_2": 1e-5 * (1 + torch.rand((), generator=rng)),
        "input_scale": 1e-3 * (1 + torch.rand((), generator=rng)),
    }


def size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def plain_copy(source: Path, out: Path, *, jobs: int, synced: bool) -> None:
    """Every file, in the kernel where it can; ``synced``: on disk at the end."""
    out.mkdir()

    def copy(path: Path) -> None:
        made = shutil.copyfile(path, out / path.name)
        if synced:
            with made.open("rb") as f:
                os.fsync(f.fileno())

    with ThreadPoolExecutor(jobs) as threads:
        list(threads.map(copy, sorted(source.iterdir())))


def timed(run: Callable[[], Any], out: Path) -> tuple[float, float]:
    """Wall and CPU seconds, those of ended child processes included; what ran before has its bytes
    on disk."""
    os.sync()
    before, begin = os.times(), time.perf_counter()
    run()
    seconds, after = time.perf_counter() - begin, os.times()
    shutil.rmtree(out)
    return seconds, sum(after[:4]) - sum(before[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6, help="of NVFP4; of bf16 a third")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument(
        "--rounds", type=int, default=7, help="where codes stay what they are; elsewhere a third"
    )
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
        f"experts of {HIDDEN} x {WIDTH}, {args.experts} a layer of NVFP4, {args.experts // 2} of "
        f"bf16 and MXFP4, in {args.layers} and {max(1, args.layers // 3)} files; written, synced "
        "to disk and read back; medians; a copy has as many threads, and its source in memory too"
    )
    write_result(args.out, head, rows)


def measure(folder: Path, layers: int, experts: int, rounds: int) -> list[dict[str, Any]]:
    bf16 = write_source(folder / "bf16", max(1, layers // 3), experts // 2, "bf16")
    nvfp4 = write_source(folder / "nvfp4", layers, experts, "nvfp4")
    mxfp4 = convert(bf16, folder / "mxfp4", Options("mxfp4")).folder
    out = folder / "out"
    cores = len(os.sched_getaffinity(0))
    wanted = [
        (nvfp4, Options("nvfp4-ue5m3"), 1),
        (nvfp4, Options("nvfp4-ue5m3"), cores),
        (nvfp4, Options("nvfp4-ue4m3", names="compressed-tensors"), 1),
        (nvfp4, Options("nvfp4-ue4m3", names="compressed-tensors"), cores),
        (nvfp4, Options("bf16"), 1),
        (nvfp4, Options("bf16"), cores),
        (mxfp4, Options("bf16"), 1),
        (bf16, Options("nvfp4-ue4m3"), 1),
        (bf16, Options("nvfp4-ue4m3"), cores),
        (bf16, Options("nvfp4-ue5m3"), 1),
        (bf16, Options("mxfp4"), 1),
    ]
    rows = []
    for source, options, jobs in wanted:
        kept = source is nvfp4 and options.target != "bf16"
        rows.append(row(source, out, options, jobs, rounds if kept else max(1, rounds // 3)))
        print(rows[-1], flush=True)
    return rows


def row(source: Path, out: Path, options: Options, jobs: int, rounds: int) -> dict[str, Any]:
    """One conversion; copies alternate with it."""
    runs: dict[str, Callable[[], Any]] = {
        "unsynced": lambda: plain_copy(source, out, jobs=jobs, synced=False),
        "synced": lambda: plain_copy(source, out, jobs=jobs, synced=True),
        "convert": lambda: convert(source, out, options, jobs=jobs),
    }
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu = []
    for _ in range(rounds):
        for name, run in runs.items():
            seconds, busy = timed(run, out)
            wall[name].append(seconds)
        cpu.append(busy)  # of the conversion, the last
    nbytes = size(source)

    def rate(seconds: float) -> float:
        return round(nbytes / seconds / MB, 1)

    took = {name: median(seconds) for name, seconds in wall.items()}
    return {
        "from": _FROM.get(source.name, source.name),
        "to": options.target + (f" ({options.names})" if options.names != "auto" else ""),
        "processes": jobs,
        "rounds": rounds,
        "bytes": nbytes,
        "mb_per_second": rate(took["convert"]),
        "mb_per_second_slowest_fastest": [rate(f(wall["convert"])) for f in (max, min)],
        "mb_per_cpu_second": rate(median(cpu)),
        "copy_mb_per_second": rate(took["synced"]),
        "copy_mb_per_second_slowest_fastest": [rate(f(wall["synced"])) for f in (max, min)],
        "of_copy": round(took["synced"] / took["convert"], 3),
        "unsynced_copy_mb_per_second": rate(took["unsynced"]),
        "of_unsynced_copy": round(took["unsynced"] / took["convert"], 3),
    }


if __name__ == "__main__":
    main()
