"""``rubin-moe replay``: launches with the emulator's result, run again on a real GPU.

rubin-moe replay --save FOLDER --backend sm107 --format mxfp4     anywhere: one layer's launches
rubin-moe replay --expect FILE.launch                             anywhere: of any saved launch
rubin-moe replay FOLDER                                           with a GPU: run and compare
"""

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def replay(
    paths: Annotated[list[Path] | None, typer.Argument(help=".launch files, or folders")] = None,
    save: Annotated[Path | None, typer.Option(help="folder for a layer's launches")] = None,
    backend: Annotated[str, typer.Option(help="with --save: sm107 or sm90")] = "sm107",
    fmt: Annotated[str, typer.Option("--format", help="with --save: of the weights")] = "mxfp4",
    activation: Annotated[
        str, typer.Option(help="with --save: silu, swigluoai, or relu2, whose layer is exact")
    ] = "silu",
    tokens: Annotated[int, typer.Option(help="with --save: of the batch")] = 23,
    expect: Annotated[bool, typer.Option("--expect", help="add the emulator's result")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON of what came out")] = None,
) -> None:
    """Save launches with the memory the emulator leaves, or run saved ones on this GPU and compare.

    Exit code 1 if memory differs from the emulator's, 2 if a launch cannot be run here.
    """
    from rubin_moe.errors import RubinMoeError

    try:
        if save is not None:
            _save(save, backend, fmt, activation, tokens)
        files = _files(paths or [])
        if expect:
            from rubin_moe.replay.record import expect as add_expected

            for path in files:
                add_expected(path)
                typer.echo(f"{path.name}: expected memory added")
        elif files:
            _run(files, output)
        elif save is None:
            raise typer.BadParameter("name launches to run, or a folder to --save to")
    except RubinMoeError as error:
        typer.echo(f"rubin-moe: {error}", err=True)
        raise typer.Exit(2) from None


def _files(paths: list[Path]) -> list[Path]:
    found = []
    for path in paths:
        found += sorted(path.glob("*.launch")) if path.is_dir() else [path]
    return found


def _run(files: list[Path], output: Path | None) -> None:
    from dataclasses import asdict

    from rubin_moe.replay import file as saved
    from rubin_moe.replay.gpu import CudaMachine, replay

    machine = CudaMachine()
    outcomes = []
    for path in files:
        outcomes.append(replay(machine, saved.load(path)))
        typer.echo(str(outcomes[-1]))
    if output is not None:
        what = "launches, memory after them: this GPU against the emulator"
        rows = [asdict(outcome) for outcome in outcomes]
        facts = {"what": what, **machine.describe(), "rows": rows}
        output.write_text(json.dumps(facts, indent=1) + "\n")
    if not all(outcome.equal for outcome in outcomes):
        raise typer.Exit(1)


def _save(folder: Path, backend: str, fmt: str, kind: str, tokens: int) -> None:
    from dataclasses import replace

    from rubin_moe.emulation import EmulatorLauncher
    from rubin_moe.errors import ConfigError
    from rubin_moe.formats.spec import FORMATS
    from rubin_moe.kernels.activation import Activation
    from rubin_moe.kernels.sm107.rules import PAIRS
    from rubin_moe.layers.experts import problem_of
    from rubin_moe.replay import record

    if backend not in ("sm107", "sm90") or fmt not in PAIRS:
        raise ConfigError(
            f"--backend {backend} --format {fmt}: backends are sm107 and sm90, formats "
            f"{', '.join(PAIRS)}"
        )
    limit = 7.0 if kind == "swigluoai" else None
    activation = Activation(kind, limit=limit)  # type: ignore[arg-type]
    weights = record.layer(FORMATS[fmt], activation.gated)
    launcher = record.RecordingLauncher(folder, EmulatorLauncher())
    x, ids, topk_weights = record.batch(tokens, one_hot=kind == "relu2")
    if backend == "sm107":
        from rubin_moe.kernels.sm107.host import Sm107Kernel

        problem = replace(
            problem_of(weights, 2, activation, x.dtype),
            activation_format=PAIRS[fmt],  # type: ignore[arg-type]
        )
        kernel = Sm107Kernel(problem, launcher, num_ctas=4)
        kernel.run(kernel.prepare(weights), x, ids, topk_weights)
    else:
        from rubin_moe.kernels.sm90.host import Sm90Kernel

        problem = problem_of(weights, 2, activation, x.dtype)
        hopper = Sm90Kernel(problem, launcher, 4, "cpu")
        hopper.run(hopper.prepare(weights), x, ids, topk_weights)
    for path in launcher.saved:
        typer.echo(f"saved {path}")
