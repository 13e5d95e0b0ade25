"""The hooks as machine code: compiled by numba once, then kept with the other compiled code.

Numba's own cache would not notice a change of a module that another one compiles in.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba

from rubin_moe.emulator.order import hooks
from rubin_moe.emulator.order.layout import HOOKS
from rubin_moe.emulator.state import registers

#: What numba wraps around a function to hand exceptions to Python: never used here.
_WRAPPER = re.compile(r"^define i64 @cfunc\..*?^}\n", re.MULTILINE | re.DOTALL)
_REST = re.compile(r"^(@PyExc|@\"?\.const|declare .*@(numba_|Py)).*\n", re.MULTILINE)
_NAME = re.compile(r"^define i64 @cfunc\.([\w.]+)\(", re.MULTILINE)


def key() -> str:
    """Cache key: what the hooks are made of, the CPU and the compilers."""
    digest = hashlib.sha256()
    for path in (*sorted(Path(__file__).parent.glob("*.py")), Path(registers.__file__)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    versions = f"{numba.__version__} {llvmlite.__version__} {llvm.llvm_version_info}"
    digest.update(f"{versions} {llvm.get_host_cpu_name()}".encode())
    digest.update(llvm.get_host_cpu_features().flatten().encode())
    return "order-" + digest.hexdigest()[:32]


def signatures() -> dict[str, int]:
    """Number of arguments of each hook."""
    return {name: getattr(hooks, name).__code__.co_argcount for name in HOOKS}


def texts() -> list[str]:
    """LLVM IR of one module for each hook, which defines ``i64 order.<name>(i64, ...)``."""
    return [_module_text(name, getattr(hooks, name)) for name in HOOKS]


def _module_text(name: str, function: Callable[..., Any]) -> str:
    arguments = signatures()[name]
    signature = f"int64({','.join(['int64'] * arguments)})"
    text = numba.cfunc(signature, error_model="numpy")(function).inspect_llvm()
    (body,) = _NAME.findall(text)
    text = _REST.sub("", _WRAPPER.sub("", text))
    names = [f"i64 %a{i}" for i in range(arguments)]
    return text + (
        f'\ndefine i64 @"order.{name}"({", ".join(names)}) {{\n'
        "  %result = alloca i64\n"
        f"  call i32 @{body}(ptr %result, ptr null, {', '.join(names)})\n"
        "  %value = load i64, ptr %result\n  ret i64 %value\n}\n"
    )
