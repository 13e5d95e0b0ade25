"""A whole MoE layer on one GPU, ours beside other projects', all in one run.

``worker SHAPE IMPLEMENTATION`` sets one up, checks it, says that it is ready, waits, and times
itself alone, twice; ``us`` is the better pass. ``all`` starts a worker for each, so that they set
up and compile side by side, lets one after another time, and writes the report. Times are medians
of CUDA-graph replays over rotated routings, from top-k ids and weights to the weighted sum, with
bfloat16 activations.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from h200_layer import (
    SHAPES,
    SILU,
    Shape,
    experts_touched,
    median_us,
    random_weights,
    reference,
    relative,
    routing,
    routings,
)
from h200_peers import OTHER_ACTIVATION, SETUPS, Make

from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.kernels.base import Target
from rubin_moe.kernels.registry import select

app = typer.Typer()
TOKENS = (1, 4, 16, 64, 256)
OURS = "rubin_moe"
WORST_ERROR = 1e-2
PACKAGES = ("torch", "triton", "vllm", "humming-kernels", "nvidia-cutlass-dsl")


def setup_ours(shape: Shape, weights: ExpertWeights) -> Make:
    target = Target("cuda", torch.cuda.get_device_capability(), {"nvidia-cutlass-dsl": "4.8"})
    kernel = select(shape.problem(), target, "sm90").kernel()
    prepared = kernel.prepare(weights)
    return lambda x, ids, router: partial(kernel.run, prepared, x, ids, router)


def layer_weights(shape: Shape) -> ExpertWeights:
    """One global scale an expert: peers take no other for gate and up together."""
    weights = random_weights(shape)
    one = weights.w13.dec[:, :1].expand(-1, 2).contiguous()
    return replace(weights, w13=replace(weights.w13, dec=one))


def check(shape: Shape, weights: ExpertWeights, make: Make, name: str) -> float:
    """Relative error at 16 tokens against float32."""
    x = torch.randn(16, shape.hidden, device="cuda").bfloat16()
    ids, router = routing(shape, 16)
    activation = SILU if name in OTHER_ACTIVATION else shape.activation
    return relative(make(x, ids, router)(), reference(weights, activation, x, ids, router))


def eager_us(call: Any) -> float:
    """Host time of one call outside a graph, the device kept busy."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        call()
    us = (time.perf_counter() - start) / 20 * 1e6
    torch.cuda.synchronize()
    return us


@app.command()
def worker(shape_name: str, name: str, folder: Path) -> None:
    """One shape, one implementation: ``folder / SHAPE.NAME.json``."""
    shape, stem = SHAPES[shape_name], f"{shape_name}.{name}"
    torch.manual_seed(7)
    weights = layer_weights(shape)
    make = setup_ours(shape, weights) if name == OURS else SETUPS[name](shape, weights)
    error = check(shape, weights, make, name)
    print(stem, "relative error", error, flush=True)
    cases = []
    for m in TOKENS:
        x = torch.randn(m, shape.hidden, device="cuda").bfloat16()
        routed = routings(shape, m)
        calls = [make(x, ids, router) for ids, router in routed]
        calls[0]()
        touched = experts_touched(routed)
        cases.append((m, calls, touched))
    torch.cuda.synchronize()
    (folder / f"{stem}.ready").touch()
    while not (folder / f"{stem}.go").exists():
        time.sleep(0.02)
    rows = []
    for m, calls, touched in cases:
        us = [median_us(calls), median_us(calls)]
        row = {"shape": shape_name, "num_tokens": m, "impl": name, "us": round(min(us), 2)}
        row |= {"us_other_pass": round(max(us), 2), "experts": touched}
        row |= {"floor_us": round(shape.floor_us(m, touched), 2)}
        row |= {"host_us": round(eager_us(calls[0]), 1), "error": error}
        rows.append(row)
    (folder / f"{stem}.json").write_text(json.dumps(rows))


@app.command(name="all")
def run_all(
    folder: Path,
    report: Annotated[Path, typer.Option()],
    peer_site: Annotated[str, typer.Option(help="PYTHONPATH of the peers")] = "",
    shapes: str = ",".join(SHAPES),
    ready_s: float = 150,
    total_s: float = 280,
) -> None:
    """Every worker, then the report."""
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    workers = {}
    for shape in shapes.split(","):
        for name in (OURS, *SETUPS):
            if name == "triton_kernels" and SHAPES[shape].fmt != "mxfp4":
                continue  # it has no NVFP4
            path = os.environ.get("PYTHONPATH", "")
            path = path if name == OURS else f"{peer_site}:{path}"
            log = (folder / f"{shape}.{name}.log").open("w")
            workers[f"{shape}.{name}"] = subprocess.Popen(
                [sys.executable, __file__, "worker", shape, name, str(folder)],
                env=dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="2"),
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
    while time.monotonic() - start < ready_s and any(
        not (folder / f"{n}.ready").exists() and p.poll() is None for n, p in workers.items()
    ):
        time.sleep(0.2)
    left_out = {}
    for name, process in workers.items():
        if not (folder / f"{name}.ready").exists():
            process.kill()
            left_out[name] = (folder / f"{name}.log").read_text()[-300:]
    for name, process in workers.items():
        if name in left_out:
            continue
        (folder / f"{name}.go").touch()
        try:
            process.wait(max(1.0, total_s - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            process.kill()
        if not (folder / f"{name}.json").exists():
            left_out[name] = (folder / f"{name}.log").read_text()[-300:]
        print(f"{time.monotonic() - start:.0f} s: {name}", flush=True)
    rows = [r for f in sorted(folder.glob("*.*.json")) for r in json.loads(f.read_text())]
    write(report, rows, left_out, _versions(peer_site))


def write(
    report: Path, rows: list[dict[str, Any]], left_out: dict[str, str], versions: dict[str, str]
) -> None:
    """The report: rows, the best peer of each cell, geometric mean and minimum of the ratios."""
    cells = []
    for ours in (r for r in rows if r["impl"] == OURS):
        where = (ours["shape"], ours["num_tokens"])
        peers = [
            r for r in rows
            if (r["shape"], r["num_tokens"]) == where and r["impl"] != OURS
            and r["error"] < WORST_ERROR
        ]  # fmt: skip
        if not peers:
            continue
        best = min(peers, key=lambda r: r["us"])
        cells.append(
            {"shape": where[0], "num_tokens": where[1], "us": ours["us"],
             "floor_us": ours["floor_us"], "of_floor": round(ours["floor_us"] / ours["us"], 3),
             "best_peer": best["impl"], "peer_us": best["us"],
             "ratio": round(best["us"] / ours["us"], 3)}
        )  # fmt: skip
    ratios = [c["ratio"] for c in cells]
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "summary": {
            "geomean_ratio": round(statistics.geometric_mean(ratios), 3) if ratios else None,
            "min_ratio": min(ratios, default=None),
            "cells": cells,
        },
        "not_timed": left_out,
        "rows": rows,
    }
    report.write_text(json.dumps(facts, indent=1) + "\n")
    for c in cells:
        print(*c.values())
    print({k: v for k, v in facts["summary"].items() if k != "cells"}, sorted(left_out))


@app.command()
def table(report: Path) -> None:
    """The report's cells as a Markdown table."""
    print("| shape | M | us | floor | of floor | best peer | us | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for c in json.loads(report.read_text())["summary"]["cells"]:
        numbers = f"{c['us']:.1f} | {c['floor_us']:.1f} | {100 * c['of_floor']:.0f} %"
        peer = f"{c['best_peer']} | {c['peer_us']:.1f} | {c['ratio']:.2f}"
        print(f"| {c['shape']} | {c['num_tokens']} | {numbers} | {peer} |")


def _versions(peer_site: str) -> dict[str, str]:
    path = [*(p for p in peer_site.split(":") if p), *sys.path]
    found = {d.metadata["Name"]: d.version for d in distributions(path=path)}
    return {name: found[name] for name in PACKAGES if name in found}


if __name__ == "__main__":
    app()
