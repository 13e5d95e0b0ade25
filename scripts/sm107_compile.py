#!/usr/bin/env python
"""How long the sm_107a kernels take to compile, and to come back from the disk cache.

    python scripts/sm107_compile.py [--output PATH]

Every figure is of a process of its own. ``cold``: the call that compiles with an empty cache, the
import of CuTe DSL included in the first kernel's figure and stated apart; ``warm``: the same call
in a new process. ``together``: that many processes at once on one cold cache. Wall-clock and CPU
seconds, since other work shares the machine. Writes docs/results/sm107_compile.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rubin_moe.provenance import provenance, write_result  # noqa: E402

PACKAGES = ("nvidia-cutlass-dsl", "torch")
TOGETHER = 8
KERNELS = (("fc1", 128, "nvfp4-ue4m3"), ("fc2", 32, "nvfp4-ue5m3"), ("fc1", 256, "mxfp8"))
CHILD = """
import json, sys, time
import torch
from rubin_moe.kernels.sm107.compiled import fc1_kernel, fc2_kernel
from rubin_moe.kernels.sm107.plan import plan_gemm
gemm, tile_n, fmt = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if sys.argv[4] == "imported":
    import cutlass.cute
wall, cpu = time.perf_counter(), time.process_time()
plan = plan_gemm(fmt, tile_n)
kernel = fc1_kernel(plan) if gemm == "fc1" else fc2_kernel(plan, atomic=False)
print(json.dumps({
    "wall_s": round(time.perf_counter() - wall, 3),
    "cpu_s": round(time.process_time() - cpu, 3),
    "ptx_bytes": len(kernel.ptx),
}))
"""


def start(folder: str, gemm: str, tile_n: int, fmt: str, how: str) -> subprocess.Popen[str]:
    """A child process that asks for one kernel."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, gemm, str(tile_n), fmt, how],
        cwd=ROOT,
        env=os.environ | {"RUBIN_MOE_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def figures(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it printed. Raises CalledProcessError where it failed."""
    text, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return dict(json.loads(text))


def kernel_row(gemm: str, tile_n: int, fmt: str) -> dict[str, Any]:
    """Cold, warm, and cold with CuTe DSL imported before."""
    row: dict[str, Any] = {"kernel": gemm, "tile_n": tile_n, "format": fmt}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        row["cold"] = figures(start(folder, gemm, tile_n, fmt, "bare"))
        row["warm"] = figures(start(folder, gemm, tile_n, fmt, "bare"))
        row["cold_dsl_imported"] = figures(start(other, gemm, tile_n, fmt, "imported"))
    typer.echo(row)
    return row


def together() -> dict[str, Any]:
    """Many processes at once, one cold cache: each succeeds, one whole file stays."""
    with tempfile.TemporaryDirectory() as folder:
        wall = time.perf_counter()
        children = [start(folder, "fc2", 32, "nvfp4-ue4m3", "bare") for _ in range(TOGETHER)]
        done = [figures(child) for child in children]
        names = sorted(path.suffix for path in Path(folder, "kernels").iterdir())
    if names != [".bin"]:
        raise AssertionError(f"the cache holds {names}")
    return {
        "kernel": "fc2",
        "processes": TOGETHER,
        "succeeded": len(done),
        "files": len(names),
        "wall_s": round(time.perf_counter() - wall, 1),
    }


def main(
    output: Annotated[Path, typer.Option()] = ROOT / "docs/results/sm107_compile.json",
) -> None:
    """Measure and write."""
    load = os.getloadavg()[0]
    rows = [kernel_row(g, n, s) for g, n, s in KERNELS]
    rows.append(together())
    head = {
        "what": "compile time of the sm_107a kernels, cold and from the disk cache",
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
        "cores": os.cpu_count(),
    }
    write_result(output, head | provenance(PACKAGES), rows)


if __name__ == "__main__":
    typer.run(main)
