"""The emulator's cache of compiled kernels: many processes, folders that cannot be written, other
versions."""

import multiprocessing
from pathlib import Path

import pytest

from rubin_moe.emulator.native import compiler

PROCESSES = 8
VALUE = {"code": b"x" * 100_000}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RUBIN_MOE_EMULATOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(key: str = "key") -> tuple[object, int]:
    """The value, and how often it had to be made."""
    calls = []

    def make():
        calls.append(None)
        return VALUE

    return compiler.cached(key, make), len(calls)


def test_the_second_time_it_is_read(folder):
    assert made() == (VALUE, 1)
    assert made() == (VALUE, 0)
    assert [p.name for p in folder.iterdir()] == ["key.pickle"]


def test_many_processes_on_one_cold_folder(folder):
    """None sees half a file, and one whole file remains."""
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(PROCESSES), context.Queue()

    def run():
        start.wait()
        results.put(made()[0] == VALUE)

    processes = [context.Process(target=run) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    assert all(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert [p.name for p in folder.iterdir()] == ["key.pickle"]
    assert made() == (VALUE, 0)


@pytest.mark.parametrize("damage", [b"", b"x", b"x" * 100])
def test_a_damaged_file_is_made_anew(folder, damage):
    made()
    (folder / "key.pickle").write_bytes(damage)
    assert made() == (VALUE, 1)
    assert made() == (VALUE, 0)


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("RUBIN_MOE_EMULATOR_CACHE", str(tmp_path / "file"))
    assert made() == (VALUE, 1)
    assert made() == (VALUE, 1)


def test_a_read_only_folder_still_serves_what_it_holds(folder, monkeypatch):
    made("held")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(compiler.tempfile, "mkstemp", refuse)
    assert made("held") == (VALUE, 0)
    assert made("other") == (VALUE, 1)
    assert [p.name for p in folder.iterdir()] == ["held.pickle"]


def test_a_write_that_fails_leaves_no_file(folder, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler.os, "replace", refuse)
    assert made() == (VALUE, 1)
    assert list(folder.iterdir()) == []


def test_another_version_does_not_find_it(folder, monkeypatch):
    before = compiler.cache_key("text")
    monkeypatch.setattr(compiler, "source_hash", lambda: "another version")
    assert compiler.cache_key("text") != before
    assert compiler.cache_key("text") == compiler.cache_key("text")


def test_no_folder_keeps_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("RUBIN_MOE_EMULATOR_CACHE", "")
    monkeypatch.chdir(tmp_path)
    assert made() == (VALUE, 1)
    assert list(Path().iterdir()) == []
