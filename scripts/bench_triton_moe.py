"""The portable Triton backend beside the sm_90a one on a Hopper GPU, a whole MoE layer each.

For information: which of the two serves Hopper is decided by preference, not by this table. Times
are medians of CUDA-graph replays over rotated routings, from top-k ids and weights to the weighted
sum, with bfloat16 activations; each result is checked against a float32 reference before it is
timed. Host time is that of one eager call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from h200_layer import (
    SHAPES,
    Shape,
    experts_touched,
    median_us,
    random_weights,
    reference,
    relative,
    routings,
)

from rubin_moe.kernels.base import Target
from rubin_moe.kernels.registry import select
from rubin_moe.kernels.target import installed_versions
from rubin_moe.provenance import provenance, write_result

TOKENS = (1, 4, 16, 64, 256, 1024)
WORST_ERROR = 1e-2
CHECKED_TOKENS = 64  # the reference decodes every touched expert


def host_us(call: Callable[[], object]) -> float:
    """Median microseconds until an eager call returns."""
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def measure(name: str, shape: Shape, backend: str, tokens: list[int]) -> list[dict[str, Any]]:
    target = Target("cuda", torch.cuda.get_device_capability(), installed_versions())
    kernel = select(shape.problem(), target, backend).kernel()
    weights = random_weights(shape)
    prepared = kernel.prepare(weights)
    rows: list[dict[str, Any]] = []
    for m in tokens:
        routed = routings(shape, m)
        x = torch.randn(m, shape.hidden, device="cuda").bfloat16()
        calls = [partial(kernel.run, prepared, x, ids, router) for ids, router in routed]
        part = slice(0, CHECKED_TOKENS)
        ids, router = routed[0]
        expected = reference(weights, shape.activation, x[part], ids[part], router[part])
        error = relative(calls[0]()[part], expected)
        if not error < WORST_ERROR:
            raise SystemExit(f"{name}, {m} tokens, {backend}: relative error {error}")
        rows.append(
            {
                "shape": name,
                "num_tokens": m,
                "backend": backend,
                "us": round(median_us(calls), 1),
                "host_us": round(host_us(calls[0]), 1),
                "floor_us": round(shape.floor_us(m, experts_touched(routed)), 1),
                "error": round(error, 5),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main(
    report: Annotated[Path, typer.Argument(help="JSON to write")],
    backends: Annotated[str, typer.Option(help="comma-separated")] = "sm90,triton",
    tokens: Annotated[str, typer.Option(help="comma-separated")] = ",".join(map(str, TOKENS)),
) -> None:
    """Measures every shape with every backend; the report grows with each."""
    rows: list[dict[str, Any]] = []
    for name, shape in SHAPES.items():
        for backend in backends.split(","):
            rows += measure(name, shape, backend, [int(m) for m in tokens.split(",")])
            torch.cuda.empty_cache()
            write_result(report, provenance(("torch", "triton"), "cuda"), rows)


if __name__ == "__main__":
    typer.run(main)
