"""The sm_90a backend on the GPU that is here, against a float32 reference; fails if a check does.

Formats x activations x numbers of tokens, missing experts, expert maps, runs bit for bit, rows
alone and in a batch, tile choices, CUDA graphs replayed with another routing. ``--compile`` fills
the kernel cache and needs no GPU.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import Annotated

import torch
import typer
from h200_layer import OAI, SILU, Shape, graph_of, random_weights, reference, relative, routing

from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import Target
from rubin_moe.kernels.launch import launcher
from rubin_moe.kernels.sm90 import choice
from rubin_moe.kernels.sm90.host import Sm90Kernel, decode_kernel
from rubin_moe.kernels.sm90.plan import DecodePlan, Tiles, check
from rubin_moe.layers.experts import MoEExperts

WORST_ERROR = {"bfloat16": 4e-3, "float16": 5e-4}  # rounding between the GEMMs, and the output's
FORMATS = ("nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4")
ACTIVATIONS = (
    (SILU, False), (OAI, True), (Activation("gelu_tanh"), False), (Activation("relu2"), True),
)  # fmt: skip
TOKENS = {SILU: (1, 7, 33, 200, 1100)}
OTHER_TOKENS = (33, 200)
SMALL = Tiles(8, 2, 3, 3)
TILES = (
    SMALL, Tiles(6, 3, 1, 2), Tiles(6, 2, 3, 3, split=True), Tiles(4, 2, 3, 3, buffers=1),
    Tiles(8, 2, 3, 3, pass_tokens=16), Tiles(6, 2, 3, 2, split=True, pass_tokens=16),
)  # fmt: skip


def shape_of(fmt: str, activation: Activation, bias: bool, dtype: str = "bfloat16") -> Shape:
    return Shape(8, 2, 576, 352, fmt, activation, bias, dtype)


def grid() -> list[tuple[Shape, int]]:
    halves = [(shape_of(fmt, SILU, False, "float16"), m) for fmt in FORMATS for m in (1, 200)]
    return halves + [
        (shape_of(fmt, activation, bias), m)
        for fmt in FORMATS
        for activation, bias in ACTIVATIONS
        for m in TOKENS.get(activation, OTHER_TOKENS)
    ]


def tile_plans() -> list[DecodePlan]:
    sizes = choice.sizes_of(shape_of(FORMATS[0], SILU, False).problem())
    return [check(DecodePlan(sizes, tiles, 512)) for tiles in TILES]


def compile_one(job: tuple[DecodePlan, Activation, bool]) -> None:
    decode_kernel(*job)


def compile_all() -> None:
    jobs = {
        (choice.choose(shape.problem(), m), shape.activation, shape.bias) for shape, m in grid()
    }
    jobs |= {(plan, SILU, False) for plan in tile_plans()}
    with Pool(2) as pool:
        pool.map(compile_one, sorted(jobs, key=str), chunksize=1)
    print(len(jobs), "kernels")


class Checks:
    """Results by name; a failure is printed at once."""

    def __init__(self) -> None:
        self.results: dict[str, bool] = {}

    def __call__(self, name: str, good: bool, detail: object = "") -> None:
        self.results[name] = bool(good)
        print("ok  " if good else "FAIL", name, detail, flush=True)


def layer_of(shape: Shape) -> MoEExperts:
    target = Target("cuda", (9, 0), {"nvidia-cutlass-dsl": "4.8.1"})
    return MoEExperts(random_weights(shape), shape.problem(), target, "sm90")


def tokens(shape: Shape, num_tokens: int) -> torch.Tensor:
    x = torch.randn(num_tokens, shape.hidden, device="cuda")
    return x.to(getattr(torch, shape.dtype))


def numbers(checks: Checks) -> None:
    for shape, m in grid():
        experts = layer_of(shape)
        x = tokens(shape, m)
        ids, router = routing(shape, m)
        ids[torch.rand(ids.shape, device="cuda") < 0.1] = -1
        out = experts(x, ids, router)
        expected = reference(random_weights(shape), shape.activation, x, ids, router)
        error = relative(out, expected) if bool((ids >= 0).any()) else float(out.abs().max())
        kind = shape.activation.kind
        name = f"{shape.fmt} {shape.dtype} {kind} bias={shape.bias} M={m}"
        checks(name, error < WORST_ERROR[shape.dtype], error)


def one(checks: Checks) -> None:
    """One launch, for compute-sanitizer."""
    shape = shape_of(FORMATS[0], SILU, False)
    x, (ids, router) = tokens(shape, 33), routing(shape, 33)
    out = layer_of(shape)(x, ids, router)
    error = relative(out, reference(random_weights(shape), SILU, x, ids, router))
    checks("one launch", error < WORST_ERROR[shape.dtype], error)


def determinism(checks: Checks) -> None:
    for fmt in FORMATS:
        shape = shape_of(fmt, SILU, False)
        experts = layer_of(shape)
        x, (ids, router) = tokens(shape, 33), routing(shape, 33)
        first = experts(x, ids, router)
        same = all(torch.equal(experts(x, ids, router), first) for _ in range(20))
        checks(f"{fmt}: 20 runs bit-equal", same)
        alone = [experts(*(t[r : r + 1] for t in (x, ids, router))) for r in range(33)]
        checks(f"{fmt}: rows alone", torch.equal(torch.cat(alone), first))
        checks(f"{fmt}: no tokens", experts(x[:0], ids[:0], router[:0]).shape == (0, 576))
        where = torch.randperm(8, device="cuda").int()
        moved = torch.empty_like(where)
        moved[where.long()] = torch.arange(8, device="cuda").int()
        same = torch.equal(experts(x, where[ids.long()], router, moved), first)
        checks(f"{fmt}: expert map", same)


def graphs(checks: Checks) -> None:
    for fmt in FORMATS:
        shape = shape_of(fmt, SILU, False)
        experts = layer_of(shape)
        x, (ids, router) = tokens(shape, 33), routing(shape, 33)
        out = torch.empty_like(x)
        graph = graph_of([partial(experts, x, ids, router, out=out)])
        same = True
        for _ in range(20):
            fresh = tokens(shape, 33), *routing(shape, 33)
            for target, source in zip((x, ids, router), fresh, strict=True):
                target.copy_(source)
            graph.replay()
            same &= torch.equal(out, experts(*fresh))
        checks(f"{fmt}: graph replayed with 20 other routings", same)


class Fixed(Sm90Kernel):
    """The layer with one plan."""

    def __init__(self, shape: Shape, plan: DecodePlan) -> None:
        super().__init__(shape.problem(), launcher("driver"), 132)
        self.plan = plan

    def _plan(self, num_tokens: int) -> DecodePlan:
        return self.plan


def tile_choices(checks: Checks) -> None:
    shape = shape_of(FORMATS[0], SILU, False)
    prepared = Fixed(shape, tile_plans()[0]).prepare(random_weights(shape))
    x, (ids, router) = tokens(shape, 200), routing(shape, 200)
    first = None
    for plan in tile_plans():
        out = Fixed(shape, plan).run(prepared, x, ids, router)
        first = out if first is None else first
        checks(f"tiles change no bit: {plan}", torch.equal(out, first))


def main(
    compile_only: Annotated[bool, typer.Option("--compile")] = False,
    only_one: Annotated[bool, typer.Option("--one", help="a single launch")] = False,
    report: Path | None = None,
) -> None:
    """Runs every check; exit status 1 if one fails."""
    if compile_only:
        compile_all()
        return
    checks = Checks()
    for part in (one,) if only_one else (numbers, determinism, graphs, tile_choices):
        part(checks)
    failed = [name for name, good in checks.results.items() if not good]
    print(f"{len(checks.results) - len(failed)} of {len(checks.results)} checks passed")
    if report:
        report.write_text(json.dumps(checks.results, indent=1) + "\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    typer.run(main)
