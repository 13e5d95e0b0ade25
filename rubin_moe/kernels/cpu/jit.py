"""From generated code to callable addresses, with object code kept on disk.

A cache file is named by a hash of the code, the CPU, its features and LLVM's version, is written
under another name and renamed (so processes may race), and is checked by a hash of its own; a
folder that cannot be written means compiling, not failing.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import binding, ir

from rubin_moe import envs
from rubin_moe.kernels.cpu.isa import Isa

log = logging.getLogger(__name__)
compiled = 0
"""Modules that this process has compiled rather than found."""


class Library:
    """Linked object code; addresses live as long as the object."""

    def __init__(self, module: ir.Module, isa: Isa) -> None:
        machine = _machine(isa)
        module.triple = binding.get_process_triple()
        text = str(module)
        self._engine = binding.create_mcjit_compiler(
            binding.parse_assembly(""), machine, use_lmm=True
        )
        self._engine.add_object_file(
            binding.ObjectFileRef.from_data(_object_code(text, isa, machine))
        )
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        at = int(self._engine.get_function_address(name))
        if not at:
            raise KeyError(name)
        return at


@cache
def _initialize() -> None:
    with contextlib.suppress(RuntimeError, AttributeError):  # newer llvmlite does it itself
        binding.initialize()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()


def _machine(isa: Isa) -> Any:
    _initialize()
    target = binding.Target.from_triple(binding.get_process_triple())
    return target.create_target_machine(
        cpu=isa.cpu, features=isa.features, opt=3, reloc="pic", codemodel="small"
    )


def _object_code(text: str, isa: Isa, machine: Any) -> bytes:
    version = ".".join(map(str, binding.llvm_version_info))
    key = hashlib.sha256("\0".join((text, isa.cpu, isa.features, version)).encode()).hexdigest()
    path = envs.cache_dir() / "cpu" / f"{key[:40]}.o"
    code = _read(path)
    if code is None:
        code = _compile(text, machine)
        _write(path, code)
    return code


def _compile(text: str, machine: Any) -> bytes:
    global compiled
    compiled += 1
    module = binding.parse_assembly(text)
    module.verify()
    return bytes(machine.emit_object(module))


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:32], data[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as f:
            f.write(hashlib.sha256(code).digest() + code)
        os.replace(name, path)
    except OSError as e:
        log.info("compiled CPU kernels are not kept: %s", e)
