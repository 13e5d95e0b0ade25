#!/usr/bin/env python3
"""Runs saved launches on this machine's GPU and compares memory with the emulator's, byte by byte.

    python scripts/replay_on_gpu.py make FOLDER   anywhere: whole sm_90a kernels, on the emulator
    python scripts/replay_on_gpu.py run FOLDER    with a GPU: adds emulator_h200_kernels.json there

`make` needs the package's emulator, CuTe DSL and the peer kernels' wheel; `run` needs a driver that
loads cubins of CUDA 13, and NumPy. A file `<name>.launch` is a launch with its memory before it
(`rubin_moe.emulator.saved`), `<name>.after` the same memory after it, as the emulator leaves it,
`<name>.layout` the offset and size of each parameter in the PTX's parameter block.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

_TARGET = "sm_90a"
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_MAX_DYNAMIC_SMEM, _NON_PORTABLE_CLUSTER = 8, 14


def make(folder: Path) -> None:
    """Saves every Hopper peer and Triton kernel with what the emulator makes of its memory."""
    from rubin_moe.emulator.dsl import emulated_device
    from rubin_moe.emulator.ptx import parse_ptx
    from rubin_moe.emulator.saved import SavedLaunch
    from tests.emulator.peers.suite import CASES

    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if case.target == _TARGET:
            with emulated_device(case.target, save_to=folder) as gpu:
                case.prepare().run(gpu)
                (made,) = folder.glob("001_*.launch")
                target = made.rename(folder / f"{case.name}.launch")
                ranges = [(b.address, len(b.data)) for b in SavedLaunch.load(target).buffers]
                after = b"".join(ctypes.string_at(at, size) for at, size in ranges)
                target.with_suffix(".after").write_bytes(after)
                saved = SavedLaunch.load(target)
                (entry,) = [e for e in parse_ptx(saved.ptx).entries if e.name == saved.kernel]
                layout = [[param.offset, param.size] for param in entry.params]
                target.with_suffix(".layout").write_text(json.dumps(layout))
            print(f"{case.name}: {len(after):,} bytes", flush=True)


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


def replay(driver: Any, path: Path) -> dict[str, Any]:
    """One row: how many bytes of the launch's memory differ from the emulator's."""
    with zipfile.ZipFile(path) as archive:
        facts = json.loads(archive.read("launch.json"))
        cubin, params = archive.read("kernel.cubin"), archive.read("params.bin")
        before = [archive.read(f"buffer_{i}.bin") for i in range(len(facts["buffers"]))]
    places = []
    for buffer, data in zip(facts["buffers"], before, strict=True):
        pointer = driver.allocate(len(data))
        driver.copy_in(pointer, data)
        places.append((buffer["address"], len(data), pointer))
    layout = json.loads(path.with_suffix(".layout").read_text())
    moved = relocate(params, places)
    driver.launch(cubin, facts, [moved[offset : offset + size] for offset, size in layout])
    after = b"".join(driver.copy_out(pointer, size) for _, size, pointer in places)
    want = np.frombuffer(path.with_suffix(".after").read_bytes(), np.uint8)
    start = np.frombuffer(b"".join(before), np.uint8)
    got = np.frombuffer(after, np.uint8)
    return {
        "kernel": path.stem,
        "bytes": int(want.size),
        "bytes_changed_by_the_kernel": int((got != start).sum()),
        "bytes_that_differ": int((got != want).sum()),
    }


def relocate(params: bytes, places: list[tuple[int, int, Any]]) -> bytes:
    """Parameters and tensor maps with every address inside a buffer moved to its new place."""
    words = list(struct.unpack(f"<{len(params) // 8}Q", params[: len(params) // 8 * 8]))
    for index, word in enumerate(words):
        for address, size, pointer in places:
            if address <= word < address + size:
                words[index] = pointer.value + word - address
    return struct.pack(f"<{len(words)}Q", *words) + params[len(words) * 8 :]


def make_driver() -> Any:
    """The recorder's driver with a launch of a cubin in clusters."""
    from record_silicon import Driver

    class ReplayDriver(Driver):
        def copy_in(self, pointer: Any, data: bytes) -> None:
            self._call("cuMemcpyHtoD_v2", pointer, data, ctypes.c_size_t(len(data)))

        def copy_out(self, pointer: Any, size: int) -> bytes:
            out = ctypes.create_string_buffer(size)
            self._call("cuMemcpyDtoH_v2", out, pointer, ctypes.c_size_t(size))
            return out.raw

        def launch(self, cubin: bytes, facts: dict[str, Any], params: list[bytes]) -> None:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), cubin)
            name = facts["kernel"].encode()
            self._call("cuModuleGetFunction", ctypes.byref(function), module, name)
            smem = facts["dynamic_smem_bytes"]
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SMEM, smem)
            self._call("cuFuncSetAttribute", function, _NON_PORTABLE_CLUSTER, 1)
            attribute = struct.pack("<II3I", _CLUSTER, 0, *facts["cluster"]).ljust(72, b"\0")
            held = ctypes.create_string_buffer(attribute, 72)
            config = LaunchConfig(
                (ctypes.c_uint * 3)(*facts["grid"]),
                (ctypes.c_uint * 3)(*facts["block"]),
                smem,
                None,
                ctypes.addressof(held),
                1,
            )
            # One pointer a parameter: the machine code places them otherwise than the PTX.
            values = [ctypes.create_string_buffer(value, len(value)) for value in params]
            addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            self._call("cuLaunchKernelEx", ctypes.byref(config), function, addresses, None)
            self._call("cuCtxSynchronize")

    return ReplayDriver()


def run(folder: Path) -> None:
    """Replays every launch of the folder and writes the rows."""
    driver = make_driver()
    rows = []
    for path in sorted(folder.glob("*.launch")):
        rows.append(replay(driver, path))
        print(rows[-1], flush=True)
    what = "whole kernels, memory after the launch: this GPU against the emulator"
    result = {"what": what, **driver.describe(), "rows": rows}
    (folder / "emulator_h200_kernels.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    {"make": make, "run": run}[sys.argv[1]](Path(sys.argv[2]))
