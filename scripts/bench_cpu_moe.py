"""One MoE layer on a CPU: this backend on FP4 weights beside vLLM's own bf16 path.

Both compute gate and up, SwiGLU, down and the weighted sum from the same routings, in one
process, round by round in turn; weights are random and every routing is cold. A routing's time is
the fastest of the rounds, so that other work on the machine is left out on both sides; a row holds
medians over routings.

    python scripts/bench_cpu_moe.py
    python scripts/bench_cpu_moe.py --instruction-set avx2   # both sides without AVX-512
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import torch
import typer

from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.spec import FORMATS, BlockFormat
from rubin_moe.kernels.base import ActivationFormat, MoEProblem
from rubin_moe.kernels.cpu import isa
from rubin_moe.kernels.cpu.host import CpuKernel

RESULTS = Path(__file__).parents[1] / "docs" / "results"
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Row = dict[str, object]
TOKENS = (1, 4, 16)


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.hidden}x{self.intermediate}x{self.num_experts} top-{self.top_k}"

    def routings(self, num_tokens: int) -> list[torch.Tensor]:
        """int32 ``[M, top_k]`` each; one token at a time goes through all experts in turn."""
        g = torch.Generator().manual_seed(num_tokens)
        if num_tokens == 1:
            order = torch.randperm(self.num_experts, generator=g).int()
            return list(order.view(-1, 1, self.top_k))
        rows = 6 * num_tokens
        ids = torch.stack(
            [torch.randperm(self.num_experts, generator=g)[: self.top_k] for _ in range(rows)]
        )
        return list(ids.int().view(6, num_tokens, self.top_k))


SHAPES = (Shape(2048, 768, 128, 8), Shape(2880, 2880, 32, 4))


def import_vllm_kernels(instruction_set: str) -> None:
    """The library that vLLM itself picks on this CPU, or the one it would on an AVX2 machine."""
    if instruction_set == "avx2":
        with contextlib.suppress(ImportError):  # no Python module inside; its operators are there
            importlib.import_module("vllm._C_AVX2")
        return
    from vllm.platforms import current_platform

    current_platform.import_kernels()


def vllm_bf16(shape: Shape) -> Run:
    """vLLM's fused experts on bf16 weights in its own packed order."""
    packed = []
    for n, k in (
        (2 * shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
    ):
        w = torch.empty(shape.num_experts, n, k, dtype=torch.bfloat16)
        w[:] = torch.randn(n, k) * k**-0.5  # the same for all: only the time is wanted
        packed.append(torch.empty_like(w))
        torch.ops._C.prepack_moe_weight(w, packed[-1], "vec")

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops._C.cpu_fused_moe(out, x, *packed, None, None, weights, ids, False, "silu", "vec")
        return out

    return run


def ours(shape: Shape, fmt: BlockFormat, act: ActivationFormat, instruction_set: str) -> Run:
    e, h, i = shape.num_experts, shape.hidden, shape.intermediate
    low, high = {"ue4m3": (0x48, 0x7E), "ue5m3": (0x38, 0x58), "ue8m0": (117, 123)}[fmt.scale]

    def projection(n: int, k: int, halves: int) -> ProjectionWeights:
        codes = torch.randint(0, 256, (e, n, fmt.packed_k(k)), dtype=torch.uint8)
        scales = torch.randint(low, high, (e, n, fmt.scales_k(k)), dtype=torch.uint8)
        return ProjectionWeights(codes, scales, torch.full((e, halves), 2.0**-12))

    w = ExpertWeights(
        fmt, h, i, True, projection(2 * i, h, 2), projection(h, i, 1), tuple(range(e))
    )
    problem = MoEProblem(e, e, shape.top_k, h, i, fmt, activation_format=act)
    kernel = CpuKernel(problem, isa.detect(instruction_set))
    prepared = kernel.prepare(w)
    return lambda x, ids, weights: kernel.run(prepared, x, ids, weights)


def one_round(run: Run, shape: Shape, num_tokens: int) -> list[float]:
    """Microseconds of a call for each of the cold routings."""
    x = torch.randn(num_tokens, shape.hidden, dtype=torch.bfloat16)
    weights = torch.full((num_tokens, shape.top_k), 1 / shape.top_k)
    times = []
    for ids in shape.routings(num_tokens):
        start = time.perf_counter()
        run(x, ids, weights)
        times.append(1e6 * (time.perf_counter() - start))
    return times


def measure(own: Run, peer: Run, shape: Shape, rounds: int, labels: dict[str, str]) -> list[Row]:
    """Rows of one shape and format: all numbers of tokens and threads."""
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for m in TOKENS:
            pairs = [(one_round(peer, shape, m), one_round(own, shape, m)) for _ in range(rounds)]
            rows.append(
                {"shape": str(shape), **labels, "tokens": m, "threads": threads}
                | figures(pairs, shape, m, FORMATS[labels["weights"]])
            )
            typer.echo(json.dumps(rows[-1]))
    return rows


def figures(
    pairs: list[tuple[list[float], list[float]]], shape: Shape, m: int, fmt: BlockFormat
) -> Row:
    """Of (vLLM's, our) times in interleaved rounds: the fastest of each routing."""
    touched = statistics.mean(len(set(ids.flatten().tolist())) for ids in shape.routings(m))
    weights = touched * 3 * shape.hidden * shape.intermediate
    peer, own = (
        [min(times) for times in zip(*(pair[side] for pair in pairs), strict=True)]
        for side in (0, 1)
    )
    ratios = [p / o for p, o in zip(peer, own, strict=True)]
    own_us = statistics.median(own)
    return {
        "vllm_bf16_us": round(statistics.median(peer), 1),
        "ours_us": round(own_us, 1),
        "ours_gb_per_s": round(weights * (0.5 + 1 / fmt.sf_vec_size) / own_us / 1e3, 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main(
    rounds: Annotated[int, typer.Option(help="interleaved rounds a row")] = 9,
    formats: Annotated[str, typer.Option(help="weight formats")] = "nvfp4-ue4m3,mxfp4",
    activations: Annotated[str, typer.Option(help="activation formats")] = "16bit,int8",
    instruction_set: Annotated[str, typer.Option(help="of both sides")] = isa.available()[0],
    out: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
) -> None:
    """Measures every row and writes the JSON."""
    head = provenance(instruction_set, rounds)
    import_vllm_kernels(instruction_set)
    rows = []
    with torch.inference_mode():
        for shape in SHAPES:
            peer = vllm_bf16(shape)
            for fmt, act in itertools.product(formats.split(","), activations.split(",")):
                labels = {"weights": fmt, "activations": act}
                own = ours(shape, FORMATS[fmt], cast(ActivationFormat, act), instruction_set)
                rows += measure(own, peer, shape, rounds, labels)
    native = instruction_set == isa.available()[0]
    path = out or RESULTS / f"cpu_moe{'' if native else '_' + instruction_set}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


def provenance(instruction_set: str, rounds: int) -> Row:
    version = importlib.metadata.version
    return {
        "device": f"{cpu_name()}, {os.cpu_count()} cores",
        "instruction_set": instruction_set,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("torch", "vllm", "llvmlite")},
        "peer": "vLLM's CPU fused experts on bf16 weights, the same layer and routings",
        "ratio": "peer's time / ours",
        "statistic": "fastest of interleaved rounds per routing, median over routings",
        "rounds": rounds,
        "load_average": os.getloadavg()[0],
    }


if __name__ == "__main__":
    typer.run(main)
