#!/usr/bin/env python
"""Runs every peer kernel on the emulator and records how it compares with float64.

    python scripts/emulator_peers.py [--only TEXT] [--seeds N] [--rules enforce] [--output PATH]

Writes docs/results/emulator_peers.json: one row a kernel, with what `--rules` found under any of
the seeds (errors end a run; findings by rule and line). With `--only` it replaces the rows of these
kernels. The numbers are of the emulator, executed on a CPU; nothing in them is a measurement of the
architecture they were compiled for.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path
from typing import Annotated, Any, cast

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rubin_moe.emulator.dsl import emulated_device  # noqa: E402
from rubin_moe.emulator.findings import Mode  # noqa: E402
from tests.emulator.peers.case import PeerCase  # noqa: E402
from tests.emulator.peers.suite import CASES  # noqa: E402

PACKAGES = ("flashinfer-python", "nvidia-cutlass-dsl", "llvmlite", "numpy", "torch")


def run_case(case: PeerCase, seeds: int, rules: Mode | None) -> dict[str, Any]:
    """One row: the worst comparison over `seeds` schedules, and what the emulator reported."""
    row: dict[str, Any] = {
        "kernel": case.name,
        "target": case.target,
        "formats": case.formats,
        "shape": case.shape,
        "seeds": seeds,
    }
    started, comparisons = time.monotonic(), []
    findings: dict[tuple[str, int], str] = {}
    try:
        prepared = None
        for seed in range(seeds):
            with emulated_device(case.target, seed=seed, rules=rules) as gpu:
                prepared = prepared or case.prepare()
                comparisons.append(prepared.run(gpu))
            for launch in gpu.launches:
                assert launch.report is not None
                for found in launch.report.findings:
                    findings.setdefault((found.rule, found.line), f"{found.severity}: {found}")
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
    if rules is not None:
        row["rules"] = rules
        row["findings"] = [
            {"rule": rule, "line": line, "text": text}
            for (rule, line), text in sorted(findings.items())
        ]
    row["seconds"] = round(time.monotonic() - started, 1)
    return row


def main(
    only: Annotated[str, typer.Option(help="Run cases whose key contains this.")] = "",
    seeds: Annotated[int, typer.Option(help="Schedules to run each kernel under.")] = 1,
    rules: Annotated[str, typer.Option(help="enforce, report or none.")] = "none",
    output: Annotated[Path, typer.Option()] = ROOT / "docs/results/emulator_peers.json",
) -> None:
    """Run the peer kernels; exit 1 if any differs or fails."""
    mode = None if rules == "none" else cast(Mode, rules)
    rows = []
    for case in CASES:
        if only in case.key:
            rows.append(run_case(case, seeds, mode))
            row = rows[-1]
            equal = f"{row.get('bit_equal', 0)}/{row.get('elements', 0)} equal"
            print(f"{case.key:60} {row['status']:7} {equal:24} {row['seconds']:6.1f} s", flush=True)
            for found in row.get("findings", ()):
                print(f"    {found['rule']}, line {found['line']}", flush=True)
            if "error" in row:
                print(f"    {row['error']}", flush=True)
    result = {
        "what": "kernels of FlashInfer, compiled by CuTe DSL, executed on the emulator",
        "executed_on": f"emulator, {platform.processor() or platform.machine()}",
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "rows": rows,
    }
    if only and output.exists():  # these kernels again, the others' rows stay
        again = {(row["target"], row["kernel"]): row for row in rows}
        earlier = json.loads(output.read_text())["rows"]
        result["rows"] = [again.get((row["target"], row["kernel"]), row) for row in earlier]
    if not only or output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")
    if any(row["status"] != "passed" for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
