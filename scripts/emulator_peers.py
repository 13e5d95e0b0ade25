#!/usr/bin/env python
"""Runs every peer kernel on the emulator and records how it compares with float64.

    python scripts/emulator_peers.py [--only TEXT] [--seeds N] [--output PATH]

Writes docs/results/emulator_peers.json: one row a kernel. The numbers are of the emulator, executed
on a CPU; nothing in them is a measurement of the architecture they were compiled for.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rubin_moe.emulator.dsl import emulated_device  # noqa: E402
from tests.emulator.peers.case import PeerCase  # noqa: E402
from tests.emulator.peers.suite import CASES  # noqa: E402

PACKAGES = ("flashinfer-python", "nvidia-cutlass-dsl", "llvmlite", "numpy", "torch")


def run_case(case: PeerCase, seeds: int) -> dict[str, Any]:
    """One row: the worst comparison over `seeds` schedules, and what the emulator reported."""
    row: dict[str, Any] = {
        "kernel": case.name,
        "target": case.target,
        "formats": case.formats,
        "shape": case.shape,
        "seeds": seeds,
    }
    started, comparisons, findings = time.monotonic(), [], []
    try:
        prepared = None
        for seed in range(seeds):
            with emulated_device(case.target, seed=seed) as gpu:
                prepared = prepared or case.prepare()
                comparisons.append(prepared.run(gpu))
            for launch in gpu.launches:
                assert launch.report is not None
                findings += [str(f) for f in getattr(launch.report, "findings", [])]
                row["warp_instructions"] = launch.report.warp_instructions
    except Exception as error:
        row |= {"status": "error", "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    if comparisons:
        worst = max(comparisons, key=lambda c: (not c.passed, c.max_error))
        row |= {
            "compared": worst.text,
            "elements": worst.elements,
            "bit_equal": min(c.bit_equal for c in comparisons),
            "max_error": worst.max_error,
            "bound": worst.bound,
        }
        if "status" not in row:
            row["status"] = "passed" if worst.passed else "failed"
    row["findings"] = sorted(set(findings))
    row["seconds"] = round(time.monotonic() - started, 1)
    return row


def main(
    only: Annotated[str, typer.Option(help="Run cases whose key contains this.")] = "",
    seeds: Annotated[int, typer.Option(help="Schedules to run each kernel under.")] = 1,
    output: Annotated[Path, typer.Option()] = ROOT / "docs/results/emulator_peers.json",
) -> None:
    """Run the peer kernels; exit 1 if any differs or fails."""
    rows = []
    for case in CASES:
        if only in case.key:
            rows.append(run_case(case, seeds))
            row = rows[-1]
            equal = f"{row.get('bit_equal', 0)}/{row.get('elements', 0)} equal"
            print(f"{case.key:60} {row['status']:7} {equal:24} {row['seconds']:6.1f} s", flush=True)
            if "error" in row:
                print(f"    {row['error']}", flush=True)
    result = {
        "what": "kernels of FlashInfer, compiled by CuTe DSL, executed on the emulator",
        "executed_on": f"emulator, {platform.processor() or platform.machine()}",
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "rows": rows,
    }
    if not only:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")
    if any(row["status"] != "passed" for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
