"""Shadow memory of a checked launch: a byte for each byte, zero where the byte is defined.

Shared and tensor memory are poisoned at first, local memory too; an allocation of tensor memory is
poisoned again. Global memory is defined, except what the host marks (`GlobalMemory.mark`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rubin_moe.emulator.state.memory import SharedArena
from rubin_moe.emulator.state.tmem import LANES, MAX_COLUMNS

POISON = 0xFF
POISON_WORD = np.uint32(0xFFFFFFFF)


class ClusterShadow:
    """Shadow of a cluster's shared and tensor memory, with a cluster's interface: an operation
    performed on it moves poison as the real one moves data."""

    def __init__(self, ctas: int, limit: int, tensor_memory: bool) -> None:
        self.arena = SharedArena(ctas, limit)
        self.collectors: dict[tuple[int, str], Any] = {}
        for rank in range(ctas):
            self.arena.smem(rank).fill(POISON)
        shape = (LANES, MAX_COLUMNS)
        self._tmem = [np.full(shape, POISON_WORD) for _ in range(ctas if tensor_memory else 0)]

    def smem(self, rank: int) -> NDArray[np.uint8]:
        """Shadow of a CTA's shared memory, uint8 [bytes]."""
        return self.arena.smem(rank)

    def tmem(self, rank: int) -> NDArray[np.uint32]:
        """Shadow of a CTA's tensor memory, uint32 [128, 576]."""
        return self._tmem[rank]

    def poison_columns(self, rank: int, column: int, columns: int) -> None:
        """An allocation changed hands: what it held is gone."""
        self._tmem[rank][:, column : column + columns] = POISON_WORD
