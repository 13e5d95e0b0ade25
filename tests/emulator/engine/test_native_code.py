"""Loaded objects that the garbage collector finds, wherever it happens to run."""

from __future__ import annotations

import gc
import threading
import weakref

import llvmlite.binding as llvm
import pytest

from rubin_moe.emulator.native.compiler import NativeCode, compile_object

OBJECT = compile_object("define i32 @f() { ret i32 7 }", 0)


def garbage() -> weakref.ref[NativeCode]:
    """A loaded object that only the garbage collector frees."""
    code = NativeCode(OBJECT)
    code.cycle = code  # type: ignore[attr-defined]
    return weakref.ref(code)


def calls_left() -> int:
    try:
        return 1 + calls_left()
    except RecursionError:
        return 0


def collect(calls: int) -> None:
    """Collects garbage below so many calls."""
    if calls:
        collect(calls - 1)
    else:
        gc.collect()


@pytest.fixture
def no_other_garbage():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("room", range(1, 12))
def test_death_at_the_recursion_limit_locks_nobody_out(room: int, no_other_garbage: None) -> None:
    """llvmlite's finalizer fails there with its lock taken, and so all other threads waited."""
    code = garbage()
    collect(calls_left() - room)
    assert code() is None
    other = threading.Thread(target=llvm.get_default_triple, daemon=True)
    other.start()
    other.join(10)
    assert not other.is_alive()


def test_engines_of_dead_objects_go_when_the_next_is_loaded(no_other_garbage: None) -> None:
    alive = NativeCode(OBJECT)
    before = len(NativeCode._engines)
    dead = [garbage() for _ in range(5)]
    gc.collect()
    assert [code() for code in dead] == [None] * 5
    engine = weakref.ref(NativeCode._engines[dead[0]])
    another = NativeCode(OBJECT)
    assert len(NativeCode._engines) == before + 1
    assert engine() is None
    assert alive.address("f") != another.address("f")
