"""What an operation reads and writes, for a race detector and for reports.

A :class:`Footprint` names one memory: ``"smem"``, ``"tmem"`` or ``"gmem"``, the CTA rank within the
cluster (0 for global memory) and the ranges touched there:

* shared and global memory: int64 ``[n, 2]``, half-open byte intervals ``start, stop``;
* tensor memory: int64 ``[n, 4]``, half-open rectangles ``lane, lane stop, column, column stop``.

Ranges are exact up to 16 bytes of shared memory and whole 32-bit columns of tensor memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Space = Literal["smem", "tmem", "gmem"]


@dataclass(frozen=True)
class Footprint:
    """Ranges of one memory; see the module's docstring for their shape."""

    space: Space
    rank: int
    ranges: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Bytes covered (tensor memory counts four bytes a cell)."""
        r = self.ranges
        if self.space == "tmem":
            return int((4 * (r[:, 1] - r[:, 0]) * (r[:, 3] - r[:, 2])).sum())
        return int((r[:, 1] - r[:, 0]).sum())


def intervals(starts: NDArray[np.integer], width: int) -> NDArray[np.int64]:
    """Merge equal-width intervals given by their ``starts`` (any shape) into int64 ``[n, 2]``."""
    s = np.unique(np.asarray(starts, np.int64).reshape(-1))
    if s.size == 0:
        return np.zeros((0, 2), np.int64)
    breaks = np.flatnonzero(np.diff(s) > width)
    first = np.concatenate([[0], breaks + 1])
    last = np.concatenate([breaks, [s.size - 1]])
    return np.stack([s[first], s[last] + width], axis=1)


def rectangle(lane: int, lanes: int, column: int, columns: int) -> NDArray[np.int64]:
    """One tensor-memory rectangle as int64 ``[1, 4]``."""
    return np.array([[lane, lane + lanes, column, column + columns]], np.int64)
