"""``rubin-moe select``: which backend would run a model's experts, and why no other."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, cast, get_args

import typer

from rubin_moe import envs
from rubin_moe.cli.model import Layers, Model, find_model
from rubin_moe.errors import CheckpointError, UnsupportedError
from rubin_moe.kernels import registry
from rubin_moe.kernels.base import InputScale, MoEProblem, Target
from rubin_moe.kernels.target import detect, named
from rubin_moe.loader.for_activations import default_activations, weight_format_for
from rubin_moe.loader.sharding import Shard
from rubin_moe.shapes import model_names

app = typer.Typer(add_completion=False)

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="a checkpoint's folder, or a name; 'list': names")
]
Where = Annotated[str, typer.Option(help="cpu, sm_107a, 10.7, or 'here'")]
Backend = Annotated[str | None, typer.Option(help="the one backend wanted")]
Activations = Annotated[
    str,
    typer.Option(
        help="16bit, nvfp4-ue4m3, nvfp4-ue5m3, mxfp8, fp8-e4m3, int8, or 'auto': "
        "RUBIN_MOE_ACTIVATION_FORMAT, else what suits model and target"
    ),
]
TP = Annotated[int, typer.Option(help="ranks that cut every expert")]
EP = Annotated[int, typer.Option(help="ranks that share out the experts")]


@app.command()
def select(
    model: ModelName,
    target: Where = "here",
    backend: Backend = None,
    activations: Activations = "auto",
    tp: TP = 1,
    ep: EP = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print the winner and every other backend's reason, for each group of like layers.

    A folder is read by its headers and config alone. Exit code 2 if no backend can, or the
    checkpoint would not load.
    """
    if model == "list":
        typer.echo("\n".join(model_names()))
        return
    found, where = find_model(model), at(target)
    shard = Shard(tp_size=tp, ep_size=ep)
    chosen = list(selections(found, where, shard, backend, activations))
    if as_json:
        groups = [group_record(layers, one) for layers, one in chosen]
        typer.echo(json.dumps({**model_record(found, where, shard), "groups": groups}, indent=1))
        return
    typer.echo(str(found))
    for layers, one in chosen:
        typer.echo(f"{layers}; computed as {formats(one.problem)}\n{one}")


def at(target: str) -> Target:
    """What a user names as the place."""
    return detect() if target == "here" else named(target)


def selections(
    model: Model, where: Target, shard: Shard, backend: str | None, activations: str
) -> Iterator[tuple[Layers, registry.Selection]]:
    """Every group's backend, as a server with these environment variables would choose it.

    Raises:
        UnsupportedError: none computes a group; names its layers where there are several groups.
        See `problem` for the others.
    """
    for layers in model.groups:
        wanted = problem(layers, where, shard, activations)
        try:
            yield layers, registry.select(wanted, where, backend)
        except UnsupportedError as error:
            if len(model.groups) == 1:
                raise
            what = str(error).partition("\n")[0]
            raise UnsupportedError(f"{layers}\n{what}", error.reasons) from None


def problem(layers: Layers, where: Target, shard: Shard, activations: str) -> MoEProblem:
    """One layer on the rank that holds most: weights in the format that the activations ask for.

    Args:
        activations: ``auto``: those of ``RUBIN_MOE_ACTIVATION_FORMAT``, else what these layers get
            there.

    Raises:
        CheckpointError: sizes that TP or EP cannot cut, or input scales that are not there.
        FoldError: an unknown format, or one that these weights may not become.
        ConfigError: a variable that does not exist or has a wrong value.
    """
    envs.check()
    stored = layers.problem
    if activations == "auto":
        activations = envs.text("RUBIN_MOE_ACTIVATION_FORMAT") or default_activations(
            stored.weight_format, layers.scheme, where.capability
        )
    weight_format = weight_format_for(stored.weight_format, activations)
    if activations == "nvfp4-ue4m3" and layers.why_not_static is not None:
        raise CheckpointError(layers.why_not_static)
    columns = shard.columns(stored.intermediate, stored.weight_format.sf_vec_size)
    return replace(
        stored,
        num_experts=len(shard.experts(stored.num_experts)),
        intermediate=columns.padded,
        weight_format=weight_format,
        activation_format=activations,  # type: ignore[arg-type]
        deterministic=envs.flag("RUBIN_MOE_DETERMINISTIC", True),
        batch_invariant=envs.flag("RUBIN_MOE_BATCH_INVARIANT", False),
        input_scale=cast(InputScale, envs.choice("RUBIN_MOE_INPUT_SCALE", get_args(InputScale))),
    )


def formats(problem: MoEProblem) -> str:
    """What is multiplied, in words."""
    return f"{problem.weight_format} weights, {problem.activation_format} activations"


def model_record(model: Model, where: Target, shard: Shard) -> dict[str, object]:
    """What was asked, as plain data."""
    return {
        "model": model.name,
        "source": model.source,
        "unquantized": list(model.unquantized),
        "target": str(where),
        "tp": shard.tp_size,
        "ep": shard.ep_size,
    }


def group_record(layers: Layers, chosen: registry.Selection) -> dict[str, object]:
    """A group and its backend as plain data."""
    asked = chosen.problem
    return {
        "layers": list(layers.names),
        "count": layers.count,
        "stored": layers.stored,
        "backend": chosen.backend,
        "why": chosen.why,
        "weights": asked.weight_format.name,
        "activations": asked.activation_format,
        "reasons": dict(chosen.reasons),
    }
