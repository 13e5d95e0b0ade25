"""``vllm serve`` on the CPU under 16 clients for a while: failures, memory, equal answers.

    python scripts/soak_serve.py models/kjv/nvfp4-ue4m3 --minutes 60

Every client sends prompts and lengths of its own choosing (seeded); one request in eight is
dropped by closing its connection. A fixed set of requests was answered one at a time before:
greedy answers under load must be the same tokens. Memory is the resident set of the server and
its children, at the end against after a third of the time. Exit code 1 if a request failed, an
answer differs, or memory grew by more than 2 %.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rubin_moe.adapters.vllm.server import Server, ServerError, running
from rubin_moe.provenance import provenance, write_result

ROOT = Path(__file__).parents[1]
WORDS = ("the", "LORD", "king", "house", "of", "Israel", "went", "up", "said", "unto", "days")
GROWTH = 0.02
SETTLED = 1 / 3  # of the time: until then every length and batch size has occurred
DROPPED = 8  # one request in so many


@dataclass
class Counts:
    """What the clients saw."""

    answered: int = 0
    dropped: int = 0
    compared: int = 0
    failures: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Request:
    """A greedy completion."""

    prompt: str
    tokens: int

    @classmethod
    def draw(cls, rng: random.Random) -> "Request":
        return cls(" ".join(rng.choices(WORDS, k=rng.randint(2, 120))), rng.randint(1, 96))


def resident() -> int:
    """Bytes resident in the descendants of this process: the server and its workers."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                after = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(after[1]), []).append(int(entry.name))
    pages, todo = 0, list(children.get(os.getpid(), ()))
    while todo:
        one = todo.pop()
        todo += children.get(one, [])
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def answer(server: Server, request: Request) -> str:
    """The text, or ServerError."""
    found = server.complete(request.prompt, request.tokens, temperature=0, ignore_eos=True)
    if found["usage"]["completion_tokens"] != request.tokens:
        raise ServerError(f"{found['usage']} for {request.tokens} tokens")
    return str(found["choices"][0]["text"])


def drop(server: Server, request: Request, after: float) -> None:
    """Sends a request and closes the connection before it is answered."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port.split("/")[0]), timeout=60)
    body = {"model": server.model, "prompt": request.prompt, "max_tokens": 256, "stream": True}
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        time.sleep(after)
    finally:
        connection.close()


def client(
    server: Server, seed: int, until: float, fixed: dict[Request, str], counts: Counts
) -> None:
    """Sends one request after another until the time is over."""
    rng = random.Random(seed)
    known = list(fixed)
    while time.monotonic() < until:
        try:
            if rng.randrange(DROPPED) == 0:
                drop(server, Request.draw(rng), rng.uniform(0.01, 0.5))
                with counts.lock:
                    counts.dropped += 1
                continue
            request = rng.choice(known) if rng.random() < 0.3 else Request.draw(rng)
            text = answer(server, request)
        except (ServerError, OSError, http.client.HTTPException) as error:
            with counts.lock:
                counts.failures.append(repr(error)[:300])
            continue
        with counts.lock:
            counts.answered += 1
            if request in fixed:
                counts.compared += 1
                if text != fixed[request]:
                    counts.differing.append(f"{request}: {text!r}, alone {fixed[request]!r}"[:300])


def soak(model: Path, minutes: float, clients: int) -> dict[str, Any]:
    """One server, one soak; the row of the result."""
    rng = random.Random(1)
    with running(model) as server:
        fixed = {r: answer(server, r) for r in (Request.draw(rng) for _ in range(12))}
        counts = Counts()
        begin = time.monotonic()
        until = begin + 60 * minutes
        threads = [
            threading.Thread(target=client, args=(server, i, until, fixed, counts))
            for i in range(clients)
        ]
        for thread in threads:
            thread.start()
        settled, samples = 0, []
        while time.monotonic() < until:
            time.sleep(min(5.0, 60 * minutes / 12))
            samples.append(resident())
            if not settled and time.monotonic() - begin >= 60 * minutes * SETTLED:
                settled = samples[-1]
        for thread in threads:
            thread.join()
        after = {r: answer(server, r) for r in fixed}
        row = {
            "model": model.name,
            "minutes": round((time.monotonic() - begin) / 60, 1),
            "clients": clients,
            "answered": counts.answered,
            "dropped_by_client": counts.dropped,
            "failures": len(counts.failures),
            "compared_with_single_requests": counts.compared,
            "differing": len(counts.differing) + sum(after[r] != fixed[r] for r in fixed),
            "resident_bytes_settled": settled,
            "resident_bytes_end": samples[-1],
            "growth": round(samples[-1] / settled - 1, 4),
        }
    print(*counts.failures[:3], *counts.differing[:3], sep="\n")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "soak.json")
    args = parser.parse_args()
    row = soak(args.model, args.minutes, args.clients)
    print(row)
    head = provenance(("torch", "vllm", "transformers"))
    head["what"] = "one vllm serve on the CPU under clients with mixed lengths and cancellations"
    write_result(args.out, head, [row])
    bad = row["failures"] or row["differing"] or row["growth"] > GROWTH
    raise SystemExit(int(bool(bad)))


if __name__ == "__main__":
    main()
