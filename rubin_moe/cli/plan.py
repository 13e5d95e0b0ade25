"""``rubin-moe plan``: tiles, stages, memory and bytes of a model's experts for a step."""

import json
from typing import Annotated, Any

import typer

from rubin_moe.cli.model import Layers, find_model
from rubin_moe.cli.select import (
    EP,
    TP,
    Activations,
    Backend,
    ModelName,
    Where,
    at,
    formats,
    group_record,
    model_record,
    selections,
)
from rubin_moe.errors import ConfigError
from rubin_moe.kernels import registry
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.loader.sharding import Shard

app = typer.Typer(add_completion=False)

WIDTH = 150


@app.command()
def plan(
    model: ModelName,
    target: Where = "here",
    tokens: Annotated[
        str, typer.Option(help="of a step, comma-separated numbers")
    ] = "1,16,256,4096",
    backend: Backend = None,
    activations: Activations = "auto",
    tp: TP = 1,
    ep: EP = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print what the backend that `select` names would launch. Nothing is compiled or run.

    A folder is read by its headers and config alone. Exit code 2 if no backend can, or the
    checkpoint would not load.
    """
    counts = _counts(tokens)
    found, where = find_model(model), at(target)
    shard = Shard(tp_size=tp, ep_size=ep)
    chosen = list(selections(found, where, shard, backend, activations))
    planned = [(layers, one, _plans(one, counts)) for layers, one in chosen]
    if as_json:
        groups = [
            {**group_record(layers, one), "layer": _layer(one.problem), "plans": rows}
            for layers, one, rows in planned
        ]
        typer.echo(json.dumps({**model_record(found, where, shard), "groups": groups}, indent=1))
        return
    typer.echo(str(found))
    for layers, one, rows in planned:
        _print(layers, one, shard, rows)


def _plans(chosen: registry.Selection, counts: list[int]) -> list[dict[str, Any]]:
    """A row a number of tokens."""
    rules = next(r for r in registry.ROWS if r.name == chosen.backend).rules()
    expert_bytes = _layer(chosen.problem)["expert_bytes"]
    return [
        {
            "tokens": n,
            "weight_bytes_at_most": _experts_met(chosen.problem, n) * expert_bytes,
            **rules.plan(chosen.problem, n).fields,
        }
        for n in counts
    ]


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


def _print(
    layers: Layers, chosen: registry.Selection, shard: Shard, rows: list[dict[str, Any]]
) -> None:
    """A column a number of tokens: plans have more fields than a line has room."""
    from rich.console import Console
    from rich.table import Table

    layer = _layer(chosen.problem)
    cut = "" if shard == Shard() else f" on a rank of TP {shard.tp_size}, EP {shard.ep_size}"
    typer.echo(f"{layers}\n{chosen.backend} on {chosen.target}: {formats(chosen.problem)}")
    typer.echo(
        f"a layer{cut}: {layer['experts']} experts, top {layer['top_k']}; FC1 "
        f"{layer['fc1_shape']}, FC2 {layer['fc2_shape']}; {layer['bytes']:,} bytes, "
        f"{layer['bytes'] * layers.count:,} in {layers.count} layers"
    )
    table = Table("", *(_tokens(r["tokens"]) for r in rows), box=None)
    for name in dict.fromkeys(k for r in rows for k in r if k != "tokens"):
        table.add_row(name, *(_cell(r.get(name, "")) for r in rows))
    Console(width=WIDTH, highlight=False).print(table)


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' if count > 1 else ''}"


def _cell(value: object) -> str:
    return f"{value:,}" if type(value) is int else str(value)
