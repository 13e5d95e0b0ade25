"""Multiplicand tiles in shared memory to float64 matrices, for ``tcgen05.mma`` and ``wgmma``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import operand_kernels as kernels
from .descriptors import ChunkTable
from .elements import ELEMENT_VALUES, Element, decode_codes
from .legality import refuse

_TABLES: dict[Element, NDArray[np.float32]] = {
    # writable copies: the compiled loops are specialised for one kind of array
    key: np.array(table)
    for key, table in ELEMENT_VALUES.items()
}
_MODES = {32: kernels.TF32, 16: kernels.BITS16, 8: kernels.BITS8, 6: kernels.PADDED6}


def value_table(element: Element) -> NDArray[np.float32]:
    """Code -> value, for the compiled loops (one entry, not used, for TF32)."""
    if element not in _TABLES:
        if element is Element.TF32:
            _TABLES[element] = np.zeros(1, np.float32)
        else:
            _TABLES[element] = np.array(decode_codes(np.arange(1 << 16), element))
    return _TABLES[element]


def decode_rows(
    memory: NDArray[np.uint8],
    base: int,
    offsets: NDArray[np.int32],
    rows: int,
    k: int,
    element: Element,
    mn_major: bool,
    packed: bool = True,
    transposed: bool = False,
) -> NDArray[np.float64]:
    """A tile as float64 ``[rows, k]`` (``[k, rows]``, transposed); ``rows`` run along M or N.

    ``offsets`` are a chunk table's, relative to ``base`` in ``memory``. ``packed`` matters for
    four-bit elements only: False has sixteen of them in the first half of each 16 bytes.
    """
    mode = _MODES.get(element.bits, kernels.PACKED4 if packed else kernels.PADDED4)
    out = np.empty((k, rows) if transposed else (rows, k))
    tile = out.T if transposed else out
    kernels.decode_elements(memory, base, offsets, mode, value_table(element), mn_major, tile)
    return out


def multiply(
    left: NDArray[np.float64],
    right: NDArray[np.float64],
    scales: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None,
) -> NDArray[np.float64]:
    """``left @ right``, float64 [M, K] by [K, N], both contiguous; M and K multiples of 4.

    ``scales`` [M, blocks] and [N, blocks] multiply the blocks of K of both sides.
    """
    if scales is None:
        scales = np.ones((left.shape[0], 1)), np.ones((right.shape[1], 1))
    out = np.empty((left.shape[0], right.shape[1]))
    kernels.multiply(left, right, *scales, left.shape[1] // scales[0].shape[1], out)
    return out


def check_bounds(memory: NDArray[np.uint8], base: int, table: ChunkTable, what: str) -> None:
    """Raise unless every chunk of the tile lies in ``memory``."""
    if base + table.top > memory.size or base + table.bottom < 0:
        refuse(
            "shared memory: out of bounds",
            f"{what} takes bytes {base + table.bottom}..{base + table.top - 1} of {memory.size}",
        )
