"""LLVM IR text to callable machine code, with objects kept on disk.

The cache folder is ``RUBIN_MOE_EMULATOR_CACHE``, else ``rubin_moe/emulator`` under
``XDG_CACHE_HOME`` (``~/.cache``); an empty value turns the cache off. Keys hold the text compiled,
the emulator's source, the CPU and the LLVM version, so nothing stale is ever found.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import pickle
import tempfile
import weakref
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import llvmlite
import llvmlite.binding as llvm

from rubin_moe.emulator.native import control, cvt, functions, library, memory, order, sync, taint
from rubin_moe.emulator.order import build
from rubin_moe.emulator.order.layout import HOOKS

#: Compiled modules kept on disk (most are below 0.5 MB).
_CACHED_KERNELS = 512
_RUNTIME_MODULES = (control, memory, sync, cvt, functions, order, taint)


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Digest of the emulator's own source, CPU and LLVM: part of every cache key."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(f"{llvmlite.__version__} {llvm.llvm_version_info}".encode())
    digest.update(llvm.get_host_cpu_name().encode())
    digest.update(llvm.get_host_cpu_features().flatten().encode())
    return digest.hexdigest()


def cache_key(*texts: str) -> str:
    """Key of something made from ``texts`` by this version of the emulator."""
    digest = hashlib.sha256(source_hash().encode())
    for text in texts:
        digest.update(b"\0" + text.encode())
    return digest.hexdigest()[:32]


def cache_folder() -> Path | None:
    """Where compiled kernels are kept, or None when the cache is off."""
    chosen = os.environ.get("RUBIN_MOE_EMULATOR_CACHE")
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rubin_moe" / "emulator"


def cached(key: str, make: Callable[[], Any]) -> Any:
    """``make()``, or what an earlier process made for the same key."""
    folder = cache_folder()
    if folder is None:
        return make()
    path = folder / f"{key}.pickle"
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        if hashlib.sha256(data[32:]).digest() == data[:32]:
            return pickle.loads(data[32:])
    value = make()
    with contextlib.suppress(OSError):  # a folder that cannot be written only costs time
        _keep(path, pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
        _prune(folder)
    return value


def _keep(path: Path, data: bytes) -> None:
    """Writes a file that appears whole, behind its digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(hashlib.sha256(data).digest() + data)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def _prune(folder: Path) -> None:
    """Forget the files made longest ago; another process may be doing the same."""
    ages: list[tuple[float, Path]] = []
    for path in folder.glob("*.pickle"):
        with contextlib.suppress(FileNotFoundError):
            ages.append((path.stat().st_mtime, path))
    for _, path in sorted(ages)[:-_CACHED_KERNELS]:
        path.unlink(missing_ok=True)


@lru_cache(maxsize=1)
def _initialise() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def _target_machine(opt: int) -> llvm.TargetMachine:
    _initialise()
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    name = llvm.get_host_cpu_name()
    return target.create_target_machine(
        cpu=name, features=features, opt=opt, reloc="pic", codemodel="jitdefault", jit=True
    )


def compile_object(text: str, opt: int, *others: str) -> bytes:
    """Machine code (an ELF object) of LLVM IR text; ``opt`` above 1 also runs the IR passes.

    ``others`` are modules linked with it.
    """
    _initialise()
    module = llvm.parse_assembly(text)
    for other in others:
        module.link_in(llvm.parse_assembly(other))
    module.verify()
    machine = _target_machine(opt)
    if opt > 1:
        options = llvm.create_pipeline_tuning_options(speed_level=opt)
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
    return bytes(machine.emit_object(module))


class NativeCode:
    """A loaded object; functions are looked up by name.

    Kernels die in cycles, so by the garbage collector: on any thread and at any depth of calls.
    llvmlite's finalizer takes a lock, and at the recursion limit it raises without giving it back,
    after which every other thread waits for ever. So the engines of dead objects are kept until
    the next object is loaded.
    """

    _engines: ClassVar[dict[weakref.ref[NativeCode], llvm.ExecutionEngine]] = {}

    def __init__(self, code: bytes) -> None:
        _initialise()
        for loaded in list(self._engines):
            if loaded() is None:
                self._engines.pop(loaded, None)
        empty = llvm.parse_assembly("")
        self._engine = llvm.create_mcjit_compiler(empty, _target_machine(0))
        self._engines[weakref.ref(self)] = self._engine
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Address of a function."""
        address = int(self._engine.get_function_address(name))
        if address == 0:
            raise KeyError(f"native symbol {name!r} is not defined")
        return address


class Runtime:
    """The loaded runtime library; its functions are visible to kernels compiled later."""

    def __init__(self) -> None:
        key = cache_key("runtime")
        code = cached(key, lambda: compile_object(library.library_text(), 2))
        llvm.load_library_permanently("libm.so.6")
        self._native = NativeCode(code)
        for name in library.function_names():
            llvm.add_symbol(name, self._native.address(name))
        # runs for long: releases the interpreter lock
        self.schedule = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(
            self._native.address("emu.schedule")
        )
        # over at once: keeps it
        number, pointer = ctypes.c_int32, ctypes.c_void_p
        self.mbarrier_update = ctypes.PYFUNCTYPE(
            ctypes.c_int64, pointer, pointer, number, number, number
        )(self._native.address("emu.mbarrier_update"))


class OrderHooks:
    """The functions of the race detector: addresses for native code, callables for Python."""

    def __init__(self) -> None:
        self._native = NativeCode(
            cached(build.key(), lambda: compile_object("", 2, *build.texts()))
        )
        self.addresses = [self._native.address(f"order.{name}") for name in HOOKS]
        self.call: dict[str, Callable[..., int]] = {}
        for (name, arguments), address in zip(
            build.signatures().items(), self.addresses, strict=True
        ):
            self.call[name] = ctypes.PYFUNCTYPE(*[ctypes.c_int64] * (arguments + 1))(address)


@lru_cache(maxsize=1)
def order_hooks() -> OrderHooks:
    """The race detector of this process: compiled when a launch first has rules."""
    return OrderHooks()


@lru_cache(maxsize=1)
def runtime() -> Runtime:
    """The runtime of this process."""
    assert _RUNTIME_MODULES
    return Runtime()
