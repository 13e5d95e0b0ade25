"""What a GPU answered to the probes: one compressed file, read and written here.

``recording.npz`` holds, for each probe in order, its output bytes, and for every tensor map the 128
bytes that the driver encoded (with the base address zeroed). ``meta`` is JSON: device, driver, date
and, per probe, a digest of kernel and inputs, so that a recording of another probe is not used.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import alu, cluster, copies, matrix, warp
from .probe import MapSpec, Probe

PATH = Path(__file__).with_name("recording.npz")
MAP_BYTES = 128


def all_probes() -> list[Probe]:
    """Every probe, in the order of the recording."""
    parts = (alu, copies, matrix, warp, cluster)
    return [probe for part in parts for probe in part.probes()]


def all_maps() -> list[MapSpec]:
    """Tensor maps that are encoded for the decoder's sake alone."""
    return copies.map_specs()


def digest(probe: Probe) -> str:
    """Identity of a probe: kernel, inputs, launch."""
    h = hashlib.sha256(probe.ptx.encode())
    h.update(probe.data.tobytes())
    h.update(repr((probe.out_bytes, probe.block, probe.grid, probe.smem, probe.maps)).encode())
    return h.hexdigest()[:16]


@dataclass
class Recording:
    """Answers of one device. ``outputs`` and ``maps`` are keyed by the probe's digest;
    ``encodings`` holds the driver's bytes of every spec of :func:`all_maps`, or None where the
    driver refused it; ``errors`` the driver's error by digest."""

    meta: dict[str, Any]
    outputs: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    maps: dict[str, bytes] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    encodings: list[bytes | None] = field(default_factory=list)

    def save(self, path: Path = PATH) -> None:
        """Write the file."""
        keys = list(self.outputs)
        blob = np.concatenate([self.outputs[k] for k in keys]) if keys else np.zeros(0, np.uint8)
        index = {
            "outputs": {k: self.outputs[k].size for k in keys},
            "maps": {k: v.hex() for k, v in self.maps.items()},
            "errors": self.errors,
            "encodings": [e.hex() if e is not None else None for e in self.encodings],
            "meta": self.meta,
        }
        text = np.frombuffer(json.dumps(index).encode(), np.uint8)
        np.savez_compressed(path, blob=blob, index=text)

    @classmethod
    def load(cls, path: Path = PATH) -> Recording:
        """Read the file; raises FileNotFoundError where none was recorded."""
        with np.load(path) as archive:
            index = json.loads(archive["index"].tobytes())
            blob = archive["blob"]
        outputs, at = {}, 0
        for key, size in index["outputs"].items():
            outputs[key] = blob[at : at + size]
            at += size
        return cls(
            meta=index["meta"],
            outputs=outputs,
            maps={k: bytes.fromhex(v) for k, v in index["maps"].items()},
            errors=index["errors"],
            encodings=[bytes.fromhex(e) if e else None for e in index["encodings"]],
        )
