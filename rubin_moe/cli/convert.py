"""``rubin-moe convert``: a checkpoint in another format, shard by shard."""

from pathlib import Path
from typing import Annotated, Any

import typer

from rubin_moe.errors import ConvertError

app = typer.Typer(add_completion=False)

MB = 1_000_000


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="folder of the checkpoint; never written to")],
    out: Annotated[Path, typer.Argument(help="folder that appears when everything is verified")],
    to: Annotated[str, typer.Option(help="nvfp4-ue4m3, nvfp4-ue5m3, mxfp4 or bf16")],
    names: Annotated[
        str, typer.Option(help="auto, modelopt, compressed-tensors, gpt-oss or rubin")
    ] = "auto",
    mx_rule: Annotated[str, typer.Option(help="MXFP4 scales: floor, even or ceil")] = "ceil",
    search: Annotated[
        bool, typer.Option("--search", help="choose block scales by squared error")
    ] = False,
    fold: Annotated[
        str | None, typer.Option(help="of NVFP4: none, exact, full, full+requantize")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="round what does not fit, and report it")
    ] = False,
    linears: Annotated[
        bool | None,
        typer.Option("--linears/--experts-only", help="attention and dense matrices too"),
    ] = None,
    activations: Annotated[
        str, typer.Option(help="what the config says of activations: none or dynamic")
    ] = "none",
    calibrate: Annotated[
        Path | None, typer.Option(help="text: measure the activations of a 16-bit source on it")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="module or pattern to leave as it is; repeatable")
    ] = None,
    shard_mb: Annotated[int, typer.Option(help="largest output file in MB")] = 5000,
    stacking: Annotated[
        str | None,
        typer.Option(help="how stacked experts lie: [transposed][,interleaved] or plain"),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="processes [default: one a core]")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the plan, from headers alone")
    ] = False,
) -> None:
    """Convert the routed experts of a checkpoint; copy everything else byte for byte.

    A run that was interrupted goes on after its last finished file when it is started again.
    """
    from rubin_moe.convert.config import configs
    from rubin_moe.convert.options import Options
    from rubin_moe.convert.planner import make_plan
    from rubin_moe.loader.load import ModelCheckpoint

    options = Options(
        target=to,  # type: ignore[arg-type]
        names=names,  # type: ignore[arg-type]
        mx_rule=mx_rule,  # type: ignore[arg-type]
        search=search,
        fold=fold,  # type: ignore[arg-type]
        force=force,
        linears=linears,
        activations=activations,  # type: ignore[arg-type]
        calibrate=None if calibrate is None else str(calibrate),
        exclude=tuple(exclude or ()),
        max_shard_bytes=shard_mb * MB,
        stacking=_stacking(stacking),
    )
    if dry_run:
        checkpoint = ModelCheckpoint(source)
        plan = make_plan(checkpoint, options)
        configs(checkpoint, plan)  # what they cannot say is told now
        typer.echo("\n".join(plan.lines()))
        return
    _run(source, out, options, jobs)


def _run(source: Path, out: Path, options: Any, jobs: int | None) -> None:
    from rubin_moe.cli.bars import Bars
    from rubin_moe.convert.run import convert

    with Bars() as bars:
        outcome = convert(source, out, options, jobs=jobs, report=bars.report)
    if outcome.resumed:
        typer.echo(f"went on after {outcome.resumed} finished files")
    typer.echo(f"{outcome.folder}: {outcome.plan.output_bytes:,} bytes, verified")
    for line in outcome.tally.lines():
        typer.echo(f"  {line}")
    for module, experts in outcome.plan.uncalibrated.items():
        typer.echo(f"  no input scale of their own: {module} experts {list(experts)}")
    for note in outcome.plan.notes:
        typer.echo(f"  note: {note}")


def _stacking(text: str | None) -> Any:
    from rubin_moe.loader.dialect import Stacking

    if text is None:
        return None
    words = set(text.split(",")) - {"plain"}
    if not words <= {"transposed", "interleaved"}:
        raise ConvertError(f"stacking {text!r}: expected transposed, interleaved, both or plain")
    return Stacking("transposed" in words, "interleaved" in words)
