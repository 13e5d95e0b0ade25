"""Triton's kernels compiled as a launch would compile them, for any GPU and without one.

`Launches` stands in for Triton's launcher: a layer that runs while it is installed has its
kernels compiled for an architecture with the very arguments of its launches, and executed on the
emulator if the architecture is sm_90a.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rubin_moe.emulator.compile import load_ptx
from rubin_moe.emulator.launch import Device

TYPES = {
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
}


@dataclass(frozen=True)
class Source:
    """A kernel as Triton specialises it: `ASTSource`'s arguments and the launch's options."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, int], ...]

    @cache  # noqa: B019
    def compile(self, capability: int) -> Any:
        attrs = {(index,): [["tt.divisibility", 16]] for index in self.aligned}
        source = ASTSource(self.kernel, dict(self.signature), dict(self.constants), attrs)
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options=dict(self.options))


def source_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Source, list]:
    """The specialisation of one launch, and the values that are left for the parameter block."""
    names = kernel.arg_names
    options = {k: v for k, v in kwargs.items() if k not in names}
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    static = {p.name for p in kernel.params if p.is_constexpr}
    signature, constants, aligned, values = [], [], [], []
    for index, param in enumerate(kernel.params):
        value = given[param.name]
        one = value == 1 if isinstance(value, int) and not param.do_not_specialize else False
        if param.name in static or value is None or one:
            signature.append((param.name, "constexpr"))
            constants.append((param.name, value))
            continue
        address = value.data_ptr() if isinstance(value, Tensor) else value
        if address % 16 == 0 and not param.do_not_specialize:
            aligned.append(index)
        signature.append((param.name, TYPES[value.dtype] if isinstance(value, Tensor) else "i32"))
        values.append(value)
    parts = (signature, constants, aligned, sorted(options.items()))
    return Source(kernel, *map(tuple, parts)), values


class Launches:
    """What a layer started, in order.

    Attributes:
        capability: compiles for it; emulate: executes each launch (sm_90a).
        compiled: `triton.compile`'s results; reports: the emulator's.
    """

    def __init__(self, monkeypatch: Any, capability: int = 90, emulate: bool = True) -> None:
        self.capability = capability
        self.emulate = emulate
        self.compiled: list[Any] = []
        self.reports: list[Any] = []
        monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", self._run_bound())

    def _run_bound(self) -> Any:
        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self._launch(kernel, grid, args, kwargs)

        return run

    def _launch(self, kernel: Any, grid: tuple[int, ...], args: Any, kwargs: Any) -> None:
        source, values = source_of(kernel, args, kwargs)
        compiled = source.compile(self.capability)
        self.compiled.append(compiled)
        if not self.emulate:
            return
        facts = compiled.metadata
        device = Device("sm_90a")
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                device.register_range(storage.data_ptr(), storage.nbytes(), kernel.__name__)
        addresses = [v.data_ptr() if isinstance(v, Tensor) else v for v in values]
        report = device.launch(
            load_ptx(compiled.asm["ptx"]).entry(facts.name),
            grid,
            32 * facts.num_warps,
            [*addresses, 0, 0],  # Triton's scratch and profile pointers
            dynamic_smem=facts.shared,
        )
        self.reports.append(report)


def launched(function: Any) -> list[str]:
    """Names of a kernel's parameters, for messages."""
    return list(inspect.signature(function.fn).parameters)
