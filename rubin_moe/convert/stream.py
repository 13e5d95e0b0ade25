"""Writes one output file: header first, then every group's bytes at their known offsets.

Groups are independent, so that worker processes share a file and each holds one group. Workers are
forked before torch has computed anything and end with their parent, however that ends.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from rubin_moe.convert.checksum import crc32
from rubin_moe.convert.disk import COPY_BYTES, Range, RangeWriter, allocate, write_all
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

_KEPT_BYTES = 64 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

_Call = TypeVar("_Call")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Done:
    """One group written: the ranges with their CRC-32, and its tally."""

    pieces: list[Range]
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
        self._buffer = memoryview(bytearray(COPY_BYTES))

    @contextmanager
    def running(self) -> Iterator["Writer"]:
        """Starts and ends the workers."""
        global _WRITER
        _WRITER = self
        self._pool: ProcessPoolExecutor | None = None
        try:
            if self._jobs > 1:
                from rubin_moe.convert import execute  # noqa: F401  imported once, not by each

                self._pool = ProcessPoolExecutor(
                    self._jobs, get_context("fork"), _start_worker, (os.getpid(),)
                )
                self._pool.submit(os.getpid).result()  # forks now: there are no threads yet
            else:
                _keep_freed_memory()
            yield self
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
            if self._source is not None:
                self._source.close()
            _WRITER = None

    @contextmanager
    def written(self, index: int, progress: Progress) -> Iterator[Finished]:
        """One whole file: complete on entering, on disk on leaving.

        Raises:
            ConvertError: the disk is full or not writable, a worker died; anything `execute`
                raises.
        """
        shard = self._shards[index]
        path = self._folder / shard.name
        pieces = [(0, len(shard.header), crc32(shard.header))]
        tally = Tally()
        try:
            with path.open("wb") as f:  # open all along: hears of every disk error
                allocate(f.fileno(), shard.size)
                write_all(f.fileno(), memoryview(shard.header), 0)
                calls = [(index, g) for g in range(len(shard.groups))]
                # In order, so that what is summed in floating point is the same each time.
                for done in self.map(_run, calls, chunksize=4):
                    pieces += done.pieces
                    tally.add(done.tally)
                    progress(done.nbytes)
                pieces.sort()
                with ThreadPoolExecutor(1) as disk:
                    synced = disk.submit(os.fsync, f.fileno())
                    yield Finished(shard.name, shard.size, tuple(pieces), tally)
                    synced.result()
        except OSError as e:
            raise ConvertError(
                f"{path.name}: cannot be written: {e.strerror}; finished files are kept in "
                f"{self._folder.parent.name}, the same command goes on from there"
            ) from e

    def map(
        self, function: Callable[[_Call], _Result], calls: Sequence[_Call], chunksize: int = 1
    ) -> Iterator[_Result]:
        """Results in the order of ``calls``, computed by the workers.

        Raises:
            ConvertError: a worker died. What ``function`` raises comes as it is.
        """
        if self._pool is None:
            yield from map(function, calls)
            return
        try:
            yield from self._pool.map(function, calls, chunksize=chunksize)
        except BrokenProcessPool as e:
            raise ConvertError(
                f"{self._folder.parent.name}: a worker process died (killed, or out of memory); "
                "the same command goes on from the last finished file"
            ) from e

    def run(self, index: int, number: int) -> Done:
        """Writes one group; called in a worker."""
        from rubin_moe.convert.execute import execute
        from rubin_moe.convert.output import Span
        from rubin_moe.convert.source import Source

        if self._source is None:
            self._source = Source(self._checkpoint)
        shard = self._shards[index]
        group, tally = shard.groups[number], Tally()
        fd = os.open(self._folder / shard.name, os.O_WRONLY)
        try:
            out = RangeWriter(fd, self._buffer)
            for made in execute(self._source, group, self._options, tally):
                start = shard.starts[made.tensor]
                if isinstance(made, Span):
                    read = partial(self._source.read_into, made.entry)
                    out.copy(start, made.entry.nbytes, read)
                else:
                    out.write(start + made.offset, _view(made.data))
            return Done(out.finish(), tally, group.nbytes)
        finally:
            os.close(fd)


_WRITER: Writer | None = None  # inherited by forked workers


def _run(call: tuple[int, int]) -> Done:
    assert _WRITER is not None
    return _WRITER.run(*call)


def _view(tensor: Any) -> memoryview:
    import torch

    flat = tensor.contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def _start_worker(parent: int) -> None:
    """One thread, no Ctrl-C of its own, and an end with the parent."""
    import torch

    torch.set_num_threads(1)
    _keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _keep_freed_memory() -> None:
    """Asks glibc to keep what a matrix leaves for the next one. By default it goes back to the
    kernel, which clears its pages anew: 0.9 million page faults a GB decoded to bf16."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES // 2)  # glibc takes no more on 64 bits
