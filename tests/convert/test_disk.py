"""Ranges of a file: what is written, with which checksums, and where room is asked for."""

import errno
import os
import zlib

import pytest

from rubin_moe.convert import disk
from rubin_moe.convert.disk import COPY_BYTES, RangeWriter, allocate
from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert
from rubin_moe.errors import ConvertError

from .sources import write_fp4


class NoFallocate:
    """A C library whose file system answers with these errors and then gives blocks; by default it
    never can."""

    def __init__(self, libc, *codes):
        self.libc, self.sync_file_range = libc, libc.sync_file_range
        self.codes = list(codes or [errno.EOPNOTSUPP] * 9)

    def fallocate(self, *args):
        if not self.codes:
            return self.libc.fallocate(*args)
        disk.ctypes.set_errno(self.codes.pop(0))
        return -1


@pytest.fixture
def target(tmp_path):
    with (tmp_path / "a").open("w+b") as f:
        yield f


def read(file):
    file.seek(0)
    return file.read()


def test_pieces_in_any_order_become_the_ranges_they_make(target):
    data = os.urandom(400)
    allocate(target.fileno(), 400)
    out = RangeWriter(target.fileno(), memoryview(bytearray(COPY_BYTES)))
    for start, stop in ((300, 310), (0, 100), (100, 100), (100, 104), (104, 250), (310, 400)):
        out.write(start, memoryview(data)[start:stop])
    found = out.finish()
    assert found == [(0, 250, zlib.crc32(data[:250])), (300, 400, zlib.crc32(data[300:]))]
    assert read(target) == data[:250] + bytes(50) + data[300:]


def test_what_is_copied_joins_what_is_written_beside_it(target, monkeypatch):
    monkeypatch.setattr(disk, "COPY_BYTES", 64)
    data = os.urandom(1000)
    allocate(target.fileno(), 1000)
    out = RangeWriter(target.fileno(), memoryview(bytearray(64)))

    def source(view, at):
        view[:] = data[10 + at : 10 + at + len(view)]

    out.write(0, memoryview(data)[:10])
    out.copy(10, 900, source)
    out.write(910, memoryview(data)[910:])
    assert out.finish() == [(0, 1000, zlib.crc32(data))]
    assert read(target) == data


def test_no_call_takes_much_more_than_a_cache_holds(target, monkeypatch):
    """Large pieces, and small ones side by side, at odd offsets."""
    calls = []
    for name in ("pwrite", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real: calls.append(n := real(*a)) or n)
    data = os.urandom(5 * COPY_BYTES + 77)
    allocate(target.fileno(), len(data))
    out = RangeWriter(target.fileno(), memoryview(bytearray(COPY_BYTES)))
    out.write(0, memoryview(data)[:7])
    out.write(7, memoryview(data)[7 : 3 * COPY_BYTES])
    for start in range(3 * COPY_BYTES, len(data), COPY_BYTES // 3):
        out.write(start, memoryview(data)[start : start + COPY_BYTES // 3])
    assert out.finish() == [(0, len(data), zlib.crc32(data))]
    assert max(calls) < 2 * COPY_BYTES
    assert len(calls) < 9
    assert read(target) == data


def test_many_pieces_and_a_write_that_is_cut_short(target, monkeypatch):
    """More than one call takes, and calls that take less than they are given."""
    real, calls = os.pwritev, []

    def pwritev(fd, views, offset):
        calls.append(len(views))
        return real(fd, views[: len(views) // 2 + 1], offset) - 1

    monkeypatch.setattr(os, "pwritev", pwritev)
    data = os.urandom(3000)
    allocate(target.fileno(), 3000)
    out = RangeWriter(target.fileno(), memoryview(bytearray(COPY_BYTES)))
    for i in range(3000):
        out.write(i, memoryview(data)[i : i + 1])
    assert out.finish() == [(0, 3000, zlib.crc32(data))]
    assert read(target) == data
    assert calls == [1024, 1024, 952]


def test_much_is_not_held_until_the_end(target, monkeypatch):
    monkeypatch.setattr(disk, "HELD_BYTES", 100)
    data = os.urandom(300)
    out = RangeWriter(target.fileno(), memoryview(bytearray(COPY_BYTES)))
    for at in (200, 100, 0):
        out.write(at, memoryview(data)[at : at + 100])
    assert read(target)[100:] == data[100:]
    out.finish()
    assert read(target) == data


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_a_file_system_without_fallocate_gets_a_file_of_that_size(target, monkeypatch, size):
    monkeypatch.setattr(disk, "_LIBC", NoFallocate(disk._LIBC))
    allocate(target.fileno(), size)
    assert read(target) == bytes(size)


def test_a_signal_on_the_way_is_no_error(target, monkeypatch):
    library = NoFallocate(disk._LIBC, errno.EINTR, errno.EINTR)
    monkeypatch.setattr(disk, "_LIBC", library)
    allocate(target.fileno(), 100_000)
    assert not library.codes
    assert read(target) == bytes(100_000)


def test_a_full_disk_is_told_before_the_first_byte(tmp_path, monkeypatch):
    source, _ = write_fp4(tmp_path / "a", "modelopt")
    monkeypatch.setattr(disk, "_LIBC", NoFallocate(disk._LIBC, errno.ENOSPC))
    with pytest.raises(ConvertError, match="cannot be written: No space left on device"):
        convert(source, tmp_path / "b", Options("nvfp4-ue5m3"), jobs=1)
    (made,) = (tmp_path / "b.partial").glob("files/*")
    assert made.stat().st_size == 0


@pytest.mark.parametrize("call", ["pwrite", "pwritev"])
def test_a_disk_that_fills_up_on_the_way(tmp_path, monkeypatch, call):
    """Where blocks cannot be had ahead of time; the same command goes on when there is room."""
    source, _ = write_fp4(tmp_path / "a", "modelopt")
    monkeypatch.setattr(disk, "_LIBC", NoFallocate(disk._LIBC))
    real = getattr(os, call)

    def write(fd, data, offset):
        if offset > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, call, write)
    with pytest.raises(ConvertError, match="cannot be written: No space left on device"):
        convert(source, tmp_path / "b", Options("nvfp4-ue5m3"), jobs=1)
    assert not (tmp_path / "b").exists()
    monkeypatch.undo()
    convert(source, tmp_path / "b", Options("nvfp4-ue5m3"), jobs=1)
