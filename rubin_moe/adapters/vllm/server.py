"""``vllm serve`` as a child process, for demonstrations and load tests on one machine."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rubin_moe.errors import RubinMoeError

START_SECONDS = 600
_SUMMARY = "rubin_moe serves"
_CPU_OPTIONS = ("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "64")
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class ServerError(RubinMoeError):
    """The server did not start, died, or answered with an error; carries the end of its log."""


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: of its OpenAI API, without ``/v1``; model: name to ask for; log: what it writes.
        start_seconds: from the command to its first answer.
    """

    url: str
    model: str
    log: Path
    start_seconds: float

    def complete(self, prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """One ``/v1/completions`` answer. Raises ServerError."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, **fields}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            raise ServerError(f"{error.code}: {error.read().decode()[:500]}") from error

    def backend_report(self) -> str:
        """The plugin's own line about what serves which layers and why."""
        for line in self.log.read_text(errors="replace").splitlines():
            if _SUMMARY in line:
                return line[line.index(_SUMMARY) :]
        raise ServerError(
            f"no line '{_SUMMARY}' in the log: the plugin served nothing\n{self.tail()}"
        )

    def tail(self, lines: int = 40) -> str:
        """The end of the log; of a failed start, the first error's traceback."""
        written = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in written if " ERROR " in line]
        return "\n".join(errors[:lines] or written[-lines:])


@contextlib.contextmanager
def running(model: Path, options: Sequence[str] = _CPU_OPTIONS) -> Iterator[Server]:
    """``vllm serve model --quantization rubin_moe`` on a free port of this machine, until the end.

    Raises:
        ServerError: it ended or gave no answer within `START_SECONDS`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--quantization", "rubin_moe", "--host", "127.0.0.1", "--port", str(port)),
        *options,
    ]
    with tempfile.TemporaryDirectory(prefix="rubin_moe_serve_") as folder:
        log = Path(folder) / "vllm.log"
        begin = time.monotonic()
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**_ENVIRONMENT, **os.environ},
                start_new_session=True,
            )
        try:
            server = Server(f"http://127.0.0.1:{port}", str(model), log, 0.0)
            _wait(server, process, begin)
            yield Server(server.url, server.model, log, time.monotonic() - begin)
        finally:
            _stop(process)


def _wait(server: Server, process: subprocess.Popen[bytes], begin: float) -> None:
    while time.monotonic() - begin < START_SECONDS:
        if process.poll() is not None:
            raise ServerError(f"vLLM ended with code {process.returncode}:\n{server.tail()}")
        if _healthy(server.url):
            return
        time.sleep(0.3)
    raise ServerError(f"vLLM gave no answer within {START_SECONDS} s:\n{server.tail()}")


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The server and the processes it started: they are a group of their own."""
    for wanted, patience in ((signal.SIGINT, 20), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, wanted)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
