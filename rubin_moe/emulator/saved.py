"""A launch in one file: what it takes to run a kernel again, elsewhere and without its host code.

The file is a zip of `launch.json`, `kernel.ptx`, `kernel.cubin` (may be empty), `params.bin` and
`buffer_<i>.bin`. Parameters and tensor maps hold addresses, so a replay places every buffer at the
address it had, in fresh memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rubin_moe.emulator.compile import load_ptx
from rubin_moe.emulator.errors import EmulatorError
from rubin_moe.emulator.launch import Device
from rubin_moe.emulator.report import Report

_FORMAT = 1
_MAP_FIXED_NOREPLACE = 0x100000  # Linux: fail instead of replacing a mapping


@dataclass(frozen=True)
class SavedBuffer:
    """Device memory before the launch."""

    address: int
    data: bytes


@dataclass(frozen=True)
class SavedLaunch:
    """A launch and the device memory it starts from.

    `params` is the parameter block; `cubin` what ptxas made of `ptx`, for a run on a GPU.
    """

    arch: str
    ptx: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem_bytes: int
    params: bytes
    buffers: tuple[SavedBuffer, ...]
    cubin: bytes = b""

    def save(self, path: Path) -> None:
        """Writes the file; an existing one is replaced."""
        facts = {
            "format": _FORMAT,
            "arch": self.arch,
            "kernel": self.kernel,
            "grid": self.grid,
            "block": self.block,
            "cluster": self.cluster,
            "dynamic_smem_bytes": self.dynamic_smem_bytes,
            "buffers": [{"address": b.address, "bytes": len(b.data)} for b in self.buffers],
        }
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("launch.json", json.dumps(facts, indent=1))
            archive.writestr("kernel.ptx", self.ptx)
            archive.writestr("kernel.cubin", self.cubin)
            archive.writestr("params.bin", self.params)
            for index, buffer in enumerate(self.buffers):
                archive.writestr(f"buffer_{index}.bin", buffer.data)

    @classmethod
    def load(cls, path: Path) -> SavedLaunch:
        """Reads a file that `save` wrote. Raises EmulatorError if it is something else."""
        try:
            with zipfile.ZipFile(path) as archive:
                facts = json.loads(archive.read("launch.json"))
                if facts["format"] != _FORMAT:
                    raise EmulatorError(
                        f"{path}: saved launch of format {facts['format']}, this reads {_FORMAT}"
                    )
                buffers = tuple(
                    SavedBuffer(b["address"], archive.read(f"buffer_{index}.bin"))
                    for index, b in enumerate(facts["buffers"])
                )
                return cls(
                    facts["arch"],
                    archive.read("kernel.ptx").decode(),
                    facts["kernel"],
                    _triple(facts["grid"]),
                    _triple(facts["block"]),
                    _triple(facts["cluster"]),
                    facts["dynamic_smem_bytes"],
                    archive.read("params.bin"),
                    buffers,
                    archive.read("kernel.cubin"),
                )
        except (zipfile.BadZipFile, KeyError, json.JSONDecodeError) as error:
            raise EmulatorError(f"{path} is not a saved launch: {error}") from error

    def run(self, seed: int | None = None, **options: Any) -> tuple[Report, list[np.ndarray]]:
        """Runs it on a new Device; returns its report and the buffers after it (uint8 each).

        seed and options are those of `Device.launch`.

        Raises EmulatorError when an address is taken in this process (then use a fresh one), and
        whatever the launch raises.
        """
        with memory_at(self.buffers) as arrays:
            device = Device(self.arch)
            for array in arrays:
                device.register(array)
            kernel = load_ptx(
                self.ptx, deferred=seed is not None, checked=options.get("rules") is not None
            ).entry(self.kernel)
            report = device.launch(
                kernel,
                self.grid,
                self.block,
                self.params,
                cluster=self.cluster,
                dynamic_smem=self.dynamic_smem_bytes,
                seed=seed,
                **options,
            )
            return report, [array.copy() for array in arrays]


def _triple(values: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = values
    return (x, y, z)


@contextlib.contextmanager
def memory_at(buffers: Sequence[SavedBuffer]) -> Iterator[list[np.ndarray]]:
    """uint8 arrays over fresh pages at the buffers' own addresses, filled with their data."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    mapped: list[tuple[int, int]] = []
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    try:
        for start, stop in _page_ranges(buffers):
            at = libc.mmap(start, stop - start, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
            if at != start:
                if at not in (None, ctypes.c_void_p(-1).value):
                    libc.munmap(at, stop - start)
                raise EmulatorError(
                    f"the launch needs its memory at {start:#x}..{stop:#x}, which this process "
                    "uses for something else: run it in a fresh process"
                )
            mapped.append((start, stop))
        arrays = []
        for buffer in buffers:
            raw = (ctypes.c_uint8 * len(buffer.data)).from_address(buffer.address)
            arrays.append(np.ctypeslib.as_array(raw))
            arrays[-1][:] = np.frombuffer(buffer.data, np.uint8)
        yield arrays
    finally:
        for start, stop in mapped:
            libc.munmap(start, stop - start)


def _page_ranges(buffers: Sequence[SavedBuffer]) -> list[tuple[int, int]]:
    """Page-aligned ranges that cover the buffers, sorted, neighbours merged."""
    page = mmap.PAGESIZE
    ranges: list[tuple[int, int]] = []
    for buffer in sorted(buffers, key=lambda b: b.address):
        start = buffer.address // page * page
        stop = -(-(buffer.address + len(buffer.data)) // page) * page
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
        else:
            ranges.append((start, stop))
    return ranges
