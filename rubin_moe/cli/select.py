"""``rubin-moe select``: which backend would run a model's experts, and why no other."""

import json
from typing import Annotated

import typer

from rubin_moe.kernels import registry
from rubin_moe.kernels.base import ActivationFormat, Target
from rubin_moe.kernels.target import detect, named
from rubin_moe.shapes import model_names, model_shape

app = typer.Typer()


@app.command()
def select(
    model: Annotated[str, typer.Argument(help="a name of configs/models, or 'list'")],
    target: Annotated[str, typer.Option(help="cpu, sm_107a, 10.7, or 'here'")] = "here",
    backend: Annotated[str | None, typer.Option(help="the one backend wanted")] = None,
    activations: Annotated[str, typer.Option(help="activation format of the experts")] = "16bit",
    tokens: Annotated[int, typer.Option(min=0, help="tokens of the plan that is printed")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print the winner, its plan, and every other backend's reason. Exit code 2 if none can."""
    if model == "list":
        typer.echo("\n".join(model_names()))
        return
    wanted: ActivationFormat = activations  # type: ignore[assignment]
    problem = model_shape(model).problem(wanted)
    where: Target = detect() if target == "here" else named(target)
    chosen = registry.select(problem, where, backend)
    row = next(r for r in registry.ROWS if r.name == chosen.backend)
    plan = row.rules().plan(problem, tokens)
    if as_json:
        fields = {"backend": chosen.backend, "target": str(where), "why": chosen.why}
        typer.echo(
            json.dumps({**fields, "plan": dict(plan.fields), "reasons": dict(chosen.reasons)})
        )
    else:
        typer.echo(str(chosen))
        typer.echo(f"plan for {tokens} tokens: {plan}")
