"""CuTe DSL kernels compiled ahead, without a GPU, and kept on disk.

A kernel's key is its name, a hash of the architecture, its constants and the source of every file
it is made of, and the compiler's version. The cache is safe for processes that start at once (a
file appears whole, by rename) and for a folder that cannot be written (it compiles, and says so
once). Needs cutlass only to compile: a machine without it serves what the folder holds, by whatever
version it was compiled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rubin_moe import envs
from rubin_moe.errors import ConfigError
from rubin_moe.kernels.launch import CompiledKernel

logger = logging.getLogger(__name__)
DSL = "nvidia-cutlass-dsl"
OLDEST_DSL = (4, 8)
MEND = "pip install 'nvidia-cutlass-dsl[cu13]>=4.8.1,<4.9'"


def dsl_version() -> str | None:
    """The installed DSL's, if it is. Raises ConfigError with the line that mends it if too old."""
    try:
        found = version(DSL)
    except PackageNotFoundError:
        return None
    numbers = tuple(int(part) for part in found.split(".")[:2])
    if numbers < OLDEST_DSL:
        raise ConfigError(f"{DSL} {found} knows no sm_107a, 4.8 is the first: {MEND}")
    return found


@lru_cache(maxsize=8)
def source_hash(*sources: str) -> str:
    """SHA-256 of these Python files and packages under `rubin_moe`, and of the rules."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for source in sorted({*sources, "arch"}):
        at = root / source
        for path in [at] if at.suffix else sorted(at.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def key_of(name: str, arch: str, constants: str, folders: tuple[str, ...], dsl: str) -> str:
    """The key described above; ``dsl`` may be a pattern of versions."""
    text = "\0".join((arch, constants, source_hash(*folders)))
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:40]}-{dsl}"


def compiled(
    name: str,
    arch: str,
    constants: str,
    folders: tuple[str, ...],
    block: int,
    smem_bytes: int,
    build: Callable[[], tuple[Any, tuple[Any, ...]]],
    cluster: int = 1,
) -> CompiledKernel:
    """From memory, from disk, or compiled now.

    Args:
        constants: everything that the kernel was specialised on, printed.
        folders: packages and files of the kernel's sources, such as ``kernels/sm107``.
        build: imports the DSL; returns the jit-able object and example arguments.

    Raises:
        ConfigError: it was never compiled here, and the DSL is not installed or too old.
    """
    dsl = dsl_version()
    key = key_of(name, arch, constants, folders, dsl or "*")
    found = _loaded.get(key) or (_read(key) if dsl else _read_any(key))
    if found is None:
        if dsl is None:
            raise ConfigError(
                f"{name} ({constants}) is not in {_folder()}, and {DSL} is not installed to "
                f"compile it: {MEND}"
            )
        ptx, cubin, entry = _compile(arch, build)
        found = CompiledKernel(name, arch, entry, ptx, cubin, block, smem_bytes, key, cluster)
        _write(found)
    _loaded[key] = found
    return found


_loaded: dict[str, CompiledKernel] = {}


def _compile(arch: str, build: Callable[[], tuple[Any, Any]]) -> tuple[str, bytes, str]:
    import cutlass.cute as cute

    target, args = build()
    with tempfile.TemporaryDirectory(prefix="rubin_moe_") as dump:
        options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir={dump}"
        function = cute.compile(target, *args, options=options)
        ptx, cubin = function.artifacts.PTX, function.__cubin__
    entry = next(
        line.split(".entry", 1)[1].split("(")[0].strip()
        for line in ptx.splitlines()
        if ".entry" in line
    )
    return ptx, bytes(cubin), entry


def _folder() -> Path:
    return envs.cache_dir() / "kernels"


def _path(key: str) -> Path:
    return _folder() / f"{key}.bin"


def _read_any(pattern: str) -> CompiledKernel | None:
    """The kernel by the last of the compiler's versions that are there."""
    for path in sorted(_folder().glob(f"{pattern}.bin"), reverse=True):
        found = _read(path.name.removesuffix(".bin"))
        if found is not None:
            return found
    return None


def _read(key: str) -> CompiledKernel | None:
    """None where there is no file, or one that was cut short or made by something else."""
    try:
        packed = _path(key).read_bytes()
        head, _, body = packed.partition(b"\n")
        facts = json.loads(head)
        if facts["crc"] != zlib.crc32(body):
            return None
        text = zlib.decompress(body)
        ptx_bytes = facts.pop("ptx_bytes")
        facts.pop("crc")
        kernel = CompiledKernel(ptx=text[:ptx_bytes].decode(), cubin=text[ptx_bytes:], **facts)
    except (OSError, ValueError, KeyError, TypeError, zlib.error):
        return None
    return kernel if kernel.key == key else None


def _write(kernel: CompiledKernel) -> None:
    path = _path(kernel.key)
    facts = asdict(kernel)
    ptx = facts.pop("ptx").encode()
    body = zlib.compress(ptx + facts.pop("cubin"))
    head = {**facts, "ptx_bytes": len(ptx), "crc": zlib.crc32(body)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(head).encode() + b"\n" + body)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:
        _say_once(f"compiled kernels are not kept: {path.parent}: {error.strerror}")


@cache
def _say_once(message: str) -> None:
    logger.warning(message)
