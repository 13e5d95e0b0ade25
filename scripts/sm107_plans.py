#!/usr/bin/env python
"""What the sm_107a kernels take of an SM, and what they multiply in vain, beside FlashInfer's.

    python scripts/sm107_plans.py [--output PATH]

Writes docs/results/sm107_plans.json. Rows of ``table: plan``: every kernel assembled by ptxas of
CUDA 13.5 (registers, spills), shared memory, TMEM columns, stages, and the ten points of the port
check. Rows of ``table: padding``: multiply-adds of the problem over those issued, by the emulator's
reports, for 1 to 128 tokens an expert. Nothing here was measured on hardware.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import files
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rubin_moe.arch.port_check import check_ptx  # noqa: E402
from rubin_moe.arch.ptx_facts import target_of  # noqa: E402
from rubin_moe.emulation import EmulatorLauncher  # noqa: E402
from rubin_moe.emulator.dsl import emulated_device  # noqa: E402
from rubin_moe.emulator.report import Report  # noqa: E402
from rubin_moe.emulator.saved import SavedLaunch  # noqa: E402
from rubin_moe.kernels.sm107 import plan as plans  # noqa: E402
from rubin_moe.kernels.sm107.compiled import (  # noqa: E402
    fc1_kernel,
    fc2_kernel,
    quantize_kernel,
    route_kernel,
    sum_kernel,
)
from rubin_moe.kernels.sm107.host import make_work  # noqa: E402
from rubin_moe.layouts.sm107_tiles import BLOCK_BYTES  # noqa: E402
from rubin_moe.provenance import provenance, write_result  # noqa: E402
from tests.emulator.peers.fc1 import Fc1  # noqa: E402
from tests.emulator.peers.fc2 import Fc2  # noqa: E402
from tests.emulator.peers.operands import NVFP4  # noqa: E402
from tests.emulator.peers.routing import Sizes  # noqa: E402
from tests.emulator.peers.swap_ab import SwapAb  # noqa: E402

PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cuda-nvcc", "flashinfer-python", "torch", "llvmlite")
TOKENS = (1, 4, 8, 16, 23, 32, 48, 64, 96, 128)
N, K, EXPERTS = 256, 512, 3  # two experts get every token, the third none
Row = dict[str, Any]
METRICS = {"registers": 1, "spill_bytes": 1, "smem_bytes": 1, "tmem_columns": 1, "stages": -1}
"""1: less is better, -1: more is."""
REASONS = {
    "registers": "one block an SM on both sides, so nothing waits for registers: 320 threads may "
    "take 204 each; the epilogue keeps 32 columns of a lane at once",
    "smem_bytes": "the block's shared memory is the ring: more of it is more stages",
}


@dataclass(frozen=True)
class Peer:
    """One kernel of FlashInfer. ``note``: what to know when comparing."""

    gemm: str
    case: Fc1 | Fc2 | SwapAb
    note: str = ""

    def __str__(self) -> str:
        tile = "x".join(map(str, self.case.tile))
        return f"{self.case.target} {self.case.name} {tile}"


_I1 = (128, 128, 128)
_SM100 = "K = 64 instructions: compiled for sm_100a"
PEERS = (
    Peer("fc1", Fc1("fc1_gather_swiglu_cpasync", "sm_107a", NVFP4, (128, 128, 256), inst=_I1)),
    Peer("fc1", SwapAb("swap_ab_fc1_nvfp4", "sm_100a", NVFP4, NVFP4, (128, 64)), _SM100),
    Peer("fc1", SwapAb("swap_ab_fc1_nvfp4_2cta", "sm_100a", NVFP4, NVFP4, (256, 32)), _SM100),
    Peer("fc2", Fc2("fc2_finalize", "sm_107a", NVFP4, (128, 128, 256), inst=_I1)),
    Peer("fc2", SwapAb("swap_ab_fc2_nvfp4_2cta", "sm_100a", NVFP4, NVFP4, (256, 64)), _SM100),
)


class Assembler:
    """ptxas of the installed nvidia-cuda-nvcc, whose file lacks the run bit."""

    def __init__(self, folder: Path) -> None:
        source = next(f for f in files("nvidia-cuda-nvcc") or [] if f.name == "ptxas")
        self._path = folder / "ptxas"
        shutil.copy(str(source.locate()), self._path)
        self._path.chmod(0o700)

    def resources(self, ptx: str) -> Row:
        """Registers a thread, bytes of stack and of spills."""
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(ptx)
            file.flush()
            arch = f"-arch={target_of(ptx)}"
            text = subprocess.run(
                [self._path, "-v", arch, file.name, "-o", "/dev/null"],
                check=True,
                capture_output=True,
                text=True,
            ).stderr
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", text)]
        stack = [int(n) for n in re.findall(r"(\d+) bytes stack frame", text)]
        registers = [int(n) for n in re.findall(r"Used (\d+) registers", text)]
        return {"registers": max(registers), "stack_bytes": max(stack), "spill_bytes": sum(spills)}


def port_points(ptx: str, plan: plans.GemmPlan) -> Row:
    """Verdict by number of the ten points."""
    points = check_ptx(ptx, plan.smem, ("sB", "sSFB"))
    return {str(point.number): point.status for point in points}


def own_plans(assembler: Assembler) -> list[Row]:
    """One row a kernel that can be launched."""
    rows = []
    for scale in ("ue4m3", "ue5m3"):
        for tile_n in plans.TILES_N:
            plan = plans.plan_gemm(tile_n, scale)
            for gemm, kernel in (
                ("fc1", fc1_kernel(plan)),
                ("fc2", fc2_kernel(plan, atomic=False)),
                ("fc2 atomic", fc2_kernel(plan, atomic=True)),
            ):
                rows.append(
                    {
                        "table": "plan",
                        "whose": "rubin-moe",
                        "gemm": gemm,
                        "kernel": f"sm_107a {kernel.name} {scale} 128x{tile_n}x256",
                        "threads": kernel.block,
                        **assembler.resources(kernel.ptx),
                        "smem_bytes": kernel.smem_bytes,
                        "tmem_columns": plan.tmem.allocated,
                        "stages": plan.stages,
                        "accumulators": 2,
                        "cubin_bytes": len(kernel.cubin),
                        "port_check": port_points(kernel.ptx, plan),
                    }
                )
                typer.echo(rows[-1])
    return rows


def own_padding(gemm: str, tokens: int) -> Report:
    """One launch over ``tokens`` for each of two experts; zeros, since no value matters."""
    tile_n = plans.choose_tile_n(tokens, 2, EXPERTS)
    plan = plans.plan_gemm(tile_n, "ue4m3")
    launcher = EmulatorLauncher(keep_reports=True)
    ids = torch.tensor([[0, 1]] * tokens)
    work = make_work(launcher, ids, torch.ones(tokens, 2), EXPERTS, tile_n)
    rows, k_tiles, row_tiles = 2 * tokens, K // plans.TILE_K, N // plans.TILE_M
    codes = torch.zeros(rows, K // 2, dtype=torch.uint8)
    scales = torch.zeros(rows, K // 16, dtype=torch.uint8)
    weights = torch.zeros(EXPERTS, row_tiles, k_tiles, BLOCK_BYTES, dtype=torch.uint8)
    common = [work.items, work.num_items, work.token, codes, scales, weights]
    ones = torch.ones(EXPERTS, 2)
    if gemm == "fc1":
        out = [torch.zeros(rows, 128, dtype=torch.uint8), torch.zeros(rows, 16, dtype=torch.uint8)]
        kernel, args = fc1_kernel(plan), [*common, ones, *out, ones, k_tiles, row_tiles, 1]
    else:
        out = [torch.zeros(rows, N), work.choice, work.weight]
        kernel, args = fc2_kernel(plan, atomic=False), [*common, ones, *out, k_tiles, row_tiles, N]
    launcher.launch(kernel, 2, args)
    return launcher.reports[-1]


def rowwise_plans(assembler: Assembler) -> list[Row]:
    """The kernels without a matrix product: no ring, no tensor memory, nobody beside them."""
    dtypes = ("bfloat16", "float32")
    kernels = [(f"{s} {d}", quantize_kernel(s, d)) for s in ("ue4m3", "ue5m3") for d in dtypes]
    kernels += [(d, sum_kernel(d)) for d in dtypes]
    kernels.append(("any sizes", route_kernel()))
    return [
        {
            "table": "plan",
            "whose": "rubin-moe",
            "gemm": "none",
            "kernel": f"sm_107a {kernel.name} {constants}",
            "threads": kernel.block,
            **assembler.resources(kernel.ptx),
            "smem_bytes": 0,
            "cubin_bytes": len(kernel.cubin),
        }
        for constants, kernel in kernels
    ]


@contextmanager
def compiled_once(seen: dict[str, Any]) -> Iterator[None]:
    """A peer's sizes are run-time values: its first compilation serves all of them.

    ``seen`` gets the kernel object and the compiled function.
    """
    import cutlass

    original: Callable[..., Any] = cutlass.cute.compile

    def compile_once(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        if "function" not in seen:
            seen["function"] = original(wrapper, *args, **kwargs)
            seen["kernel"] = wrapper.__self__
        return seen["function"]

    cutlass.cute.compile = compile_once
    try:
        yield
    finally:
        cutlass.cute.compile = original


def peer_rows(peer: Peer, assembler: Assembler, folder: Path) -> tuple[Row, dict[int, Report]]:
    """The plan's row, and the reports by tokens an expert."""
    seen: dict[str, Any] = {}
    reports: dict[int, Report] = {}
    for tokens in TOKENS:
        case = replace(peer.case, sizes=Sizes(tokens, EXPERTS, N, K))
        with emulated_device(case.target, save_to=folder) as gpu, compiled_once(seen):
            comparison = case.prepare().run(gpu)
        if not comparison.passed:
            raise AssertionError(f"{peer}: {comparison}")
        report = gpu.launches[-1].report
        assert report is not None
        reports[tokens] = report
    saved = SavedLaunch.load(max(folder.iterdir()))
    for file in folder.iterdir():
        file.unlink()
    kernel, report = seen["kernel"], reports[TOKENS[-1]]
    row = {
        "table": "plan",
        "whose": "FlashInfer",
        "gemm": peer.gemm,
        "kernel": str(peer),
        "threads": report.block[0] * report.block[1] * report.block[2],
        **assembler.resources(saved.ptx),
        "smem_bytes": report.shared_bytes,
        "tmem_columns": report.peak_tmem_columns,
        "stages": _first_attribute(kernel, "num_ab_stage", "num_ab_stages", "num_stages"),
        "accumulators": _first_attribute(kernel, "num_acc_stage", "num_acc_stages"),
        "cubin_bytes": len(saved.cubin),
    }
    typer.echo(row)
    return row, reports


def _first_attribute(kernel: Any, *names: str) -> int | None:
    return next((int(v) for n in names if (v := getattr(kernel, n, None)) is not None), None)


def comparisons(rows: list[Row]) -> list[Row]:
    """Our plans beside FlashInfer's of the same tile, metric by metric; a reason where one is
    worse."""
    made = []
    for peer in (r for r in rows if r["whose"] == "FlashInfer"):
        tile_n = int(peer["kernel"].rsplit(" ", 1)[1].split("x")[1])
        own = next(
            r
            for r in rows
            if r["whose"] == "rubin-moe"
            and r["gemm"] == peer["gemm"]
            and f"ue4m3 128x{tile_n}x" in r["kernel"]
        )
        row: Row = {"table": "comparison", "ours": own["kernel"], "peer": peer["kernel"]}
        for metric, sign in METRICS.items():
            row[metric] = [own[metric], peer[metric]]
            if sign * own[metric] > sign * peer[metric]:
                row.setdefault("worse", {})[metric] = REASONS[metric]
        made.append(row)
    return made


def padding_row(peer: Peer, tokens: int, own: Report, theirs: Report) -> Row:
    """Both sides' multiply-adds of one batch."""
    useful = 2 * tokens * N * K
    row = {
        "table": "padding",
        "gemm": peer.gemm,
        "peer": str(peer),
        "tokens_per_expert": tokens,
        "useful_macs": useful,
        "ours_macs": own.mma_macs,
        "peer_macs": theirs.mma_macs,
        "ours_useful": round(useful / own.mma_macs, 4),
        "peer_useful": round(useful / theirs.mma_macs, 4),
        "ours_instructions": own.mma_count,
        "peer_instructions": theirs.mma_count,
        "no_worse": own.mma_macs <= theirs.mma_macs,
    }
    return row | ({"note": peer.note} if peer.note else {})


def main(
    output: Annotated[Path, typer.Option()] = ROOT / "docs/results/sm107_plans.json",
) -> None:
    """Assemble, emulate, compare; exit 1 if a kernel of ours spills or a batch is worse."""
    with tempfile.TemporaryDirectory(prefix="rubin_moe_") as name:
        assembler, launches = Assembler(Path(name)), Path(name) / "launches"
        launches.mkdir()
        rows, padding = own_plans(assembler) + rowwise_plans(assembler), []
        own = {(g, t): own_padding(g, t) for g in ("fc1", "fc2") for t in TOKENS}
        for peer in PEERS:
            row, reports = peer_rows(peer, assembler, launches)
            rows.append(row)
            padding += [padding_row(peer, t, own[peer.gemm, t], reports[t]) for t in TOKENS]
    head = {
        "what": "kernels assembled by ptxas of CUDA 13.5, and multiply-adds by the emulator",
        "executed_on": "the emulator; not measured on hardware",
        "shape": f"padding: {EXPERTS} experts, one empty, N = {N}, K = {K}, NVFP4 with UE4M3",
    }
    write_result(output, head | provenance(PACKAGES), rows + comparisons(rows) + padding)
    bad = [r for r in rows if r["whose"] == "rubin-moe" and r["spill_bytes"]]
    bad += [r for r in padding if not r["no_worse"]]
    for row in bad:
        typer.echo(f"worse: {row}")
    raise typer.Exit(bool(bad))


if __name__ == "__main__":
    typer.run(main)
