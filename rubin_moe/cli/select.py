"""``rubin-moe select``: which backend would run a model's experts, and why no other."""

import json
from dataclasses import replace
from typing import Annotated

import typer

from rubin_moe import envs
from rubin_moe.kernels import registry
from rubin_moe.kernels.base import MoEProblem, Target
from rubin_moe.kernels.target import detect, named
from rubin_moe.loader.for_activations import default_activations, weight_format_for
from rubin_moe.shapes import ModelShape, model_names, model_shape

app = typer.Typer()

Where = Annotated[str, typer.Option(help="cpu, sm_107a, 10.7, or 'here'")]
Backend = Annotated[str | None, typer.Option(help="the one backend wanted")]
Activations = Annotated[
    str,
    typer.Option(
        help="16bit, nvfp4-ue4m3, nvfp4-ue5m3, mxfp8, fp8-e4m3, int8, or 'auto': "
        "RUBIN_MOE_ACTIVATION_FORMAT, else what suits model and target"
    ),
]


@app.command()
def select(
    model: Annotated[str, typer.Argument(help="a name of configs/models, or 'list'")],
    target: Where = "here",
    backend: Backend = None,
    activations: Activations = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print the winner and every other backend's reason. Exit code 2 if none can."""
    if model == "list":
        typer.echo("\n".join(model_names()))
        return
    where = at(target)
    chosen = registry.select(problem(model_shape(model), where, activations), where, backend)
    if as_json:
        typer.echo(json.dumps(record(chosen)))
    else:
        typer.echo(f"{formats(chosen.problem)}\n{chosen}")


def at(target: str) -> Target:
    """What a user names as the place."""
    return detect() if target == "here" else named(target)


def problem(model: ModelShape, where: Target, activations: str) -> MoEProblem:
    """One layer as a server with these environment variables would serve it: weights in the format
    that the activations ask for.

    Args:
        activations: ``auto``: those of ``RUBIN_MOE_ACTIVATION_FORMAT``, else what a checkpoint
            without calibrated input scales gets there.

    Raises:
        FoldError: an unknown format, or one that these weights may not become.
        ConfigError: a variable that does not exist or has a wrong value.
    """
    envs.check()
    stored = model.problem()
    if activations == "auto":
        activations = envs.text("RUBIN_MOE_ACTIVATION_FORMAT") or default_activations(
            stored.weight_format, "w4a4-dynamic", where.capability
        )
    return replace(
        stored,
        weight_format=weight_format_for(stored.weight_format, activations),
        activation_format=activations,  # type: ignore[arg-type]
        batch_invariant=envs.flag("RUBIN_MOE_BATCH_INVARIANT", False),
    )


def formats(problem: MoEProblem) -> str:
    """What is multiplied, in words."""
    return f"{problem.weight_format} weights, {problem.activation_format} activations"


def record(chosen: registry.Selection) -> dict[str, object]:
    """A selection as plain data."""
    return {
        "backend": chosen.backend,
        "target": str(chosen.target),
        "why": chosen.why,
        "weights": chosen.problem.weight_format.name,
        "activations": chosen.problem.activation_format,
        "reasons": dict(chosen.reasons),
    }
