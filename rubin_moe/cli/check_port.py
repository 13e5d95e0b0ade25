"""``rubin-moe check-port``: the ten points of porting a kernel to sm_107a."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rubin_moe.arch.port_check import check_ptx

app = typer.Typer()


@app.command()
def check_port(
    ptx: Annotated[
        Path, typer.Argument(help="PTX text compiled for sm_107a", exists=True, dir_okay=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say of each point whether a kernel meets it, misses it, or it does not apply, and why.

    Exit code 1 if a point is missed.
    """
    points = check_ptx(ptx.read_text(errors="replace"))
    if as_json:
        typer.echo(json.dumps([asdict(p) for p in points], indent=1))
    else:
        for point in points:
            typer.echo(str(point))
    raise typer.Exit(int(any(p.status == "missed" for p in points)))
