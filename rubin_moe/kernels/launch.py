"""Compiled device code and what starts it.

A kernel is its PTX, its cubin and a few numbers; it is started with plain values (tensors and
integers) by a `Launcher`. Kernels know the CUDA driver's; another one (the emulator's) is installed
by name by whoever wants it, so that nothing here depends on it.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rubin_moe.errors import ConfigError, RubinMoeError

Argument = Tensor | int | None
"""A tensor passes its address (8 bytes), None the address 0, an integer 4 bytes."""


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel for one architecture.

    Attributes:
        name: for messages; entry: name of the entry function.
        block: threads; smem_bytes: dynamic shared memory.
        key: names the source, plan, compiler and architecture that it was made from.
        cluster: blocks of a cluster; a grid is a multiple of it.
    """

    name: str
    arch: str
    entry: str
    ptx: str
    cubin: bytes
    block: int
    smem_bytes: int
    key: str
    cluster: int = 1


class Launcher(Protocol):
    """Starts compiled device code in stream order."""

    def launch(self, kernel: CompiledKernel, grid: int, args: Sequence[Argument]) -> None:
        """One launch of ``grid`` blocks."""


_FACTORIES: dict[str, Callable[[], Launcher]] = {}
_lock = threading.Lock()
_made: dict[str, Launcher] = {}


def install_launcher(name: str, factory: Callable[[], Launcher]) -> None:
    """Makes `launcher` answer to ``name``; installing the same name again replaces it."""
    with _lock:
        _FACTORIES[name] = factory
        _made.pop(name, None)


def launcher(name: str) -> Launcher:
    """The launcher of that name, made on first use. Raises ConfigError if none was installed."""
    with _lock:
        if name not in _made:
            if name not in _FACTORIES:
                raise ConfigError(
                    f"no launcher {name!r} is installed; there are {', '.join(_FACTORIES)}"
                )
            _made[name] = _FACTORIES[name]()
        return _made[name]


def pack(args: Sequence[Argument]) -> list[bytes]:
    """Each argument's bytes, little-endian."""
    out = []
    for value in args:
        if isinstance(value, int):
            out.append(struct.pack("<i", value))
        else:
            out.append(struct.pack("<Q", 0 if value is None else value.data_ptr()))
    return out


def _slot(value: Argument) -> int:
    if isinstance(value, int):
        return value & 0xFFFFFFFF
    return 0 if value is None else value.data_ptr()


class DriverError(RubinMoeError):
    """A call of the CUDA driver failed."""


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute`` with an integer value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class DriverLauncher:
    """Launches through the CUDA driver on torch's current stream and context.

    A kernel that waits for the launches before it (``griddepcontrol.wait``) starts while they end.
    """

    _MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    _PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._functions: dict[tuple[str, int], ctypes.c_void_p] = {}
        self._images: list[Any] = []
        self._waits: dict[str, bool] = {}

    def launch(self, kernel: CompiledKernel, grid: int, args: Sequence[Argument]) -> None:
        """Asynchronous; errors of earlier launches may surface here, as always with CUDA."""
        function, n = self._function(kernel), len(args)
        # a slot of 8 bytes each, little-endian: the driver reads as many as the parameter has
        slots = (ctypes.c_uint64 * n)(*map(_slot, args))
        first = ctypes.addressof(slots)
        pointers = (ctypes.c_void_p * n)(*range(first, first + 8 * n, 8))
        config = _Config((grid, 1, 1), (kernel.block, 1, 1), kernel.smem_bytes)
        config.stream = torch.cuda.current_stream().cuda_stream
        wanted = []
        if kernel.cluster > 1:
            wanted.append(_Attribute(self._CLUSTER, 0, (kernel.cluster, 1, 1)))
        if self._waits_itself(kernel):
            wanted.append(_Attribute(self._PROGRAMMATIC, 0, (1,)))
        config.attributes, config.num_attributes = (_Attribute * len(wanted))(*wanted), len(wanted)
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)

    def _waits_itself(self, kernel: CompiledKernel) -> bool:
        if kernel.key not in self._waits:
            self._waits[kernel.key] = "griddepcontrol.wait" in kernel.ptx
        return self._waits[kernel.key]

    def _function(self, kernel: CompiledKernel) -> ctypes.c_void_p:
        where = (kernel.key, torch.cuda.current_device())
        if where not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            image = ctypes.create_string_buffer(kernel.cubin, len(kernel.cubin))
            self._images.append(image)
            self._call("cuModuleLoadData", ctypes.byref(module), image)
            self._call("cuModuleGetFunction", ctypes.byref(function), module, kernel.entry.encode())
            self._call("cuFuncSetAttribute", function, self._MAX_DYNAMIC_SMEM, kernel.smem_bytes)
            self._functions[where] = function
        return self._functions[where]

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown error').decode()}")


install_launcher("driver", DriverLauncher)
