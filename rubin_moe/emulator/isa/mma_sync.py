"""``mma.sync``: D = A * B + C of one warp, operands in registers.

``decode_mma_sync(shape, d, a, b, c)`` returns a :class:`WarpMma`; its ``multiply(a, b, c)`` takes
and returns uint32 ``[registers, 32]``. The index maps are exported for native compilation:
``op.a_map`` and ``op.b_map`` int32 ``[registers, 32, elements a register, 2]`` of (row, k) and
(k, column); ``op.c_map`` the same of (row, column).

Fragments (PTX ISA, "matrix fragments for mma.m16n8k..."), group g = lane // 4, t = lane % 4, with e
elements a register: A registers 0..3 hold rows g, g + 8, g, g + 8 at k = e t + i, the last two
4 e further; B registers hold column g at k = e t + i, the second 4 e further; C and D hold rows g
and g + 8 at columns 2 t and 2 t + 1, float16 two to a register.

Arithmetic: as an H200 does it, to the bit (`fragment_kernels.aligned_sums`): of the products and C,
all below 2^-25 of the largest's power of two is dropped, and the sum truncated to float32 or
rounded to float16. FP8 products are exact and rounded once, int32 wraps or saturates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from . import fragment_kernels as kernels
from .elements import Element, decode_codes
from .legality import refuse, require

TYPES = {
    "f16": Element.F16,
    "bf16": Element.BF16,
    "tf32": Element.TF32,
    "e4m3": Element.E4M3,
    "e5m2": Element.E5M2,
    "s8": Element.S8,
    "u8": Element.U8,
}
"""PTX type name -> element."""

ALIGNMENT = 25
"""Bits below the largest exponent that take part in a sum of 16-bit or TF32 products."""

_DEPTHS = {"f16": (8, 16), "bf16": (8, 16), "tf32": (4, 8), "e4m3": (16, 32), "e5m2": (16, 32)}
_DEPTHS |= {"s8": (16, 32), "u8": (16, 32)}


def a_fragment(k: int, element: Element) -> NDArray[np.int32]:
    """(row, k) of every element of A's registers in a 16 x k tile."""
    e = 32 // element.bits
    registers = 16 * k // (32 * e)
    j = np.arange(registers)[:, None, None]
    lane = np.arange(32)[None, :, None]
    i = np.arange(e)[None, None, :]
    row = lane // 4 + 8 * (j % 2) + 0 * i
    depth = e * (lane % 4) + i + 4 * e * (j // 2)
    return np.stack([row, depth], axis=-1).astype(np.int32)


def b_fragment(k: int, element: Element) -> NDArray[np.int32]:
    """(k, column) of every element of B's registers in a k x 8 tile."""
    e = 32 // element.bits
    registers = 8 * k // (32 * e)
    j = np.arange(registers)[:, None, None]
    lane = np.arange(32)[None, :, None]
    i = np.arange(e)[None, None, :]
    depth = e * (lane % 4) + i + 4 * e * j
    return np.stack([depth, lane // 4 + 0 * depth], axis=-1).astype(np.int32)


def c_fragment(n: int, bits: int) -> NDArray[np.int32]:
    """(row, column) of every element of the accumulator's registers in a 16 x n tile."""
    e = 32 // bits
    j = np.arange(16 * n // (32 * e))[:, None, None]
    lane = np.arange(32)[None, :, None]
    i = np.arange(e)[None, None, :]
    flat = j * e + i  # index of the element within the thread
    row = lane // 4 + 8 * (flat // 2 % 2)
    column = 8 * (flat // 4) + 2 * (lane % 4) + flat % 2
    return np.stack(np.broadcast_arrays(row, column), axis=-1).astype(np.int32)


def unpack(registers: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    """Codes uint32 ``[registers, 32, 32 // bits]``, low bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (registers[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)


def pack(codes: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    """Inverse of :func:`unpack`."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return np.asarray(np.bitwise_or.reduce(codes.astype(np.uint32) << shifts, axis=-1))


def gather(
    registers: NDArray[np.uint32],
    index: NDArray[np.int32],
    shape: tuple[int, int],
    element: Element,
) -> NDArray[np.float64]:
    """The float64 tile that registers hold under an index map."""
    out = np.empty(shape)
    values = decode_codes(unpack(registers, element.bits), element)
    out[index[..., 0], index[..., 1]] = values
    return out


def read_accumulator(
    registers: NDArray[np.uint32], index: NDArray[np.int32], shape: tuple[int, int], form: str
) -> NDArray[np.float64]:
    """The float64 tile of an accumulator of form f16, f32 or s32."""
    bits = 16 if form == "f16" else 32
    codes = unpack(registers, bits)
    if form == "f16":
        values = codes.astype(np.uint16).view(np.float16).astype(np.float64)
    elif form == "f32":
        values = codes.view(np.float32).astype(np.float64)
    else:
        values = codes.view(np.int32).astype(np.float64)
    out = np.empty(shape)
    out[index[..., 0], index[..., 1]] = values
    return out


def write_accumulator(
    tile: NDArray[np.float64], index: NDArray[np.int32], form: str, saturate: bool = False
) -> NDArray[np.uint32]:
    """Round a tile once to form f16, f32 or s32 and lay it out as registers."""
    values = tile[index[..., 0], index[..., 1]]
    with np.errstate(over="ignore", invalid="ignore"):
        if form == "f16":
            return pack(values.astype(np.float16).view(np.uint16).astype(np.uint32), 16)
        if form == "f32":
            return pack(values.astype(np.float32).view(np.uint32), 32)
    whole = values.astype(np.int64)
    if saturate:
        whole = np.clip(whole, -(1 << 31), (1 << 31) - 1)
    return pack((whole & 0xFFFFFFFF).astype(np.uint32), 32)


@dataclass(frozen=True, eq=False)
class WarpMma:
    """One form of ``mma.sync``; see the module's docstring for the maps."""

    k: int
    a: Element
    b: Element
    c: str
    d: str
    saturate: bool
    a_map: NDArray[np.int32]
    b_map: NDArray[np.int32]
    c_map: NDArray[np.int32]
    d_map: NDArray[np.int32]

    @property
    def macs(self) -> int:
        """Multiply-adds of the instruction."""
        return 16 * 8 * self.k

    def multiply(
        self, a: NDArray[np.uint32], b: NDArray[np.uint32], c: NDArray[np.uint32]
    ) -> NDArray[np.uint32]:
        """D's registers uint32 ``[registers, 32]`` from A's, B's and C's."""
        left = gather(a, self.a_map, (16, self.k), self.a)
        right = gather(b, self.b_map, (self.k, 8), self.b)
        total = read_accumulator(c, self.c_map, (16, 8), self.c)
        with np.errstate(invalid="ignore", over="ignore"):
            if self.a.bits == 8:
                total += left @ right
                return write_accumulator(total, self.d_map, self.d, self.saturate)
            kernels.aligned_sums(left, right, ALIGNMENT, total)
        if self.d == "f32":
            out = np.empty((4, 32), np.uint32)
            kernels.write_f32(total, 0, 23, out)
            return out
        return write_accumulator(total, self.d_map, self.d, self.saturate)


@lru_cache(maxsize=128)
def decode_mma_sync(shape: str, d: str, a: str, b: str, c: str, saturate: bool = False) -> WarpMma:
    """Decode the qualifiers of ``mma.sync.aligned.<shape>.row.col.<d>.<a>.<b>.<c>``."""
    require(shape.startswith("m16n8k"), "mma.sync: shape", f"{shape} is not modelled")
    if a not in TYPES or b not in TYPES:
        refuse("mma.sync: type", f"{a} x {b} is not modelled")
    k = int(shape.removeprefix("m16n8k"))
    left, right = TYPES[a], TYPES[b]
    require(k in _DEPTHS[a], "mma.sync: shape", f"{shape} of {a} (legal K: {_DEPTHS[a]})")
    pair = {a, b}
    mixed = pair <= {"e4m3", "e5m2"} or pair <= {"s8", "u8"}
    require(len(pair) == 1 or mixed, "mma.sync: type", f"{a} x {b} cannot be mixed")
    if pair <= {"s8", "u8"}:
        legal = {("s32", "s32")}
    elif pair == {"f16"}:
        legal = {("f16", "f16"), ("f32", "f32"), ("f16", "f32"), ("f32", "f16")}
    elif mixed:
        legal = {("f32", "f32"), ("f16", "f16")}
    else:
        legal = {("f32", "f32")}
    require((d, c) in legal, "mma.sync: accumulator", f"D {d} and C {c} for {a} x {b}")
    require(not saturate or d == "s32", "mma.sync: satfinite", f"satfinite on {d}")
    return WarpMma(
        k=k,
        a=left,
        b=right,
        c=c,
        d=d,
        saturate=saturate,
        a_map=a_fragment(k, left),
        b_map=b_fragment(k, right),
        c_map=c_fragment(8, 16 if c == "f16" else 32),
        d_map=c_fragment(8, 16 if d == "f16" else 32),
    )
