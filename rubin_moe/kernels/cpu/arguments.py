"""The one block of numbers and addresses that all generated functions of a call share."""

from __future__ import annotations

import ctypes

from llvmlite import ir

from rubin_moe.kernels.cpu.ir import I64, PTR, Function, Value

_NUMBERS = (
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
    *("ids_wide", "weight_on_input", "tiles_per_item13", "tiles_per_item2", "gemm"),
    # results
    *("num_active", "num_groups", "bad_id", "bad_count"),
)
_ACTIVATION = ("limit", "alpha", "beta")
COUNTERS = ("pack", "fc1", "fc2", "reduce")
"""Of the stages that threads share work of."""


class Block(ctypes.Structure):
    """Addresses and sizes as int64, the activation's numbers as float32, work counters."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((name, ctypes.c_float) for name in _ACTIVATION),
        ("apart", ctypes.c_char * 64),
        # each counter on a cache line of its own
        *((name, ctypes.c_int64 * 8) for name in COUNTERS),
    )


def offset(name: str) -> int:
    """Bytes from the start of the block."""
    return int(getattr(Block, name).offset)


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
