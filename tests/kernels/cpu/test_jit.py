"""Object code on disk: found by the next process, safe with several, never required."""

import ctypes
import mmap
import multiprocessing
import os
import platform
import stat
import sys
from dataclasses import replace

import pytest
from llvmlite import ir

from rubin_moe.kernels.cpu import isa, jit
from rubin_moe.kernels.cpu.ir import I64, Function

PROCESSES = 8


def module(value=42):
    m = ir.Module("m")
    f = Function(m, "answer", [], I64)
    f.ret(f.i64(value))
    return m


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("RUBIN_MOE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cpu"


def build(path):
    os.environ["RUBIN_MOE_CACHE_DIR"] = path
    before = jit.compiled
    jit.Library(module(), isa.detect())
    return jit.compiled - before


def test_the_second_start_compiles_nothing(cache_dir):
    assert build(str(cache_dir.parent)) == 1
    assert build(str(cache_dir.parent)) == 0
    assert len(list(cache_dir.iterdir())) == 1


def test_other_code_is_another_file(cache_dir):
    jit.Library(module(1), isa.detect())
    jit.Library(module(2), isa.detect())
    jit.Library(module(1), replace(isa.detect(), features=""))
    assert len(list(cache_dir.iterdir())) == 3


@pytest.mark.parametrize("damage", [b"", b"x" * 40])
def test_a_damaged_file_is_compiled_anew(cache_dir, damage):
    build(str(cache_dir.parent))
    (file,) = cache_dir.iterdir()
    file.write_bytes(damage)
    assert build(str(cache_dir.parent)) == 1
    assert build(str(cache_dir.parent)) == 0


def test_a_read_only_folder_still_serves_what_it_holds(cache_dir, monkeypatch):
    build(str(cache_dir.parent))

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(jit.tempfile, "mkstemp", refuse)
    assert build(str(cache_dir.parent)) == 0
    jit.Library(module(1), isa.detect())
    assert len(list(cache_dir.iterdir())) == 1


def test_the_cache_of_another_llvm_is_not_read(cache_dir, monkeypatch):
    build(str(cache_dir.parent))
    monkeypatch.setattr(jit.binding, "llvm_version_info", (1, 2, 3))
    assert build(str(cache_dir.parent)) == 1
    assert len(list(cache_dir.iterdir())) == 2


def test_a_folder_that_cannot_be_written_only_costs_time(cache_dir):
    blocked = cache_dir.parents[1] / "file"
    blocked.write_text("not a folder")
    assert build(str(blocked)) == 1
    assert blocked.read_text() == "not a folder"


def test_several_processes_may_start_at_once(cache_dir):
    with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
        assert sum(pool.map(build, [str(cache_dir.parent)] * PROCESSES, chunksize=1)) >= 1
    (file,) = cache_dir.iterdir()
    assert stat.S_ISREG(file.stat().st_mode)
    assert build(str(cache_dir.parent)) == 0


# ---- a fragmented address space

STEPS = 1000
RESERVED = 8 << 30


def long_code_with_a_constant():
    """``STEPS`` times ``x = x * x + 0.1``: more than a page of code, less of constants."""
    double = ir.DoubleType()
    m = ir.Module("m")
    fn = ir.Function(m, ir.FunctionType(double, [double]), "polynomial")
    b = ir.IRBuilder(fn.append_basic_block())
    x = fn.args[0]
    for _ in range(STEPS):
        x = b.fadd(b.fmul(x, x), ir.Constant(double, 0.1))
    b.ret(x)
    return m


def leave_holes_of_a_page():
    """Takes what is free at the top of the address space, but for single pages; what needs more
    finds its place ``RESERVED`` bytes below."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    no_reserve = 0x4000  # Linux: pages that are never touched count for nothing

    def take(nbytes):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        at = libc.mmap(None, nbytes, 0, flags, -1, 0)
        assert at != ctypes.c_void_p(-1).value
        return at

    low = take(RESERVED)
    for nbytes in (1 << 30, 1 << 24, 1 << 18, mmap.PAGESIZE):
        while (at := take(nbytes)) > low:
            pass
        libc.munmap(at, nbytes)
    for hole in range(1, 80, 2):
        libc.munmap(low + RESERVED - (hole + 1) * mmap.PAGESIZE, mmap.PAGESIZE)


def links_far_from_its_constants(path):
    os.environ["RUBIN_MOE_CACHE_DIR"] = path
    jit.Library(module(), isa.detect())  # what LLVM needs at first is there
    leave_holes_of_a_page()
    library = jit.Library(long_code_with_a_constant(), isa.detect())
    x = expected = 0.25
    for _ in range(STEPS):
        expected = expected * expected + 0.1
    function = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(library.address("polynomial"))
    assert function(x) == expected


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the holes are made with what x86-64 Linux does",
)
def test_code_and_constants_stay_together(cache_dir):
    """They are linked by 32-bit distances, whatever is free where."""
    child = multiprocessing.get_context("fork").Process(
        target=links_far_from_its_constants, args=(str(cache_dir.parent),)
    )
    child.start()
    child.join(60)
    child.kill()
    assert child.exitcode == 0
