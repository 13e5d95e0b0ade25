"""Bytes into a file of known size, each range with its CRC-32.

Room is taken before the first byte, so that a full disk is told then; Linux is asked to bring every
range to the disk as soon as it is written, so that little is left to wait for at the end. What lies
side by side becomes one range.
"""

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rubin_moe.convert import checksum

Range: TypeAlias = tuple[int, int, int]
"""Start, stop and CRC-32 of bytes of a file."""

COPY_BYTES = 1 << 20
"""Held at a time of what is copied: stays in a core's cache from read to checksum to write."""

HELD_BYTES = 16 << 20
"""Small pieces are kept until they are this much together, and written by few calls."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)
_SYNC_FILE_RANGE_WRITE = 2
_MOST_VIEWS = 1024  # of one call; the kernel's UIO_MAXIOV


def allocate(fd: int, size: int) -> None:
    """Gives an empty file its size, with blocks on the disk where the file system can.

    Raises:
        OSError: there is no room, or the file may not grow so far.
    """
    if sys.platform == "linux" and size:
        # Not posix_fallocate: where the file system cannot, that writes to every block.
        if not _LIBC.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
            return
        code = ctypes.get_errno()
        if code not in _UNSUPPORTED:
            raise OSError(code, os.strerror(code))
    os.truncate(fd, size)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """All of ``data`` at an offset."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


class RangeWriter:
    """Writes pieces of one group in any order; `finish` tells what was written.

    Args:
        fd: of a file that `allocate` made; stays open.
        buffer: `COPY_BYTES` that are used for what is copied.
    """

    def __init__(self, fd: int, buffer: memoryview) -> None:
        self._fd, self._buffer = fd, buffer
        self._held: list[tuple[int, memoryview]] = []
        self._held_bytes = 0
        self._written: list[Range] = []

    def write(self, start: int, data: memoryview) -> None:
        """Bytes at an offset; must not change until `finish`."""
        self._held.append((start, data))
        self._held_bytes += len(data)
        if self._held_bytes > HELD_BYTES:
            self._flush()

    def copy(self, start: int, nbytes: int, read: Callable[[memoryview, int], None]) -> None:
        """Bytes that ``read`` puts into a view, from an offset of its own on."""
        crc = 0
        for at in range(0, nbytes, COPY_BYTES):
            data = self._buffer[: min(COPY_BYTES, nbytes - at)]
            read(data, at)
            crc = checksum.crc32(data, crc)
            write_all(self._fd, data, start + at)
        self._written.append((start, start + nbytes, crc))

    def finish(self) -> list[Range]:
        """Everything that was written, in order of the file, on its way to the disk."""
        self._flush()
        found = merged(self._written)
        if sys.platform == "linux":
            for start, stop, _ in found:
                _LIBC.sync_file_range(
                    self._fd, ctypes.c_int64(start), ctypes.c_int64(stop - start),
                    _SYNC_FILE_RANGE_WRITE,
                )  # fmt: skip
        return found

    def _flush(self) -> None:
        self._held.sort(key=lambda piece: piece[0])
        side_by_side: list[memoryview] = []
        begin = end = 0
        for start, data in self._held:
            if start != end or len(side_by_side) == _MOST_VIEWS:
                self._write_views(begin, side_by_side)
                side_by_side, begin = [], start
            side_by_side.append(data)
            end = start + len(data)
        self._write_views(begin, side_by_side)
        self._held, self._held_bytes = [], 0

    def _write_views(self, start: int, views: Sequence[memoryview]) -> None:
        if not views:
            return
        nbytes, crc = sum(map(len, views)), 0
        for data in views:
            crc = checksum.crc32(data, crc)
        if os.pwritev(self._fd, views, start) < nbytes:  # rare: once more, one by one
            at = start
            for data in views:
                write_all(self._fd, data, at)
                at += len(data)
        self._written.append((start, start + nbytes, crc))


def merged(ranges: Sequence[Range]) -> list[Range]:
    """The same bytes in order of the file, as few ranges as can be."""
    found: list[Range] = []
    for start, stop, crc in sorted(ranges):
        if found and found[-1][1] == start:
            begin, end, before = found.pop()
            crc = checksum.whole([(end - begin, before), (stop - start, crc)])
            start = begin
        found.append((start, stop, crc))
    return found
