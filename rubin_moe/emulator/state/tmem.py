"""Tensor memory of one CTA: the cells, and who owns which columns.

Cells are uint32 [128 lanes, 576 columns]; a part with 512 columns leaves the rest alone. An
allocation takes all lanes of a range of columns. Addresses hold the lane in bits 16-31 (bits 30-31
are the scale-factor id where an operand is a scale) and the column in bits 0-15.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..isa.legality import require

LANES = 128
MAX_COLUMNS = 576
CAPACITY = {"sm_100a": 512, "sm_103a": 512, "sm_107a": 576}
"""Columns an SM has."""


def allocation_sizes(arch: str) -> tuple[int, ...]:
    """Legal column counts of ``tcgen05.alloc``: powers of two, and 544 and 576 on sm_107a."""
    sizes = tuple(32 << i for i in range(5))
    return sizes + tuple(range(544, CAPACITY[arch] + 1, 32))


class TensorMemory:
    """Cells and column allocations of one CTA."""

    def __init__(self, arch: str) -> None:
        require(arch in CAPACITY, "tensor memory: architecture", f"{arch} has no tensor memory")
        self.arch = arch
        self.cells: NDArray[np.uint32] = np.zeros((LANES, MAX_COLUMNS), np.uint32)
        self.allocations: dict[int, int] = {}
        self.peak = 0
        self.relinquished = False
        self.exclusive = False

    def allocate(self, columns: int, exclusive: bool = False) -> int | None:
        """Address of ``columns`` new columns, or None while there is no room (the warp waits).

        ``exclusive`` (sm_107a's ``.exclusive``) waits until nothing else is allocated and keeps
        others out until it is freed.
        """
        sizes = allocation_sizes(self.arch)
        require(
            columns in sizes,
            "tcgen05.alloc: columns",
            f"{columns} columns on {self.arch} (legal: {sizes})",
        )
        require(  # ptxas 13.4 refuses the text without the modifier
            exclusive or columns <= 512,
            "tcgen05.alloc: columns",
            f"{columns} columns without .exclusive",
        )
        require(
            not self.relinquished,
            "tcgen05.alloc: permit",
            "the CTA gave up its right to allocate (relinquish_alloc_permit)",
        )
        if self.exclusive or (exclusive and self.allocations):
            return None
        start = 0
        for at in sorted(self.allocations):
            if at - start >= columns:
                break
            start = at + self.allocations[at]
        if start + columns > CAPACITY[self.arch]:
            return None
        self.allocations[start] = columns
        self.exclusive = exclusive
        self.peak = max(self.peak, sum(self.allocations.values()))
        return start

    def free(self, address: int, columns: int) -> None:
        """Return an allocation; it must be one that ``allocate`` made, with its size."""
        held = self.allocations.get(address & 0xFFFF)
        require(
            held == columns and address >> 16 == 0,
            "tcgen05.dealloc: allocation",
            f"{columns} columns at {address:#x} are not an allocation "
            f"(held: {dict(sorted(self.allocations.items()))})",
        )
        del self.allocations[address]
        self.exclusive = False

    def relinquish(self) -> None:
        """Give up the right to allocate."""
        self.relinquished = True

    def owns(self, column: int, columns: int) -> bool:
        """Whether every column of ``column .. column + columns`` is allocated."""
        stop = column + columns
        while column < stop:
            for start, size in self.allocations.items():
                if start <= column < start + size:
                    column = start + size
                    break
            else:
                return False
        return True

    def check_freed(self) -> None:
        """Raise where an allocation outlives its CTA."""
        require(
            not self.allocations,
            "tcgen05.alloc: never freed",
            f"the CTA exits holding {dict(sorted(self.allocations.items()))}",
        )
