"""Runs CuTe DSL host functions on the emulator.

    with emulated_device("sm_107a") as gpu:
        gpu.register(a, b, sfa, sfb, c)            # CPU tensors stand for device memory
        compiled = cute.compile(kernel, *args)
        compiled(*args)                            # every launch runs on the emulator
        print(gpu.launches[-1].report)

The host function is the one that would run on the GPU, unchanged: it packs its tensor maps,
computes its grid and launches through CuTe DSL's runtime library, for which a stand-in is linked
(`dsl_runtime/standin.c`). `cutlass` may be imported before or inside; what the context changes in
it is put back on exit. A function compiled inside one context may be called inside a later one,
outside it fails with "no CUDA-capable device".

Launches run one after the other in the order of the calls, whatever their stream: a legal order
also for programmatic dependent launch, and each has finished when the host call returns. The
context is process-wide, since CuTe DSL's settings are: a second one, nested or from another
thread, is refused. Inside, host functions may be called from several threads; launches take turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rubin_moe.emulator.compile import CompiledEntry, Module, load_ptx
from rubin_moe.emulator.dsl_runtime import cute_dsl
from rubin_moe.emulator.dsl_runtime.standin import LaunchConfig, StandinRuntime, library_path
from rubin_moe.emulator.errors import EmulatorError
from rubin_moe.emulator.findings import Mode
from rubin_moe.emulator.launch import Device
from rubin_moe.emulator.report import Report
from rubin_moe.emulator.saved import SavedBuffer, SavedLaunch

# cudaLaunchAttributeID: those that change what a launch does, and hints that do not.
_COOPERATIVE, _CLUSTER, _PROGRAMMATIC = 2, 4, 6
# ... access policy window, cluster scheduling preference, priority, carveout, shared memory mode.
_HINTS = {1, 5, 8, 14, 18}

# cudaFuncAttribute: permissions (dynamic shared memory, odd clusters, shared memory mode) and
# hints (carveout, cluster scheduling). The limits themselves are checked at the launch.
_ACCEPTED_FUNCTION_ATTRIBUTES = {8, 9, 14, 15, 16}


@dataclass(frozen=True)
class DslLaunch:
    """One launch as the host code asked for it, and what the emulator reports of it.

    `grid`, `block`, `cluster` are (x, y, z); `params` is the parameter block in the layout of the
    PTX entry; `stream` is recorded and otherwise ignored.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem_bytes: int
    params: bytes
    stream: int
    cooperative: bool
    programmatic: bool
    report: Report | None = None


@dataclass
class EmulatedDevice:
    """The device that an `emulated_device` block yields.

    `device` is the emulator's own device; `launches` grows by one entry a launch. The other fields
    are the arguments of `emulated_device`.
    """

    device: Device
    multiprocessors: int
    execute: bool
    seed: int | None
    rules: Mode | None
    save_to: Path | None
    launches: list[DslLaunch] = field(default_factory=list)

    def register(self, *buffers: Any) -> None:
        """Makes torch tensors or NumPy arrays device memory at their own addresses."""
        for buffer in buffers:
            self.device.register(buffer)

    def saved(self, launch: DslLaunch, ptx: str, cubin: bytes) -> SavedLaunch:
        """`launch` with the registered memory as it is now."""
        ranges = self.device.memory.ranges
        buffers = (SavedBuffer(at, ctypes.string_at(at, size)) for at, size in ranges)
        return SavedLaunch(
            self.device.arch,
            ptx,
            launch.kernel,
            launch.grid,
            launch.block,
            launch.cluster,
            launch.dynamic_smem_bytes,
            launch.params,
            tuple(buffers),
            cubin,
        )


@contextlib.contextmanager
def emulated_device(
    arch: str,
    *,
    multiprocessors: int = 4,
    execute: bool = True,
    seed: int | None = None,
    rules: Mode | None = None,
    save_to: Path | None = None,
    **device_options: Any,
) -> Iterator[EmulatedDevice]:
    """Inside the block, CuTe DSL compiles for `arch` and launches on the emulator.

    arch: "sm_90a", "sm_100a", "sm_103a" or "sm_107a". multiprocessors: what the host code is told
    (`HardwareInfo`); persistent kernels size their grid by it, so few is fast. execute: False only
    records launches. seed: delay asynchronous operations by this seed (`DelayPolicy`); None, they
    happen at issue. rules: check every launch, "enforce" or "report" (`Device.launch`). save_to: a
    folder for one file a launch (`saved.SavedLaunch`), written before it runs. device_options go to
    `Device`. Yields an EmulatedDevice.

    Raises EmulatorError for a missing or untried CuTe DSL, a nested or concurrent context, and
    whatever the emulator raises from the host call that launched.
    """
    cute_dsl.check_version()
    if not _context.acquire(blocking=False):
        raise EmulatorError(
            "emulated_device is active already (nested, or in another thread): it redirects CuTe "
            "DSL for the whole process, so use the device of the outer block"
        )
    try:
        device = Device(arch, **device_options)
        gpu = EmulatedDevice(device, multiprocessors, execute, seed, rules, save_to)
        host = _Host(gpu)
        with (
            tempfile.TemporaryDirectory(prefix="rubin_moe_dsl_") as dump_dir,
            cute_dsl.configured(
                arch,
                library_path(),
                Path(dump_dir),
                multiprocessors=multiprocessors,
                on_function=_images.know,
                after_run=host.raise_pending,
            ),
        ):
            runtime = StandinRuntime(host)
            try:
                yield gpu
            finally:
                runtime.detach()
    finally:
        _context.release()


_context = threading.Lock()


class _Images:
    """Device code by library number. It outlives a context: so do the compiled functions."""

    def __init__(self) -> None:
        self._ptx_by_cubin: dict[bytes, str] = {}
        self._code: dict[int, tuple[str, bytes]] = {}
        self._modules: dict[tuple[int, bool, bool], Module] = {}
        self._numbers = itertools.count(1)

    def know(self, function: Any) -> None:
        """Remembers the PTX that a compiled function's cubin was made of."""
        artifacts = function.artifacts
        if artifacts is not None and artifacts.PTX and artifacts.CUBIN:
            self._ptx_by_cubin[bytes(artifacts.CUBIN)] = artifacts.PTX

    def load(self, address: int) -> int:
        image = _read_image(address)
        for cubin, ptx in reversed(self._ptx_by_cubin.items()):
            if cubin in image:
                number = next(self._numbers)
                self._code[number] = ptx, cubin
                return number
        raise EmulatorError(
            "device code whose PTX CuTe DSL did not keep: was an option overridden?"
        )

    def code(self, number: int) -> tuple[str, bytes]:
        """PTX and cubin."""
        return self._code[number]

    def module(self, number: int, deferred: bool, checked: bool) -> Module:
        key = number, deferred, checked
        if key not in self._modules:
            self._modules[key] = load_ptx(self._code[number][0], deferred, checked)
        return self._modules[key]


_images = _Images()


def _read_image(address: int) -> bytes:
    """The bytes of a fatbin (magic, 16-bit version and header size, 64-bit payload size)."""
    header = ctypes.string_at(address, 16)
    if header[:4] != b"\x50\xed\x55\xba":
        raise EmulatorError(f"device code with magic {header[:4].hex()}: not a fatbin")
    header_bytes = int.from_bytes(header[6:8], "little")
    return ctypes.string_at(address, header_bytes + int.from_bytes(header[8:16], "little"))


class _Host:
    """Answers the stand-in runtime for one EmulatedDevice."""

    def __init__(self, gpu: EmulatedDevice) -> None:
        self._gpu = gpu
        self._turn = threading.Lock()
        self._pending = threading.local()

    def load_image(self, address: int) -> int:
        return _images.load(address)

    def num_params(self, library: int, kernel: str) -> int:
        return len(self._module(library).entry(kernel).compiled.params)

    def launch(self, library: int, kernel: str, config: LaunchConfig, params: list[int]) -> None:
        entry = self._module(library).entry(kernel)
        launch = DslLaunch(
            kernel=kernel,
            grid=_xyz(config.grid),
            block=_xyz(config.block),
            dynamic_smem_bytes=config.dynamic_smem_bytes,
            params=_pack(entry.compiled, params),
            stream=config.stream or 0,
            **_attributes(kernel, config),
        )
        with self._turn:
            self._gpu.launches.append(launch)
            if self._gpu.save_to is not None:
                path = self._gpu.save_to / f"{len(self._gpu.launches):03}_{kernel[:80]}.launch"
                self._gpu.saved(launch, *_images.code(library)).save(path)
            if self._gpu.execute:
                report = self._gpu.device.launch(
                    entry,
                    launch.grid,
                    launch.block,
                    launch.params,
                    cluster=launch.cluster,
                    dynamic_smem=launch.dynamic_smem_bytes,
                    seed=self._gpu.seed,
                    rules=self._gpu.rules,
                )
                self._gpu.launches[-1] = replace(launch, report=report)

    def _module(self, library: int) -> Module:
        gpu = self._gpu
        return _images.module(library, gpu.seed is not None, gpu.rules is not None)

    def device_attribute(self, attribute: int) -> int:
        major, minor = _capability(self._gpu.device.arch)
        values = {
            10: 32,  # warp size
            16: self._gpu.multiprocessors,
            75: major,
            76: minor,
            97: self._gpu.device.max_shared,
        }
        if attribute not in values:
            raise EmulatorError(f"the host code asks for cudaDeviceAttr {attribute}: not modelled")
        return values[attribute]

    def function_attribute(self, library: int, kernel: str, attribute: int, value: int) -> None:
        if attribute not in _ACCEPTED_FUNCTION_ATTRIBUTES:
            raise EmulatorError(f"{kernel}: cudaFuncAttribute {attribute} is not modelled")

    def refused(self, entry_point: str) -> None:
        raise EmulatorError(f"the host code calls {entry_point}, which the emulator does not offer")

    def failed(self, error: BaseException) -> None:
        self._pending.error = error

    def raise_pending(self) -> None:
        """Raises what a callback raised on this thread, in place of the host code's error."""
        error, self._pending.error = getattr(self._pending, "error", None), None
        if error is not None:
            raise error


def _xyz(dims: Any) -> tuple[int, int, int]:
    return (int(dims[0]), int(dims[1]), int(dims[2]))


def _attributes(kernel: str, config: LaunchConfig) -> dict[str, Any]:
    cluster, cooperative, programmatic = (1, 1, 1), False, False
    for identifier, value in config.attribute_records():
        if identifier == _CLUSTER:
            cluster = _xyz(memoryview(value).cast("I"))
        elif identifier == _COOPERATIVE:
            cooperative = bool(int.from_bytes(value[:4], "little"))
        elif identifier == _PROGRAMMATIC:
            programmatic = bool(int.from_bytes(value[:4], "little"))
        elif identifier not in _HINTS:
            raise EmulatorError(f"{kernel}: cudaLaunchAttribute {identifier} is not modelled")
    return {"cluster": cluster, "cooperative": cooperative, "programmatic": programmatic}


def _pack(entry: CompiledEntry, addresses: list[int]) -> bytes:
    """The parameter block of an entry, from the address of each parameter."""
    block = bytearray(entry.param_bytes)
    for param, address in zip(entry.params, addresses, strict=True):
        block[param.offset : param.offset + param.size] = ctypes.string_at(address, param.size)
    return bytes(block)


def _capability(arch: str) -> tuple[int, int]:
    digits = re.fullmatch(r"sm_(\d+)(\d)[af]?", arch)
    if digits is None:
        raise EmulatorError(f"{arch!r} is not an architecture name such as 'sm_107a'")
    return int(digits[1]), int(digits[2])
