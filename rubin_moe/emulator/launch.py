"""Devices and launches: the emulator's entry point.

A :class:`Device` holds global memory (registered host buffers at their own addresses) and runs
launches one after another; all of them see the same memory. Contract with the functional units in
``isa/``: global memory is ``GlobalMemory.view(address, nbytes)``; a cluster gives ``smem(rank)``
(uint8 bytes, offset 0 is the start of the window, its first 1024 bytes reserved), ``tmem(rank)``
(uint32 [128 lanes, 576 columns]) and ``size``; a shared::cluster address is
``offset | rank << 24``.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rubin_moe.emulator.async_ops import DelayPolicy, ImmediatePolicy, Policy
from rubin_moe.emulator.compile import RESERVED_SMEM, CompiledEntry, Kernel, Module
from rubin_moe.emulator.errors import EmulatorError
from rubin_moe.emulator.findings import Findings, Mode
from rubin_moe.emulator.machine import Geometry, LaunchContext
from rubin_moe.emulator.native.compiler import order_hooks, runtime
from rubin_moe.emulator.order.model import LaunchOrder
from rubin_moe.emulator.ptx.ast import Param
from rubin_moe.emulator.report import Report, Statistics, summarise
from rubin_moe.emulator.scheduler import Scheduler
from rubin_moe.emulator.state.memory import GlobalMemory, address_range
from rubin_moe.emulator.worker import Limits

#: Shared memory that one block may use, in bytes, and SMs that are taken as resident at once.
_ARCHITECTURES = {
    "sm_90a": (232_448, 132),
    "sm_100a": (232_448, 148),
    "sm_103a": (232_448, 148),
    "sm_107a": (334_848, 204),
}
_MAX_CLUSTER = 16
_MAX_THREADS = 1024

Dims = Sequence[int] | int


class LaunchError(EmulatorError, ValueError):
    """A launch that a driver would refuse; the message names the limit."""


def _dims(value: Dims) -> tuple[int, int, int]:
    items = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    if not 1 <= len(items) <= 3 or any(v < 1 for v in items):
        raise LaunchError(f"dimensions {value!r} are not one to three positive numbers")
    return (*items, *(1,) * (3 - len(items)))  # type: ignore[return-value]


class Device:
    """An emulated GPU of one architecture (``sm_90a``, ``sm_100a``, ``sm_103a``, ``sm_107a``).

    ``num_sms`` CTAs are in flight at most, as on the hardware; fewer shows where a kernel counts on
    co-residency. ``workers`` threads run the clusters of a launch unless the launch says otherwise.
    """

    def __init__(self, arch: str, num_sms: int | None = None, workers: int = 1) -> None:
        if arch not in _ARCHITECTURES:
            raise LaunchError(f"{arch} is not emulated (known: {', '.join(_ARCHITECTURES)})")
        self.arch = arch
        self.max_shared, default_sms = _ARCHITECTURES[arch]
        self.num_sms = num_sms or default_sms
        self.workers = workers
        self.memory = GlobalMemory()
        self._module_data: dict[int, tuple[Kernel, list[NDArray[np.uint8]]]] = {}

    def register(self, buffer: Any) -> int:
        """Make a torch tensor or NumPy array accessible to kernels; returns its address."""
        return self.memory.register(buffer)

    def register_range(self, address: int, nbytes: int, owner: Any = None) -> None:
        """Make raw host memory accessible; ``owner`` is kept alive."""
        self.memory.register_range(address, nbytes, owner)

    def mark_undefined(self, buffer: Any) -> None:
        """Say that nothing wrote a registered buffer (``torch.empty``): checked launches refuse to
        use what they read there before a kernel wrote it. Host writes are not seen: say
        `mark_defined` after them. Raises MemoryFaultError for memory that is not registered."""
        self.memory.mark(*address_range(buffer), undefined=True)

    def mark_defined(self, buffer: Any) -> None:
        """The opposite of `mark_undefined`."""
        self.memory.mark(*address_range(buffer), undefined=False)

    def undefined(self, buffer: Any) -> int:
        """Bytes of a registered buffer that are marked undefined and no checked launch wrote."""
        shadow = self.memory.shadow(*address_range(buffer))
        return 0 if shadow is None else int(np.count_nonzero(shadow))

    def launch(
        self,
        kernel: Module | Kernel,
        grid: Dims,
        block: Dims,
        params: bytes | Sequence[Any] = (),
        *,
        cluster: Dims | None = None,
        dynamic_smem: int = 0,
        policy: Policy | None = None,
        seed: int | None = None,
        limits: Limits | None = None,
        useful_macs: int | None = None,
        workers: int | None = None,
        rules: Mode | None = None,
    ) -> Report:
        """Run a kernel to its end.

        ``params`` is the parameter block, or one value a parameter: int, float, bytes, or a tensor
        or array (registered, its address passed). ``policy`` says when asynchronous operations
        happen (default: at issue); ``seed`` is short for ``DelayPolicy(seed)``. A policy that
        defers needs a module loaded with ``deferred=True``. ``workers`` threads run the clusters
        (default: the device's); the report says how many did: one under a policy that defers, whose
        order of events is the seed's, and never more than clusters or SMs. ``rules`` checks the
        launch: "enforce" ends it at the first violation of an enforced rule, "report" goes on;
        both leave findings in the report (`rules.py`).

        Raises LaunchError for what a driver refuses and EmulationError when the kernel traps, hangs
        (every waiting warp is named) or exceeds its budget.
        """
        entry = kernel.entry() if isinstance(kernel, Module) else kernel
        if policy is None:
            policy = ImmediatePolicy() if seed is None else DelayPolicy(seed)
        geometry = self._geometry(entry.compiled, grid, block, cluster, dynamic_smem)
        if policy.deferred and not entry.compiled.deferred:
            raise LaunchError("a deferring policy needs load_ptx(text, deferred=True)")
        if rules and not entry.compiled.checked:
            raise LaunchError("rules need load_ptx(text, checked=True)")
        if rules not in (None, "enforce", "report"):
            raise LaunchError(f"rules={rules!r}: 'enforce', 'report' or None")
        findings = Findings(rules) if rules else None
        parameters = self._parameter_block(entry, params)
        order = (
            LaunchOrder(geometry, self.memory, order_hooks(), rules == "enforce")
            if findings
            else None
        )
        contexts = [
            LaunchContext(
                arch=self.arch,
                memory=self.memory,
                params=parameters,
                statistics=Statistics(geometry.warps, len(entry.compiled.segments)),
                policy=policy,
                num_sms=self.num_sms,
                runtime=runtime(),
                findings=findings,
                order=order,
            )
            for _ in range(1 if order else self._threads(geometry, policy, workers))
        ]
        start = time.perf_counter()
        Scheduler(entry, geometry, contexts, limits or Limits()).run()
        while policy.advance():
            pass
        if order is not None:
            order.drain()
        seconds = time.perf_counter() - start
        statistics = contexts[0].statistics
        for context in contexts[1:]:
            statistics.merge(context.statistics)
        head = {
            "kernel": entry.name,
            "target": self.arch,
            "grid": geometry.grid,
            "block": geometry.block,
            "cluster": geometry.cluster,
            "shared_bytes": entry.compiled.static_smem - RESERVED_SMEM + geometry.dynamic_smem,
            "useful_macs": useful_macs,
            "seconds": seconds,
            "workers": len(contexts),
            "findings": findings.all if findings else [],
            "findings_dropped": findings.dropped if findings else 0,
        }
        return summarise(statistics, entry.compiled.segments, head)

    def _threads(self, geometry: Geometry, policy: Policy, workers: int | None) -> int:
        wanted = self.workers if workers is None else workers
        if wanted < 1:
            raise LaunchError(f"{wanted} workers; at least one runs a launch")
        if policy.deferred:
            return 1
        resident = max(self.num_sms // geometry.cluster_size, 1)
        return min(wanted, resident, geometry.clusters)

    def _geometry(
        self,
        entry: CompiledEntry,
        grid: Dims,
        block: Dims,
        cluster: Dims | None,
        dynamic_smem: int,
    ) -> Geometry:
        if entry.target != self.arch:
            raise LaunchError(f"{entry.name} is compiled for {entry.target}, not {self.arch}")
        shape = _dims(cluster if cluster is not None else (entry.cluster or 1))
        geometry = Geometry(_dims(grid), _dims(block), shape, dynamic_smem)
        if geometry.threads > min(entry.max_threads, _MAX_THREADS):
            raise LaunchError(f"{geometry.threads} threads a block; at most {entry.max_threads}")
        if any(g % c for g, c in zip(geometry.grid, geometry.cluster, strict=True)):
            raise LaunchError(f"grid {geometry.grid} is no multiple of cluster {geometry.cluster}")
        if geometry.cluster_size > _MAX_CLUSTER:
            raise LaunchError(f"{geometry.cluster_size} CTAs a cluster; at most {_MAX_CLUSTER}")
        used = entry.static_smem - RESERVED_SMEM + dynamic_smem
        if used > self.max_shared:
            raise LaunchError(
                f"{used} bytes of shared memory a block; {self.arch} has {self.max_shared}"
            )
        return geometry

    def _parameter_block(self, kernel: Kernel, params: bytes | Sequence[Any]) -> NDArray[np.uint8]:
        entry = kernel.compiled
        if isinstance(params, (bytes, bytearray)):
            if len(params) != entry.param_bytes:
                raise LaunchError(f"{len(params)} parameter bytes; {entry.param_bytes} expected")
            raw = bytes(params)
        else:
            raw = self._pack(entry.params, params)
        # tensor maps must be 64-byte aligned in the block
        storage = np.zeros(entry.pointer_bytes + 128, np.uint8)
        start = -int(storage.ctypes.data) % 64
        block = storage[start : start + entry.pointer_bytes]
        block[: len(raw)] = np.frombuffer(raw, np.uint8)
        for (_, slot), data in zip(entry.globals, self._global_data(kernel), strict=True):
            block[slot : slot + 8].view(np.uint64)[0] = data.ctypes.data
        return block

    def _global_data(self, kernel: Kernel) -> list[NDArray[np.uint8]]:
        """Storage of the module's variables: made once, kept over launches."""
        known = self._module_data.get(id(kernel))
        if known is not None:
            return known[1]
        buffers = []
        for variable, _ in kernel.compiled.globals:
            data = np.zeros(max(variable.size, 1), np.uint8)
            data[: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
            self.register(data)
            buffers.append(data)
        self._module_data[id(kernel)] = (kernel, buffers)
        return buffers

    def _pack(self, declared: tuple[Param, ...], given: Sequence[Any]) -> bytes:
        if len(given) != len(declared):
            raise LaunchError(f"{len(given)} parameters given; {len(declared)} declared")
        block = bytearray(max((p.offset + p.size for p in declared), default=0))
        for param, value in zip(declared, given, strict=True):
            block[param.offset : param.offset + param.size] = self._encode(param, value)
        return bytes(block)

    def _encode(self, param: Param, value: Any) -> bytes:
        if isinstance(value, (bytes, bytearray)):
            raw = bytes(value)
        elif isinstance(value, (bool, int, np.integer)):
            raw = (int(value) & ((1 << 8 * param.size) - 1)).to_bytes(param.size, "little")
        elif isinstance(value, (float, np.floating)):
            raw = struct.pack("<f" if param.size == 4 else "<d", float(value))
        else:
            raw = self.register(value).to_bytes(8, "little")
        if len(raw) != param.size:
            raise LaunchError(f"parameter {param.name} takes {param.size} bytes, not {len(raw)}")
        return raw
