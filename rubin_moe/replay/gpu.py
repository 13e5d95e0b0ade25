"""Saved launches on this machine's GPU, through the CUDA driver alone."""

from __future__ import annotations

import ctypes
import datetime
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from rubin_moe.errors import RubinMoeError
from rubin_moe.replay.compare import Outcome, compare
from rubin_moe.replay.file import Bytes, ReplayFile

_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_MAX_DYNAMIC_SMEM, _NON_PORTABLE_CLUSTER = 8, 14  # CU_FUNC_ATTRIBUTE_*
_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


class ReplayError(RubinMoeError):
    """The driver refused a call, or the device is another one than the kernel's."""


class Machine(Protocol):
    """What runs a launch."""

    def allocate(self, data: Bytes) -> int:
        """Address of device memory that holds ``data``."""

    def launch(self, file: ReplayFile, params: Sequence[bytes]) -> None:
        """Runs the kernel to its end."""

    def read(self, address: int, nbytes: int) -> Bytes:
        """Device memory."""

    def free(self, address: int) -> None:
        """Gives ``allocate``'s memory back."""


def replay(machine: Machine, file: ReplayFile) -> Outcome:
    """Runs it in memory of its own, with every address moved there, and compares."""
    places = [machine.allocate(data) for data in file.before]
    try:
        moved = relocate(file, places)
        machine.launch(file, [moved[offset : offset + size] for offset, size in file.layout])
        pairs = zip(places, file.before, strict=True)
        return compare(file, [machine.read(place, data.size) for place, data in pairs])
    finally:
        for place in places:
            machine.free(place)


def relocate(file: ReplayFile, places: Sequence[int]) -> bytes:
    """Parameters (tensor maps among them) with every 8-byte word that points into a buffer moved to
    its new place."""
    whole = len(file.params) // 8
    words = list(struct.unpack(f"<{whole}Q", file.params[: 8 * whole]))
    for index, word in enumerate(words):
        for address, data, place in zip(file.addresses, file.before, places, strict=True):
            if address <= word < address + data.size:
                words[index] = place + word - address
    return struct.pack(f"<{whole}Q", *words) + file.params[8 * whole :]


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class CudaMachine:
    """The first CUDA device, in its primary context. Raises ReplayError where there is none."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ReplayError(f"no CUDA driver here: {error}") from None
        self._call("cuInit", 0)
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)

    def describe(self) -> dict[str, str]:
        """Name, architecture, driver's CUDA version, date."""
        name, version = ctypes.create_string_buffer(128), ctypes.c_int()
        self._call("cuDeviceGetName", name, 128, self._device)
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return {
            "device": name.value.decode(),
            "arch": self.arch,
            "cuda_driver": f"{version.value // 1000}.{version.value % 1000 // 10}",
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        }

    @property
    def arch(self) -> str:
        numbers = [ctypes.c_int(), ctypes.c_int()]
        for value, attribute in zip(numbers, _CAPABILITY, strict=True):
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
        return f"sm_{numbers[0].value}{numbers[1].value}a"

    def allocate(self, data: Bytes) -> int:
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(data.size, 1)))
        self._call("cuMemcpyHtoD_v2", pointer, data.tobytes(), ctypes.c_size_t(data.size))
        return pointer.value

    def read(self, address: int, nbytes: int) -> Bytes:
        out = ctypes.create_string_buffer(max(nbytes, 1))
        self._call("cuMemcpyDtoH_v2", out, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        return np.frombuffer(out.raw[:nbytes], np.uint8)

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def launch(self, file: ReplayFile, params: Sequence[bytes]) -> None:
        """Raises ReplayError for a kernel of another architecture."""
        if file.arch != self.arch:
            raise ReplayError(
                f"{file.name} is compiled for {file.arch}, this device is {self.arch}"
            )
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), file.cubin)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, file.kernel.encode())
        self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SMEM, file.dynamic_smem_bytes)
        self._call("cuFuncSetAttribute", function, _NON_PORTABLE_CLUSTER, 1)
        attribute = struct.pack("<II3I", _CLUSTER, 0, *file.cluster).ljust(72, b"\0")
        held = ctypes.create_string_buffer(attribute, 72)
        config = _Config(
            (ctypes.c_uint * 3)(*file.grid),
            (ctypes.c_uint * 3)(*file.block),
            file.dynamic_smem_bytes,
            None,
            ctypes.addressof(held),
            1 if max(file.cluster) > 1 else 0,
        )
        # one pointer a parameter: the machine code places them otherwise than the PTX
        values = [ctypes.create_string_buffer(value, len(value)) for value in params]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, addresses, None)
        self._call("cuCtxSynchronize")
        self._call("cuModuleUnload", module)

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise ReplayError(f"{name}: {(text.value or b'unknown error').decode()}")
