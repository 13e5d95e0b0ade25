"""Object code on disk: found by the next process, safe with several, never required."""

import multiprocessing
import os
import stat
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
