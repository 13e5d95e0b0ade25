"""64 OpenAI requests at once to ``vllm serve`` with rubin_moe on this machine's CPU.

``python scripts/serve_load.py models/kjv/nvfp4-ue4m3`` writes docs/results/serve_cpu.json:
requests, failures, tokens per second.
"""

import argparse
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rubin_moe.adapters.vllm.server import Server, ServerError, running
from rubin_moe.provenance import provenance, write_result

ROOT = Path(__file__).parents[1]
WORDS = (
    "the",
    "LORD",
    "king",
    "house",
    "of",
    "Israel",
    "went",
    "up",
    "said",
    "unto",
    "them",
    "days",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="+")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "serve_cpu.json")
    args = parser.parse_args()
    rows = [measure(model, args.requests, args.tokens) for model in args.model]
    head = provenance(("torch", "vllm", "transformers", "llvmlite"))
    head["what"] = (
        "OpenAI completions sent at once to one vllm serve; greedy, bfloat16; start-up not counted"
    )
    write_result(args.out, head, rows)


def measure(model: Path, requests: int, tokens: int) -> dict[str, Any]:
    """One server, one burst."""
    rng = random.Random(7)
    prompts = [" ".join(rng.choices(WORDS, k=rng.randint(3, 40))) for _ in range(requests)]
    with running(model) as server:
        _answer(server, prompts[0], 4)  # what happens once is not in the speed
        begin = time.perf_counter()
        with ThreadPoolExecutor(requests) as pool:
            answers = list(pool.map(lambda prompt: _answer(server, prompt, tokens), prompts))
        seconds = time.perf_counter() - begin
        failures = [a for a in answers if isinstance(a, str)]
        good = [a for a in answers if not isinstance(a, str)]
        generated = sum(a["usage"]["completion_tokens"] for a in good)
        row = {
            "model": str(model),
            "requests": requests,
            "failures": len(failures),
            "prompt_tokens": sum(a["usage"]["prompt_tokens"] for a in good),
            "generated_tokens": generated,
            "seconds": round(seconds, 2),
            "tokens_per_second": round(generated / seconds, 1),
            "start_seconds": round(server.start_seconds, 1),
            "served_by": server.backend_report(),
        }
    print(*failures[:3], sep="\n")
    print({k: v for k, v in row.items() if k != "served_by"})
    return row


def _answer(server: Server, prompt: str, tokens: int) -> dict[str, Any] | str:
    """The answer, or what went wrong."""
    try:
        found = server.complete(prompt, tokens, temperature=0, ignore_eos=True)
    except (ServerError, OSError) as error:
        return repr(error)
    complete = found["usage"]["completion_tokens"] == tokens and found["choices"][0]["text"]
    return found if complete else f"{found['usage']} for {tokens} tokens"


if __name__ == "__main__":
    main()
