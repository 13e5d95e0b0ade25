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
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rubin_moe.errors import ConfigError, RubinMoeError


class At(NamedTuple):
    """The address of a tensor's byte."""

    tensor: Tensor
    byte: int


Argument = Tensor | At | int | None
"""A tensor or its byte passes an address (8 bytes), None the address 0, an integer 4 bytes."""


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

    def load(self, kernel: CompiledKernel) -> None:
        """Does what the first launch of ``kernel`` would do beforehand."""


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
    return [struct.pack("<i" if isinstance(v, int) else "<Q", _number(v)) for v in args]


def _number(value: Argument) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    if isinstance(value, At):
        return value.tensor.data_ptr() + value.byte
    return value.data_ptr()


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


class _Ready:
    """One kernel on one device for one thread: what the driver reads, filled anew by each launch.

    A slot has 8 bytes, little-endian: the driver reads as many of them as the parameter has.
    """

    def __init__(
        self, function: ctypes.c_void_p, kernel: CompiledKernel, number: int, wanted: list[Any]
    ) -> None:
        self.slots = ctypes.create_string_buffer(8 * number)
        self.fill = struct.Struct(f"<{number}q").pack_into
        first = ctypes.addressof(self.slots)
        self.pointers = (ctypes.c_void_p * number)(*range(first, first + 8 * number, 8))
        self.config = _Config((1, 1, 1), (kernel.block, 1, 1), kernel.smem_bytes)
        self.config.attributes = (_Attribute * len(wanted))(*wanted)
        self.config.num_attributes = len(wanted)
        self.arguments = ctypes.byref(self.config), function, self.pointers, None
        self.grid = 1


class DriverLauncher:
    """Launches through the CUDA driver on torch's current stream and context.

    A kernel that waits for the launches before it (``griddepcontrol.wait``) starts while they end.
    """

    _MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    _PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._launch = self._cuda.cuLaunchKernelEx
        self._functions: dict[tuple[str, int], ctypes.c_void_p] = {}
        self._images: list[Any] = []
        self._of_thread = threading.local()

    def launch(self, kernel: CompiledKernel, grid: int, args: Sequence[Argument]) -> None:
        """Asynchronous; errors of earlier launches may surface here, as always with CUDA."""
        device = torch.cuda.current_device()
        ready = self._ready(kernel, device, len(args))
        ready.fill(ready.slots, 0, *map(_number, args))
        if grid != ready.grid:
            ready.config.grid[0] = ready.grid = grid
        ready.config.stream = _stream(device)
        code = self._launch(*ready.arguments)
        if code:
            self._fail("cuLaunchKernelEx", code)

    def load(self, kernel: CompiledKernel) -> None:
        """Onto the current device, whose context is there; not while a stream is captured."""
        self._function(kernel, torch.cuda.current_device())

    def _ready(self, kernel: CompiledKernel, device: int, number: int) -> _Ready:
        try:
            known: dict[tuple[str, int], _Ready] = self._of_thread.known
        except AttributeError:
            known = self._of_thread.known = {}
        ready = known.get((kernel.key, device))
        if ready is None:
            wanted = []
            if kernel.cluster > 1:
                wanted.append(_Attribute(self._CLUSTER, 0, (kernel.cluster, 1, 1)))
            if "griddepcontrol.wait" in kernel.ptx:
                wanted.append(_Attribute(self._PROGRAMMATIC, 0, (1,)))
            function = self._function(kernel, device)
            ready = known[kernel.key, device] = _Ready(function, kernel, number, wanted)
        return ready

    def _function(self, kernel: CompiledKernel, device: int) -> ctypes.c_void_p:
        where = (kernel.key, device)
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
            self._fail(name, code)

    def _fail(self, name: str, code: int) -> None:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorName(code, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'unknown error').decode()}")


def _stream(device: int) -> int:
    """torch's current stream there, without an object for it."""
    number: int = torch._C._cuda_getCurrentRawStream(device)
    return number


install_launcher("driver", DriverLauncher)
