"""The only writer of configs/tuning/sm90: times candidate tiles on the GPU that is here.

``--compile`` fills the kernel cache and needs no GPU; a machine without the compiler can then
measure with that cache. Every candidate's numbers are checked before it is timed: against a float32
reference, and bit for bit against the first candidate that passes.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from h200_layer import (
    SHAPES,
    Shape,
    compile_all,
    experts_touched,
    median_us,
    random_weights,
    reference,
    relative,
    routings,
)

from rubin_moe.errors import PlanError
from rubin_moe.kernels import tuning
from rubin_moe.kernels.launch import launcher
from rubin_moe.kernels.sm90 import choice
from rubin_moe.kernels.sm90.host import Sm90Kernel
from rubin_moe.kernels.sm90.plan import Plan, Tiles, WideTiles, check

TOKENS = (1, 4, 16, 64, 256)
WORST_ERROR = 4e-3  # relative; bfloat16 between the GEMMs and in the output gives about 2.5e-3
CANDIDATES: dict[str, list[Tiles | WideTiles]] = {
    "qwen3": [
        Tiles(24, 2, 4, 4), Tiles(16, 3, 4, 4), Tiles(12, 4, 4, 4),
        Tiles(16, 2, 4, 4, pass_tokens=24, buffers=1), WideTiles(3, 24, 4, 4, 4),
    ],
    "gptoss": [
        Tiles(12, 2, 9, 9), Tiles(15, 2, 9, 9, split=True, buffers=1),
        Tiles(12, 2, 9, 9, pass_tokens=16, buffers=1), WideTiles(3, 16, 3, 3, 6),
    ],
    "dsv3tp8": [
        Tiles(20, 2, 4, 2, buffers=1), Tiles(16, 2, 4, 2, split=True, buffers=1),
        WideTiles(3, 16, 2, 2, 8),
    ],
    "mixtral": [
        Tiles(20, 2, 4, 4), Tiles(20, 2, 4, 4, pass_tokens=16, buffers=1),
        WideTiles(3, 24, 2, 2, 7), WideTiles(3, 32, 2, 2, 6),
        WideTiles(2, 72, 2, 2, 6), WideTiles(2, 80, 2, 2, 6),
    ],
}  # fmt: skip


def plan_of(shape: Shape, tiles: Tiles | WideTiles, num_tokens: int) -> Plan | None:
    """None where these tiles do not fit."""
    pairs = num_tokens * shape.top_k
    bucket = next(b for b in choice.BUCKETS if b >= pairs)
    try:
        return check(choice.plan_of(choice.sizes_of(shape.problem()), tiles, bucket))
    except PlanError:
        return None


def worth(shape: Shape, tiles: Tiles | WideTiles, num_tokens: int) -> bool:
    """Splits are for few tokens; wide passes for many, and none much wider than their tokens."""
    if isinstance(tiles, WideTiles):
        each = num_tokens * shape.top_k / shape.num_experts
        return num_tokens >= 64 and each / 2 <= tiles.pass_tokens <= 16 + 2 * each
    if tiles.split:
        return num_tokens <= 16
    return tiles.pass_tokens == 8 or num_tokens >= 64


class Fixed(Sm90Kernel):
    """The layer with one plan, whatever the table says."""

    def __init__(self, shape: Shape, plan: Plan) -> None:
        super().__init__(shape.problem(), launcher("driver"), _multiprocessors())
        self.plan = plan

    def _plan(self, num_tokens: int) -> Plan:
        return self.plan


def measure(name: str, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of one shape: every number of tokens, every candidate."""
    shape = SHAPES[name]
    weights = random_weights(shape)
    any_plan = choice.choose(shape.problem(), 1)
    prepared = Fixed(shape, any_plan).prepare(weights)
    rows: list[dict[str, Any]] = []
    for m in numbers:
        x = torch.randn(m, shape.hidden, device="cuda").bfloat16()
        routed = routings(shape, m)
        touched = experts_touched(routed)
        expected = reference(weights, shape.activation, x, *routed[0])
        first = None
        for tiles in CANDIDATES[name]:
            plan = plan_of(shape, tiles, m)
            if plan is None or not worth(shape, tiles, m):
                continue
            kernel = Fixed(shape, plan)
            out = kernel.run(prepared, x, *routed[0])
            error = relative(out, expected)
            equal = first is None or torch.equal(out, first)
            if not error < WORST_ERROR or not equal:
                print(f"{name} {m} {plan}: error {error}, equal {equal}: left out", flush=True)
                continue
            first = out
            calls = [partial(kernel.run, prepared, x, *r) for r in routed]
            us = median_us(calls)
            floor = shape.floor_us(m, touched)
            rows.append(
                {"num_tokens": m, "us": round(us, 2), "floor_us": round(floor, 2),
                 "error": error, "tiles": asdict(tiles)}
            )  # fmt: skip
            print(f"{name} {m:4d} {us:8.2f} us {floor / us:.2f} {tiles}", flush=True)
    return rows


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def main(
    shapes: list[str],
    compile_only: Annotated[bool, typer.Option("--compile")] = False,
    tokens: Annotated[str, typer.Option(help="others keep their rows")] = "1,4,16,64,256",
    folder: Path | None = None,
) -> None:
    """Tunes the named shapes, or compiles their candidates."""
    numbers = [int(m) for m in tokens.split(",")]
    if compile_only:
        compile_all(
            (plan, SHAPES[name].activation, SHAPES[name].bias)
            for name in shapes
            for tiles in CANDIDATES[name]
            for m in numbers
            if worth(SHAPES[name], tiles, m) and (plan := plan_of(SHAPES[name], tiles, m))
        )
        return
    for name in shapes:
        file = tuning.file_name(choice.shape_key(choice.sizes_of(SHAPES[name].problem())))
        known = tuning.folder() / "sm90" / file
        old = json.loads(known.read_text())["all"] if known.is_file() else []
        rows = [r for r in old if r["num_tokens"] not in numbers] + measure(name, numbers)
        best: dict[int, dict[str, Any]] = {}
        for row in sorted(rows, key=lambda r: (r["num_tokens"], r["us"])):
            best.setdefault(row["num_tokens"], row)
        facts = {
            "device": torch.cuda.get_device_name(0),
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "rows": list(best.values()),
            "all": rows,
        }
        path = (folder or known.parent) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
