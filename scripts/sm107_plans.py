#!/usr/bin/env python
"""What the sm_107a kernels take of an SM, and what they multiply in vain, beside FlashInfer's.

    python scripts/sm107_plans.py [--output PATH]

Writes docs/results/sm107_plans.json. Rows of ``table: plan``: every kernel assembled by ptxas of
CUDA 13.5 (registers, spills), shared memory, TMEM columns, stages, and the ten points of the port
check. Rows of ``table: padding``: multiply-adds of the problem over those issued, by the emulator's
reports, for 1 to 128 tokens an expert. Rows of ``table: regime``: from how many tokens an expert
on weights on the M side lose. Nothing here was measured on hardware.
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
from functools import cache
from importlib.metadata import files
from itertools import product
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
from rubin_moe.formats.spec import FORMATS  # noqa: E402
from rubin_moe.kernels.sm107 import plan as plans  # noqa: E402
from rubin_moe.kernels.sm107.compiled import (  # noqa: E402
    fc1_kernel,
    fc2_kernel,
    quantize_kernel,
    route_kernel,
    sum_kernel,
)
from rubin_moe.kernels.sm107.host import make_work  # noqa: E402
from rubin_moe.kernels.sm107.regimes import MOST_TOKENS, swap_ab_loses_from  # noqa: E402
from rubin_moe.kernels.sm107.rules import PAIRS  # noqa: E402
from rubin_moe.layouts.sm107_tiles import Sm107Tiles  # noqa: E402
from rubin_moe.provenance import provenance, write_result  # noqa: E402
from rubin_moe.shapes import model_names, model_shape  # noqa: E402
from tests.emulator.peers.fc1 import Fc1  # noqa: E402
from tests.emulator.peers.fc2 import Fc2  # noqa: E402
from tests.emulator.peers.operands import MXFP4, MXFP8, NVFP4, NVFP4_UE5M3  # noqa: E402
from tests.emulator.peers.routing import Sizes  # noqa: E402
from tests.emulator.peers.swap_ab import SwapAb  # noqa: E402

PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cuda-nvcc", "flashinfer-python", "torch", "llvmlite")
TOKENS = (1, 4, 8, 16, 23, 32, 48, 64, 96, 128)
N, K, EXPERTS = 256, 512, 3  # two experts get every token, the third none
Row = dict[str, Any]
METRICS = {
    "registers": 1,
    "spill_bytes": 1,
    "smem_bytes": 1,
    "tmem_columns": 1,
    "stages": -1,
    "token_stages": -1,
}
"""1: less is better, -1: more is."""
REASONS = {
    "registers": "one block an SM on both sides, so nothing waits for registers: 320 threads may "
    "take 204 each; the epilogue keeps 32 columns of a lane at once",
    "smem_bytes": "the block's shared memory is the ring: more of it is more stages",
    "token_stages": "a ring of their own: tokens lie in L2, and the weights, which come from HBM, "
    "get the stages that this frees; the peer has one ring",
}


@dataclass(frozen=True)
class Peer:
    """One kernel of FlashInfer. ``fmt`` and ``cta_group``: of ours to compare with; ``note``: what
    to know when comparing."""

    gemm: str
    case: Fc1 | Fc2 | SwapAb
    fmt: str = "nvfp4-ue4m3"
    cta_group: int = 1
    note: str = ""

    def __str__(self) -> str:
        tile = "x".join(map(str, self.case.tile))
        return f"{self.case.target} {self.case.name} {tile}"


_S7, _S0 = "sm_107a", "sm_100a"
_I1, _I2 = (128, 128, 128), (256, 128, 128)
_T1, _T2 = (128, 128, 256), (256, 128, 256)
_UE4M3, _UE5M3 = "nvfp4-ue4m3", "nvfp4-ue5m3"
_SM100 = "K = 64 instructions: compiled for sm_100a"
_MIXED = "K = 32 instructions, FP4 a byte an element: compiled for sm_100a"
PEERS = (
    Peer("fc1", Fc1("fc1_gather_swiglu_cpasync", _S7, NVFP4, _T1, inst=_I1)),
    Peer(
        "fc1",
        Fc1("fc1_gather_swiglu_cpasync_2cta", _S7, NVFP4_UE5M3, _T2, (2, 1), _I2),
        _UE5M3,
        2,
    ),
    Peer("fc1", SwapAb("swap_ab_fc1_nvfp4", _S0, NVFP4, NVFP4, (128, 64)), _UE4M3, 1, _SM100),
    Peer("fc1", SwapAb("swap_ab_fc1_nvfp4_2cta", _S0, NVFP4, NVFP4, (256, 32)), _UE4M3, 2, _SM100),
    Peer("fc2", Fc2("fc2_finalize", _S7, NVFP4, _T1, inst=_I1)),
    Peer("fc2", Fc2("fc2_finalize_2cta", _S7, NVFP4_UE5M3, _T2, (2, 1), _I2), _UE5M3, 2),
    Peer("fc2", SwapAb("swap_ab_fc2_nvfp4_2cta", _S0, NVFP4, NVFP4, (256, 64)), _UE4M3, 2, _SM100),
    Peer(
        "fc2",
        SwapAb("swap_ab_fc2_rows_mxfp4_x_mxfp8", _S0, MXFP4, MXFP8, (128, 128), False),
        "mxfp8",
        1,
        _MIXED,
    ),
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
    points = check_ptx(ptx, plan.smem, plans.GATHERED)
    return {str(point.number): point.status for point in points}


def own_plans(assembler: Assembler) -> list[Row]:
    """One row a kernel that can be launched."""
    rows = []
    for fmt, tile_n, cta_group in product(plans.OPERANDS, plans.TILES_N, (1, 2)):
        plan = plans.plan_gemm(fmt, tile_n, cta_group)
        for gemm, kernel in (
            ("fc1", fc1_kernel(plan)),
            ("fc2", fc2_kernel(plan, atomic=False)),
            ("fc2 atomic", fc2_kernel(plan, atomic=True)),
        ):
            tile = f"{plans.TILE_M * cta_group}x{tile_n}x{plan.operands.tile_k}"
            rows.append(
                {
                    "table": "plan",
                    "whose": "rubin-moe",
                    "gemm": gemm,
                    "kernel": f"sm_107a {kernel.name} {fmt} {tile}",
                    "format": fmt,
                    "tile_n": tile_n,
                    "cta_group": cta_group,
                    "chosen": plans.choose_cta_group(fmt, tile_n) == cta_group,
                    "threads": kernel.block,
                    **assembler.resources(kernel.ptx),
                    "smem_bytes": kernel.smem_bytes,
                    "tmem_columns": plan.tmem.allocated,
                    "stages": plan.weight_stages,
                    "token_stages": plan.token_stages,
                    "accumulators": 2,
                    "cubin_bytes": len(kernel.cubin),
                    "port_check": port_points(kernel.ptx, plan),
                }
            )
            typer.echo(rows[-1])
    return rows


@cache
def own_padding(gemm: str, fmt: str, cta_group: int, tokens: int) -> Report:
    """One launch over ``tokens`` for each of two experts; zeros, since no value matters."""
    tile_n = plans.choose_tile_n(tokens, 2, EXPERTS)
    plan = plans.plan_gemm(fmt, tile_n, cta_group)
    launcher = EmulatorLauncher(keep_reports=True)
    ids = torch.tensor([[0, 1]] * tokens)
    work = make_work(launcher, ids, torch.ones(tokens, 2), EXPERTS, tile_n)
    rows, k_tiles, row_tiles = 2 * tokens, plans.tiles_of(fmt, K), N // plans.TILE_M
    codes = torch.zeros(rows, 128 * k_tiles, dtype=torch.uint8)
    scales = torch.zeros(rows, plan.operands.scales_k * k_tiles, dtype=torch.uint8)
    weight_format = next(w for w, a in PAIRS.items() if a == fmt)
    shape = Sm107Tiles(FORMATS[weight_format]).storage_shape((EXPERTS, N, K))
    weights = torch.zeros(shape, dtype=torch.uint8)
    common = [work.items, work.num_items, work.token, codes, scales, weights]
    ones, bias, none = torch.ones(EXPERTS, 2), torch.zeros(EXPERTS, N), torch.ones(3)
    if gemm == "fc1":
        out_tiles = plans.tiles_of(fmt, N // 2)
        out = [
            torch.zeros(rows, 128 * out_tiles, dtype=torch.uint8),
            torch.zeros(rows, plan.operands.scales_k * out_tiles, dtype=torch.uint8),
        ]
        kernel = fc1_kernel(plan)
        args = [*common, ones, bias, none, *out, ones, k_tiles, row_tiles, out_tiles]
    else:
        out = [torch.zeros(rows, N), work.choice, work.weight]
        kernel = fc2_kernel(plan, atomic=False)
        args = [*common, ones, bias, *out, k_tiles, row_tiles, N]
    launcher.launch(kernel, 2, args)
    return launcher.reports[-1]


def rowwise_plans(assembler: Assembler) -> list[Row]:
    """The kernels without a matrix product: no ring, no tensor memory, nobody beside them."""
    dtypes = ("bfloat16", "float32")
    scales = dict.fromkeys(o.scale for o in plans.OPERANDS.values())
    kernels = [(f"{s} {d}", quantize_kernel(s, d)) for s in scales for d in dtypes]
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
            "smem_bytes": kernel.smem_bytes,
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
    stages = _first_attribute(kernel, "num_ab_stage", "num_ab_stages", "num_stages")
    row = {
        "table": "plan",
        "whose": "FlashInfer",
        "gemm": peer.gemm,
        "kernel": str(peer),
        "format": peer.fmt,
        "tile_n": peer.case.tile[1],
        "cta_group": peer.cta_group,
        "threads": report.block[0] * report.block[1] * report.block[2],
        **assembler.resources(saved.ptx),
        "smem_bytes": report.shared_bytes,
        "tmem_columns": report.peak_tmem_columns,
        "stages": stages,
        "token_stages": stages,
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
        same = ("gemm", "format", "tile_n", "cta_group")
        own = next(
            r
            for r in rows
            if r["whose"] == "rubin-moe" and all(r.get(key) == peer[key] for key in same)
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


def regimes() -> list[Row]:
    """For every published model and both GEMMs: tokens an expert from which on weights on M lose
    to tokens on M, by bytes and multiply-adds (`kernels.sm107.regimes`)."""
    rows = []
    for name in model_names():
        shape = model_shape(name)
        fmt = PAIRS[shape.weight_format]
        for gemm, features, k in (
            ("fc1", 2 * shape.intermediate, shape.hidden),
            ("fc2", shape.hidden, shape.intermediate),
        ):
            rows.append(
                {
                    "table": "regime",
                    "model": name,
                    "gemm": gemm,
                    "format": fmt,
                    "features": features,
                    "k": k,
                    "swap_ab_loses_from": swap_ab_loses_from(fmt, features, k),
                    "searched_to": MOST_TOKENS,
                }
            )
    return rows


def main(
    output: Annotated[Path, typer.Option()] = ROOT / "docs/results/sm107_plans.json",
) -> None:
    """Assemble, emulate, compare; exit 1 if a kernel of ours spills or a batch is worse."""
    with tempfile.TemporaryDirectory(prefix="rubin_moe_") as name:
        assembler, launches = Assembler(Path(name)), Path(name) / "launches"
        launches.mkdir()
        rows, padding = own_plans(assembler) + rowwise_plans(assembler), []
        for peer in PEERS:
            row, reports = peer_rows(peer, assembler, launches)
            rows.append(row)
            for tokens, theirs in reports.items():
                own = own_padding(peer.gemm, peer.fmt, peer.cta_group, tokens)
                padding.append(padding_row(peer, tokens, own, theirs))
    head = {
        "what": "kernels assembled by ptxas of CUDA 13.5, and multiply-adds by the emulator",
        "executed_on": "the emulator; not measured on hardware",
        "shape": f"padding: {EXPERTS} experts, one empty, N = {N}, K = {K}",
    }
    made = [*rows, *comparisons(rows), *padding, *regimes()]
    write_result(output, head | provenance(PACKAGES), made)
    bad = [r for r in rows if r["whose"] == "rubin-moe" and r["spill_bytes"]]
    bad += [r for r in padding if not r["no_worse"]]
    for row in bad:
        typer.echo(f"worse: {row}")
    raise typer.Exit(bool(bad))


if __name__ == "__main__":
    typer.run(main)
