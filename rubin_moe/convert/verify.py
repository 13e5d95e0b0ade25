"""Reads back what was written: sizes, checksums, headers as planned, every value finite.

Values are judged by their bits, a range at a time: an exponent of all ones is NaN or infinity, and
the NaN codes of FP8 and of block scales are codes. Every byte is read once, by all workers; the
checksum of a whole file follows from those of its ranges.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from rubin_moe.convert import checksum
from rubin_moe.convert.disk import COPY_BYTES, Range
from rubin_moe.convert.journal import Finished
from rubin_moe.convert.output import OutTensor
from rubin_moe.convert.plan import CopyGroup, Shard
from rubin_moe.convert.stream import Progress
from rubin_moe.errors import ConvertError

_EXPONENT: Mapping[str, tuple[type[np.generic], int]] = {
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000),
}
_NAN_CODE = {"F8_E4M3": (0x7F, 0x7F), "F8_E8M0": (0xFF, 0xFF)}  # mask and code
_TASK_BYTES = 32 << 20  # read by a worker at a call


class _Placed(NamedTuple):
    """A tensor and its first and last byte in a file."""

    start: int
    stop: int
    out: OutTensor


class _Task(NamedTuple):
    """Ranges of one file that one worker reads, and the tensors in them, in order."""

    path: Path
    ranges: tuple[Range, ...]
    tensors: tuple[_Placed, ...]

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop, _ in self.ranges)


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
    _check_coverage(shard, done)
    copied = {g.out.name for g in shard.groups if isinstance(g, CopyGroup)}
    tasks = list(_tasks(shard, path, done.pieces))
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
    with path.open("rb") as f:
        if f.read(len(shard.header)) != shard.header:
            raise ConvertError(f"{shard.name}: its header is not the planned one")


def _check_coverage(shard: Shard, done: Finished) -> None:
    """Every byte was written, once."""
    ends = [0, *(stop for _, stop, _ in done.pieces)]
    starts = [*(start for start, _, _ in done.pieces), shard.size]
    for end, start in zip(ends, starts, strict=True):
        if start != end:
            raise ConvertError(f"{shard.name}: bytes {end} to {start} were never written")


def _tasks(shard: Shard, path: Path, ranges: Sequence[Range]) -> Iterator[_Task]:
    begins = [shard.starts[o.name] for o in shard.outputs]
    tensors = [_Placed(s, s + o.nbytes, o) for s, o in zip(begins, shard.outputs, strict=True)]
    held: list[Range] = []
    for found in ranges:
        held.append(found)
        first, last = held[0][0], found[1]
        if found is ranges[-1] or last - first >= _TASK_BYTES:
            within = slice(max(0, bisect_right(begins, first) - 1), bisect_left(begins, last))
            yield _Task(path, tuple(held), tuple(tensors[within]))
            held = []


def read_back(task: _Task) -> list[str]:
    """Tensors of a task with a value that is not finite. Raises ConvertError on other bytes."""
    bad: list[str] = []
    buffer = memoryview(bytearray(COPY_BYTES))
    with task.path.open("rb", buffering=0) as f:
        for start, stop, crc in task.ranges:
            found = 0
            for at, data in _blocks(f.fileno(), start, stop, buffer, task.path.name):
                found = checksum.crc32(data, found)
                parts = _parts(task.tensors, at, data)
                bad += (out.name for out, part in parts if not _finite(out.dtype, part))
            if found != crc:
                within = [t.out.name for t in task.tensors if t.start < stop and t.stop > start]
                where = f"tensor {within[0]!r}" if within else "the header"
                more = f" or {len(within) - 1} after it" if len(within) > 1 else ""
                raise ConvertError(f"{task.path.name}: {where}{more} reads back with other bytes")
    return bad


def _blocks(
    fd: int, start: int, stop: int, buffer: memoryview, name: str
) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) of a range. Cut at multiples of `COPY_BYTES` of the file: through no value,
    since the plan aligns every tensor to its dtype."""
    at = start
    while at < stop:
        end = min(stop, (at // COPY_BYTES + 1) * COPY_BYTES)
        data = buffer[: end - at]
        try:
            got = os.preadv(fd, [data], at)
        except OSError as e:
            raise ConvertError(f"{name}: cannot be read back: {e}") from e
        if got != len(data):
            raise ConvertError(f"{name}: cut short while it was read back")
        yield at, data
        at = end


def _parts(
    tensors: Sequence[_Placed], at: int, data: memoryview
) -> Iterator[tuple[OutTensor, memoryview]]:
    """Tensors that bytes from offset ``at`` on belong to, and which bytes."""
    end = at + len(data)
    for tensor in tensors[max(0, bisect_right(tensors, at, key=_start) - 1) :]:
        if tensor.start >= end:
            return
        if tensor.stop > at:
            yield tensor.out, data[max(tensor.start, at) - at : min(tensor.stop, end) - at]


_start = attrgetter("start")


def _finite(dtype: str, data: memoryview) -> bool:
    if dtype in _EXPONENT:
        kind, exponent = _EXPONENT[dtype]
        bits = np.frombuffer(data, kind)
        return not bool(((bits & kind(exponent)) == exponent).any())  # type: ignore[call-arg]
    if dtype in _NAN_CODE:
        mask, code = _NAN_CODE[dtype]
        return not bool(((np.frombuffer(data, np.uint8) & mask) == code).any())
    return True
