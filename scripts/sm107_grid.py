#!/usr/bin/env python
"""Runs the sm_107a kernels over the whole grid on the emulator and records what came out.

    python scripts/sm107_grid.py [OPTIONS]

Accumulators have to equal float64 bit for bit; codes between the GEMMs too, but where the stated
bound of the activation spans a rounding boundary (at most 0.1 % of them); every ``--every``-th
case also runs under that many schedules of delayed asynchronous operations and has to give the
same bytes. The emulator's rules are enforced in every launch: a race, a missing fence or a value
that nothing wrote ends it. Writes docs/results/sm107_grid.json, one row a case. Executed on the
emulator; nothing here was measured on an sm_107a device.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rubin_moe.emulation import EmulatorLauncher  # noqa: E402
from rubin_moe.provenance import provenance, write_result  # noqa: E402
from tests.kernels.sm107.grid import GridCase, GridProblem, cases, padded_macs  # noqa: E402

PACKAGES = ("nvidia-cutlass-dsl", "torch", "numpy", "llvmlite")
MOST_DIFFERING = 1e-3
CASE = ("format", "activation", "cta_group", "tokens", "experts", "routing", "hidden",
        "intermediate")  # fmt: skip


def run_case(case: GridCase, seeds: int) -> dict[str, Any]:
    """One row."""
    torch.set_num_threads(1)
    started = time.monotonic()
    row: dict[str, Any] = {
        "format": case.fmt,
        "activation": case.activation,
        "cta_group": case.cta_group,
        "tokens": case.tokens,
        "experts": case.experts,
        "routing": case.routing,
        "hidden": case.hidden,
        "intermediate": case.intermediate,
        "tile_n": case.tile_n,
        "seeds": seeds,
    }
    try:
        problem = GridProblem(case)
        launcher = EmulatorLauncher(keep_reports=True, rules="enforce")
        out = problem.run(launcher)
        equal, accumulators = problem.accumulators_equal(out)
        codes = problem.compare_codes(out)
        same = [
            out.equal(problem.run(EmulatorLauncher(seed, rules="enforce"))) for seed in range(seeds)
        ]
    except Exception as error:
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        return row | {"status": "error", "error": first}
    differing = codes.elements - codes.bit_equal
    passed = (
        equal == accumulators
        and codes.passed
        and differing <= MOST_DIFFERING * codes.elements
        and all(same)
    )
    return row | {
        "accumulators": accumulators,
        "accumulators_bit_equal": equal,
        "codes": codes.elements,
        "codes_differing": differing,
        "past_a_boundary": codes.max_error,
        "bound": codes.bound,
        "seeds_equal": sum(same),
        "useful_macs": problem.useful_macs(),
        "padded_macs": padded_macs(launcher.reports),
        "warp_instructions": sum(r.warp_instructions for r in launcher.reports),
        "findings": sorted({f.rule for r in launcher.reports for f in r.findings}),
        "seconds": round(time.monotonic() - started, 1),
        "status": "passed" if passed else "failed",
    }


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Which case a row is of."""
    return tuple(row[name] for name in CASE)


def main(
    only: Annotated[str, typer.Option(help="Run cases whose name contains this.")] = "",
    sample: Annotated[int, typer.Option(help="Run every such case.")] = 1,
    every: Annotated[int, typer.Option(help="Delay operations in every such case.")] = 31,
    seeds: Annotated[int, typer.Option(help="Schedules of those cases.")] = 8,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    add: Annotated[
        list[Path] | None, typer.Option(help="Earlier results: rows of other cases are kept.")
    ] = None,
    output: Annotated[Path, typer.Option()] = ROOT / "docs/results/sm107_grid.json",
) -> None:
    """Run the grid; exit 1 if any case differs."""
    # primes, so that samples have all batches, routings, sizes and formats
    chosen = [c for c in cases()[::sample] if only in str(c)]
    numbered = [(c, 0 if i % every else seeds) for i, c in enumerate(chosen)]
    with ProcessPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_case, case, number) for case, number in numbered]
        rows = [future.result() for future in tqdm(futures)]
    for case, row in zip(chosen, rows, strict=True):
        if row["status"] != "passed":
            typer.echo(f"{case}: {row}")
    for path in add or ():
        known = [key(row) for row in rows]
        rows += [r for r in json.loads(path.read_text())["rows"] if key(r) not in known]
    head = {
        "what": "FC1 and FC2 of kernels/sm107, compiled for sm_107a: accumulators and codes "
        "against float64",
        "executed_on": "the emulator; not measured on hardware",
        "rules": "enforce",
        "cases": f"{len(rows)} of {len(cases())}",
    }
    write_result(output, head | provenance(PACKAGES), rows)
    if any(row["status"] != "passed" for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
