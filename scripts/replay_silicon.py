#!/usr/bin/env python3
"""Replay the recorded answers of a GPU on the emulator and write docs/results/emulator_h200.json.

    python scripts/replay_silicon.py [--output FILE]

One row an instruction: probes, 32-bit words compared, words that differ by more than the stated
tolerance, and the largest distance seen. A probe that the driver refused counts as one case; it
matches when the emulator refuses it too; so does a launch that ends in an error.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rubin_moe.emulator.errors import EmulatorError  # noqa: E402
from tests.emulator.silicon.probe import Probe  # noqa: E402
from tests.emulator.silicon.recording import Recording, all_probes, digest  # noqa: E402
from tests.emulator.silicon.replay import compare, driver_maps, emulate, faults, refuses  # noqa: E402

OUTPUT = ROOT / "docs" / "results" / "emulator_h200.json"


def tolerance(probe: Probe) -> str:
    """How the probe's outputs are compared."""
    if probe.ulps:
        return f"{probe.ulps} ulp"
    return "bitwise"


def replay(probe: Probe, recording: Recording) -> dict[str, Any]:
    """Cases, mismatches and the worst distance of one probe."""
    key = digest(probe)
    if key in recording.errors:
        note = recording.errors[key]
        loaded = not note.startswith("cuModuleLoadData")
        matches = faults(probe, driver_maps(probe)) if loaded else refuses(probe)
        return {"cases": 1, "mismatches": int(not matches), "worst": 0.0, "note": note}
    try:
        emulated = emulate(probe, recording.maps.get(key, b""))
    except EmulatorError as error:
        cases = recording.outputs[key].size // 4
        return {"cases": cases, "mismatches": cases, "worst": 0.0, "note": str(error)}
    result = compare(probe, recording.outputs[key], emulated)
    return {"cases": result.cases, "mismatches": result.mismatches, "worst": result.worst}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    recording = Recording.load()
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    missing = []
    for probe in all_probes():
        if digest(probe) not in {*recording.outputs, *recording.errors}:
            missing.append(probe.name)
            continue
        one = replay(probe, recording)
        key = (probe.instruction, tolerance(probe))
        empty = {"instruction": key[0], "compared": key[1], "probes": 0, "cases": 0}
        row = rows.setdefault(key, {**empty, "mismatches": 0, "worst": 0.0})
        row["probes"] += 1
        row["cases"] += one["cases"]
        row["mismatches"] += one["mismatches"]
        row["worst"] = max(row["worst"], one["worst"])
        if "note" in one:
            row.setdefault("notes", []).append(f"{probe.name}: {one['note']}")
        if one["mismatches"]:
            row.setdefault("differing_probes", []).append(probe.name)
            print(f"{probe.name}: {one['mismatches']} of {one['cases']}, worst {one['worst']:g}")
    listed = list(rows.values())
    result = {
        "recorded": recording.meta,
        "replayed": {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "instructions": len({row["instruction"] for row in listed}),
        "cases": sum(row["cases"] for row in listed),
        "mismatches": sum(row["mismatches"] for row in listed),
        "not_recorded": missing,
        "rows": listed,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['cases']} cases, {result['mismatches']} mismatches: {arguments.output}")


if __name__ == "__main__":
    main()
