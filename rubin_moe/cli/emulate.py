"""``rubin-moe emulate``: run a saved launch on the emulator and report what it did.

A launch is saved by `rubin_moe.emulator.dsl.emulated_device(..., save_to=FOLDER)`.
"""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def emulate(
    path: Annotated[Path, typer.Argument(help="a .launch file", exists=True, dir_okay=False)],
    seed: Annotated[int | None, typer.Option(help="delay asynchronous operations by it")] = None,
    rules: Annotated[
        str | None, typer.Option(help="enforce: stop at a broken rule; report: list them")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    picture: Annotated[Path | None, typer.Option(help="PNG of the memory maps")] = None,
    memory: Annotated[
        Path | None, typer.Option(help="folder for the buffers after the launch, one .bin each")
    ] = None,
) -> None:
    """Run a saved launch on the emulator and report what it did.

    Exit code 1 if the kernel traps or hangs, 2 if it is refused.
    """
    from rubin_moe.emulator import EmulationError
    from rubin_moe.emulator.errors import EmulatorError
    from rubin_moe.emulator.saved import SavedLaunch

    try:
        report, buffers = SavedLaunch.load(path).run(seed, rules=rules)
    except EmulationError as error:
        typer.echo(f"{error.outcome}: {error}", err=True)
        raise typer.Exit(1) from None
    except (EmulatorError, ValueError) as error:
        typer.echo(f"rubin-moe: {path}: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(report.to_json() if as_json else str(report))
    if picture is not None:
        from rubin_moe.emulator.maps import draw_report

        draw_report(picture, report)
    if memory is not None:
        memory.mkdir(parents=True, exist_ok=True)
        for index, buffer in enumerate(buffers):
            (memory / f"buffer_{index}.bin").write_bytes(buffer.tobytes())
