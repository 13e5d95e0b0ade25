"""Conversions that are killed or run out of room, in forked processes.

Called by the tests a few times and by ``scripts/fuzz_checkpoints.py --crashes`` twenty times each.
"""

import hashlib
import os
import resource
import signal
from pathlib import Path

import torch

from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert


def digest(folder: Path) -> dict[str, str]:
    """File name -> SHA-256 of its bytes."""
    files = sorted(p for p in folder.iterdir() if p.is_file())
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def _start(
    source: Path, out: Path, options: Options, jobs: int, limit: int | None = None
) -> tuple[int, int]:
    """A child that converts, and a pipe that gets a byte with each report of progress. Its exit
    code is 0, or 2 with the error in ``OUT.error``."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    torch.set_num_threads(1)
    error = os.open(out.with_name(out.name + ".error"), os.O_WRONLY | os.O_CREAT, 0o600)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        convert(source, out, options, jobs=jobs, report=lambda *_: os.write(writing, b"."))
        os._exit(0)
    except BaseException as e:  # the parent is told, whatever it is
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.write(error, f"{type(e).__name__}: {e}".encode())
        os._exit(2)


def reports(source: Path, out: Path, options: Options, jobs: int) -> int:
    """Reports of progress of an undisturbed conversion."""
    child, progress = _start(source, out, options, jobs)
    with os.fdopen(progress, "rb") as pipe:
        count = len(pipe.read())
    _, status = os.waitpid(child, 0)
    assert status == 0
    return count


def killed(source: Path, out: Path, options: Options, jobs: int, after: int) -> bool:
    """Kills a conversion (-9) after so many reports; whether it was still running."""
    child, progress = _start(source, out, options, jobs)
    with os.fdopen(progress, "rb", buffering=0) as pipe:
        while after and pipe.read(1):
            after -= 1
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def cut_short(source: Path, out: Path, options: Options, limit: int) -> str:
    """Converts while no file may grow beyond ``limit`` bytes, which fails like a full disk; the
    error, "" if there was room."""
    child, progress = _start(source, out, options, jobs=1, limit=limit)
    with os.fdopen(progress, "rb") as pipe:
        pipe.read()
    os.waitpid(child, 0)
    return out.with_name(out.name + ".error").read_text()
