"""The only writer of configs/tuning/sm90: times candidate tiles on the GPU that is here.

``--compile`` fills the kernel cache and needs no GPU; a machine without the compiler can then
measure with that cache. Every candidate's numbers are checked before it is timed: against a float32
reference, and bit for bit against the first candidate of its regime (decode, prefill) that passes.
Where the two regimes' times cross, from some number of tokens on, the file says ``prefill_from``.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
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
from torch import Tensor

from rubin_moe.arch import SM90A
from rubin_moe.errors import PlanError
from rubin_moe.kernels import tuning
from rubin_moe.kernels.launch import launcher
from rubin_moe.kernels.sm90 import choice
from rubin_moe.kernels.sm90.host import Sm90Kernel
from rubin_moe.kernels.sm90.plan import Tiles, WideTiles, check
from rubin_moe.kernels.sm90.prefill_plan import (
    MAX_PASS,
    PrefillPlan,
    PrefillTiles,
    check_prefill,
)
from rubin_moe.kernels.sm90.prefill_tiles import asynchronous

TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
MOST_DECODE = 512  # tokens at which decode's tiles are timed
LEAST_PREFILL = 2  # tokens an expert, on average, at which prefill's are
WORST_ERROR = 4e-3  # relative; bfloat16 between the GEMMs and in the output gives about 2.5e-3
CANDIDATES: dict[str, list[Tiles | WideTiles]] = {
    "qwen3": [
        Tiles(24, 1, 4, 4, split=True), Tiles(14, 2, 8, 4),
        Tiles(24, 2, 4, 4), Tiles(16, 3, 4, 4), Tiles(12, 4, 4, 4),
        Tiles(16, 2, 4, 4, pass_tokens=24, buffers=1), WideTiles(3, 24, 4, 4, 4),
    ],
    "gptoss": [
        Tiles(20, 3, 3, 3, split=True),
        Tiles(12, 2, 9, 9), Tiles(15, 2, 9, 9, split=True, buffers=1),
        Tiles(12, 2, 9, 9, pass_tokens=16, buffers=1), WideTiles(3, 16, 3, 3, 6),
    ],
    "dsv3tp8": [
        Tiles(20, 2, 4, 2, buffers=1), Tiles(16, 2, 4, 2, split=True, buffers=1),
        WideTiles(3, 16, 2, 2, 8),
    ],
    "mixtral": [
        Tiles(16, 2, 4, 4, split=True),
        Tiles(20, 2, 4, 4), Tiles(20, 2, 4, 4, pass_tokens=16, buffers=1),
        WideTiles(3, 24, 2, 2, 7), WideTiles(3, 32, 2, 2, 6),
        WideTiles(2, 72, 2, 2, 6), WideTiles(2, 80, 2, 2, 6),
    ],
}  # fmt: skip


def candidates(name: str, num_tokens: int) -> list[choice.AnyTiles]:
    """What is timed at a number of tokens."""
    shape = SHAPES[name]
    out: list[choice.AnyTiles] = []
    if num_tokens <= MOST_DECODE:
        out += [tiles for tiles in CANDIDATES[name] if worth(shape, tiles, num_tokens)]
    if num_tokens * shape.top_k >= LEAST_PREFILL * shape.num_experts:
        out += prefill_tiles(shape, num_tokens)
    return out


def prefill_tiles(shape: Shape, num_tokens: int) -> list[PrefillTiles]:
    """Passes that hold an expert's tokens in as few as there can be, for experts of the average
    number of tokens and some standard deviations more, with narrower MMAs for those with fewer; for
    many tokens also the widest pass."""
    each = num_tokens * shape.top_k / shape.num_experts
    if each <= MAX_PASS:
        sizes = {choice.pass_that_holds(each, sigmas) for sigmas in (1.2, 2.2)}
    else:
        sizes = {choice.pass_that_holds(each, 1.2), 144, 160}
    found = {
        str(plan_of(shape, tiles, 0)): tiles
        for size in sorted(min(size, MAX_PASS) for size in sizes)
        for tiles in (with_stages(shape, t) for t in of_width(shape, size))
    }
    return list(found.values())


def of_width(shape: Shape, size: int) -> list[PrefillTiles]:
    """Copies of 1 to 2 KB a tile of weights, and widths that the compiler keeps asynchronous: as
    many as there can be, or two."""
    sizes, out = choice.sizes_of(shape.problem()), []
    for blocks in (4, 5) if size <= 32 else (2, 4) if size <= 48 else (2,) if size <= 88 else (1,):
        lag = {1: 3, 2: 2}.get(blocks, 2 if size > 32 else 1)
        for most, step in ((4, 8), (1, 16)) if size in range(72, 96) else ((4, 8),):
            step = 16 if size > 112 else step
            for narrower in range(min(most, (size - 8) // step), -1, -1):
                tiles = PrefillTiles(size, narrower, step, blocks13=blocks, blocks2=blocks, lag=lag)
                if asynchronous(PrefillPlan(sizes, tiles)):
                    out.append(tiles)
                    break
    return out


def with_stages(shape: Shape, tiles: PrefillTiles) -> PrefillTiles:
    """As many of each GEMM as fit into shared memory, ten at most."""
    for name in ("stages13", "stages2"):
        for stages in range(10, tiles.lag, -1):
            more = replace(tiles, **{name: stages})
            if fits(shape, more, name == "stages13"):
                tiles = more
                break
    return tiles


def fits(shape: Shape, tiles: PrefillTiles, fc1: bool) -> bool:
    plan = PrefillPlan(choice.sizes_of(shape.problem()), tiles)
    return (plan.smem13 if fc1 else plan.smem2) <= SM90A.smem_per_block


def plan_of(shape: Shape, tiles: choice.AnyTiles, num_tokens: int) -> choice.AnyPlan | None:
    """None where these tiles do not fit."""
    sizes = choice.sizes_of(shape.problem())
    pairs = min(num_tokens, choice.max_tokens(shape.problem())) * shape.top_k
    try:
        if isinstance(tiles, PrefillTiles):
            return check_prefill(PrefillPlan(sizes, tiles))
        bucket = next(b for b in choice.BUCKETS if b >= pairs)
        return check(choice.plan_of(sizes, tiles, bucket))
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

    def __init__(self, shape: Shape, plan: choice.AnyPlan) -> None:
        super().__init__(shape.problem(), launcher("driver"), _multiprocessors())
        self.plan = plan

    def _plan(self, num_tokens: int) -> choice.AnyPlan:
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
        first: dict[bool, Tensor] = {}
        for tiles in candidates(name, m):
            plan = plan_of(shape, tiles, m)
            if plan is None:
                continue
            kernel = Fixed(shape, plan)
            out = kernel.run(prepared, x, *routed[0])
            error = relative(out, expected)
            prefill = isinstance(tiles, PrefillTiles)
            equal = prefill not in first or torch.equal(out, first[prefill])
            if not error < WORST_ERROR or not equal:
                print(f"{name} {m} {plan}: error {error}, equal {equal}: left out", flush=True)
                continue
            first.setdefault(prefill, out)
            calls = [partial(kernel.run, prepared, x, *r) for r in routed]
            us = median_us(calls)
            floor = shape.floor_us(m, touched)
            rows.append(
                {"num_tokens": m, "us": round(us, 2), "floor_us": round(floor, 2),
                 "error": error, "tiles": asdict(tiles)}
            )  # fmt: skip
            print(f"{name} {m:5d} {us:8.2f} us {floor / us:.2f} {tiles}", flush=True)
    return rows


def best_of(rows: Iterable[dict[str, Any]], prefill: bool) -> dict[int, dict[str, Any]]:
    """The fastest of one regime's rows, by number of tokens."""
    best: dict[int, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda r: (r["num_tokens"], r["us"])):
        if choice.of_prefill(row["tiles"]) == prefill:
            best.setdefault(row["num_tokens"], row)
    return best


def crossing(decode: dict[int, dict[str, Any]], prefill: dict[int, dict[str, Any]]) -> int | None:
    """The number of tokens from which on prefill is the faster one: between two at which both were
    timed, where straight lines between their logarithms cross; None without any such times."""
    both = sorted(decode.keys() & prefill.keys())
    gain = {m: math.log(decode[m]["us"] / prefill[m]["us"]) for m in both}
    losing = [m for m in both if gain[m] <= 0]
    if not both or not losing:
        return both[0] if both else None
    low = losing[-1]
    if low == both[-1]:
        return low + 1
    high = both[both.index(low) + 1]
    part = -gain[low] / (gain[high] - gain[low])
    return round(low * (high / low) ** part) + 1


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def main(
    shapes: list[str],
    compile_only: Annotated[bool, typer.Option("--compile")] = False,
    tokens: Annotated[str, typer.Option(help="others keep their rows")] = ",".join(
        map(str, TOKENS)
    ),
    folder: Path | None = None,
) -> None:
    """Tunes the named shapes, or compiles their candidates."""
    numbers = [int(m) for m in tokens.split(",")]
    if compile_only:
        compile_all(
            (plan, SHAPES[name].activation, SHAPES[name].bias)
            for name in shapes
            for m in numbers
            for tiles in candidates(name, m)
            if (plan := plan_of(SHAPES[name], tiles, m))
        )
        return
    for name in shapes:
        file = tuning.file_name(choice.shape_key(choice.sizes_of(SHAPES[name].problem())))
        known = tuning.folder() / "sm90" / file
        old = json.loads(known.read_text())["all"] if known.is_file() else []
        rows = [r for r in old if r["num_tokens"] not in numbers] + measure(name, numbers)
        facts = {
            "device": torch.cuda.get_device_name(0),
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "prefill_from": crossing(best_of(rows, False), best_of(rows, True)),
            "rows": [*best_of(rows, False).values(), *best_of(rows, True).values()],
            "all": rows,
        }
        path = (folder or known.parent) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
