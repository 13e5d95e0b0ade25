"""The disk cache of compiled kernels: many processes, folders that cannot be written, keys."""

import ast
import importlib
import logging
import multiprocessing
import os
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from rubin_moe.errors import ConfigError
from rubin_moe.kernels import compile_cache
from rubin_moe.kernels.compile_cache import compiled, key_of
from rubin_moe.kernels.launch import CompiledKernel

MODULE = "rubin_moe.kernels.sm107.mainloop"
PTX = ".version 9.4\n.entry kernel_0(\n)\n" * 4000
PROCESSES = 8


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A cold cache, and a compiler that takes no time and counts itself."""
    monkeypatch.setenv("RUBIN_MOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_cache, "_loaded", {})
    compile_cache._say_once.cache_clear()
    monkeypatch.setattr(compile_cache, "_compile", Compiler())
    return tmp_path / "kernels"


class Compiler:
    calls = 0

    def __init__(self) -> None:
        Compiler.calls = 0

    def __call__(self, arch, module, build) -> tuple[str, bytes, str]:
        Compiler.calls += 1
        return PTX, b"\x7fELF" + bytes(100_000), "kernel_0"


def get(constants: str = "tile 32") -> CompiledKernel:
    return compiled("kernel", "sm_107a", constants, MODULE, 320, 1024, lambda: (None, ()))


def forget() -> None:
    """As a new process would start."""
    compile_cache._loaded.clear()


def test_the_second_process_reads_what_the_first_wrote(folder):
    """Field report 103: a second start compiles nothing."""
    first = get()
    forget()
    assert get() == first
    assert Compiler.calls == 1
    assert [p.name for p in folder.iterdir()] == [f"{first.key}.bin"]


def _start(barrier, results) -> None:
    barrier.wait()
    results.put(get() == get() and get().ptx == PTX)


def test_many_processes_on_one_cold_cache(folder):
    """Field report 104."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(PROCESSES), context.Queue()
    started = [context.Process(target=_start, args=(barrier, results)) for _ in range(PROCESSES)]
    for process in started:
        process.start()
    assert all(results.get(timeout=60) for _ in started)
    for process in started:
        process.join()
        assert process.exitcode == 0
    (file,) = folder.iterdir()  # one whole file, and no temporary one
    assert compile_cache._read(file.stem) is not None


def _rank(rank, folder, barrier, results) -> None:
    os.environ["RUBIN_MOE_CACHE_DIR"] = str(folder)
    forget()
    barrier.wait()
    found = get()
    results.put((rank, Compiler.calls, found.key, found.ptx == PTX))


def test_ranks_with_different_caches_do_not_wait_for_one_another(folder):
    """Field report 103: one rank has the kernel and another one compiles it, and both go on with
    the same. Nothing is agreed on between them: keys and tiles follow from files of the package."""
    kernel = get()
    calls = Compiler.calls
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    caches = [folder.parent, folder.parent / "cold"]
    ranks = [context.Process(target=_rank, args=(r, caches[r], barrier, results)) for r in (0, 1)]
    for process in ranks:
        process.start()
    found = sorted(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join()
    assert found == [(0, calls, kernel.key, True), (1, calls + 1, kernel.key, True)]


@pytest.mark.parametrize("harm", ["cut", "foreign", "flipped", "empty", "another"])
def test_a_broken_file_is_compiled_again(folder, harm):
    kernel = get()
    path = folder / f"{kernel.key}.bin"
    packed = path.read_bytes()
    other = replace(kernel, key="another")
    compile_cache._write(other)
    path.write_bytes(
        {
            "cut": packed[: len(packed) // 2],
            "foreign": b"no kernel of ours\n" + packed,
            "flipped": packed[:-9] + bytes([packed[-9] ^ 1]) + packed[-8:],
            "empty": b"",
            "another": (folder / f"{other.key}.bin").read_bytes(),
        }[harm]
    )
    forget()
    assert get() == kernel
    assert Compiler.calls == 2
    assert path.read_bytes() == packed


def test_a_folder_that_cannot_be_written_is_said_once(folder, monkeypatch, caplog):
    blocked = folder.parent / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("RUBIN_MOE_CACHE_DIR", str(blocked))
    with caplog.at_level(logging.WARNING):
        first, second = get("tile 32"), get("tile 64")
    assert first.ptx == second.ptx == PTX
    assert len(caplog.records) == 1
    assert "compiled kernels are not kept" in caplog.text


def test_a_read_only_folder_still_serves_what_it_holds(folder, monkeypatch):
    kernel = get()
    forget()
    monkeypatch.setattr(compile_cache.tempfile, "mkstemp", _refuse)
    assert get() == kernel
    assert Compiler.calls == 1


def _refuse(*args, **kwargs):
    raise PermissionError(13, "Permission denied")


def test_a_write_that_fails_leaves_no_temporary_file(folder, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compile_cache.os, "replace", full)
    assert get().ptx == PTX
    assert list(folder.iterdir()) == []


def test_everything_that_decides_the_code_is_in_the_key(monkeypatch):
    def key(name="k", arch="sm_107a", constants="tile 32", module=MODULE, dsl="4.8.1") -> str:
        return key_of(name, arch, constants, module, dsl)

    keys = {
        key(),
        key(name="j"),
        key(arch="sm_100a"),
        key(constants="tile 64"),
        key(module="rubin_moe.kernels.cute.ptx"),
        key(dsl="4.8.2"),
    }
    monkeypatch.setattr(compile_cache, "source_hash", lambda module: "edited")
    keys.add(key())
    assert len(keys) == 7


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package of this name, found where the installed one was."""
    root = tmp_path / "rubin_moe"
    for path, text in {
        "__init__.py": "",
        "arch/__init__.py": "from rubin_moe.arch.sm107 import SM107A\n",
        "arch/sm107.py": "SM107A = 1\n",
        "kernels/__init__.py": "",
        "kernels/registry.py": "",
        "kernels/sm90/decode.py": "",
        "kernels/sm107/__init__.py": "",
        "kernels/sm107/mainloop.py": "import torch\nfrom rubin_moe.arch import SM107A\n"
        "from . import work\ndef f():\n    import rubin_moe.kernels.cute.ptx as ptx\n",
        "kernels/sm107/work.py": "from rubin_moe.kernels.sm107 import mainloop\n",
        "kernels/sm107/host.py": "",
        "kernels/cute/ptx.py": "",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    monkeypatch.setattr(compile_cache, "__file__", str(root / "kernels" / "compile_cache.py"))
    compile_cache.source_hash.cache_clear()
    yield root
    compile_cache.source_hash.cache_clear()


def test_the_source_hash_follows_an_edit(package):
    """Field report 103: of any file the kernel is made of and of nothing else."""

    def edited(path: str) -> bool:
        compile_cache.source_hash.cache_clear()
        before = compile_cache.source_hash(MODULE)
        with (package / path).open("a") as file:
            file.write("b = 1\n")
        compile_cache.source_hash.cache_clear()
        return compile_cache.source_hash(MODULE) != before

    own = ("kernels/sm107/mainloop.py", "kernels/sm107/work.py", "kernels/cute/ptx.py")
    assert all(
        map(edited, (*own, "arch/__init__.py", "arch/sm107.py", "kernels/sm107/__init__.py"))
    )
    others = ("kernels/sm90/decode.py", "kernels/sm107/host.py", "kernels/registry.py")
    assert not any(map(edited, others))


ROOT = Path(compile_cache.__file__).parents[1]
DEVICE_CODE = [path for path in ROOT.glob("kernels/*/*.py") if "@cute.kernel" in path.read_text()]


@pytest.mark.parametrize("path", DEVICE_CODE, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_the_sources_are_all_that_python_imports(path, monkeypatch):
    """No kernel is served that was made of other text: each file of this package that importing
    the kernel's module executes is in its key, or holds no code."""
    pytest.importorskip("cutlass")
    module = ".".join(["rubin_moe", *path.relative_to(ROOT).with_suffix("").parts])
    for name in [n for n in sys.modules if n.partition(".")[0] == "rubin_moe"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module(module)
    executed = {
        Path(str(found.__file__))
        for name, found in list(sys.modules.items())
        if name.partition(".")[0] == "rubin_moe"
    }
    missing = executed - {ROOT / "__init__.py"} - set(compile_cache.sources_of(module))
    assert path not in missing
    assert all(p.name == "__init__.py" and not _code(p) for p in missing), missing


def _code(path: Path) -> list[ast.stmt]:
    """Statements but for docstrings."""
    return [node for node in ast.parse(path.read_text()).body if not isinstance(node, ast.Expr)]


@pytest.mark.parametrize("found", ["4.7.0", "3.9"])
def test_an_old_dsl_is_refused_with_the_line_that_mends_it(folder, monkeypatch, found):
    """Field report 105."""
    monkeypatch.setattr(compile_cache, "version", lambda name: found)
    with pytest.raises(ConfigError, match=r"pip install 'nvidia-cutlass-dsl\[cu13\]>=4\.8\.1"):
        get()


def _missing(name: str) -> str:
    raise PackageNotFoundError(name)


def test_a_machine_without_the_compiler_serves_what_was_compiled(folder, monkeypatch):
    kernel = get()
    forget()
    monkeypatch.setattr(compile_cache, "version", _missing)
    assert get() == kernel
    with pytest.raises(ConfigError, match=r"kernel \(tile 64\) is not in .* not installed"):
        get("tile 64")
