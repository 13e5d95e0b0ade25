"""``rubin-moe check-port``: the ten points of porting a kernel to sm_107a."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rubin_moe.arch.port_check import PlannedKernel, check_plan, check_ptx
from rubin_moe.errors import ConfigError, PlanError
from rubin_moe.kernels.sm107 import plan as plans

app = typer.Typer(add_completion=False)


@app.command()
def check_port(
    ptx: Annotated[
        Path | None,
        typer.Argument(help="PTX text compiled for sm_107a", exists=True, dir_okay=False),
    ] = None,
    plan: Annotated[
        str,
        typer.Option(
            help="of our grouped GEMMs, FORMAT:TOKENS or FORMAT:TOKENS:CTAS (nvfp4-ue5m3:64:1): "
            "checked alone, or the PTX's"
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say of each point whether a kernel meets it, misses it, or it does not apply, and why.

    Exit code 1 if a point is missed.
    """
    planned = _planned(plan) if plan else None
    if ptx is not None:
        more = (planned.smem, planned.cp_async_buffers) if planned else ()
        points = check_ptx(ptx.read_text(errors="replace"), *more)
    elif planned is not None:
        points = check_plan(planned)
    else:
        raise ConfigError("nothing to check: give a PTX file, --plan, or both")
    if as_json:
        typer.echo(json.dumps([asdict(p) for p in points], indent=1))
    else:
        for point in points:
            typer.echo(str(point))
    raise typer.Exit(int(any(p.status == "missed" for p in points)))


def _planned(text: str) -> PlannedKernel:
    fmt, *numbers = text.split(":")
    if not 1 <= len(numbers) <= 2 or not all(n.isdecimal() for n in numbers):
        raise ConfigError(f"--plan {text!r}: expected FORMAT:TOKENS or FORMAT:TOKENS:CTAS")
    groups = int(numbers[1]) if len(numbers) == 2 else 1
    if groups not in (1, 2):
        raise PlanError(f"--plan {text!r}: {groups} CTAs; an instruction has 1 or 2")
    gemm = plans.plan_gemm(fmt, int(numbers[0]), groups)
    return PlannedKernel(
        gemm.operands.kind, groups, gemm.idesc, gemm.tmem.allocated, gemm.smem, plans.GATHERED
    )
