"""Small kernels around the instructions under test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rubin_moe.emulator import Device, Limits, Report, load_ptx

BLOCK = 128
_SUFFIX = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
_LETTER = {1: "%c", 2: "%h", 4: "%r", 8: "%d"}

REGISTERS = """
 .reg .pred %p<16>; .reg .b16 %c<16>; .reg .b16 %h<32>; .reg .b32 %r<64>; .reg .b64 %d<32>;
 .reg .b64 %addr<16>; .reg .b32 %i<8>;
"""


def module(body: str, params: str = "", target: str = "sm_107a", head: str = "") -> str:
    """A PTX module with one entry ``k``."""
    return (
        f".version 9.4\n.target {target}\n.address_size 64\n{head}\n"
        f".visible .entry k({params})\n{{\n{REGISTERS}\n{body}\n ret;\n}}\n"
    )


def elementwise(body: str, inputs: Sequence[NDArray], output: np.dtype | type) -> NDArray:
    """Run ``body`` once an element.

    Input j is in register %r<j>, %h<j> or %d<j> by its width (8-bit inputs in %c<j>); the result
    is taken from %r63, %h31, %d31 or %c15 by the width of ``output``.
    """
    count = len(inputs[0])
    padded = -(-count // BLOCK) * BLOCK
    arrays = [np.resize(np.ascontiguousarray(a), padded) for a in inputs]
    result = np.zeros(padded, output)
    lines = [
        " mov.u32 %i0, %tid.x; mov.u32 %i1, %ctaid.x;",
        f" mad.lo.u32 %i0, %i1, {BLOCK}, %i0;",
    ]
    for j, array in enumerate(arrays):
        size = array.dtype.itemsize
        lines += [
            f" ld.param.u64 %addr{j}, [p{j}]; mul.wide.u32 %addr15, %i0, {size};",
            f" add.s64 %addr{j}, %addr{j}, %addr15;",
            f" ld.global.{_SUFFIX[size]} {_LETTER[size]}{j}, [%addr{j}];",
        ]
    size = result.dtype.itemsize
    last = {1: 15, 2: 31, 4: 63, 8: 31}[size]
    lines += [
        body,
        f" ld.param.u64 %addr14, [out]; mul.wide.u32 %addr15, %i0, {size};",
        " add.s64 %addr14, %addr14, %addr15;",
        f" st.global.{_SUFFIX[size]} [%addr14], {_LETTER[size]}{last};",
    ]
    params = ", ".join([f".param .u64 p{j}" for j in range(len(arrays))] + [".param .u64 out"])
    run(module("\n".join(lines), params), [*arrays, result], padded // BLOCK, BLOCK)
    return result[:count]


def run(
    text: str,
    params: Sequence[object],
    grid: int | tuple[int, ...] = 1,
    block: int = 32,
    **options: object,
) -> Report:
    """Load and launch the only entry of ``text`` on a fresh device."""
    target = text.split(".target ")[1].split()[0]
    options.setdefault("limits", Limits(spins=20, instructions=2_000_000))
    loaded = load_ptx(
        text, deferred=options.get("seed") is not None, checked=options.get("rules") is not None
    )
    return Device(target).launch(loaded, grid, block, params, **options)  # type: ignore[arg-type]
