#!/usr/bin/env python
"""Puts faults into kernels and counts how many of them the emulator's rules find.

    python scripts/emulator_mutants.py [--count N | --sample] [--only TEXT] [--jobs N]
    python scripts/emulator_mutants.py --add RESULTS [--only TEXT] [--count N]

The second form puts results together: of kernels named by --only mutants are drawn anew, the other
rows are kept, and their survivors tried again.

Every mutant is a sound kernel with one fault: a wait, fence, commit or arrival dropped, a phase
flipped, a count, index, offset or descriptor field off by a step, two asynchronous operations in
the wrong order. It is drawn by a fixed seed among the instructions that the sound kernel executes,
and runs on the emulator under `rules="enforce"` with several seeds, until a rule, a deadlock, or
different bytes in device memory show it. Survivors are either shown to be equivalent to the sound
kernel (`tests/emulator/mutants/equivalence.py`) or listed.

Writes docs/results/emulator_mutants.json, but with --sample or with --only alone it only prints.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

#: Draws the mutants.
DRAW_SEED = 20261130
#: Schedules of asynchronous operations that a mutant runs under, until it is caught.
SEEDS = (1, 2, 3, 4)
LEARN = (1, 2, 3)
SAMPLE = 40
#: Kernels of the sample: quick ones of each kind.
SAMPLED = ("sm_107a-dense_nvfp4_ue4m3_128x64", "sm_107a-fc2_finalize", "triton matmul_tma",
           "triton matmul_wgmma")  # fmt: skip
PACKAGES = ("flashinfer-python", "nvidia-cutlass-dsl", "llvmlite", "numpy")
ATTEMPTS = 3


def record(name: str, path: Path) -> None:
    """Compile a subject and save its launch, unless that was done before."""
    if path.exists():
        return
    from tests.emulator.mutants.subjects import SUBJECTS

    (subject,) = [s for s in SUBJECTS if s.name == name]
    subject.record().save(path)


def examine(
    path: Path, name: str, quota: int, rules: str | None, faults: list[str] | None = None
) -> dict[str, Any]:
    """Draw a subject's mutants, or find those with some faults, and judge them."""
    from rubin_moe.emulator.errors import EmulationError
    from rubin_moe.emulator.saved import SavedLaunch
    from tests.emulator.mutants.draw import draw
    from tests.emulator.mutants.equivalence import proof
    from tests.emulator.mutants.trial import bench

    started = time.monotonic()
    rows = []
    with bench(SavedLaunch.load(path), rules) as b:  # type: ignore[arg-type]
        try:
            b.learn(LEARN)
        except EmulationError as error:
            print(f"{name}: the sound kernel fails: {error}", flush=True)
            return {"name": name, "rows": [], "unsound": str(error)}
        if faults is None:
            drawn = draw(b.mutations(), quota, f"{DRAW_SEED} {name}")
        else:
            found = {str(m): m for sites in b.mutations().values() for m in sites}
            drawn = [found[fault] for fault in faults]
        for mutation in drawn:
            verdict = b.judge(mutation, SEEDS)
            row: dict[str, Any] = {
                "kernel": name,
                "fault": str(mutation),
                "operator": mutation.operator,
            }
            row |= {"caught_by": verdict.kind, "rule": verdict.rule, "seeds": verdict.seeds}
            row["message"] = verdict.message[:300]
            if not verdict.kind:
                row["equivalent"] = proof(b, mutation)
            rows.append(row)
            shown = verdict.kind or (
                f"EQUIVALENT {row['equivalent']}" if row["equivalent"] else "SURVIVES"
            )
            print(f"{name:45} {mutation} -> {shown} {verdict.rule}", flush=True)
    return {"name": name, "rows": rows, "seconds": round(time.monotonic() - started, 1)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The counts that matter."""
    from tests.emulator.mutants.survivors import reason

    equivalent = [r for r in rows if r.get("equivalent")]
    caught = [r for r in rows if r["caught_by"]]
    survivors = [
        {"kernel": r["kernel"], "fault": r["fault"], "reason": reason(r["operator"], r["fault"])}
        for r in rows
        if not r["caught_by"] and not r.get("equivalent")
    ]
    operators: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = operators.setdefault(
            row["operator"], {"mutants": 0, "equivalent": 0, "caught": 0, "survived": 0}
        )
        counts["mutants"] += 1
        which = (
            "caught" if row["caught_by"] else "equivalent" if row.get("equivalent") else "survived"
        )
        counts[which] += 1
    return {
        "mutants": len(rows),
        "equivalent": len(equivalent),
        "caught": len(caught),
        "caught_percent": round(100 * len(caught) / max(len(rows) - len(equivalent), 1), 1),
        "caught_by": dict(Counter(r["caught_by"] for r in caught).most_common()),
        "rules": dict(Counter(r["rule"] for r in caught if r["rule"]).most_common()),
        "operators": operators,
        "survivors": survivors,
    }


def main(
    count: Annotated[int, typer.Option(help="Mutants to draw.")] = 300,
    sample: Annotated[bool, typer.Option(help="40 mutants of quick kernels.")] = False,
    only: Annotated[str, typer.Option(help="Kernels whose name contains this.")] = "",
    jobs: Annotated[int, typer.Option(help="Processes.")] = min(os.cpu_count() or 1, 8),
    rules: Annotated[str, typer.Option(help="enforce, or none: traps only.")] = "enforce",
    add: Annotated[
        list[Path] | None,
        typer.Option(help="Earlier results: kept, their survivors tried again."),
    ] = None,
    launches: Annotated[Path | None, typer.Option(help="Keep the launches, use kept ones.")] = None,
    output: Annotated[Path, typer.Option()] = ROOT / "docs/results/emulator_mutants.json",
) -> None:
    """Exit 1 if fewer than 95 % of the mutants that are not equivalent are caught."""
    from tests.emulator.mutants.subjects import SUBJECTS

    drawn = [s for s in SUBJECTS if only in s.name and (not sample or s.name in SAMPLED)]
    if add and not only:
        drawn = []
    names = {s.name for s in drawn}
    earlier = [row for path in add or () for row in json.loads(path.read_text())["rows"]]
    earlier = [row for row in earlier if row["kernel"] not in names]
    again: dict[str, list[str]] = {}
    for row in earlier:
        if not row["caught_by"] and not row.get("equivalent"):
            again.setdefault(row["kernel"], []).append(row["fault"])
    chosen = drawn + [s for s in SUBJECTS if s.name in again]
    total, kinds = SAMPLE if sample else count, len(drawn)
    quotas = [total * (i + 1) // kinds - total * i // kinds for i in range(kinds)]
    quotas += [0] * (len(chosen) - kinds)
    mode = None if rules == "none" else rules
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(
            jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1
        ) as pool,
    ):
        kept = launches or Path(folder)
        paths = {s.name: kept / f"{s.name.replace(' ', '_')}.launch" for s in chosen}
        recorded = {s.name: pool.submit(record, s.name, paths[s.name]) for s in chosen}
        futures = {}
        for subject, quota in zip(chosen, quotas, strict=True):
            recorded[subject.name].result()
            futures[subject.name] = pool.submit(
                examine, paths[subject.name], subject.name, quota, mode, again.get(subject.name)
            )
        results = []
        for subject, quota in zip(chosen, quotas, strict=True):
            for attempt in range(ATTEMPTS):
                try:
                    results.append(futures[subject.name].result())
                    break
                except Exception as error:
                    if "fresh process" not in str(error) or attempt == ATTEMPTS - 1:
                        print(f"{subject.name}: {type(error).__name__}: {error}", flush=True)
                        results.append({"name": subject.name, "rows": [], "unsound": str(error)})
                        break
                    # an address of the launch is taken in that process
                    futures[subject.name] = pool.submit(
                        examine, paths[subject.name], subject.name, quota, mode,
                        again.get(subject.name),
                    )  # fmt: skip
    rows = [row for result in results for row in result["rows"]]
    known = {(row["kernel"], row["fault"]) for row in rows}
    rows = [row for row in earlier if (row["kernel"], row["fault"]) not in known] + rows
    counts = summary(rows)
    result = {
        "what": "kernels with one fault each, executed on the emulator",
        "executed_on": f"emulator, {platform.processor() or platform.machine()}",
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "rules": rules,
        "draw_seed": DRAW_SEED,
        "seeds": list(SEEDS),
        "kernels": [
            {"name": s.name, "origin": s.origin}
            for s in SUBJECTS
            if s.name in {row["kernel"] for row in rows}
        ],
        "seconds": round(time.monotonic() - started, 1),
        **counts,
        "rows": rows,
    }
    shown = {k: v for k, v in counts.items() if k not in ("survivors", "operators")}
    print(json.dumps(shown, indent=1))
    for row in counts["survivors"]:
        print(f"survives: {row['kernel']}: {row['fault']}")
    print(f"{result['seconds']} s")
    if not sample and mode is not None and (add or not only):
        output.write_text(json.dumps(result, indent=1) + "\n")
    unsound = [r["name"] for r in results if "unsound" in r]
    if unsound or counts["caught_percent"] < 95:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
