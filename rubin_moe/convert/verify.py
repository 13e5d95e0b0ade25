"""Reads back what was written: sizes, checksums, headers as planned, every value finite.

Values are judged by their bits, a range at a time: an exponent of all ones is NaN or infinity, and
the NaN codes of FP8 and of block scales are codes. Every byte is read once, by all workers; the
checksum of a whole file follows from those of its ranges.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from rubin_moe.convert import checksum
from rubin_moe.convert.journal import Finished
from rubin_moe.convert.output import OutTensor
from rubin_moe.convert.plan import CopyGroup, Shard
from rubin_moe.convert.stream import COPY_BYTES, Progress
from rubin_moe.errors import ConvertError
from rubin_moe.loader.checkpoint import read_header

_EXPONENT: Mapping[str, tuple[type[np.generic], int]] = {
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000),
}
_NAN_CODE = {"F8_E4M3": 0x7F, "F8_E8M0": 0xFF}
_TASK_BYTES = 32 << 20  # read by a worker at a call


class _Range(NamedTuple):
    """Bytes of a file with their CRC-32; ``out``: the tensor they belong to, None: the header."""

    start: int
    stop: int
    crc: int
    out: OutTensor | None


class _Task(NamedTuple):
    """Ranges of one file that one worker reads."""

    path: Path
    ranges: tuple[_Range, ...]

    @property
    def nbytes(self) -> int:
        return sum(r.stop - r.start for r in self.ranges)


Map: TypeAlias = Callable[[Callable[[_Task], list[str]], Sequence[_Task]], Iterable[list[str]]]
"""`stream.Writer.map`, or `map` itself."""


def verify(shard: Shard, path: Path, done: Finished, progress: Progress, run: Map = map) -> int:
    """CRC-32 of one file, checked.

    Adds copied tensors that are not finite in the source to the file's tally.

    Args:
        done: what was written to it.

    Raises:
        ConvertError: names the file, the tensor and what is wrong.
    """
    _check_header(shard, path)
    copied = {g.out.name for g in shard.groups if isinstance(g, CopyGroup)}
    tasks = list(_tasks(path, _ranges(shard, done)))
    for task, bad in zip(tasks, run(read_back, tasks), strict=True):
        for name in bad:
            if name not in copied:
                raise ConvertError(f"{name}: NaN or infinity in {shard.name}")
        done.tally.non_finite = tuple(sorted({*done.tally.non_finite, *bad}))
        progress(task.nbytes)
    return checksum.whole((stop - start, crc) for start, stop, crc in done.pieces)


def _check_header(shard: Shard, path: Path) -> None:
    size = path.stat().st_size
    if size != shard.size:
        raise ConvertError(f"{shard.name}: {size} bytes on disk, {shard.size} planned")
    wanted = {o.name: (o.dtype, o.shape) for o in shard.outputs}
    if {n: (e.dtype, e.shape) for n, e in read_header(path).items()} != wanted:
        raise ConvertError(f"{shard.name}: its header is not the planned one")


def _ranges(shard: Shard, done: Finished) -> Iterator[_Range]:
    """What was written, whole and without a gap."""
    owners, end = _Owners(shard), 0
    for start, stop, crc in done.pieces:
        if start != end:
            raise ConvertError(f"{shard.name}: bytes {end} to {start} were never written")
        yield _Range(start, stop, crc, owners.at(start))
        end = stop
    if end != shard.size:
        raise ConvertError(f"{shard.name}: bytes {end} to {shard.size} were never written")


def _tasks(path: Path, ranges: Iterable[_Range]) -> Iterator[_Task]:
    held: list[_Range] = []
    nbytes = 0
    for found in ranges:
        held.append(found)
        nbytes += found.stop - found.start
        if nbytes >= _TASK_BYTES:
            yield _Task(path, tuple(held))
            held, nbytes = [], 0
    if held:
        yield _Task(path, tuple(held))


def read_back(task: _Task) -> list[str]:
    """Tensors of a task with a value that is not finite. Raises ConvertError on other bytes."""
    bad: list[str] = []
    buffer = memoryview(bytearray(COPY_BYTES))
    with task.path.open("rb", buffering=0) as f:
        for start, stop, crc, out in task.ranges:
            found, finite = 0, True
            for at in range(start, stop, COPY_BYTES):
                data = buffer[: min(COPY_BYTES, stop - at)]
                try:
                    got = os.preadv(f.fileno(), [data], at)
                except OSError as e:
                    raise ConvertError(f"{task.path.name}: cannot be read back: {e}") from e
                if got != len(data):
                    raise ConvertError(f"{task.path.name}: cut short while it was read back")
                found = checksum.crc32(data, found)
                finite = finite and (out is None or _finite(out, data))
            if found != crc:
                where = "the header" if out is None else f"tensor {out.name!r}"
                raise ConvertError(f"{task.path.name}: {where} reads back with other bytes")
            if out is not None and not finite:
                bad.append(out.name)
    return bad


class _Owners:
    """Which tensor a range belongs to; asked in ascending order."""

    def __init__(self, shard: Shard) -> None:
        self._outputs = [o for o in shard.outputs if o.nbytes]
        self._starts = shard.starts
        self._next = 0

    def at(self, start: int) -> OutTensor | None:
        while self._next < len(self._outputs):
            out = self._outputs[self._next]
            begin = self._starts[out.name]
            if begin <= start < begin + out.nbytes:
                return out
            if start < begin:
                return None
            self._next += 1
        return None


def _finite(out: OutTensor, data: memoryview) -> bool:
    if out.dtype in _EXPONENT:
        kind, mask = _EXPONENT[out.dtype]
        bits = np.frombuffer(data, kind)
        return not bool(((bits & kind(mask)) == mask).any())  # type: ignore[call-arg]
    if out.dtype in _NAN_CODE:
        mask = 0x7F if out.dtype == "F8_E4M3" else 0xFF
        return not bool(((np.frombuffer(data, np.uint8) & mask) == _NAN_CODE[out.dtype]).any())
    return True
