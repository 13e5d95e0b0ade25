"""Imports FlashInfer's kernel modules without running its packages' `__init__` files.

Those initialise CUDA, load libraries and import optional dependencies; the kernel modules need none
of it. `install()` makes `flashinfer` and every folder below it a bare package.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

VERSION = "0.7.4"


class _BarePackages(MetaPathFinder):
    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, *folders = fullname.split(".")
        if package != "flashinfer":
            return None
        folder = self._root.joinpath(*folders)
        if not folder.is_dir():
            return None  # a module: found through the bare package that holds it
        spec = ModuleSpec(fullname, loader=None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


def install() -> str:
    """Makes `import flashinfer.gemm.kernels...` work; returns the version found.

    Raises RuntimeError if another FlashInfer is installed or was already imported in full.
    """
    version = importlib.metadata.version("flashinfer-python")
    if version != VERSION:
        raise RuntimeError(f"the peer kernels are those of FlashInfer {VERSION}, not {version}")
    if any(isinstance(finder, _BarePackages) for finder in sys.meta_path):
        return version
    if "flashinfer" in sys.modules:
        raise RuntimeError("flashinfer was imported in full before the peer kernels")
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None
    assert spec.origin is not None
    sys.meta_path.insert(0, _BarePackages(Path(spec.origin).parent))
    return version
