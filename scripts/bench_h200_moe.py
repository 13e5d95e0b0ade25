"""A whole MoE layer on one GPU, ours beside other projects', all in one run.

``worker SHAPE IMPLEMENTATION`` sets one up, checks it, says that it is ready, waits, and times
itself alone, twice; ``us`` is the better pass. ``all`` starts a worker for each, so that they set
up and compile side by side, lets one after another time, and writes the report; ``plot`` draws it.
Times are medians of CUDA-graph replays over rotated routings, with bfloat16 activations, to the
weighted sum: from top-k ids and weights, and up to 256 tokens from router logits (softmax, top-k,
renormalized). triton_kernels is timed from logits, which is its faster way.
Where another of our kernels takes over, ours is also timed one token before and behind.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from rubin_moe.kernels.base import ActivationFormat, MoEProblem
from rubin_moe.kernels.registry import select
from rubin_moe.kernels.sm90.choice import choose
from rubin_moe.kernels.sm90.fp8_choice import choose_fp8
from rubin_moe.kernels.sm90.host import Sm90Kernel, router_of
from rubin_moe.kernels.sm90.rules import plan
from rubin_moe.kernels.target import detect

app = typer.Typer()
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
CHECKED = (16, 1024)  # tokens at which the numbers are compared, for the two halves
DECODE = 256  # tokens at most, of the two halves of the summary
OURS, OURS_FP8, UNQUANTIZED = "rubin_moe", "rubin_moe_fp8", "triton_bf16"
ONLY_MXFP4 = (OURS_FP8, "triton_kernels")
SOURCES = ("ids", "logits")
WORST_ERROR = 1e-2
PACKAGES = ("torch", "triton", "vllm", "humming-kernels", "nvidia-cutlass-dsl")


def setup_ours(
    shape: Shape, weights: ExpertWeights, activation_format: ActivationFormat = "16bit"
) -> tuple[Make, Make]:
    """From ids, and from logits."""
    problem = shape.problem(activation_format)
    kernel = cast(Sm90Kernel, select(problem, detect("cuda"), "sm90").kernel())
    prepared = kernel.prepare(weights)

    def with_router(x: Tensor, ids: Tensor, router: Tensor) -> Call:
        logits = logits_of(shape, ids, router)
        return lambda: kernel.run_from_logits(prepared, x, logits)

    return lambda x, ids, router: partial(kernel.run, prepared, x, ids, router), with_router


def setup(name: str, shape: Shape, weights: ExpertWeights) -> dict[str, Make]:
    """By source. triton_kernels has one way only, from logits; it stands in both tables."""
    if name == OURS:
        return dict(zip(SOURCES, setup_ours(shape, weights), strict=True))
    if name == OURS_FP8:
        return {"ids": setup_ours(shape, weights, "fp8-e4m3")[0]}
    make = SETUPS[name](shape, weights)
    if name == "triton_kernels":
        return {"logits": make}
    return {"ids": make, "logits": partial(from_logits, make, shape)}


def compile_ours() -> list[Any]:
    """Our kernels of every cell; needs no GPU."""
    problems = [(s.problem(), s) for s in SHAPES.values()]
    for problem, _ in problems:
        router_of(problem.num_experts, problem.top_k, "bf16", True)
    fp8 = [s for s in SHAPES.values() if s.fmt == "mxfp4"]
    return [
        (choose_fp8(s.problem("fp8-e4m3"), m), s.activation, s.bias)
        for s in fp8
        for m in {*TOKENS, *CHECKED}
    ] + [
        (choose(p, m), s.activation, s.bias)
        for p, s in problems
        for m in {*TOKENS, *CHECKED, *near_switches(p)}
    ]


def near_switches(problem: MoEProblem) -> list[int]:
    """The numbers of tokens around those from which another kernel computes than for one less."""
    kinds = [type(choose(problem, m)) for m in range(1, TOKENS[-1] + 1)]
    first = [m + 1 for m in range(1, len(kinds)) if kinds[m] is not kinds[m - 1]]
    return [m for n in first for m in (n - 1, n, n + 1)]


def layer_weights(shape: Shape) -> ExpertWeights:
    """One global scale an expert: peers take no other for gate and up together."""
    weights = random_weights(shape)
    one = weights.w13.dec[:, :1].expand(-1, 2).contiguous()
    return replace(weights, w13=replace(weights.w13, dec=one))


def check(shape: Shape, weights: ExpertWeights, make: Make, name: str, num_tokens: int) -> float:
    """Relative error against float32."""
    x = torch.randn(num_tokens, shape.hidden, device="cuda").bfloat16()
    ids, router = routing(shape, num_tokens)
    activation = SILU if name in OTHER_ACTIVATION else shape.activation
    return relative(make(x, ids, router)(), reference(weights, activation, x, ids, router))


def eager_us(call: Any, times: int) -> float:
    """Host time of one call outside a graph, the device kept busy."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    us = (time.perf_counter() - start) / times * 1e6
    torch.cuda.synchronize()
    return us


@contextmanager
def at_a_time(folder: Path, alone: bool) -> Iterator[None]:
    """One worker after another, if ``alone``: their scratch memory would not fit together."""
    with (folder / "lock").open("w") as lock:
        if alone:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@app.command()
def worker(shape_name: str, name: str, folder: Path) -> None:
    """One shape, one implementation: ``folder / SHAPE.NAME.json``."""
    shape, stem = SHAPES[shape_name], f"{shape_name}.{name}"
    torch.manual_seed(7)
    weights = layer_weights(shape)
    makes = setup(name, shape, weights)
    errors = [max(check(shape, weights, mk, name, m) for mk in makes.values()) for m in CHECKED]
    print(stem, "relative errors", errors, flush=True)
    cases = []
    numbers = {m: tuple(makes) if m <= DECODE else tuple(makes)[:1] for m in TOKENS}
    if name == OURS:
        numbers = dict.fromkeys(near_switches(shape.problem()), ("ids",)) | numbers
    for m, sources in sorted(numbers.items()):
        x = torch.randn(m, shape.hidden, device="cuda").bfloat16()
        routed = routings(shape, m)
        calls = {s: [makes[s](x, *r) for r in routed] for s in sources}
        with at_a_time(folder, m >= 4096):
            for each in calls.values():
                each[0]()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # others have to find room
        cases.append((m, calls, experts_touched(routed)))
    (folder / f"{stem}.ready").touch()
    while not (folder / f"{stem}.go").exists():
        time.sleep(0.02)
    rows = []
    for m, calls, touched in cases:
        for source, each in calls.items():
            us = [median_us(each, 40), median_us(each, 40)]
            torch.cuda.empty_cache()
            row = {"source": source, "shape": shape_name, "num_tokens": m, "impl": name}
            row |= {"us": round(min(us), 2), "us_other_pass": round(max(us), 2)}
            row |= {"experts": touched, "floor_us": round(shape.floor_us(m, touched), 2)}
            if name == OURS:
                row["kernel"] = plan(shape.problem(), m).fields["kernel"]
            row["host_us"] = round(eager_us(each[0], 20 if m <= DECODE else 4), 1)
            row["error"] = errors[m > DECODE]
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
        for name in (OURS, OURS_FP8, *SETUPS):
            if name in ONLY_MXFP4 and SHAPES[shape].fmt != "mxfp4":
                continue
            path = os.environ.get("PYTHONPATH", "")
            path = path if name in (OURS, OURS_FP8) else f"{peer_site}:{path}"
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
    """The report: rows, and by source the best peer of each cell and the ratios to it; times around
    our switches from kernel to kernel apart from them."""
    rows = rows + [r | {"source": "ids"} for r in rows if r["impl"] == "triton_kernels"]
    keys = ("shape", "num_tokens", "kernel", "us", "us_other_pass", "floor_us")
    around = {name: near_switches(shape.problem()) for name, shape in SHAPES.items()}
    near = [
        {k: r[k] for k in keys}
        for r in rows
        if r["impl"] == OURS and r["source"] == "ids" and r["num_tokens"] in around[r["shape"]]
    ]
    rows = [r for r in rows if r["num_tokens"] in TOKENS]
    summary: dict[str, Any] = {}
    for source in SOURCES:
        cells = cells_of([r for r in rows if r["source"] == source])
        summary[source] = {
            "decode": ratios_of([c for c in cells if c["num_tokens"] <= DECODE]),
            "prefill": ratios_of([c for c in cells if c["num_tokens"] > DECODE]),
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
        "switches": near,
        "rows": rows,
    }
    report.write_text(json.dumps(facts, indent=1) + "\n")
    for row in near:
        print(*row.values())
    print("not timed:", sorted(left_out))


def cells_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours beside the fastest peer whose numbers are right."""
    cells = []
    for ours in (r for r in rows if r["impl"] == OURS):
        where = (ours["shape"], ours["num_tokens"])
        peers = [
            r for r in rows
            if (r["shape"], r["num_tokens"]) == where and r["impl"] not in (OURS, OURS_FP8)
            and (r["error"] or 0) < WORST_ERROR
        ]  # fmt: skip
        if not peers:
            continue
        best = min(peers, key=lambda r: r["us"])
        cell = {"shape": where[0], "num_tokens": where[1], "us": ours["us"]}
        cell |= {"floor_us": ours["floor_us"], "of_floor": round(ours["floor_us"] / ours["us"], 3)}
        cell |= {"best_peer": best["impl"], "peer_us": best["us"]}
        cell["ratio"] = round(best["us"] / ours["us"], 3)
        fp8 = [r for r in rows if r["impl"] == OURS_FP8]
        for key, others in (
            ("ratio_4bit", [r["us"] for r in peers if r["impl"] != UNQUANTIZED]),
            ("ratio_bf16", [r["us"] for r in peers if r["impl"] == UNQUANTIZED]),
            ("fp8_us", [r["us"] for r in fp8 if (r["shape"], r["num_tokens"]) == where]),
        ):
            cell[key] = min(others, default=None)
            if key.startswith("ratio") and others:
                cell[key] = round(min(others) / ours["us"], 3)
        cells.append(cell)
    return cells


def ratios_of(cells: list[dict[str, Any]]) -> dict[str, float | None]:
    ratios = [c["ratio"] for c in cells]
    mean = round(statistics.geometric_mean(ratios), 3) if ratios else None
    return {"geomean_ratio": mean, "min_ratio": min(ratios, default=None)}


@app.command()
def table(report: Path, source: str = "ids") -> None:
    """The report's cells as a Markdown table."""
    print("| shape | M | us | floor | of floor | best peer | us | ratio | to 4-bit, to bf16 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for c in json.loads(report.read_text())["summary"][source]["cells"]:
        numbers = f"{c['us']:.1f} | {c['floor_us']:.1f} | {100 * c['of_floor']:.0f} %"
        peer = f"{c['best_peer']} | {c['peer_us']:.1f} | {c['ratio']:.2f}"
        others = f"{c['ratio_4bit'] or 0:.2f}, {c['ratio_bf16'] or 0:.2f}"
        print(f"| {c['shape']} | {c['num_tokens']} | {numbers} | {peer} | {others} |")


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
        for i, impl in enumerate((OURS, OURS_FP8, *SETUPS)):
            line = [(r["num_tokens"], r["us"]) for r in here if r["impl"] == impl]
            if line:
                style: dict[str, Any] = {"color": f"C{i}", "linewidth": 1}
                if impl in (OURS, OURS_FP8):
                    style = {"color": "black", "linewidth": 2.2 if impl == OURS else 1}
                axis.plot(*zip(*sorted(line), strict=True), marker=".", label=impl, **style)
        floor = sorted((r["num_tokens"], r["floor_us"]) for r in here if r["impl"] == OURS)
        axis.plot(*zip(*floor, strict=True), "k:", label="floor")
        axis.set(title=shape, xscale="log", yscale="log", xlabel="tokens", xticks=TOKENS)
        axis.set_xticklabels([f"{m // 1024}k" if m >= 1024 else str(m) for m in TOKENS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"us a layer, from {source}")
    lines = max(axes, key=lambda axis: len(axis.lines)).get_lines()
    figure.suptitle(f"{facts['device']}, {facts['date']}", fontsize=9)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.legend(handles=lines, loc="lower center", ncol=len(lines), fontsize=8)
    figure.savefig(picture, dpi=90)


def _versions(peer_site: str) -> dict[str, str]:
    path = [*(p for p in peer_site.split(":") if p), *sys.path]
    found = {d.metadata["Name"]: d.version for d in distributions(path=path)}
    return {name: found[name] for name in PACKAGES if name in found}


if __name__ == "__main__":
    app()
