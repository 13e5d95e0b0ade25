"""Writes one output file: header first, then every group's bytes at their known offsets.

Groups are independent, so that worker processes share a file and each holds one group. Workers are
forked before torch has computed anything and end with their parent, however that ends.
"""

import ctypes
import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rubin_moe.convert.journal import Finished
from rubin_moe.convert.options import Options
from rubin_moe.convert.plan import Shard
from rubin_moe.convert.tally import Tally
from rubin_moe.errors import ConvertError
from rubin_moe.loader.load import ModelCheckpoint

Progress = Callable[[int], None]
"""Called with source bytes that are done."""

WORKER_BYTES = 64 << 20
"""Tensor bytes that are worth a process of their own."""


@dataclass(frozen=True)
class Done:
    """One group written: the ranges with their CRC-32, and its tally."""

    pieces: list[tuple[int, int, int]]
    tally: Tally
    nbytes: int


class Writer:
    """Writes the groups of a plan's files into a folder.

    Args:
        jobs: processes; 1 works in this one.
    """

    def __init__(
        self, checkpoint: ModelCheckpoint, shards: Iterable[Shard], folder: Path, options: Options,
        jobs: int,
    ) -> None:  # fmt: skip
        self._checkpoint, self._options = checkpoint, options
        self._folder, self._jobs = folder, jobs
        self._shards = tuple(shards)
        self._source: Any = None

    @contextmanager
    def running(self) -> Iterator["Writer"]:
        """Starts and ends the workers."""
        global _WRITER
        _WRITER = self
        self._pool: ProcessPoolExecutor | None = None
        try:
            if self._jobs > 1:
                self._pool = ProcessPoolExecutor(
                    self._jobs, get_context("fork"), _start_worker, (os.getpid(),)
                )
            yield self
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
            if self._source is not None:
                self._source.close()
            _WRITER = None

    def write(self, index: int, progress: Progress) -> Finished:
        """One whole file, on disk when this returns.

        Raises:
            ConvertError: the disk is full or not writable, a worker died; anything `execute`
                raises.
        """
        shard = self._shards[index]
        path = self._folder / shard.name
        pieces = [(0, len(shard.header), zlib.crc32(shard.header))]
        tally = Tally()
        try:
            with path.open("wb") as f:
                f.write(shard.header)
                f.truncate(shard.size)
            for done in self._results(index, len(shard.groups)):
                pieces += done.pieces
                tally.add(done.tally)
                progress(done.nbytes)
            with path.open("rb") as f:
                os.fsync(f.fileno())
        except OSError as e:
            raise ConvertError(
                f"{path.name}: cannot be written: {e.strerror}; finished files are kept in "
                f"{self._folder.name}, the same command goes on from there"
            ) from e
        pieces.sort()
        return Finished(shard.name, shard.size, tuple(pieces), tally)

    def _results(self, index: int, count: int) -> Iterator[Done]:
        calls = [(index, g) for g in range(count)]
        if self._pool is None:
            yield from map(_run, calls)
            return
        try:
            # In order, so that what is summed in floating point is the same each time.
            yield from self._pool.map(_run, calls, chunksize=4)
        except BrokenProcessPool as e:
            raise ConvertError(
                f"{self._shards[index].name}: a worker process died (killed, or out of memory); "
                "the same command goes on from the last finished file"
            ) from e

    def run(self, index: int, number: int) -> Done:
        """Writes one group; called in a worker."""
        from rubin_moe.convert.execute import execute
        from rubin_moe.convert.source import Source

        if self._source is None:
            self._source = Source(self._checkpoint)
        shard = self._shards[index]
        group, tally = shard.groups[number], Tally()
        written: list[tuple[int, int, int]] = []
        fd = os.open(self._folder / shard.name, os.O_WRONLY)
        try:
            for piece in execute(self._source, group, self._options, tally):
                start = shard.starts[piece.tensor] + piece.offset
                data = _view(piece.data)
                _write_all(fd, data, start)
                written.append((start, start + len(data), zlib.crc32(data)))
        finally:
            os.close(fd)
        return Done(written, tally, group.nbytes)


_WRITER: Writer | None = None  # inherited by forked workers


def _run(call: tuple[int, int]) -> Done:
    assert _WRITER is not None
    return _WRITER.run(*call)


def _view(tensor: Any) -> memoryview:
    import torch

    flat = tensor.contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _start_worker(parent: int) -> None:
    """One thread, no Ctrl-C of its own, and an end with the parent."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
