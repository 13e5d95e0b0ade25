"""A bare cluster for the units' tests, and independent writers of operands into its memories."""

from __future__ import annotations

from typing import Any

import numpy as np

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
