"""``rubin-moe diff``: how far two checkpoints of one model are apart, worst experts first."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rubin_moe.errors import ConfigError

if TYPE_CHECKING:
    from rubin_moe.convert.compare import Difference

app = typer.Typer(add_completion=False)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="folder of a checkpoint, the reference")],
    b: Annotated[Path, typer.Argument(help="folder of another one of the same model")],
    worst: Annotated[int, typer.Option(help="experts to print")] = 20,
    limit: Annotated[
        float | None, typer.Option(help="exit code 1 if a relative error exceeds it")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="picture of layers by experts")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, every expert")] = False,
) -> None:
    """Compare codes, scales and decoded weights of every routed expert.

    Exit code 0, or 1 if --limit is exceeded; 2 if they cannot be compared.
    """
    from rubin_moe.convert.compare import compare
    from rubin_moe.loader.load import ModelCheckpoint

    first, second = ModelCheckpoint(a), ModelCheckpoint(b)
    found = sorted(compare(first, second), key=lambda d: -d.rel_err)
    if plot is not None:
        draw(found, plot, f"{a.name} - {b.name}")
    if as_json:
        typer.echo(json.dumps([asdict(d) for d in found], indent=1))
    else:
        _print(found, worst)
    raise typer.Exit(int(limit is not None and bool(found) and found[0].rel_err > limit))


def _print(found: "list[Difference]", worst: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120, highlight=False)
    same = sum(d.rel_err == 0 for d in found)
    console.print(f"{len(found)} matrices of experts, {same} of equal values")
    if same == len(found):
        return
    shown = found[: min(worst, len(found) - same)]
    mean = sum(d.rel_err for d in found) / len(found)
    console.print(f"relative error {mean:.3e} on average; the worst {len(shown)}:")
    columns = {
        "layer": [d.layer for d in shown],
        "expert": [str(d.expert) for d in shown],
        "part": [d.part for d in shown],
        "rel. error": [f"{d.rel_err:.3e}" for d in shown],
        "largest error": [f"{d.max_abs:.3e}" for d in shown],
        "largest value": [f"{d.max_value:.3e}" for d in shown],
        "codes": [_share(d.codes) for d in shown],
        "scales": [_share(d.scales) for d in shown],
    }
    told = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table(*told, box=None)
    for cells in zip(*told.values(), strict=True):
        table.add_row(*cells)
    console.print(table)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%} differ"


def draw(found: "list[Difference]", path: Path, title: str) -> None:
    """Relative error of each layer and expert, a panel a projection.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ConfigError(f"--plot needs matplotlib: pip install matplotlib ({e})") from None
    layers = sorted({d.layer for d in found}, key=_order)
    experts = sorted({d.expert for d in found})
    parts = [p for p in ("gate", "up", "down") if any(d.part == p for d in found)]
    figure = Figure(figsize=(4 * len(parts), 1.5 + 0.25 * len(layers)), layout="constrained")
    top = max((d.rel_err for d in found), default=0.0) or 1.0
    axes = figure.subplots(1, len(parts), squeeze=False)[0]
    for axis, part in zip(axes, parts, strict=True):
        grid = [[0.0] * len(experts) for _ in layers]
        for d in found:
            if d.part == part:
                grid[layers.index(d.layer)][experts.index(d.expert)] = d.rel_err
        image = axis.imshow(grid, aspect="auto", vmin=0, vmax=top, interpolation="nearest")
        axis.set(title=part, xlabel="expert", yticks=range(len(layers)), yticklabels=layers)
    figure.colorbar(image, ax=list(axes), label="relative error")
    figure.suptitle(title)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: cannot be written: {e}") from None


def _order(layer: str) -> tuple[str, int]:
    branch, _, index = layer.rpartition(".")
    return branch, int(index)
