"""CuTe DSL kernels compiled ahead, without a GPU, and kept on disk.

A kernel's key is its name, a hash of the architecture, its constants and the source of every file
it is made of, and the compiler's version. Those files are found, not listed: its module's and what
that imports of this package, at any remove. The cache is safe for processes that start at once (a
file appears whole, by rename) and for a folder that cannot be written (it compiles, and says so
once). Needs cutlass only to compile: a machine without it serves what the folder holds, by whatever
version it was compiled.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from rubin_moe import envs
from rubin_moe.errors import ConfigError, RubinMoeError
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


def sources_of(module: str) -> tuple[Path, ...]:
    """Files that a module under `rubin_moe` is made of: its own and those of all its imports under
    `rubin_moe`, also such as stand in a function. A package that only lies on the way to an
    imported module is left out."""
    found: dict[str, Path] = {}
    left = [module]
    while left:
        name = left.pop()
        path = _file_of(name)
        if name not in found and path is not None:
            found[name] = path
            left += _imports(path, name if path.stem == "__init__" else name.rpartition(".")[0])
    return tuple(found[name] for name in sorted(found))


def _file_of(module: str) -> Path | None:
    """None if it is another project's, or no module but a name in one."""
    package, *rest = module.split(".")
    if package != "rubin_moe":
        return None
    at = Path(__file__).parents[1].joinpath(*rest)
    return next((p for p in (at.with_suffix(".py"), at / "__init__.py") if p.is_file()), None)


def _imports(path: Path, package: str) -> Iterator[str]:
    """Names that may be modules."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


@lru_cache(maxsize=32)
def source_hash(module: str) -> str:
    """SHA-256 of `sources_of`."""
    digest = hashlib.sha256()
    for path in sources_of(module):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def key_of(name: str, arch: str, constants: str, module: str, dsl: str) -> str:
    """The key described above; ``dsl`` may be a pattern of versions."""
    text = "\0".join((arch, constants, source_hash(module)))
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:40]}-{dsl}"


def compiled(
    name: str,
    arch: str,
    constants: str,
    module: str,
    block: int,
    smem_bytes: int,
    build: Callable[[], tuple[Any, tuple[Any, ...]]],
    cluster: int = 1,
) -> CompiledKernel:
    """From memory, from disk, or compiled now.

    Args:
        constants: everything that the kernel was specialised on, printed.
        module: of the device code, such as ``rubin_moe.kernels.sm90.decode``.
        build: imports the DSL; returns the jit-able object, of a class of ``module``, and example
            arguments.

    Raises:
        ConfigError: it was never compiled here, and the DSL is not installed or too old.
    """
    dsl = dsl_version()
    key = key_of(name, arch, constants, module, dsl or "*")
    found = _loaded.get(key) or (_read(key) if dsl else _read_any(key))
    if found is None:
        if dsl is None:
            raise ConfigError(
                f"{name} ({constants}) is not in {_folder()}, and {DSL} is not installed to "
                f"compile it: {MEND}"
            )
        ptx, cubin, entry = _compile(arch, module, build)
        found = CompiledKernel(name, arch, entry, ptx, cubin, block, smem_bytes, key, cluster)
        _write(found)
    _loaded[key] = found
    return found


_loaded: dict[str, CompiledKernel] = {}


def _compile(
    arch: str, module: str, build: Callable[[], tuple[Any, Any]]
) -> tuple[str, bytes, str]:
    import cutlass.cute as cute

    target, args = build()
    if type(target).__module__ != module:
        raise RubinMoeError(f"{type(target).__qualname__} is not of {module}, whose key it gets")
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
