"""Run a probe on the emulator and compare with what a GPU answered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rubin_moe.emulator import Device, load_ptx
from rubin_moe.emulator.errors import EmulatorError
from tests.emulator.units.machine import tensor_map

from .probe import Probe
from .recording import MAP_BYTES

# CU_TENSOR_MAP_DATA_TYPE -> the code in the tensor map
HARDWARE_FORMAT = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 9, 9: 10}


def emulate(probe: Probe, maps: bytes = b"") -> NDArray[np.uint8]:
    """Output bytes of one probe; ``maps`` are the driver's encodings with zeroed base addresses."""
    device = Device("sm_90a")
    source, target = _buffer(probe.data.size), _buffer(probe.out_bytes)
    source[: probe.data.size] = probe.data
    for buffer in (source, target):
        device.register(buffer)
    encoded = []
    for i, spec in enumerate(probe.maps):
        raw = bytearray(maps[MAP_BYTES * i : MAP_BYTES * (i + 1)])
        raw[:8] = (source.ctypes.data + spec.offset).to_bytes(8, "little")
        encoded.append(bytes(raw))
    device.launch(
        load_ptx(probe.ptx),
        probe.grid,
        probe.block,
        [source.ctypes.data, target.ctypes.data, *encoded],
        dynamic_smem=probe.smem,
    )
    return target[: probe.out_bytes].copy()


def refuses(probe: Probe) -> bool:
    """Whether the emulator refuses to load the probe's kernel, as sm_90a's driver does."""
    try:
        load_ptx(probe.ptx)
    except EmulatorError:
        return True
    return False


def faults(probe: Probe, maps: bytes) -> bool:
    """Whether the emulator ends the launch with an error, as the device does."""
    try:
        emulate(probe, maps)
    except EmulatorError:
        return True
    return False


def _buffer(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed memory at a 256-byte boundary, as device allocations are."""
    backing = np.zeros(nbytes + 256, np.uint8)
    start = -backing.ctypes.data % 256
    return backing[start : start + nbytes]


def driver_maps(probe: Probe) -> bytes:
    """The probe's tensor maps as a driver encodes them, for launches whose maps were not kept."""
    return b"".join(
        tensor_map(0, HARDWARE_FORMAT[m.dtype], m.dims, m.strides, m.box, m.swizzle)
        for m in probe.maps
    )


@dataclass(frozen=True)
class Comparison:
    """Words compared and words that differ by more than the probe allows.

    ``worst`` is the largest distance seen: in ulps, or, for exact probes, 0 or 1.
    """

    cases: int
    mismatches: int
    worst: float
    first: int


def compare(probe: Probe, recorded: NDArray[np.uint8], emulated: NDArray[np.uint8]) -> Comparison:
    """Compare 32-bit words: bitwise, or in float32 ulps."""
    a, b = recorded.view(np.uint32), emulated.view(np.uint32)
    if probe.ulps:
        distance = _ulps(a, b)
        wrong = distance > probe.ulps
    else:
        wrong = a != b
        distance = wrong.astype(np.float64)
    first = int(np.flatnonzero(wrong)[0]) if wrong.any() else -1
    return Comparison(int(wrong.size), int(wrong.sum()), float(distance.max(initial=0)), first)


def _ulps(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Distance of float32 words in units of the last place; NaN equals NaN."""

    def ordered(words: NDArray[np.uint32]) -> NDArray[np.int64]:
        signed = words.view(np.int32).astype(np.int64)
        return np.where(signed < 0, -(signed & 0x7FFFFFFF), signed)

    distance = np.abs(ordered(a) - ordered(b)).astype(np.float64)
    x, y = a.view(np.float32), b.view(np.float32)
    distance[np.isnan(x) & np.isnan(y)] = 0
    distance[np.isnan(x) != np.isnan(y)] = np.inf
    return distance
