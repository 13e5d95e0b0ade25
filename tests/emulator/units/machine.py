"""A bare cluster for the units' tests, and independent writers of operands into its memories."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from rubin_moe.emulator.isa import wgmma

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class FakeCluster:
    """Memories of ``size`` CTAs and the dict that the MMA unit owns."""

    def __init__(self, size: int = 1, smem_bytes: int = 1 << 18) -> None:
        self.size = size
        self.collectors: dict[tuple[int, str], Any] = {}
        self._smem = [np.zeros(smem_bytes, np.uint8) for _ in range(size)]
        self._tmem = [np.zeros((128, 576), np.uint32) for _ in range(size)]

    def smem(self, rank: int) -> np.ndarray:
        return self._smem[rank]

    def tmem(self, rank: int) -> np.ndarray:
        return self._tmem[rank]


def smem_desc(start: int, lbo: int, sbo: int, swizzle: int, *, absolute: bool = False) -> int:
    """A tcgen05 shared-memory descriptor; byte values."""
    code = {0: 0, 128: 2, 64: 4, 32: 6}[swizzle]
    word = start >> 4 | (lbo >> 4) << 16 | (sbo >> 4) << 32 | 1 << 46 | code << 61
    return word | int(absolute) << 52


def multiplied(
    op: wgmma.Wgmma, smem: np.ndarray, d: np.ndarray, a: np.ndarray | None = None
) -> np.ndarray:
    """Accumulators ``[4, registers, 32]`` after a wgmma, which works in place."""
    out = d.copy()
    wgmma.multiply(op, smem, list(out), None if a is None else list(a))
    return out


def xor_swizzle(address: int, swizzle: int) -> int:
    """The PTX ISA's swizzle of one byte address, bit by bit."""
    for bit in {0: (), 32: (4,), 64: (4, 5), 128: (4, 5, 6)}[swizzle]:
        address ^= (address >> (bit + 3) & 1) << bit
    return address


def put_k_major(smem: np.ndarray, start: int, rows: np.ndarray, swizzle: int) -> tuple[int, int]:
    """Write byte ``rows`` [R, bytes] as a K-major tile; returns ``(lbo, sbo)``.

    One swizzle row a matrix row (or 16-byte columns of core matrices without swizzle).
    """
    count, width = rows.shape
    if swizzle == 0:
        sbo, lbo = 128, 128 * (-(-count // 8))
        for r in range(count):
            for byte in range(width):
                at = start + (r // 8) * sbo + (r % 8) * 16 + (byte // 16) * lbo + byte % 16
                smem[at] = rows[r, byte]
        return lbo, sbo
    assert width <= swizzle
    for r in range(count):
        for byte in range(width):
            smem[xor_swizzle(start + r * swizzle + byte, swizzle)] = rows[r, byte]
    return 16, 8 * swizzle


def put_scales(tmem: np.ndarray, column: int, scales: np.ndarray, first: int = 0) -> None:
    """Write scale bytes [rows, n] as ``tcgen05.cp`` leaves them, in all four lane quarters."""
    rows, count = scales.shape
    cells = tmem.view(np.uint8).reshape(128, -1, 4)
    for r in range(rows):
        for j in range(count):
            k = first + j
            at = column + 4 * -(-rows // 128) * (k // 4) + r // 32
            for quarter in range(4):
                cells[32 * quarter + r % 32, at, k % 4] = scales[r, j]


def pack_fp4(codes: np.ndarray) -> np.ndarray:
    """Codes [rows, K] to bytes [rows, K / 2], even K in the low nibble."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)


def block_scaled_idesc(
    kind: str, m: int, n: int, *, a: int | None = None, b: int | None = None, scale: int = 0
) -> int:
    """Instruction descriptor of a block-scaled kind; K-size bits and ids are the caller's."""
    code = 0 if kind == "mxf8f6f4" else 1
    a, b = code if a is None else a, code if b is None else b
    return a << 7 | b << 10 | (n // 8) << 17 | scale << 23 | (m // 128) << 27


def plain_idesc(kind: str, m: int, n: int, *, a: int | None = None, b: int | None = None) -> int:
    """Instruction descriptor of a plain kind with its 32-bit accumulator."""
    code = {"f16": 0, "tf32": 2, "f8f6f4": 0, "i8": 1}[kind]
    a, b = code if a is None else a, code if b is None else b
    d = 2 if kind == "i8" else 1
    return d << 4 | a << 7 | b << 10 | (n // 8) << 17 | (m // 16) << 24


class GlobalBytes:
    """Global memory of one buffer, 128-byte aligned, at its own host address."""

    def __init__(self, data: np.ndarray) -> None:
        backing = np.zeros(data.nbytes + 128, np.uint8)
        skip = -backing.ctypes.data % 128
        self.bytes = backing[skip : skip + data.nbytes]
        self.bytes[:] = data.reshape(-1).view(np.uint8)
        self.base = self.bytes.ctypes.data

    def view(self, address: int, nbytes: int) -> np.ndarray:
        offset = address - self.base
        if offset < 0 or offset + nbytes > self.bytes.size:
            raise MemoryError(f"{offset}..{offset + nbytes} of {self.bytes.size}")
        return self.bytes[offset : offset + nbytes]


def tensor_map(
    base: int,
    code: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> bytes:
    """A 128-byte tensor map; strides in bytes of dimensions 1 and up."""
    rank = len(dims)
    units = [s // 16 for s in strides] + [0] * (5 - rank)
    sizes = [d - 1 for d in dims] + [0] * (5 - rank)
    boxes = [b - 1 for b in box] + [0] * (5 - rank)
    low = [u & 0xFFFFFFFF for u in units[:4]] + [0] * (4 - len(units))
    flags = (rank - 1) << 4 | code << 7 | {0: 0, 32: 1, 64: 2, 128: 3}[swizzle] << 13
    words = [
        base,
        flags | low[0] << 32,
        low[1] | low[2] << 32,
        low[3] | sum((u >> 32) << (32 + 4 * i) for i, u in enumerate(units[:4])),
        sizes[0] | sizes[1] << 32,
        sizes[2] | sizes[3] << 32,
        sizes[4] | boxes[0] << 56,
        sum(b << 8 * i for i, b in enumerate(boxes[1:])),
    ]
    return struct.pack("<8Q", *words) + bytes(64)
