"""``tcgen05.ld``, ``tcgen05.st`` and ``tcgen05.cp``: data in and out of tensor memory.

Loads and stores are synchronous warp collectives here (the engine orders their completion):

* ``fragment_map(shape, num)`` gives int32 ``[registers, 32]`` arrays of lane and column offsets of
  every register of every thread, to be compiled or indexed;
* ``decode_access`` checks an access and returns a :class:`WarpAccess`, whose ``load(cells)`` and
  ``store(cells, registers)`` move uint32 ``[registers, 32]``.

Fragments (PTX ISA, "matrix fragments for shape ..."), thread t, register j, unit u of the repeat:

==========  =======================  ==================================================
32x32b      j = u                    lane t, column j
16x64b      j = u                    lane 8 (t % 2) + t // 4, column 2 u + t // 2 % 2
16x128b     j = 2 u + h              lane t // 4 + 8 h, column 4 u + t % 4
16x256b     j = 4 u + 2 h + i        lane t // 4 + 8 h, column 8 u + 2 (t % 4) + i
16x32bx2    j = u                    lane t % 16, column u (+ the split offset for t >= 16)
==========  =======================  ==================================================

With ``.pack::16b`` a register holds the low halves of two neighbouring columns, so the column
offsets double; ``.unpack::16b`` writes them back, clearing the upper halves.

``tcgen05.cp`` (asynchronous: ``decode_copy``, then ``perform(op, cluster)``) copies rows of a
K-major tile in shared memory to lanes, 16 bytes to four columns:

==================  =====================================  =======
128x256b, 128x128b  row r to lane r                        32, 16 bytes a row
4x256b              row r to lane (address lane) + 32 r    32 bytes a row
64x128b             02_13: row r to lanes r and r + 64;    16 bytes a row
                    01_23: rows 0-31 to lanes 0-63 twice,
                    rows 32-63 to lanes 64-127 twice
32x128b             row r to lanes r, r + 32, +64, +96     16 bytes a row
==================  =====================================  =======

``b8x16.b4x16_p64`` and ``b8x16.b6x16_p32`` expand sixteen packed codes to a byte each, the code in
the low bits. ``tcgen05.shift`` is refused: no kernel that we know of uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn, Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ..state.tmem import CAPACITY
from .descriptors import TCGEN05_ARCHS, ChunkTable, SmemDescriptor, decode_tcgen05_smem
from .footprint import Footprint, rectangle
from .legality import refuse, require
from .operands import check_bounds

Index = NDArray[np.int32]

SHAPES = {
    "32x32b": (32, 1, 1, 128),
    "16x64b": (16, 2, 1, 128),
    "16x128b": (16, 4, 2, 64),
    "16x256b": (16, 8, 4, 32),
    "16x32bx2": (16, 1, 1, 128),
}
"""Shape -> lanes, columns a unit, registers a unit, largest repeat."""


@lru_cache(maxsize=256)
def fragment_map(shape: str, num: int) -> tuple[Index, Index]:
    """Lane and column offsets, int32 ``[registers, 32]`` each, read-only."""
    _, columns, registers, _ = SHAPES[shape]
    t = np.arange(32)[None, :]
    j = np.arange(registers * num)[:, None]
    u, inner = j // registers, j % registers
    if shape == "32x32b":
        lane, column = t + 0 * j, j + 0 * t
    elif shape == "16x64b":
        lane, column = 8 * (t % 2) + t // 4 + 0 * j, 2 * u + t // 2 % 2
    elif shape == "16x128b":
        lane, column = t // 4 + 8 * inner, columns * u + t % 4
    elif shape == "16x256b":
        lane, column = t // 4 + 8 * (inner // 2), columns * u + 2 * (t % 4) + inner % 2
    else:
        lane, column = t % 16 + 0 * j, j + 0 * t
    out = tuple(
        np.ascontiguousarray(np.broadcast_to(x, (j.size, 32)), np.int32) for x in (lane, column)
    )
    for x in out:
        x.flags.writeable = False
    return out[0], out[1]


@dataclass(frozen=True)
class WarpAccess:
    """One ``tcgen05.ld`` or ``tcgen05.st`` of a warp.

    ``lane`` and ``column`` int32 ``[registers, 32]`` are absolute; ``packed`` says that each
    register holds the low halves of ``column`` and ``column + 1``.
    """

    shape: str
    num: int
    packed: bool
    lane: Index
    column: Index
    box: tuple[int, int, int, int]

    @property
    def registers(self) -> int:
        """Registers of each thread."""
        return int(self.lane.shape[0])

    def load(self, cells: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Registers uint32 ``[registers, 32]`` from tensor memory."""
        if not self.packed:
            return cells[self.lane, self.column]
        low = cells[self.lane, self.column] & np.uint32(0xFFFF)
        return low | cells[self.lane, self.column + 1] << np.uint32(16)

    def store(self, cells: NDArray[np.uint32], registers: NDArray[np.uint32]) -> None:
        """Write registers uint32 ``[registers, 32]`` to tensor memory."""
        if not self.packed:
            cells[self.lane, self.column] = registers
            return
        cells[self.lane, self.column] = registers & np.uint32(0xFFFF)
        cells[self.lane, self.column + 1] = registers >> np.uint32(16)

    def footprint(self, rank: int) -> Footprint:
        """The cells touched, as one rectangle (two column ranges of 16x32bx2 are joined)."""
        return Footprint("tmem", rank, rectangle(*self.box))


@lru_cache(maxsize=8192)
def decode_access(
    arch: str,
    shape: str,
    num: int,
    address: int,
    warp: int,
    packed: bool = False,
    half_split: int = 0,
) -> WarpAccess:
    """Check and resolve an access of warp ``warp`` (its index in the CTA) at ``address``."""
    require(arch in TCGEN05_ARCHS, "tensor memory: architecture", f"{arch} has no tensor memory")
    if shape not in SHAPES:
        refuse("tcgen05.ld/st: shape", f"{shape} (known: {', '.join(SHAPES)})")
    lanes, columns, _, largest = SHAPES[shape]
    require(
        num in (1, 2, 4, 8, 16, 32, 64, 128) and num <= largest,
        "tcgen05.ld/st: repeat",
        f".x{num} of {shape} (at most .x{largest})",
    )
    first = address >> 16
    quarter = 32 * (warp % 4)
    if first < 32:
        # Kernels that run on real parts leave the quarter out (FlashInfer's FC1 for sm_107): the
        # hardware adds the warp's own. An address that names another quarter is an error.
        first += quarter
    require(
        quarter <= first and first + lanes <= quarter + 32 and first % 16 == 0,
        "tensor memory: lane quarter",
        f"warp {warp} reaches lanes {quarter}..{quarter + 31}, not {first}..{first + lanes - 1}",
    )
    lane, column = fragment_map(shape, num)
    factor = 2 if packed else 1
    extent = columns * num * factor
    start = address & 0xFFFF
    column = column * factor + start
    if shape == "16x32bx2":
        column = column + half_split * (np.arange(32) >= 16)
        extent += max(half_split, 0)
    require(
        start + extent <= CAPACITY[arch],
        "tensor memory: column",
        f"columns {start}..{start + extent - 1} of {CAPACITY[arch]}",
    )
    return WarpAccess(
        shape,
        num,
        packed,
        (lane + first).astype(np.int32),
        column.astype(np.int32),
        (first, lanes, start, extent),
    )


def refuse_shift() -> NoReturn:
    """``tcgen05.shift`` is not modelled."""
    refuse("tcgen05.shift: not modelled", "no kernel that we know of uses it")


# ---- tcgen05.cp

COPIES = {
    ("128x256b", ""): (128, 2),
    ("128x128b", ""): (128, 1),
    ("4x256b", ""): (4, 2),
    ("64x128b", "warpx2::02_13"): (64, 1),
    ("64x128b", "warpx2::01_23"): (64, 1),
    ("32x128b", "warpx4"): (32, 1),
}
"""(shape, multicast) -> rows and 16-byte chunks a row."""

EXPANSIONS = {"": 0, "b8x16.b4x16_p64": 4, "b8x16.b6x16_p32": 6}


class Cluster(Protocol):
    """What the unit needs of the cluster."""

    def smem(self, rank: int) -> NDArray[np.uint8]:
        """Shared memory of a CTA."""

    def tmem(self, rank: int) -> NDArray[np.uint32]:
        """Tensor memory of a CTA."""


@dataclass(frozen=True)
class Tcgen05Copy:
    """One decoded ``tcgen05.cp``; ``targets`` int32 [rows, copies] are the lanes of each row."""

    shape: str
    ranks: tuple[int, ...]
    source: SmemDescriptor
    base: int
    table: ChunkTable
    targets: Index
    column: int
    expand: int

    @property
    def nbytes(self) -> int:
        """Bytes read from each CTA's shared memory."""
        return int(self.table.offsets.size) * 16

    def reads(self) -> list[Footprint]:
        """The tile in each CTA's shared memory."""
        return [Footprint("smem", rank, self.table.ranges + self.base) for rank in self.ranks]

    def writes(self) -> list[Footprint]:
        """The lanes written in each CTA's tensor memory."""
        lanes = np.unique(self.targets)
        columns = 4 * self.table.offsets.shape[1]
        if lanes.size == 4:
            boxes = [rectangle(int(lane), 1, self.column, columns) for lane in lanes]
            ranges = np.concatenate(boxes)
        else:
            ranges = rectangle(0, 128, self.column, columns)
        return [Footprint("tmem", rank, ranges) for rank in self.ranks]


@lru_cache(maxsize=16384)
def decode_copy(
    arch: str,
    shape: str,
    multicast: str,
    cta_group: int,
    rank: int,
    address: int,
    descriptor: int,
    expansion: str = "",
) -> Tcgen05Copy:
    """Decode one ``tcgen05.cp`` issued in CTA ``rank``."""
    require(arch in TCGEN05_ARCHS, "tensor memory: architecture", f"{arch} has no tensor memory")
    if (shape, multicast) not in COPIES:
        refuse("tcgen05.cp: shape", f"{shape} with multicast {multicast or 'none'} is not defined")
    if expansion not in EXPANSIONS:
        refuse("tcgen05.cp: format", f"{expansion} is not modelled")
    rows, chunks = COPIES[shape, multicast]
    lane, column = address >> 16, address & 0xFFFF
    legal = range(32) if shape == "4x256b" else range(1)
    require(lane in legal, "tcgen05.cp: lane", f"{shape} starts in lane {lane}")
    require(
        column + 4 * chunks <= CAPACITY[arch],
        "tensor memory: column",
        f"columns {column}..{column + 4 * chunks - 1} of {CAPACITY[arch]}",
    )
    source = decode_tcgen05_smem(descriptor, arch)
    base, table = source.chunks(rows, chunks)
    ranks = (rank,) if cta_group == 1 else (rank & ~1, rank | 1)
    targets = _copy_lanes(shape, multicast) + np.int32(lane)
    return Tcgen05Copy(shape, ranks, source, base, table, targets, column, EXPANSIONS[expansion])


def _copy_lanes(shape: str, multicast: str) -> Index:
    rows, _ = COPIES[shape, multicast]
    r = np.arange(rows, dtype=np.int32)[:, None]
    if shape == "4x256b":
        return 32 * r
    if multicast == "warpx4":
        return r + 32 * np.arange(4, dtype=np.int32)
    if multicast == "warpx2::02_13":
        return r + 64 * np.arange(2, dtype=np.int32)
    if multicast == "warpx2::01_23":
        return r % 32 + 64 * (r // 32) + 32 * np.arange(2, dtype=np.int32)
    return r


def perform(op: Tcgen05Copy, cluster: Cluster) -> None:
    """Copy the tile in every CTA of the group."""
    base, offsets = op.base, op.table.offsets
    for rank in op.ranks:
        smem = cluster.smem(rank)
        if base + op.table.top > smem.size or base + op.table.bottom < 0:
            check_bounds(smem, base, op.table, "tcgen05.cp")
        tmem = cluster.tmem(rank)
        if op.expand:
            _expand_rows(smem, base, offsets, op.targets, tmem, op.column, op.expand)
        else:
            _copy_rows(smem, base, offsets, op.targets, tmem, op.column)


@njit(nogil=True, error_model="numpy", cache=True)
def _copy_rows(smem, base, offsets, targets, tmem, column):
    """16-byte chunks of shared memory to four columns of every target lane."""
    words = smem[: smem.size & ~3].view(np.uint32)
    for r in range(offsets.shape[0]):
        for c in range(offsets.shape[1]):
            src = (base + offsets[r, c]) >> 2
            to = column + 4 * c
            for copy in range(targets.shape[1]):
                lane = targets[r, copy]
                for w in range(4):
                    tmem[lane, to + w] = words[src + w]


@njit(nogil=True, error_model="numpy", cache=True)
def _expand_rows(smem, base, offsets, targets, tmem, column, expand):
    """As ``_copy_rows``, each chunk sixteen codes of ``expand`` bits put into a byte each."""
    for r in range(offsets.shape[0]):
        for c in range(offsets.shape[1]):
            src = base + offsets[r, c]
            for w in range(4):
                word = np.uint32(0)
                for i in range(4):
                    at = 4 * w + i
                    if expand == 4:
                        shift = np.uint32(4 * (at % 2))
                        byte = (np.uint32(smem[src + at // 2]) >> shift) & np.uint32(15)
                    else:
                        bit = 6 * at
                        pair = np.uint32(smem[src + bit // 8])
                        pair |= np.uint32(smem[src + bit // 8 + 1]) << np.uint32(8)
                        byte = (pair >> np.uint32(bit % 8)) & np.uint32(63)
                    word |= byte << np.uint32(8 * i)
                for copy in range(targets.shape[1]):
                    tmem[targets[r, copy], column + 4 * c + w] = word
