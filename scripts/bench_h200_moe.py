"""A whole MoE layer on one GPU, ours beside other projects', all in one run.

``worker SHAPE IMPLEMENTATION`` sets one up, checks it, says that it is ready, waits, and times
itself alone, twice; ``us`` is the better pass. ``all`` starts a worker for each, so that they set
up and compile side by side, lets one after another time, and writes the report; ``plot`` draws it.
Times are medians of CUDA-graph replays over rotated routings, with bfloat16 activations, to the
weighted sum: from top-k ids and weights, and from router logits (softmax, top-k, renormalized).
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
from typing import Annotated, Any, cast

import torch
import typer
from h200_layer import (
    SHAPES,
    SILU,
    Shape,
    compile_all,
    experts_touched,
    logits_of,
    median_us,
    random_weights,
    reference,
    relative,
    routing,
    routings,
)
from h200_peers import OTHER_ACTIVATION, SETUPS, Call, Make, from_logits
from torch import Tensor

from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.kernels.registry import select
from rubin_moe.kernels.sm90.choice import choose
from rubin_moe.kernels.sm90.host import Sm90Kernel, router_of
from rubin_moe.kernels.target import detect

app = typer.Typer()
TOKENS = (1, 4, 16, 64, 256)
OURS = "rubin_moe"
SOURCES = ("ids", "logits")
WORST_ERROR = 1e-2
PACKAGES = ("torch", "triton", "vllm", "humming-kernels", "nvidia-cutlass-dsl")


def setup_ours(shape: Shape, weights: ExpertWeights) -> tuple[Make, Make]:
    """From ids, and from logits."""
    kernel = cast(Sm90Kernel, select(shape.problem(), detect("cuda"), "sm90").kernel())
    prepared = kernel.prepare(weights)

    def with_router(x: Tensor, ids: Tensor, router: Tensor) -> Call:
        logits = logits_of(shape, ids, router)
        return lambda: kernel.run(prepared, x, *kernel.route(logits))

    return lambda x, ids, router: partial(kernel.run, prepared, x, ids, router), with_router


def setup(name: str, shape: Shape, weights: ExpertWeights) -> dict[str, Make]:
    """By source. triton_kernels has one way only, from logits; it stands in both tables."""
    if name == OURS:
        return dict(zip(SOURCES, setup_ours(shape, weights), strict=True))
    make = SETUPS[name](shape, weights)
    if name == "triton_kernels":
        return {"logits": make}
    return {"ids": make, "logits": partial(from_logits, make, shape)}


def compile_ours() -> list[Any]:
    """Our kernels of every cell; needs no GPU."""
    problems = [(s.problem(), s) for s in SHAPES.values()]
    for problem, _ in problems:
        router_of(problem.num_experts, problem.top_k, "bf16", True)
    return [(choose(p, m), s.activation, s.bias) for p, s in problems for m in TOKENS]


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
    makes = setup(name, shape, weights)
    error = max(check(shape, weights, make, name) for make in makes.values())
    print(stem, "relative error", error, flush=True)
    cases = []
    for m in TOKENS:
        x = torch.randn(m, shape.hidden, device="cuda").bfloat16()
        routed = routings(shape, m)
        calls = {s: [make(x, *r) for r in routed] for s, make in makes.items()}
        for each in calls.values():
            each[0]()
        cases.append((m, calls, experts_touched(routed)))
    torch.cuda.synchronize()
    (folder / f"{stem}.ready").touch()
    while not (folder / f"{stem}.go").exists():
        time.sleep(0.02)
    rows = []
    for m, calls, touched in cases:
        for source, each in calls.items():
            us = [median_us(each, 40), median_us(each, 40)]
            row = {"source": source, "shape": shape_name, "num_tokens": m, "impl": name}
            row |= {"us": round(min(us), 2), "us_other_pass": round(max(us), 2)}
            row |= {"experts": touched, "floor_us": round(shape.floor_us(m, touched), 2)}
            row |= {"host_us": round(eager_us(each[0]), 1), "error": error}
            rows.append(row)
    (folder / f"{stem}.json").write_text(json.dumps(rows))


@app.command()
def compile() -> None:
    """Fills the kernel cache."""
    compile_all(compile_ours())


@app.command(name="all")
def run_all(
    folder: Path,
    report: Annotated[Path, typer.Option()],
    peer_site: Annotated[str, typer.Option(help="PYTHONPATH of the peers")] = "",
    shapes: str = ",".join(SHAPES),
    ready_s: float = 150,
    total_s: float = 480,
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
    """The report: rows, and by source the best peer of each cell and the ratios to it."""
    rows = rows + [r | {"source": "ids"} for r in rows if r["impl"] == "triton_kernels"]
    summary = {}
    for source in SOURCES:
        cells = cells_of([r for r in rows if r["source"] == source])
        ratios = [c["ratio"] for c in cells]
        summary[source] = {
            "geomean_ratio": round(statistics.geometric_mean(ratios), 3) if ratios else None,
            "min_ratio": min(ratios, default=None),
            "cells": cells,
        }
        for c in cells:
            print(source, *c.values())
        print(source, {k: v for k, v in summary[source].items() if k != "cells"})
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "summary": summary,
        "not_timed": left_out,
        "rows": rows,
    }
    report.write_text(json.dumps(facts, indent=1) + "\n")
    print("not timed:", sorted(left_out))


def cells_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours beside the fastest peer whose numbers are right."""
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
    return cells


@app.command()
def table(report: Path, source: str = "ids") -> None:
    """The report's cells as a Markdown table."""
    print("| shape | M | us | floor | of floor | best peer | us | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for c in json.loads(report.read_text())["summary"][source]["cells"]:
        numbers = f"{c['us']:.1f} | {c['floor_us']:.1f} | {100 * c['of_floor']:.0f} %"
        peer = f"{c['best_peer']} | {c['peer_us']:.1f} | {c['ratio']:.2f}"
        print(f"| {c['shape']} | {c['num_tokens']} | {numbers} | {peer} |")


@app.command()
def plot(report: Path, picture: Path, source: str = "ids") -> None:
    """Latency against the number of tokens: ours, the peers and the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    facts = json.loads(report.read_text())
    rows = [r for r in facts["rows"] if r["source"] == source]
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(3.2 * len(shapes), 3.4), sharey=True)
    for axis, shape in zip(axes, shapes, strict=True):
        here = [r for r in rows if r["shape"] == shape]
        for i, impl in enumerate((OURS, *SETUPS)):
            line = [(r["num_tokens"], r["us"]) for r in here if r["impl"] == impl]
            if line:
                style: dict[str, Any] = {"color": f"C{i}", "linewidth": 1}
                style = {"color": "black", "linewidth": 2.2} if impl == OURS else style
                axis.plot(*zip(*sorted(line), strict=True), marker=".", label=impl, **style)
        floor = sorted((r["num_tokens"], r["floor_us"]) for r in here if r["impl"] == OURS)
        axis.plot(*zip(*floor, strict=True), "k:", label="floor")
        axis.set(title=shape, xscale="log", yscale="log", xlabel="tokens", xticks=TOKENS)
        axis.set_xticklabels([str(m) for m in TOKENS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"us a layer, from {source}")
    max(axes, key=lambda axis: len(axis.lines)).legend(fontsize=7)
    figure.suptitle(f"{facts['device']}, {facts['date']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(picture, dpi=90)


def _versions(peer_site: str) -> dict[str, str]:
    path = [*(p for p in peer_site.split(":") if p), *sys.path]
    found = {d.metadata["Name"]: d.version for d in distributions(path=path)}
    return {name: found[name] for name in PACKAGES if name in found}


if __name__ == "__main__":
    app()
