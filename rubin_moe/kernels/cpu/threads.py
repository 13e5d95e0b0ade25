"""Runs one native function on several threads: on torch's own OpenMP threads where it has them.

A second pool would fight with torch's for the cores, so the GNU entry point ``GOMP_parallel`` of
the OpenMP runtime that this process has loaded is called (LLVM's and Intel's runtimes have it
too). Without one (macOS, Windows) Python threads do it: the call releases the interpreter lock.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from rubin_moe import envs

log = logging.getLogger(__name__)
Launch = Callable[[int, int, int], None]
"""Function address, argument address, number of threads."""


def num_threads() -> int:
    """``RUBIN_MOE_NUM_THREADS``, else torch's own setting."""
    return envs.count("RUBIN_MOE_NUM_THREADS") or torch.get_num_threads()


@cache
def launcher() -> Launch:
    """How functions are run on several threads in this process."""
    parallel = _openmp()
    if parallel is None:
        log.info("no OpenMP runtime with GOMP_parallel in this process: Python threads it is")
        return _python_threads

    def launch(function: int, argument: int, threads: int) -> None:
        parallel(function, argument, threads, 0)

    return launch


def call(function: int, argument: int) -> None:
    """On this thread."""
    _prototype(function)(argument)


@cache
def _prototype(function: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)


def _openmp() -> Callable[[int, int, int, int], None] | None:
    for path in (None, *_loaded_runtimes()):
        try:
            parallel = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError, TypeError):
            continue
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return parallel  # type: ignore[no-any-return]
    return None


def _loaded_runtimes() -> list[str]:
    """Paths of the OpenMP libraries mapped into this process (Linux)."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "omp" in line}
    except OSError:
        return []
    return sorted(p for p in paths if "/lib" in p and "omp" in p.rsplit("/", 1)[-1])


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="rubin_moe")


def _python_threads(function: int, argument: int, threads: int) -> None:
    others = [_pool().submit(call, function, argument) for _ in range(threads - 1)]
    call(function, argument)
    for other in others:
        other.result()
