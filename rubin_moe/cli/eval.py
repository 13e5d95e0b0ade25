"""``rubin-moe eval``: what quantization costs, on held-out text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rubin_moe.errors import ConfigError
from rubin_moe.provenance import read_result, write_result

if TYPE_CHECKING:
    from rubin_moe.eval.report import QualityResult

app = typer.Typer(add_completion=False)

WIDTH = 150  # of a table that is not cut when its output goes to a file


@app.command("eval")
def evaluate_checkpoints(
    checkpoints: Annotated[
        list[Path] | None, typer.Argument(help="folders of FP4 checkpoints")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="16-bit checkpoint [default: bf16 beside the first]")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="held-out text [default: corpus/heldout.txt beside it]")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="of the text [default: all]")] = None,
    window: Annotated[int, typer.Option(help="tokens the model sees at once")] = 512,
    dtype: Annotated[str, typer.Option(help="of hidden states: float32 or bfloat16")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    fold: Annotated[list[str] | None, typer.Option(help="only these fold modes")] = None,
    activations: Annotated[list[str] | None, typer.Option(help="only these formats")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="only these; the way to an opt-in backend")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write the figures as JSON")] = None,
    show: Annotated[Path | None, typer.Option(help="print such a file, measure nothing")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="print nothing but a table")] = False,
) -> None:
    """Perplexity and KL against a 16-bit reference, for every fold, activation format, backend.

    Only the experts differ between rows: everything else comes from the reference.
    """
    from rubin_moe.eval.quality import Choice
    from rubin_moe.eval.report import QualityResult, Settings, measure

    if show is not None:
        try:
            _print(QualityResult(*read_result(show)), markdown)
        except KeyError as error:
            raise ConfigError(f"{show}: no result of eval, it has no {error}") from None
        return
    if not checkpoints:
        raise ConfigError("eval needs folders of checkpoints, or --show FILE")
    beside = checkpoints[0].parent
    result = measure(
        checkpoints,
        reference or beside / "bf16",
        text or beside / "corpus" / "heldout.txt",
        Settings(tokens, window, dtype, device),
        Choice(tuple(fold or ()), tuple(activations or ()), tuple(backend or ())),
        lambda line: typer.echo(line, err=True),
    )
    if out is not None:
        write_result(out, result.head, result.rows)
    _print(result, markdown)


def _print(result: "QualityResult", markdown: bool) -> None:
    from rich.box import MARKDOWN
    from rich.console import Console
    from rich.table import Table

    from rubin_moe.eval.report import TITLES, table_cells

    table = Table(*TITLES, box=MARKDOWN)
    for cells in table_cells(result.rows):
        table.add_row(*cells)
    console = Console(width=WIDTH, highlight=False)
    console.print(table)
    if markdown:
        return
    head = result.head
    where = f"{head['text']['name']} on {head['device']}, {head['dtype']} hidden states"
    console.print(f"{head['tokens_scored']} tokens of {where}; KL in nats a token")
    for refusal in head["refused"]:
        console.print(
            f"no backend: {refusal['weights']} weights with {refusal['activations']} activations"
        )
