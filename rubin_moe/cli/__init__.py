"""The ``rubin-moe`` command.

Each command is one file of this folder that defines ``app``, a `typer.Typer` with one command, and
one row of `COMMANDS`; it is imported when it is asked for.
"""

import importlib
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

import rubin_moe

COMMANDS: dict[str, str] = {
    "check-port": "check_port",
    "convert": "convert",
    "demo": "demo",
    "diff": "diff",
    "doctor": "doctor",
    "emulate": "emulate",
    "eval": "eval",
    "inspect": "inspect",
    "plan": "plan",
    "replay": "replay",
    "select": "select",
}
"""Command name -> module of this package."""

EXTRAS = {
    "torch": "cpu",
    "numba": "cpu",
    "llvmlite": "emulator",
    "cutlass": "cute",
    "triton": "triton",
    "vllm": "vllm",
    "transformers": "vllm",
    "matplotlib": "dev",
}
"""What the light installation lacks: import name -> extra that brings it."""


class LazyGroup(TyperGroup):
    """A group whose commands are imported one by one, on use.

    Contexts and commands are click's, which typer ships under names that change: hence ``Any``.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(f"{__name__}.{COMMANDS[cmd_name]}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        return command


app = typer.Typer(
    name="rubin-moe",
    cls=LazyGroup,
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
    """Console entry point: a refusal is one message and exit code 2, never a traceback.

    Files that cannot be read or written are refusals too, and so is a missing extra.
    """
    from rubin_moe.errors import RubinMoeError

    try:
        app()
    except RubinMoeError as error:
        _refuse(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        _refuse(
            f"this needs {package}, which is not installed: "
            f"pip install 'rubin-moe[{EXTRAS[package]}]'"
        )
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        _refuse(f"{place}{error.strerror or error}")


def _refuse(message: str) -> NoReturn:
    typer.echo(f"rubin-moe: {message}", err=True)
    raise SystemExit(2) from None
