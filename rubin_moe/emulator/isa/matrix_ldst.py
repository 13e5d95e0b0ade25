"""``ldmatrix``, ``stmatrix`` and ``movmatrix``: 8 x 8 matrices of 16-bit elements.

``load_matrices(smem, addresses, num, trans)`` and ``store_matrices(...)`` take the row addresses as
int64 ``[32]`` offsets into one CTA's shared memory (thread 8 i + r names row r of matrix i; threads
past 8 * num are not looked at) and move uint32 ``[num, 32]`` registers. ``move_matrix`` transposes
in registers.

Fragments (PTX ISA, ldmatrix): thread t holds row t // 4, elements 2 (t % 4) and 2 (t % 4) + 1;
transposed, column t // 4, rows 2 (t % 4) and 2 (t % 4) + 1. ``fragment_map(trans)`` gives int32
``[32, 2, 2]``: (row, column) of both halves of a register of every thread.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .footprint import Footprint, intervals
from .legality import refuse, require


@lru_cache(maxsize=2)
def fragment_map(trans: bool) -> NDArray[np.int32]:
    """(row, column) of both 16-bit halves of a register, int32 ``[32, 2, 2]``."""
    t = np.arange(32)[:, None]
    i = np.arange(2)[None, :]
    one, other = t // 4 + 0 * i, 2 * (t % 4) + i
    pair = (other, one) if trans else (one, other)
    out = np.stack(pair, axis=-1).astype(np.int32)
    out.flags.writeable = False
    return out


def _rows(smem: NDArray[np.uint8], addresses: NDArray[np.int64], num: int) -> NDArray[np.int64]:
    require(num in (1, 2, 4), "matrix load/store: count", f".x{num} (legal: x1, x2, x4)")
    rows = np.asarray(addresses, np.int64)[: 8 * num]
    if (rows % 16).any():
        bad = int(rows[rows % 16 != 0][0])
        refuse("matrix load/store: alignment", f"row address {bad:#x} is not 16-byte aligned")
    if (rows < 0).any() or (rows + 16 > smem.size).any():
        refuse("shared memory: out of bounds", f"rows {rows.min():#x}..{rows.max() + 15:#x}")
    return rows


def load_matrices(
    smem: NDArray[np.uint8], addresses: NDArray[np.int64], num: int, trans: bool = False
) -> NDArray[np.uint32]:
    """``ldmatrix.m8n8.x<num>{.trans}.b16``: registers uint32 ``[num, 32]``."""
    rows = _rows(smem, addresses, num)
    matrices = smem[rows[:, None] + np.arange(16)].view("<u2").reshape(num, 8, 8)
    index = fragment_map(trans)
    halves = matrices[:, index[..., 0], index[..., 1]].astype(np.uint32)
    return halves[..., 0] | halves[..., 1] << np.uint32(16)


def store_matrices(
    smem: NDArray[np.uint8],
    addresses: NDArray[np.int64],
    registers: NDArray[np.uint32],
    trans: bool = False,
) -> None:
    """``stmatrix.m8n8.x<num>{.trans}.b16`` of registers uint32 ``[num, 32]``."""
    num = registers.shape[0]
    rows = _rows(smem, addresses, num)
    index = fragment_map(trans)
    matrices = np.empty((num, 8, 8), "<u2")
    matrices[:, index[:, 0, 0], index[:, 0, 1]] = registers & 0xFFFF
    matrices[:, index[:, 1, 0], index[:, 1, 1]] = registers >> 16
    smem[rows[:, None] + np.arange(16)] = matrices.view(np.uint8).reshape(8 * num, 16)


def move_matrix(registers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """``movmatrix.trans``: transpose the 8 x 8 matrix of one register, uint32 ``[32]``."""
    plain, flipped = fragment_map(False), fragment_map(True)
    matrix = np.empty((8, 8), np.uint32)
    matrix[plain[:, 0, 0], plain[:, 0, 1]] = registers & 0xFFFF
    matrix[plain[:, 1, 0], plain[:, 1, 1]] = registers >> 16
    halves = matrix[flipped[..., 0], flipped[..., 1]]
    return halves[:, 0] | halves[:, 1] << np.uint32(16)


def footprint(addresses: NDArray[np.int64], num: int, rank: int) -> Footprint:
    """The rows touched in the shared memory of CTA ``rank``."""
    return Footprint("smem", rank, intervals(np.asarray(addresses, np.int64)[: 8 * num], 16))
