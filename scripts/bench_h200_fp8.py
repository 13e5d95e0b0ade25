"""FP8 activations beside our own 16-bit ones on one GPU: a gpt-oss layer, both in one run.

``--compile`` fills the kernel cache and needs no GPU. Errors are relative to float32, with
activations in 16 bits and with equally rounded ones. Times are medians of CUDA-graph replays over
rotated routings from top-k ids, the ways in turn, the better of two passes each; other intervals of
promotion show what it costs.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from h200_layer import (
    SHAPES,
    Shape,
    dense,
    experts_touched,
    median_us,
    random_weights,
    reference,
    relative,
    routings,
)
from torch import Tensor

from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.formats.fp8_rows import dequantize_rows, quantize_rows
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.epilogue import activate
from rubin_moe.kernels.launch import launcher
from rubin_moe.kernels.sm90.fp8_choice import choose_fp8
from rubin_moe.kernels.sm90.fp8_host import Fp8Kernel, fp8_kernels
from rubin_moe.kernels.sm90.fp8_plan import Fp8Plan
from rubin_moe.kernels.sm90.host import build

SHAPE = "gptoss"
TOKENS = (16384, 4096, 1024, 256, 64, 16, 1)
PROMOTED_FROM = 4096  # tokens at which other intervals are timed
PROMOTIONS = (4, 8)  # stages of 128 of K
CHECKED = 1024  # tokens at most whose numbers are compared with float32
BUDGET_MS = 30


class Promoting(Fp8Kernel):
    """The layer with another interval of promotion."""

    promote = 0

    def _fp8_plan(self, num_tokens: int) -> Fp8Plan:
        return promoting(self.problem, num_tokens, self.promote)


def promoting(problem: MoEProblem, num_tokens: int, promote: int) -> Fp8Plan:
    plan = choose_fp8(problem, num_tokens)
    return replace(plan, tiles=replace(plan.tiles, promote=promote))


def problem_of(shape: Shape) -> MoEProblem:
    return replace(shape.problem(), activation_format="fp8-e4m3")


def rounded(x: Tensor) -> Tensor:
    """What FP8 makes of rows, as float32."""
    return dequantize_rows(quantize_rows(x))


def rounded_reference(
    shape: Shape, weights: ExpertWeights, x: Tensor, ids: Tensor, router: Tensor
) -> Tensor:
    """float32 ``[M, hidden]`` with the inputs of both GEMMs rounded as the kernels do."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    x8 = rounded(x)
    for expert in range(shape.num_experts):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        h = x8[token] @ dense(weights.w13, expert, weights.fmt).T
        h = rounded(activate(shape.activation, h).to(x.dtype))
        y = h @ dense(weights.w2, expert, weights.fmt).T
        out.index_add_(0, token, y * router[token, choice][:, None])
    return out


def measure(
    shape: Shape, weights: ExpertWeights, ways: dict[str, Any], num_tokens: int
) -> list[dict[str, Any]]:
    """Rows of one number of tokens; ``ways``: kernels and prepared weights."""
    x = torch.randn(num_tokens, shape.hidden, device="cuda").bfloat16()
    routed = routings(shape, num_tokens)
    floor = shape.floor_us(num_tokens, experts_touched(routed))
    few = [t[:CHECKED] for t in (x, *routed[0])]
    expected = rounded_reference(shape, weights, *few)
    wide = reference(weights, shape.activation, *few)
    rows = []
    calls = {}
    for name, (kernel, prepared) in ways.items():
        if "promote" in name and num_tokens < PROMOTED_FROM:
            continue
        out = kernel.run(prepared, x, *routed[0])
        row = {"num_tokens": num_tokens, "activations": name, "floor_us": round(floor, 2)}
        row |= {"error": relative(out[:CHECKED], wide)}
        row |= {"error_to_rounded": relative(out[:CHECKED], expected)}
        row |= {"repeats": torch.equal(out, kernel.run(prepared, x, *routed[0]))}
        rows.append(row)
        calls[name] = [partial(kernel.run, prepared, x, *r) for r in routed]
    us: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(2):
        for name, each in calls.items():
            us[name].append(median_us(each, BUDGET_MS))
            torch.cuda.empty_cache()
    for row in rows:
        mine = us[str(row["activations"])]
        row |= {"us": round(min(mine), 2), "us_other_pass": round(max(mine), 2)}
        row |= {"ratio": round(min(us["16bit"]) / min(mine), 3)}
        print(row, flush=True)
    kernel, prepared = ways["fp8-e4m3"]
    print(launches(kernel, prepared, x, routed[0]), flush=True)
    return rows


def launches(kernel: Fp8Kernel, prepared: Any, x: Tensor, routed: tuple[Tensor, Tensor]) -> str:
    """Times between the starts of one call's launches, without overlap of events."""
    prefill = kernel._prefill(x.shape[0])
    assert prefill is not None
    started: list[tuple[str, torch.cuda.Event]] = []
    real = prefill._launch

    def noting(found: Any, grid: int, args: Any) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        started.append((found.name, event))
        real(found, grid, args)

    prefill._launch = noting  # type: ignore[assignment]
    for _ in range(3):
        started.clear()
        kernel.run(prepared, x, *routed)
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end.record()
    torch.cuda.synchronize()
    prefill._launch = real
    ends = [event for _, event in started[1:]] + [end]
    pairs = zip(started, ends, strict=True)
    return " ".join(f"{n} {a.elapsed_time(b) * 1e3:.0f}" for (n, a), b in pairs)


def main(report: Path, compile_only: Annotated[bool, typer.Option("--compile")] = False) -> None:
    """The report, rewritten after each number of tokens."""
    shape = SHAPES[SHAPE]
    problem = problem_of(shape)
    if compile_only:
        plans = [choose_fp8(problem, m) for m in TOKENS]
        plans += [
            promoting(problem, m, p) for m in TOKENS if m >= PROMOTED_FROM for p in PROMOTIONS
        ]
        for plan in dict.fromkeys(plans):
            fp8_kernels(plan, shape.activation, shape.bias)
            print(plan, flush=True)
        return
    torch.manual_seed(7)
    weights = random_weights(shape)
    plain, narrow = build(shape.problem()), build(problem)
    prepared = narrow.prepare(weights)
    ways: dict[str, Any] = {"16bit": (plain, plain.prepare(weights))}
    ways["fp8-e4m3"] = (narrow, prepared)
    for promote in PROMOTIONS:
        count = torch.cuda.get_device_properties(0).multi_processor_count
        kernel = Promoting(problem, launcher("driver"), count)
        kernel.promote = promote
        ways[f"fp8-e4m3, promote {promote}"] = (kernel, prepared)
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "shape": SHAPE,
        "rows": [],
    }
    for m in TOKENS:
        facts["rows"] += measure(shape, weights, ways, m)
        report.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
