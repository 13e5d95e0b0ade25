"""The ``rubin-moe`` command. Each command lives in a file of its own and imports what it needs
when it runs."""

import typer

import rubin_moe

app = typer.Typer(
    name="rubin-moe",
    help="FP4 mixture-of-experts: serve, inspect, convert, plan.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def root() -> None:
    """FP4 mixture-of-experts: serve, inspect, convert, plan."""


@app.command()
def version() -> None:
    """Print the installed version."""
    typer.echo(rubin_moe.__version__)


def main() -> None:
    """Console entry point: a refusal is one message and exit code 2, never a traceback."""
    from rubin_moe.errors import RubinMoeError

    try:
        app()
    except RubinMoeError as error:
        typer.echo(f"rubin-moe: {error}", err=True)
        raise SystemExit(2) from None
