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

from rubin_moe.convert.checksum import crc32

Range: TypeAlias = tuple[int, int, int]
"""Start, stop and CRC-32 of bytes of a file."""

COPY_BYTES = 1 << 20
"""Read, summed and written at a time: stays in a core's cache from one to the next. Linux copied
calls of 9 MB at 0.5-1.5 GB/s, of up to 2 MiB at 4-8 (6.18, ext4, EPYC guest, 2026-12-01)."""

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
    # Not posix_fallocate: where the file system cannot, that writes to every block.
    while sys.platform == "linux" and size:
        if not _LIBC.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
            return
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            break
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    os.truncate(fd, size)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """All of ``data`` at an offset."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


class RangeWriter:
    """Writes pieces of one group; `finish` tells what was written.

    Args:
        fd: of a file that `allocate` made; stays open.
        buffer: `COPY_BYTES` that are used for what is copied.
    """

    def __init__(self, fd: int, buffer: memoryview) -> None:
        self._fd, self._buffer = fd, buffer
        self._held: list[tuple[int, memoryview]] = []
        self._held_bytes = 0
        self._ends: dict[int, tuple[int, int]] = {}  # end of a range -> its start and CRC-32

    def write(self, start: int, data: memoryview) -> None:
        """Bytes at an offset; must not change until `finish`."""
        if len(data) >= COPY_BYTES:
            for at in range(0, len(data), COPY_BYTES):
                self._put(start + at, data[at : at + COPY_BYTES])
            return
        self._extend(start, data)
        self._held.append((start, data))
        self._held_bytes += len(data)
        if self._held_bytes > HELD_BYTES:
            self._flush()

    def copy(self, start: int, nbytes: int, read: Callable[[memoryview, int], None]) -> None:
        """Bytes that ``read`` puts into a view, from an offset of its own on."""
        for at in range(0, nbytes, COPY_BYTES):
            data = self._buffer[: min(COPY_BYTES, nbytes - at)]
            read(data, at)
            self._put(start + at, data)

    def finish(self) -> list[Range]:
        """Everything that was written, in order of the file, on its way to the disk."""
        self._flush()
        found = sorted((start, stop, crc) for stop, (start, crc) in self._ends.items())
        if sys.platform == "linux":
            for start, stop, _ in found:
                _LIBC.sync_file_range(
                    self._fd, ctypes.c_int64(start), ctypes.c_int64(stop - start),
                    _SYNC_FILE_RANGE_WRITE,
                )  # fmt: skip
        return found

    def _put(self, start: int, data: memoryview) -> None:
        """Sums and writes at once."""
        self._extend(start, data)
        write_all(self._fd, data, start)

    def _extend(self, start: int, data: memoryview) -> None:
        """Puts bytes to the range that ends where they start, if there is one."""
        first, crc = self._ends.pop(start, (start, 0))
        self._ends[start + len(data)] = first, crc32(data, crc)

    def _flush(self) -> None:
        """Writes what is held; small pieces that lie side by side with one call."""
        side_by_side: list[memoryview] = []
        begin = end = -1
        for start, data in sorted(self._held, key=lambda piece: piece[0]):
            full = len(side_by_side) == _MOST_VIEWS or end - begin >= COPY_BYTES
            if start != end or full:
                self._write_views(begin, side_by_side)
                side_by_side, begin = [], start
            side_by_side.append(data)
            end = start + len(data)
        self._write_views(begin, side_by_side)
        self._held, self._held_bytes = [], 0

    def _write_views(self, start: int, views: Sequence[memoryview]) -> None:
        if not views or os.pwritev(self._fd, views, start) == sum(map(len, views)):
            return
        for data in views:  # cut short, which is rare: once more, one by one
            write_all(self._fd, data, start)
            start += len(data)
