"""``rubin-moe demo``: serve a small model with vLLM on this machine and let it speak."""

import importlib.util
import time
from pathlib import Path
from typing import Annotated

import typer

from rubin_moe.errors import ConfigError

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    model: Annotated[
        Path, typer.Argument(help="folder of an FP4 checkpoint", exists=True, file_okay=False)
    ],
    prompt: Annotated[str, typer.Option(help="text to continue")] = "And the LORD said unto Moses,",
    tokens: Annotated[int, typer.Option(min=1, help="tokens to generate")] = 64,
) -> None:
    """Start `vllm serve` on MODEL, print a completion, its speed, and who computed it and why."""
    from rubin_moe.adapters.vllm import server
    from rubin_moe.loader.load import ModelCheckpoint

    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("no vllm to serve with", name="vllm")
    if ModelCheckpoint(model).quant is None:  # told now, not by vLLM in a minute
        raise ConfigError(f"{model}: its config has no quantization_config")
    typer.echo(f"starting vllm serve {model} --quantization rubin_moe", err=True)
    with server.running(model) as running:
        typer.echo(f"ready after {running.start_seconds:.0f} s", err=True)
        running.complete(prompt, 4, temperature=0)  # what happens once is not in the speed
        begin = time.perf_counter()
        answer = running.complete(prompt, tokens, temperature=0.7, seed=1611, ignore_eos=True)
        seconds = time.perf_counter() - begin
        count = answer["usage"]["completion_tokens"]
        typer.echo(f"\n{prompt}{answer['choices'][0]['text']}\n")
        typer.echo(
            f"{count} tokens in {seconds:.2f} s: {count / seconds:.1f} tokens/s, one request"
        )
        typer.echo(running.backend_report().replace(" | ", "\n  "))
