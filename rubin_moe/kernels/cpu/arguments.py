"""The one block of numbers and addresses that all generated functions of a call share."""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from rubin_moe.kernels.cpu.ir import I64, PTR, Function, Value

_SLOTS = (
    # a call's tensors
    *("x", "ids", "weights", "expert_map", "out"),
    # workspace
    *("cursor", "order", "position", "active", "first_group", "group_start"),
    *("panel13", "panel2", "y", "zeros"),
    # prepared weights; no bias: zeros, with a stride of 0
    *("codes13", "scales13", "dec13", "bias13", "bias13_stride"),
    *("codes2", "scales2", "dec2", "bias2", "bias2_stride"),
    # sizes
    *("num_tokens", "top_k", "hidden", "intermediate", "num_experts", "num_global", "block"),
    *("ids_wide", "weight_on_input", "tiles_per_item", "gemm"),
    # of the activation, float32
    *("limit", "alpha", "beta"),
    # results
    *("num_active", "num_groups", "bad_id", "bad_count"),
)
COUNTERS = ("pack", "fc1", "fc2", "reduce")
_LINE = 64
_COUNTERS_AT = -(-len(_SLOTS) * 8 // _LINE) * _LINE


def offset(name: str) -> int:
    """Byte offset of a slot, or of a work counter (each on a cache line of its own)."""
    if name in COUNTERS:
        return _COUNTERS_AT + _LINE * COUNTERS.index(name)
    return 8 * _SLOTS.index(name)


class Arguments:
    """The block as Python writes it."""

    def __init__(self) -> None:
        self._words = np.zeros((_COUNTERS_AT + _LINE * len(COUNTERS)) // 8, dtype=np.int64)
        self._floats = self._words.view(np.float32)
        self.address = self._words.ctypes.data

    def set(self, **values: int) -> None:
        for name, value in values.items():
            self._words[_SLOTS.index(name)] = value

    def set_float(self, **values: float) -> None:
        for name, value in values.items():
            self._floats[2 * _SLOTS.index(name)] = value

    def get(self, name: str) -> int:
        return int(self._words[_SLOTS.index(name)])


class Slots:
    """The block as generated code reads it, each slot once, at the top of a function."""

    def __init__(self, f: Function) -> None:
        self.f, self.block = f, f.args[0]
        self._read: dict[str, Value] = {}

    def number(self, name: str, t: ir.Type = I64) -> Value:
        if name not in self._read:
            with self.f.b.goto_entry_block():
                self._read[name] = self.f.load(self.block, t, offset(name))
        return self._read[name]

    def pointer(self, name: str) -> Value:
        key = f"*{name}"
        if key not in self._read:
            with self.f.b.goto_entry_block():
                at = self.f.load(self.block, I64, offset(name))
                self._read[key] = Value(self.f.b, self.f.b.inttoptr(at.ir, PTR))
        return self._read[key]
