"""``vllm serve`` with every MoE layer executed by the sm_107a kernels on the emulator.

    python scripts/serve_emulated.py models/kjv/nvfp4-ue4m3 models/kjv/nvfp4-ue5m3

Each model is served twice over HTTP, by ``sm107-emulated`` and by ``cpu-tcgen05``, with the
activation format of its own scales, and asked for greedy completions: the token ids must be the
same. Prints the seconds that a token takes and writes docs/results/serve_emulated.json. They are
the emulator's on this CPU; they say nothing of a Rubin GPU. Exit code 1 if an answer differs.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rubin_moe.adapters.vllm.server import Server, ServerError, running
from rubin_moe.loader.load import ModelCheckpoint
from rubin_moe.provenance import provenance, write_result

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = ("sm107-emulated", "cpu-tcgen05")
PROMPTS = ("And the LORD said unto Moses,", "The words of the Preacher, the son of David, king")
PACKAGES = ("vllm", "torch", "nvidia-cutlass-dsl", "llvmlite")
OPTIONS = ("--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "4")


@dataclass(frozen=True)
class Served:
    """What one server answered.

    Attributes:
        tokens: ids generated after each prompt; seconds: of the requests, one after another;
            report: the plugin's line about what serves which layers.
    """

    tokens: list[list[int]]
    seconds: float
    start_seconds: float
    report: str

    @property
    def seconds_per_token(self) -> float:
        """The prompt's part included."""
        return self.seconds / sum(len(t) for t in self.tokens)


def activation_format(model: Path) -> str:
    """The one of the model's own scales."""
    with ModelCheckpoint(model) as checkpoint:
        return checkpoint.spec(0).fmt.name


def serve(model: Path, backend: str, num_tokens: int) -> Served:
    """One server's greedy answers."""
    os.environ["RUBIN_MOE_BACKEND"] = backend
    os.environ["RUBIN_MOE_ACTIVATION_FORMAT"] = activation_format(model)
    with running(model, OPTIONS) as server:
        try:
            _ids(server, PROMPTS[0], 1)  # compiling happens once
            begin = time.perf_counter()
            tokens = [_ids(server, prompt, num_tokens) for prompt in PROMPTS]
            seconds = time.perf_counter() - begin
        except ServerError:
            typer.echo(server.tail(), err=True)
            raise
        return Served(tokens, seconds, server.start_seconds, server.backend_report())


def _ids(server: Server, prompt: str, num_tokens: int) -> list[int]:
    answer = server.complete(
        prompt, num_tokens, temperature=0, ignore_eos=True, return_token_ids=True
    )
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def compare(model: Path, num_tokens: int) -> dict[str, Any]:
    """One row: both backends on one model."""
    emulated, slow = (serve(model, backend, num_tokens) for backend in BACKENDS)
    row = {
        "model": model.name,
        "activation_format": activation_format(model),
        "prompts": len(PROMPTS),
        "tokens_each": num_tokens,
        "equal_tokens": emulated.tokens == slow.tokens,
        "emulator_seconds_per_token": round(emulated.seconds_per_token, 3),
        "cpu_tcgen05_seconds_per_token": round(slow.seconds_per_token, 3),
        "start_seconds": round(emulated.start_seconds, 1),
        "served_by": emulated.report,
    }
    typer.echo(row)
    if not row["equal_tokens"]:
        typer.echo(f"{emulated.tokens}\n{slow.tokens}")
    return row


def main(
    models: Annotated[list[Path], typer.Argument(help="Folders of NVFP4 checkpoints.")],
    tokens: Annotated[int, typer.Option(help="Tokens generated after each prompt.")] = 16,
    output: Annotated[Path, typer.Option()] = ROOT / "docs/results/serve_emulated.json",
) -> None:
    """Serve each model by both backends; exit 1 if an answer differs."""
    rows = [compare(model, tokens) for model in models]
    head = {
        "what": "vllm serve with sm_107a kernels on the emulator against cpu-tcgen05: greedy token "
        "ids, and seconds a token of the emulator on this CPU",
        "executed_on": "the emulator; not measured on hardware",
        "load_average": round(os.getloadavg()[0], 1),
    }
    write_result(output, head | provenance(PACKAGES), rows)
    if not all(row["equal_tokens"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
