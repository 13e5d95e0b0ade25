#!/usr/bin/env python
"""Measures how fast the emulator executes, on one core of this machine.

    python scripts/emulator_speed.py [--rounds N] [--output PATH] [--only-threads] [--only-rules]

Writes docs/results/emulator_speed.json. All times are CPU time of this process (one thread), best
of the rounds, so that a busy machine does not distort them; wall time is recorded beside the whole
kernel. What a second thread gains is a ratio of wall times, taken in turns, with the load of the
machine beside it; --only-threads measures that row alone and leaves the others as they are, and so
does --only-rules for what enforcing every rule costs.
Nothing here says anything about the speed of a GPU.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rubin_moe.emulator import Device, Report, load_ptx, units  # noqa: E402
from rubin_moe.emulator.dsl import emulated_device  # noqa: E402
from rubin_moe.emulator.findings import Mode  # noqa: E402
from rubin_moe.emulator.ptx import parse_ptx  # noqa: E402
from tests.emulator.peers.dense import Dense  # noqa: E402
from tests.emulator.peers.operands import NVFP4  # noqa: E402
from tests.emulator.peers.suite import CASES  # noqa: E402

PACKAGES = ("flashinfer-python", "nvidia-cutlass-dsl", "llvmlite", "numba", "numpy")
GEMM = Dense(
    "speed", "sm_107a", NVFP4, NVFP4, (512, 512, 4096), (128, 64, 256), inst=(128, 64, 128)
)
#: Kernels with which the cost of the rules is measured: CTA pair, gather, finalize, whole layer.
RULED = (
    "sm_107a-dense_nvfp4_ue5m3_2cta_256x128",
    "sm_107a-fc1_gather_swiglu_tma",
    "sm_107a-fc2_finalize",
    "sm_100a-swap_ab_fc1_nvfp4_128x64",
)
_REPEAT = 32
_LOOPS = 2000

#: One loop body a class; %r1-%r4 and %d5-%d8 hold numbers around one (float classes) or small
#: integers, %d1 a global and %r20 a shared address of the lane.
CLASSES = {
    "integer": ["add.s32 %r1, %r2, %r3;", "xor.b32 %r2, %r1, %r4;",
                "mad.lo.s32 %r3, %r1, %r2, %r4;", "shr.u32 %r4, %r3, 3;"],
    "compare and select": ["setp.lt.s32 %p1, %r1, %r2;", "selp.b32 %r1, %r3, %r4, %p1;",
                           "setp.ne.u32 %p2, %r2, %r3;", "selp.b32 %r2, %r4, %r1, %p2;"],
    "float": ["fma.rn.f32 %r1, %r2, %r3, %r4;", "mul.f32 %r2, %r1, %r3;",
              "add.f32 %r3, %r2, %r4;", "max.f32 %r4, %r1, %r3;"],
    "packed float": ["mul.rn.f32x2 %d5, %d6, %d7;", "fma.rn.f32x2 %d6, %d5, %d7, %d8;"],
    "conversion": ["cvt.rn.bf16x2.f32 %r1, %r2, %r3;",
                   "cvt.rn.satfinite.e4m3x2.f32 %h1, %r2, %r4;"],
    "special function": ["ex2.approx.ftz.f32 %r1, %r2;", "rcp.approx.ftz.f32 %r2, %r1;"],
    "shuffle": ["shfl.sync.idx.b32 %r1, %r2, %r3, 31, -1;",
                "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;"],
    "shared memory": ["st.shared.v4.b32 [%r20], {%r1, %r2, %r3, %r4};",
                      "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r20];"],
    "global memory": ["st.global.b32 [%d1], %r1;", "ld.global.b32 %r2, [%d1];"],
    "atomics": ["red.global.add.u32 [%d1], %r1;", "atom.global.add.u32 %r2, [%d1], %r3;"],
    "branches": [],
    "divergent branches": [],
    "mbarrier": ["mbarrier.arrive.shared.b64 _, [%r21];"],
}  # fmt: skip


def class_kernel(name: str) -> tuple[str, int]:
    """PTX of a loop around one class, and how many of its instructions a loop executes."""
    lines = CLASSES[name]
    if "branches" in name:
        test = "0" if name == "branches" else "1"
        body = "\n".join(
            f" and.b32 %r5, %r1, {test}; setp.ne.u32 %p1, %r5, 0; @%p1 bra L{i};\n"
            f" add.u32 %r2, %r2, 1;\nL{i}: add.u32 %r3, %r3, 1;"
            for i in range(_REPEAT)
        )
        count = 5 * _REPEAT
    else:
        repeats = _REPEAT // len(lines)
        body, count = "\n".join(lines * repeats), repeats * len(lines)
    floats = ""
    if name in ("float", "packed float", "conversion", "special function"):
        floats = "\n".join(
            f" cvt.rn.f32.u32 %r{i}, %r{i}; mul.f32 %r{i}, %r{i}, 0f3C000000;" for i in range(1, 5)
        )
    text = f"""
.version 9.4
.target sm_107a
.address_size 64
.visible .entry speed(.param .u64 a)
{{
 .reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<32>; .reg .b64 %d<10>;
 .shared .align 16 .b8 s[4096];
 mov.u32 %r1, %tid.x; add.u32 %r2, %r1, 3; add.u32 %r3, %r1, 5; add.u32 %r4, %r1, 9;
 ld.param.u64 %d1, [a]; mul.wide.u32 %d2, %r1, 4; add.s64 %d1, %d1, %d2;
 mov.u32 %r21, s; shl.b32 %r20, %r1, 4; add.u32 %r20, %r20, %r21; add.u32 %r20, %r20, 16;
 setp.eq.u32 %p3, %r1, 0; @%p3 mbarrier.init.shared.b64 [%r21], 1048575; bar.sync 0;
 mov.b32 %r30, 0;
{floats}
 mov.b64 %d5, {{%r1, %r2}}; mov.b64 %d6, {{%r3, %r4}}; mov.b64 %d7, %d5; mov.b64 %d8, %d6;
LOOP:
{body}
 add.s32 %r30, %r30, 1; setp.lt.s32 %p2, %r30, {_LOOPS if name != "mbarrier" else 100};
 @%p2 bra LOOP;
 ret;
}}
"""
    return text, count


def measure_class(name: str, rounds: int) -> float:
    """Warp instructions a second of one class, in millions (loop overhead included)."""
    text, _ = class_kernel(name)
    module, device = load_ptx(text), Device("sm_107a")
    memory = np.zeros(128, np.uint32)
    best = 0.0
    for _ in range(rounds):
        start = time.process_time()
        report = device.launch(module, 1, 128, [memory])
        best = max(best, report.warp_instructions / (time.process_time() - start))
    return best / 1e6


def run_gemm(launch: Any, gpu: Any) -> tuple[Report, float]:
    """One launch of the whole kernel: its report and CPU seconds."""
    start = time.process_time()
    launch()
    seconds = time.process_time() - start
    report = gpu.launches[-1].report
    assert report is not None
    return report, seconds


def measure_units(launch: Any) -> dict[str, dict[str, float]]:
    """Microseconds that Python and the functional units take for each kind of instruction."""
    spent: dict[str, list[float]] = defaultdict(list)
    original = units.bind

    def timed(site: Any, context: Any) -> Any:
        handler = original(site, context)

        def call(warp: Any, mask: int) -> bool:
            start = time.perf_counter()
            result = handler(warp, mask)
            spent[site.family].append(time.perf_counter() - start)
            return result

        return call

    with mock.patch("rubin_moe.emulator.worker.bind", timed):
        launch()
    return {
        family: {
            "count": len(times),
            "median_microseconds": round(1e6 * float(np.median(times)), 2),
        }
        for family, times in sorted(spent.items())
    }


def measure_gemm(rounds: int) -> dict[str, Any]:
    """The whole dense kernel, checked against float64 once."""
    with emulated_device("sm_107a") as gpu:
        prepared = GEMM.case().prepare()
        comparison = prepared.run(gpu)
        if not comparison.passed:
            raise SystemExit(f"the GEMM is wrong: {comparison.text}")
        runs = [run_gemm(prepared.launch, gpu) for _ in range(rounds)]
        report, seconds = min(runs, key=lambda run: run[1])
        units = measure_units(prepared.launch)
    instructions = report.warp_instructions
    return {
        "kernel": "FlashInfer dense NVFP4 GEMM, sm_107a, M = N = 512, K = 4096, tile 128x64x256",
        "warp_instructions": instructions,
        "warp_instructions_per_s": round(instructions / seconds),
        "cpu_seconds": round(seconds, 4),
        "wall_seconds": round(min(r.seconds for r, _ in runs), 4),
        "mma_count": report.mma_count,
        "bit_equal": f"{comparison.bit_equal} of {comparison.elements}",
        "units": units,
    }


def measure_threads(rounds: int) -> dict[str, Any]:
    """Wall seconds with one and with two threads, in turns: the whole kernel and ALU code."""
    kernels: dict[str, dict[str, float]] = {}
    with emulated_device("sm_107a") as gpu:
        prepared = GEMM.case().prepare()
        prepared.run(gpu)

        def gemm(workers: int) -> Report:
            gpu.device.workers = workers
            return run_gemm(prepared.launch, gpu)[0]

        kernels["whole kernel"] = _in_turns(gemm, rounds)
    module, device = load_ptx(class_kernel("integer")[0]), Device("sm_107a")
    memory = np.zeros(128, np.uint32)
    kernels["integer, 32 CTAs"] = _in_turns(
        lambda workers: device.launch(module, 32, 128, [memory], workers=workers), rounds
    )
    return {
        "what": "best wall seconds of a launch on one and on two threads, measured in turns",
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "kernels": kernels,
    }


def _in_turns(launch: Callable[[int], Report], rounds: int) -> dict[str, float]:
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for workers, times in seconds.items():
            report = launch(workers)
            if report.workers != workers:
                raise SystemExit(f"{report.kernel} ran on {report.workers} threads")
            times.append(report.seconds)
    one, two = (min(times) for times in seconds.values())
    return {
        "one_thread_s": round(one, 4),
        "two_threads_s": round(two, 4),
        "speedup": round(one / two, 2),
    }


def measure_rules(rounds: int) -> dict[str, Any]:
    """CPU seconds of peers' kernels plain and with every rule enforced, in turns."""
    cases = {case.key: case for case in CASES if case.key in RULED}
    kernels: dict[str, dict[str, float]] = {}
    for key, case in {"sm_107a dense, K = 4096": GEMM.case(), **cases}.items():
        seconds: dict[Mode | None, list[float]] = {None: [], "enforce": []}
        prepared = None
        for _ in range(rounds):
            for rules, times in seconds.items():
                with emulated_device(case.target, rules=rules) as gpu:
                    prepared = prepared or case.prepare()
                    if not prepared.run(gpu).passed:
                        raise SystemExit(f"{key} is wrong with rules {rules}")
                    times.append(run_gemm(prepared.launch, gpu)[1])
        plain, checked = (min(times) for times in seconds.values())
        kernels[key] = {
            "plain_s": round(plain, 4),
            "enforced_s": round(checked, 4),
            "ratio": round(checked / plain, 2),
        }
    return {
        "what": "best CPU seconds of a launch, plain and with rules='enforce' (poison and order)",
        "date": datetime.date.today().isoformat(),
        "load_average": round(os.getloadavg()[0], 1),
        "kernels": kernels,
    }


_STARTUP = """
import sys, time
sys.path.insert(0, {root!r})
from rubin_moe.emulator.native.compiler import runtime, source_hash
from rubin_moe.emulator import load_ptx
text = open({path!r}).read()
source_hash(); runtime()
start = time.process_time(); load_ptx(text); print(time.process_time() - start)
"""


def measure_startup() -> dict[str, Any]:
    """CPU seconds to load a kernel of 3,000 instructions, cold and from the cache."""
    lines = [line for name in ("integer", "float", "compare and select", "shared memory",
                               "packed float") for line in CLASSES[name]]  # fmt: skip
    blocks = [
        "\n".join(f" {line}" for line in lines) + f"\n@%p1 bra B{i};\n add.s32 %r1, %r1, 1;\nB{i}:"
        for i in range(3000 // (len(lines) + 2))
    ]
    text, _ = class_kernel("integer")
    head, tail = text.split("LOOP:\n")
    text = head + "LOOP:\n" + "\n".join(blocks) + "\n" + tail.split("\n", _REPEAT)[-1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(text)
        program = _STARTUP.format(root=str(ROOT), path=str(path))
        environment = {**os.environ, "RUBIN_MOE_EMULATOR_CACHE": folder}
        seconds = [
            float(subprocess.check_output([sys.executable, "-c", program], env=environment))
            for _ in range(4)
        ]
    count = len(parse_ptx(text).entries[0].instructions)
    return {
        "instructions": count,
        "cold_s": round(seconds[0], 3),
        "cached_s": round(min(seconds[1:]), 4),
    }


def main(
    rounds: Annotated[int, typer.Option(help="Repetitions; the best counts.")] = 5,
    output: Annotated[Path, typer.Option()] = ROOT / "docs/results/emulator_speed.json",
    only_threads: Annotated[bool, typer.Option(help="Measure that row alone.")] = False,
    only_rules: Annotated[bool, typer.Option(help="Measure that row alone.")] = False,
) -> None:
    """Measure and record."""
    if only_threads:
        _write(output, json.loads(output.read_text()) | {"threads": measure_threads(rounds)})
        return
    if only_rules:
        _write(output, json.loads(output.read_text()) | {"rules": measure_rules(rounds)})
        return
    classes = {name: round(measure_class(name, rounds), 1) for name in CLASSES}
    gemm = measure_gemm(rounds)
    result = {
        "what": "speed of the emulator in warp instructions a second; CPU time of one thread",
        "device": _processor(),
        "date": datetime.date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "warp_instructions_per_s": gemm["warp_instructions_per_s"],
        "alu_warp_instructions_per_s": round(1e6 * classes["integer"]),
        "million_per_s_by_class": classes,
        "whole_kernel": gemm,
        "startup": measure_startup(),
        "threads": measure_threads(rounds),
        "rules": measure_rules(rounds),
    }
    _write(output, result)


def _write(output: Path, result: dict[str, Any]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def _processor() -> str:
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    typer.run(main)
