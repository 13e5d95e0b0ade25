"""Times candidate tiles of the FP8 kernels on the GPU that is here, beside `tune`.

``--compile`` fills the kernel cache and needs no GPU. Candidates that promote as the default are
checked before they are timed: against float32 of equally rounded activations, and bit for bit
against the first; the fastest goes into configs/tuning/sm90. Other intervals of promotion are timed
only: they show what it costs.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, replace
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

from rubin_moe.errors import PlanError
from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.formats.fp8_rows import dequantize_rows, quantize_rows
from rubin_moe.kernels import tuning
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.epilogue import activate
from rubin_moe.kernels.launch import launcher
from rubin_moe.kernels.sm90.choice import shape_key, sizes_of
from rubin_moe.kernels.sm90.fp8_choice import choose_fp8, with_stages
from rubin_moe.kernels.sm90.fp8_host import Fp8Kernel, fp8_kernels
from rubin_moe.kernels.sm90.fp8_plan import Fp8Plan, Fp8Tiles, fp8_sizes

SHAPE = "gptoss"
WORST_ERROR = 2e-2  # an element on the other side of a rounding boundary moves by 6 %
CHECKED = 1024  # tokens at most whose numbers are compared with float32
CANDIDATES = {
    16: [Fp8Tiles(16)],
    64: [Fp8Tiles(16)],
    256: [Fp8Tiles(16), Fp8Tiles(24)],
    1024: [Fp8Tiles(40, narrower=1), Fp8Tiles(48, narrower=1), Fp8Tiles(56, narrower=2, step=8)],
    4096: [
        Fp8Tiles(144, narrower=1),
        Fp8Tiles(144),
        Fp8Tiles(160, narrower=2),
        Fp8Tiles(144, narrower=1, panel=16),
    ],
    16384: [Fp8Tiles(136, narrower=1), Fp8Tiles(144, narrower=1), Fp8Tiles(160, narrower=2)],
}
PROMOTIONS = (0, 4, 12)


class Fixed(Fp8Kernel):
    """The layer with one plan, whatever the table says."""

    plan: Fp8Plan

    def _fp8_plan(self, num_tokens: int) -> Fp8Plan:
        return self.plan


def problem_of(shape: Shape) -> MoEProblem:
    return replace(shape.problem(), activation_format="fp8-e4m3")


def plans_of(shape: Shape, num_tokens: int) -> list[Fp8Plan]:
    """That fit."""
    sizes = fp8_sizes(sizes_of(problem_of(shape)))
    tiles = CANDIDATES[num_tokens]
    tiles = [*tiles, *(replace(tiles[0], promote=p) for p in PROMOTIONS if num_tokens > CHECKED)]
    out = []
    for one in tiles:
        try:
            out.append(with_stages(sizes, one))
        except PlanError as error:
            print(f"left out: {error}")
    return out


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


def measure(shape: Shape, weights: ExpertWeights, num_tokens: int) -> list[dict[str, Any]]:
    """Rows of one number of tokens."""
    problem = problem_of(shape)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    kernel = Fixed(problem, launcher("driver"), count)
    prepared = kernel.prepare(weights)
    x = torch.randn(num_tokens, shape.hidden, device="cuda").bfloat16()
    routed = routings(shape, num_tokens)
    floor = shape.floor_us(num_tokens, experts_touched(routed))
    few = [t[:CHECKED] for t in (x, *routed[0])]
    expected = rounded_reference(shape, weights, *few)
    wide = relative(expected, reference(weights, shape.activation, *few))
    print(f"{num_tokens}: rounding activations to FP8 costs {wide:.5f}", flush=True)
    default = choose_fp8(problem, num_tokens).tiles.promote
    rows: list[dict[str, Any]] = []
    first: Tensor | None = None
    for plan in plans_of(shape, num_tokens):
        kernel = Fixed(problem, launcher("driver"), count)
        kernel.plan = plan
        out = kernel.run(prepared, x, *routed[0])
        error = relative(out[:CHECKED], expected)
        usual = plan.tiles.promote == default
        first = out if first is None else first
        equal = torch.equal(out, first)
        good = error < WORST_ERROR and (equal or not usual)
        us = median_us([partial(kernel.run, prepared, x, *r) for r in routed], 40)
        print(f"{num_tokens} {us:.1f} us error {error:.5f} equal {equal} {plan}", flush=True)
        if good:
            row = {"num_tokens": num_tokens, "us": round(us, 2), "floor_us": round(floor, 2)}
            rows.append(row | {"error": error, "error_of_rounding": wide, "usual": usual})
            rows[-1]["tiles"] = asdict(plan.tiles)
    print(launches(kernel, prepared, x, routed[0]), flush=True)
    return rows


def launches(kernel: Fixed, prepared: Any, x: Tensor, routed: tuple[Tensor, Tensor]) -> str:
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


def main(
    compile_only: Annotated[bool, typer.Option("--compile")] = False, folder: Path | None = None
) -> None:
    """Tunes, or compiles the candidates."""
    shape = SHAPES[SHAPE]
    if compile_only:
        for plan in dict.fromkeys(p for m in CANDIDATES for p in plans_of(shape, m)):
            fp8_kernels(plan, shape.activation, shape.bias)
            print(plan, flush=True)
        return
    weights = random_weights(shape)
    rows = [row for m in CANDIDATES for row in measure(shape, weights, m)]
    best: dict[int, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda r: r["us"]):
        if row["usual"]:
            best.setdefault(row["num_tokens"], row)
    facts = {
        "device": torch.cuda.get_device_name(0),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "rows": [best[m] for m in sorted(best)],
        "all": rows,
    }
    key = shape_key(fp8_sizes(sizes_of(problem_of(shape))))
    path = (folder or tuning.folder() / "sm90") / tuning.file_name(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
