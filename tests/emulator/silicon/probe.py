"""A probe: a small PTX kernel, its inputs, and how closely the emulator must match silicon.

Inputs come from ``RandomState``, whose stream is the same in every NumPy release. Kernels take
``(u64 in, u64 out)`` and, where ``maps`` are given, one 128-byte tensor map each over
the input buffer. They use PTX ISA 8.6 and sm_90a so that driver 580 compiles them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"
HEADER += ".extern .shared .align 1024 .b8 dyn[];\n"


@dataclass(frozen=True)
class MapSpec:
    """Arguments of ``cuTensorMapEncodeTiled`` over the input buffer from byte ``offset``.

    ``dtype`` is the driver's data-type code; dims and box in elements, strides in bytes of
    dimensions 1 and up; ``fill_nan`` is the out-of-bounds fill.
    """

    dtype: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    fill_nan: bool = False
    element_strides: tuple[int, ...] = ()
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Probe:
    """One kernel. ``ulps`` bounds the distance of float32 outputs where the ISA leaves them open;
    ``refused``: the driver does not load the kernel; ``faults``: the launch ends in an error."""

    name: str
    instruction: str
    ptx: str
    data: NDArray[np.uint8]
    out_bytes: int
    block: int = 32
    grid: int = 1
    smem: int = 0
    maps: tuple[MapSpec, ...] = ()
    ulps: int = 0
    refused: bool = False
    faults: bool = False


def entry(body: str, maps: int = 0, cluster: int = 1) -> str:
    """A kernel ``probe`` around ``body``; ``%in`` and ``%out`` hold the global pointers, ``%t`` the
    thread of the CTA, ``%i`` the thread of the grid, ``%map0``.. the tensor maps."""
    params = ["\t.param .u64 p_in", "\t.param .u64 p_out"]
    params += [f"\t.param .align 64 .b8 p_map{m}[128]" for m in range(maps)]
    addresses = "".join(
        f"\tmov.b64 %map{m}, p_map{m};\n\tcvta.param.u64 %map{m}, %map{m};\n" for m in range(maps)
    )
    return (
        HEADER
        + ".visible .entry probe(\n"
        + ",\n".join(params)
        + "\n)\n"
        + (f".reqnctapercluster {cluster}, 1, 1\n" if cluster > 1 else "")
        + "{\n"
        + "\t.reg .pred %p<16>;\n\t.reg .b16 %h<16>;\n\t.reg .b32 %a<16>, %d<132>, %r<32>;\n"
        + "\t.reg .b64 %q<16>, %map<4>;\n\t.reg .b64 %in, %out;\n\t.reg .b32 %t, %i, %c, %n;\n"
        + "\tld.param.u64 %in, [p_in];\n\tcvta.to.global.u64 %in, %in;\n"
        + "\tld.param.u64 %out, [p_out];\n\tcvta.to.global.u64 %out, %out;\n"
        + addresses
        + "\tmov.u32 %t, %tid.x;\n\tmov.u32 %c, %ctaid.x;\n\tmov.u32 %n, %ntid.x;\n"
        + "\tmad.lo.u32 %i, %c, %n, %t;\n"
        + "".join(f"\t{line.strip()}\n" for line in body.strip().splitlines())
        + "\tret;\n}\n"
    )


def elementwise(
    name: str,
    instruction: str,
    body: str,
    columns: list[NDArray[np.uint32]],
    outputs: int = 1,
    ulps: int = 0,
    block: int = 128,
) -> Probe:
    """``body`` maps 32-bit words ``%a0..`` to ``%d0..``, one thread an element."""
    count = -(-max(c.size for c in columns) // block) * block
    words = np.stack([np.resize(c.astype(np.uint32), count) for c in columns], axis=1)
    width = words.shape[1]
    lines = [f"mul.wide.u32 %q14, %i, {4 * width};", "add.u64 %q14, %q14, %in;"]
    lines += [f"ld.global.b32 %a{j}, [%q14+{4 * j}];" for j in range(width)]
    lines += [body]
    lines += [f"mul.wide.u32 %q15, %i, {4 * outputs};", "add.u64 %q15, %q15, %out;"]
    lines += [f"st.global.b32 [%q15+{4 * j}], %d{j};" for j in range(outputs)]
    return Probe(
        name,
        instruction,
        entry("\n".join(lines)),
        words.reshape(-1).view(np.uint8),
        4 * count * outputs,
        block=block,
        grid=count // block,
        ulps=ulps,
    )
