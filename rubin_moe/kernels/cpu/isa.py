"""What the generated code may use of this CPU, as data.

Every value is computed on vectors of 16 lanes, a tile's rows, which LLVM splits to what the CPU
has; an `Isa` only says which of the look-up and dot product instructions exist.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

from llvmlite import binding

from rubin_moe.errors import ConfigError
from rubin_moe.kernels.cpu.rules import TILE_ROWS

LANES = TILE_ROWS


@dataclass(frozen=True)
class Isa:
    """One instruction set.

    Attributes:
        name: for messages and cache keys.
        cpu, features: what LLVM's code generator is told.
        lookup: how an E2M1 code becomes a float: ``avx512`` and ``avx2`` look it up in a register,
            ``shift`` in the nibbles of an integer constant (any CPU).
        half: whether fp16 is converted by instructions.
        bf16_dot: whether pairs of bf16 are multiplied and summed in fp32 by one instruction.
        int8_dot: how bytes are multiplied and summed by four: ``vnni``, ``maddubs`` or ``wide``.
        max_tokens: rows of activations that share one decoding of a weight.
        panel_scale: power of two that activations are multiplied with, and weights divided by.
    """

    name: str
    cpu: str
    features: str
    lookup: str
    half: bool
    bf16_dot: bool
    int8_dot: str
    max_tokens: int
    panel_scale: float = 1.0


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl"})
_AVX512_DOT = _AVX512 | {"avx512bf16", "avx512vnni"}


def _isa(name: str, cpu: str, features: str) -> Isa:
    if name == "avx512-dot":
        return Isa(name, cpu, features, "avx512", True, True, "vnni", max_tokens=8)
    if name == "avx512":
        return Isa(name, cpu, features, "avx512", True, False, "maddubs", max_tokens=8)
    if name == "avx2":
        # nothing beyond AVX2 in the code: what an AVX2 machine runs, tested on any
        return Isa(name, "haswell", "", "avx2", True, False, "maddubs", 3, panel_scale=2.0**-25)
    return Isa(name, cpu, features, "shift", _is_arm(), False, "wide", max_tokens=3)


def _is_arm() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def available() -> tuple[str, ...]:
    """Names of what this CPU has, best first; ``generic`` is always the last."""
    have = {name for name, on in _features().items() if on}
    names = []
    if have >= _AVX512_DOT:
        names.append("avx512-dot")
    if have >= _AVX512:
        names.append("avx512")
    if have >= {"avx2", "fma", "f16c"}:
        names.append("avx2")
    return (*names, "generic")


def detect(name: str | None = None) -> Isa:
    """The best instruction set, or the one named. Raises ConfigError if this CPU lacks it."""
    names = available()
    chosen = name or names[0]
    if chosen not in names:
        raise ConfigError(f"this CPU has no {chosen}; it has {', '.join(names)}")
    flags = ",".join(f"{'+' if on else '-'}{flag}" for flag, on in sorted(_features().items()))
    return _isa(chosen, binding.get_host_cpu_name(), flags)


def _features() -> dict[str, bool]:
    """LLVM's names of this CPU's features; empty where LLVM cannot ask the CPU."""
    try:
        return dict(binding.get_host_cpu_features())
    except RuntimeError:
        return {}
