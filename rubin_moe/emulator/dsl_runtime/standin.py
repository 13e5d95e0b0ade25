"""Builds and binds the stand-in runtime library (`standin.c`).

The library is compiled on first use with the C compiler named by `CC` (else `cc`, else `gcc`) into
the emulator's cache folder, or a temporary one where the cache is off; its folder's name carries a
hash of the source, so an upgrade builds anew. It keeps process-wide state: one host at a time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rubin_moe.emulator.errors import EmulatorError
from rubin_moe.emulator.native.compiler import cache_folder

CUDA_SUCCESS = 0
CUDA_LAUNCH_FAILURE = 719

_ATTRIBUTE_BYTES = 72  # cudaLaunchAttribute: id at 0, value at 8 (CUDA 13 headers)


class LaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t, as the host code lays it out on its stack."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_smem_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint32),
    ]

    def attribute_records(self) -> list[tuple[int, bytes]]:
        """(cudaLaunchAttributeID, the 64 bytes of its value) of each launch attribute."""
        records = []
        for index in range(self.num_attributes):
            raw = ctypes.string_at(self.attributes + index * _ATTRIBUTE_BYTES, _ATTRIBUTE_BYTES)
            records.append((int.from_bytes(raw[:4], "little"), raw[8:]))
        return records


_ConfigPointer = ctypes.POINTER(LaunchConfig)
_PointerArray = ctypes.POINTER(ctypes.c_void_p)
_IntPointer = ctypes.POINTER(ctypes.c_int)
_LoadImage = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, _IntPointer)
_Launch = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_char_p, _ConfigPointer, _PointerArray
)
_DeviceAttribute = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, _IntPointer)
_FunctionAttribute = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int
)
_Refused = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class _CallbackTable(ctypes.Structure):
    _fields_ = [
        ("load_image", _LoadImage),
        ("launch", _Launch),
        ("device_attribute", _DeviceAttribute),
        ("function_attribute", _FunctionAttribute),
        ("refused", _Refused),
    ]


class RuntimeHost(Protocol):
    """What the library asks of Python. A method may raise: `failed` then receives the exception,
    which cannot cross the compiled host code, and the host code a CUDA error code."""

    def load_image(self, address: int) -> int:
        """A number for the device code at `address` (a fatbin), to name it in later calls."""

    def num_params(self, library: int, kernel: str) -> int:
        """How many parameters `kernel` of that device code takes."""

    def launch(self, library: int, kernel: str, config: LaunchConfig, params: list[int]) -> None:
        """Runs it; `params` are the addresses of the parameters."""

    def device_attribute(self, attribute: int) -> int:
        """Value of a cudaDeviceAttr."""

    def function_attribute(self, library: int, kernel: str, attribute: int, value: int) -> None:
        """The host code sets a cudaFuncAttribute."""

    def refused(self, entry_point: str) -> None:
        """The host code called what the stand-in does not offer."""

    def failed(self, error: BaseException) -> None:
        """One of the other methods raised."""


@functools.cache
def library_path() -> Path:
    """Path of the built library; builds it when the cache has none for this source.

    Raises EmulatorError if there is no C compiler or it fails.
    """
    source = Path(__file__).with_name("standin.c")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    cache = cache_folder() or Path(tempfile.mkdtemp(prefix="rubin_moe_"))
    # The name matters: CuTe DSL looks libraries up by it in places.
    target = cache / f"standin-{digest}" / "libcute_dsl_runtime.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _compile(source, target)
    return target


def _compile(source: Path, target: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise EmulatorError(
            "emulated_device needs a C compiler once, to build its stand-in for CuTe DSL's "
            "runtime: install gcc or name one in CC"
        )
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(built), str(source)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise EmulatorError(f"{' '.join(command)} failed:\n{result.stderr}")
        built.replace(target)  # atomic: two processes may build at once


class StandinRuntime:
    """The loaded library with `host` attached; `detach` before dropping it."""

    def __init__(self, host: RuntimeHost) -> None:
        self._library = ctypes.CDLL(str(library_path()), mode=ctypes.RTLD_GLOBAL)
        self._host = host
        self._table = _CallbackTable(
            _LoadImage(self._load_image),
            _Launch(self._launch),
            _DeviceAttribute(self._device_attribute),
            _FunctionAttribute(self._function_attribute),
            _Refused(self._refused),
        )
        self._library.rubin_moe_attach(ctypes.byref(self._table))

    def detach(self) -> None:
        """From now on the library answers 'no device', and calls nothing."""
        self._library.rubin_moe_detach()

    def _guarded(self, action: Callable[[], None]) -> int:
        try:
            action()
        except BaseException as error:
            self._host.failed(error)
            return CUDA_LAUNCH_FAILURE
        return CUDA_SUCCESS

    def _load_image(self, image: int, library_id: ctypes._Pointer[ctypes.c_int]) -> int:
        def action() -> None:
            library_id[0] = self._host.load_image(image)

        return self._guarded(action)

    def _launch(
        self,
        library_id: int,
        kernel: bytes,
        config: ctypes._Pointer[LaunchConfig],
        params: ctypes._Pointer[ctypes.c_void_p],
    ) -> int:
        def action() -> None:
            name = kernel.decode()
            count = self._host.num_params(library_id, name)
            addresses = [params[index] for index in range(count)]
            self._host.launch(library_id, name, config.contents, addresses)

        return self._guarded(action)

    def _device_attribute(self, attribute: int, value: ctypes._Pointer[ctypes.c_int]) -> int:
        def action() -> None:
            value[0] = self._host.device_attribute(attribute)

        return self._guarded(action)

    def _function_attribute(
        self, library_id: int, kernel: bytes, attribute: int, value: int
    ) -> int:
        return self._guarded(
            lambda: self._host.function_attribute(library_id, kernel.decode(), attribute, value)
        )

    def _refused(self, entry_point: bytes) -> None:
        self._guarded(lambda: self._host.refused(entry_point.decode()))
