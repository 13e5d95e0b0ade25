"""``rubin-moe plan``: tiles, stages, memory and bytes of a model's experts for a step."""

import json
from typing import Annotated, Any

import typer

from rubin_moe.cli.select import Activations, Backend, Where, at, formats, problem, record
from rubin_moe.errors import ConfigError
from rubin_moe.kernels import registry
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.shapes import model_shape

app = typer.Typer()

WIDTH = 150


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="a name of configs/models")],
    target: Where = "here",
    tokens: Annotated[
        str, typer.Option(help="of a step, comma-separated numbers")
    ] = "1,16,256,4096",
    backend: Backend = None,
    activations: Activations = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print what the backend that `select` names would launch. Nothing is compiled or run.

    Exit code 2 if no backend can.
    """
    counts = _counts(tokens)
    shape, where = model_shape(model), at(target)
    chosen = registry.select(problem(shape, where, activations), where, backend)
    rules = next(r for r in registry.ROWS if r.name == chosen.backend).rules()
    layer = _layer(chosen.problem)
    rows = [
        {
            "tokens": n,
            "weight_bytes_at_most": _experts_met(chosen.problem, n) * layer["expert_bytes"],
            **rules.plan(chosen.problem, n).fields,
        }
        for n in counts
    ]
    if as_json:
        told = {"model": model, "layers": shape.moe_layers, "layer": layer}
        typer.echo(json.dumps({**record(chosen), **told, "plans": rows}, indent=1))
        return
    whole = layer["bytes"] * shape.moe_layers
    typer.echo(f"{chosen.backend} on {where}: {formats(chosen.problem)}")
    typer.echo(
        f"a layer: {layer['experts']} experts, top {layer['top_k']}; FC1 {layer['fc1_shape']}, FC2 "
        f"{layer['fc2_shape']}; {layer['bytes']:,} bytes, {whole:,} in {shape.moe_layers} layers"
    )
    _print(rows)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ConfigError(f"tokens {text!r}: expected numbers from 1 on, comma-separated")
    return counts


def _layer(problem: MoEProblem) -> dict[str, Any]:
    """Sizes of one layer; shapes are ``[rows, K]`` of one expert's matrices."""
    fmt, k1, k2 = problem.weight_format, problem.hidden, problem.intermediate
    rows = k2 * (2 if problem.activation.gated else 1)
    nbytes = rows * (fmt.packed_k(k1) + fmt.scales_k(k1)) + k1 * (
        fmt.packed_k(k2) + fmt.scales_k(k2)
    )
    return {
        "experts": problem.num_experts,
        "top_k": problem.top_k,
        "fc1_shape": [rows, k1],
        "fc2_shape": [k1, k2],
        "expert_bytes": nbytes,
        "bytes": nbytes * problem.num_experts,
    }


def _experts_met(problem: MoEProblem, tokens: int) -> int:
    """Most experts whose weights a step reads."""
    return min(problem.num_experts, tokens * problem.top_k)


def _print(rows: list[dict[str, Any]]) -> None:
    """A column a number of tokens: plans have more fields than a line has room."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", *(f"{r['tokens']:,} tokens" for r in rows), box=None)
    for name in dict.fromkeys(k for r in rows for k in r if k != "tokens"):
        table.add_row(name, *(_cell(r.get(name, "")) for r in rows))
    Console(width=WIDTH, highlight=False).print(table)


def _cell(value: object) -> str:
    return f"{value:,}" if type(value) is int else str(value)
