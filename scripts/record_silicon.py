#!/usr/bin/env python3
"""Run the emulator's probes on the GPU of this machine and record what it answers.

    python scripts/record_silicon.py [--output FILE] [--only TEXT]

Needs a driver that loads PTX ISA 8.6 for sm_90a (CUDA 12.8 or later) and NumPy; neither a toolkit
nor torch. The tests replay the recording on the emulator; ``--only`` runs the probes whose name
holds a text and prints a summary without writing. A probe that faults makes its CUDA context
useless, so probes run in worker processes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import multiprocessing
import os
import pickle
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.emulator.silicon.probe import MapSpec, Probe  # noqa: E402
from tests.emulator.silicon.recording import (  # noqa: E402
    MAP_BYTES,
    PATH,
    Recording,
    all_maps,
    all_probes,
    digest,
)

MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


POISONED = 3  # exit status of a worker whose context an error made useless


class DriverError(RuntimeError):
    """An error of the CUDA driver, by its name."""


class Driver:
    """The few calls of the CUDA driver API that the recorder needs."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        self.device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self.device), 0)
        self._context()

    def _context(self) -> None:
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()}")

    def describe(self) -> dict[str, Any]:
        """Name, capability and driver version of the device."""
        name = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", name, 128, self.device)
        version, major, minor = (ctypes.c_int() for _ in range(3))
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self._call("cuDeviceGetAttribute", ctypes.byref(major), 75, self.device)
        self._call("cuDeviceGetAttribute", ctypes.byref(minor), 76, self.device)
        return {
            "device": name.value.decode(),
            "capability": f"{major.value}.{minor.value}",
            "cuda_driver": f"{version.value // 1000}.{version.value % 1000 // 10}",
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        }

    def allocate(self, nbytes: int) -> ctypes.c_uint64:
        """Zeroed device memory."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        self._call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
        return pointer

    def encode(self, spec: MapSpec, address: int) -> bytes:
        """``cuTensorMapEncodeTiled`` over the tensor at ``address``."""
        rank = len(spec.dims)
        buffer = ctypes.create_string_buffer(MAP_BYTES + 64)
        start = -ctypes.addressof(buffer) % 64
        dims = (ctypes.c_uint64 * rank)(*spec.dims)
        strides = (ctypes.c_uint64 * max(rank - 1, 1))(*spec.strides)
        box = (ctypes.c_uint32 * rank)(*spec.box)
        steps = (ctypes.c_uint32 * rank)(*(spec.element_strides or (1,) * rank))
        self._call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(ctypes.addressof(buffer) + start),
            spec.dtype,
            ctypes.c_uint32(rank),
            ctypes.c_uint64(address),
            dims,
            strides,
            box,
            steps,
            0,
            {0: 0, 32: 1, 64: 2, 128: 3}[spec.swizzle],
            0,
            int(spec.fill_nan),
        )
        return buffer.raw[start : start + MAP_BYTES]

    def run(self, probe: Probe) -> tuple[np.ndarray, bytes]:
        """Output bytes of one probe and its tensor maps, base addresses zeroed."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), probe.ptx.encode())
        source, target = self.allocate(probe.data.size), self.allocate(probe.out_bytes)
        try:
            self._call("cuModuleGetFunction", ctypes.byref(function), module, b"probe")
            self._call("cuFuncSetAttribute", function, MAX_DYNAMIC_SMEM, max(probe.smem, 1))
            host = np.ascontiguousarray(probe.data)
            self._call(
                "cuMemcpyHtoD_v2",
                source,
                ctypes.c_void_p(host.ctypes.data),
                ctypes.c_size_t(host.size),
            )
            maps = [self.encode(spec, source.value + spec.offset) for spec in probe.maps]
            values: list[Any] = [source, target]
            values += [_aligned(encoded) for encoded in maps]
            pointers = (ctypes.c_void_p * len(values))(
                *(ctypes.addressof(value) for value in values)
            )
            self._call(
                "cuLaunchKernel",
                function,
                *(probe.grid, 1, 1, probe.block, 1, 1, probe.smem),
                None,
                pointers,
                None,
            )
            self._call("cuCtxSynchronize")
            out = np.empty(probe.out_bytes, np.uint8)
            self._call(
                "cuMemcpyDtoH_v2",
                ctypes.c_void_p(out.ctypes.data),
                target,
                ctypes.c_size_t(out.size),
            )
        finally:
            for pointer in (source, target):
                self._cuda.cuMemFree_v2(pointer)
            self._cuda.cuModuleUnload(module)
        return out, b"".join(bytes(8) + encoded[8:] for encoded in maps)


def _aligned(encoded: bytes) -> Any:
    """A ctypes object of 128 bytes at a 64-byte aligned address."""
    storage = (ctypes.c_char * (MAP_BYTES + 64))()
    start = -ctypes.addressof(storage) % 64
    view = (ctypes.c_char * MAP_BYTES).from_buffer(storage, start)
    view.raw = encoded
    return view


def work(share: list[Probe], log: Path) -> None:
    """Run probes in order and append what each answered to ``log``.

    Ends the process after an error that poisons the context; whoever started it goes on with the
    next probe in a new process.
    """
    driver = Driver()
    with log.open("ab") as stream:
        for probe in share:
            try:
                answer: tuple[Any, ...] = ("output", *driver.run(probe))
            except DriverError as error:
                answer = ("error", str(error))
            pickle.dump((digest(probe), answer), stream)
            stream.flush()
            if answer[0] == "error" and not answer[1].startswith("cuModuleLoadData"):
                os._exit(POISONED)


def read_log(log: Path) -> dict[str, tuple[Any, ...]]:
    """The answers in a log, by digest."""
    answers = {}
    with log.open("rb") as stream, contextlib.suppress(EOFError):
        while True:
            key, answer = pickle.load(stream)
            answers[key] = answer
    return answers


def record(probes: list[Probe], workers: int) -> Recording:
    """Run every probe in worker processes; an error costs the probe that made it alone."""
    shares = [probes[i::workers] for i in range(workers)]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{i}.log" for i in range(workers)]
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(_supervise, shares, logs))
        answers = {k: v for log in logs for k, v in read_log(log).items()}
    driver = Driver()
    recording = Recording(meta=driver.describe())
    for probe in probes:
        key = digest(probe)
        answer = answers.get(key, ("error", "no answer in time"))
        if answer[0] == "error":
            recording.errors[key] = answer[1]
            print(f"{probe.name}: {answer[1]}", flush=True)
            continue
        recording.outputs[key] = answer[1]
        if answer[2]:
            recording.maps[key] = answer[2]
    area = driver.allocate(1 << 20)
    for spec in all_maps():
        try:
            encoded = driver.encode(spec, area.value)
            recording.encodings.append(bytes(8) + encoded[8:])
        except DriverError as error:
            print(f"{spec}: {error}", flush=True)
            recording.encodings.append(None)
    return recording


def _supervise(share: list[Probe], log: Path) -> None:
    """Run a share to its end, in as many processes as errors demand."""
    context = multiprocessing.get_context("spawn")
    log.touch()
    while True:
        known = read_log(log)
        rest = [p for p in share if digest(p) not in known]
        if not rest:
            return
        process = context.Process(target=work, args=(rest, log))
        process.start()
        process.join(120)
        if process.is_alive():
            process.kill()
            process.join()
        if process.exitcode not in (0, POISONED):
            with log.open("ab") as stream:
                missing = next(p for p in rest if digest(p) not in read_log(log))
                pickle.dump((digest(missing), ("error", f"exit {process.exitcode}")), stream)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=PATH)
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    probes = [p for p in all_probes() if arguments.only in p.name]
    recording = record(probes, min(arguments.workers, len(probes)))
    print(
        f"{recording.meta['device']}, driver {recording.meta['cuda_driver']}: "
        f"{len(recording.outputs)} of {len(probes)} probes, {len(recording.errors)} errors"
    )
    if not arguments.only:
        recording.save(arguments.output)
        print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
