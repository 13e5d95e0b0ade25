"""What functional units do to poison: each operation, on shadow memory instead of memory.

A row of A or a column of B with an undefined element, or with an undefined scale, makes that row or
column of D undefined. So does D where it is added. Register taints are lane masks, uint32 a
register.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from . import copy_kernels, mma_sync, poison_kernels
from .bulk_copy import AsyncCopy, BulkCopy, TensorLoad, TensorStore, clip_box
from .tcgen05_data import WarpAccess
from .tcgen05_mma_decode import Tcgen05Mma, d_blocks
from .wgmma import Wgmma

#: No poison is stored; poison in global memory is reduced into.
NOWHERE, REDUCED = -1, -2
_ALL = np.uint32(0xFFFFFFFF)
_LANES = np.arange(32, dtype=np.uint32)
_NO_FILL = np.zeros(16, np.uint8)
Flags = NDArray[np.uint8]
Masks = NDArray[np.uint32]


class Shadow(Protocol):
    """Shadow of a cluster (`state.shadow.ClusterShadow`)."""

    collectors: dict[tuple[int, str], Any]

    def smem(self, rank: int) -> NDArray[np.uint8]:
        """Of a CTA's shared memory."""

    def tmem(self, rank: int) -> NDArray[np.uint32]:
        """Of a CTA's tensor memory."""


class GlobalShadow(Protocol):
    """Shadow of global memory (`state.memory.GlobalMemory`)."""

    def shadow(self, address: int, nbytes: int) -> NDArray[np.uint8] | None:
        """Of bytes of one range, None where all are defined."""


# ---- copies


def load_tensor(op: TensorLoad, shadow: Shadow, memory: GlobalShadow) -> None:
    """A TMA load: what the tensor holds and the fill outside it; the fill is defined."""
    t = op.map
    pitch, chunks, width, mask = t.shared_layout
    rows = len(op.rows) or t.rows
    clip = clip_box(t, op.coordinates, op.rows)
    source = memory.shadow(clip.address, clip.span) if clip is not None else None
    for rank in op.ranks:
        smem = shadow.smem(rank)
        if clip is not None and source is not None:
            copy_kernels.load_clipped(
                source, clip.offsets, clip.valid, clip.first, clip.last, smem, op.offset, pitch,
                chunks, width, mask, _NO_FILL,
            )  # fmt: skip
        elif pitch == 16 * chunks:
            smem[op.offset : op.offset + rows * pitch] = 0
        else:
            poison_kernels.define_box(smem, op.offset, rows, pitch, chunks, mask)


def store_tensor(op: TensorStore, shadow: Shadow, memory: GlobalShadow) -> int:
    """A TMA store: the offset in shared memory of poison that it stores, NOWHERE or REDUCED."""
    clip = clip_box(op.map, op.coordinates, op.rows)
    if clip is None:
        return NOWHERE
    smem = shadow.smem(op.rank)
    pitch, chunks, _, mask = op.map.shared_layout
    where = NOWHERE
    if smem[op.offset : op.offset + op.extent].any():
        where = int(
            poison_kernels.find_stored(
                smem, op.offset, pitch, chunks, mask, clip.first, clip.last, clip.valid
            )
        )
    target = memory.shadow(clip.address, clip.span)
    if target is not None:
        for offset in clip.offsets[clip.valid].tolist():
            cells = target[offset + clip.first : offset + clip.last]
            if not op.reduction:
                cells[:] = 0
            elif where == NOWHERE and cells.any():
                where = REDUCED
    return where


def copy_bulk(op: BulkCopy, shadow: Shadow, memory: GlobalShadow) -> int:
    """A bulk copy or reduction: the offset of poison that goes to global memory, NOWHERE or
    REDUCED."""
    if op.source[0] == "gmem":
        source = memory.shadow(op.source[1], op.nbytes)
    else:
        _, rank, offset = op.source
        source = shadow.smem(rank)[offset : offset + op.nbytes]
    where = NOWHERE
    for target in op.targets:
        if target[0] == "gmem":
            if source is not None and source.any():
                where = op.source[2] + int(source.argmax()) if op.source[0] == "smem" else 0
            cells = memory.shadow(target[1], op.nbytes)
            if cells is not None and not op.reduction:
                cells[:] = 0
            elif cells is not None and where == NOWHERE and cells.any():
                where = REDUCED
            continue
        cells = shadow.smem(target[1])[target[2] : target[2] + op.nbytes]
        if op.reduction:
            if source is not None:
                cells |= source
        else:
            cells[:] = 0 if source is None else source
    return where


def copy_async(op: AsyncCopy, shadow: Shadow, memory: GlobalShadow) -> None:
    """``cp.async`` of one thread; the zeros behind its source are defined."""
    smem = shadow.smem(op.rank)
    smem[op.offset : op.offset + op.size] = 0
    if op.source_size:
        source = memory.shadow(op.address, op.source_size)
        if source is not None:
            smem[op.offset : op.offset + op.source_size] = source


# ---- tensor memory and registers


def bits_of(words: NDArray[np.uint32]) -> Masks:
    """Lane masks uint32 [registers] of the entries of [registers, 32] that are not zero."""
    packed = np.packbits(words != 0, axis=1, bitorder="little")
    return packed.view("<u4").reshape(-1)


def words_of(masks: Masks) -> NDArray[np.uint32]:
    """All ones where a lane's bit is set, uint32 [registers, 32]."""
    return np.where(masks[:, None] >> _LANES & 1, _ALL, np.uint32(0))


def load_registers(op: WarpAccess, cells: NDArray[np.uint32]) -> Masks:
    """``tcgen05.ld``: taints of the registers."""
    lane, lanes, column, columns = op.box
    if not cells[lane : lane + lanes, column : column + columns].any():
        return np.zeros(op.registers, np.uint32)
    return bits_of(op.load(cells))


def store_registers(op: WarpAccess, cells: NDArray[np.uint32], taints: Masks) -> None:
    """``tcgen05.st`` of registers with these taints."""
    if taints.any() or op.packed:
        op.store(cells, words_of(taints))
    else:
        cells[op.lane, op.column] = 0


# ---- matrix instructions


def multiply(op: Tcgen05Mma, shadow: Shadow) -> None:
    """``tcgen05.mma``: poison of D in every CTA of the group."""
    columns, any_column = _side(op, shadow, "b", op.collector_b)
    rows, any_row = _side(op, shadow, "a", op.collector_a)
    n, desc = op.idesc.n, op.idesc
    for index, rank in enumerate(op.ranks):
        tmem = shadow.tmem(rank)
        own_rows, own_columns = rows[index], columns[0]
        poisoned = any_row or any_column
        if desc.sf_vec:
            own_rows, own_columns = own_rows.copy(), own_columns.copy()
            count = desc.num_scales
            for address, size, flags in (
                (op.sfa, op.rows, own_rows),
                (op.sfb, n, own_columns),
            ):
                poisoned |= poison_kernels.scale_rows(
                    tmem, address & 0xFFFF, size, address >> 30, count, flags
                )
        disabled = op.disabled_lanes[4 * index : 4 * index + 4]
        if poisoned or any(disabled):
            _spread(op, tmem, own_rows, own_columns, disabled)
        elif not op.accumulate:
            for lane, lanes, column, width, _ in d_blocks(op):
                tmem[lane : lane + lanes, column : column + width] = 0


def _side(op: Tcgen05Mma, shadow: Shadow, side: str, usage: str) -> tuple[list[Flags], bool]:
    """Poisoned rows of A in each CTA, or of all of B; from the collector buffer if that is used."""
    slot = (op.ranks[0], side)
    if usage in ("use", "lastuse"):
        flags = shadow.collectors.get(slot) or _read_side(op, shadow, side)
    else:
        flags = _read_side(op, shadow, side)
    if usage in ("fill", "use"):
        shadow.collectors[slot] = flags
    else:
        shadow.collectors.pop(slot, None)
    return flags


def _read_side(op: Tcgen05Mma, shadow: Shadow, side: str) -> tuple[list[Flags], bool]:
    desc = op.idesc
    if side == "a" and op.a is None:
        return _a_in_tensor_memory(op, shadow)
    element, mn_major = (desc.a, desc.a_mn_major) if side == "a" else (desc.b, desc.b_mn_major)
    base, table = op.tile_a if side == "a" else op.tile_b
    size = op.rows if side == "a" else desc.n // len(op.ranks)
    found, flags = False, []
    for rank in op.ranks:
        out = np.zeros(size, np.uint8)
        smem = shadow.smem(rank)
        found |= poison_kernels.tile_rows(smem, base, table.offsets, mn_major, element.bits, out)
        flags.append(out)
    return (flags if side == "a" else [np.concatenate(flags)]), found


def _a_in_tensor_memory(op: Tcgen05Mma, shadow: Shadow) -> tuple[list[Flags], bool]:
    column, columns = op.a_tmem & 0xFFFF, op.idesc.k * op.idesc.a.bits // 32
    lanes = np.concatenate([np.arange(b[0], b[0] + b[1]) for b in d_blocks(op)])
    flags = [
        (shadow.tmem(rank)[lanes, column : column + columns] != 0).any(axis=1).astype(np.uint8)
        for rank in op.ranks
    ]
    return flags, any(bool(f.any()) for f in flags)


def _spread(
    op: Tcgen05Mma,
    tmem: NDArray[np.uint32],
    rows: Flags,
    columns: Flags,
    disabled: tuple[int, ...],
) -> None:
    row = 0
    for lane, lanes, column, width, first in d_blocks(op):
        if op.rows == 64 and op.idesc.cta_group == 2:
            row = 0
        cells = tmem[lane : lane + lanes, column : column + width]
        kept = cells.copy() if any(disabled) else None
        own = columns[first : first + width]
        poison_kernels.spread(tmem, lane, column, rows[row : row + lanes], own, op.accumulate)
        row += lanes
        if kept is not None:
            word = np.array(disabled, np.uint32)
            index = np.arange(lane, lane + lanes)
            keep = (word[index >> 5] >> (index & 31).astype(np.uint32)) & 1 == 1
            cells[keep] = kept[keep]


def multiply_registers(op: mma_sync.WarpMma, a: Masks, b: Masks, c: Masks, registers: int) -> Masks:
    """``mma.sync``: taints of D's registers from those of A, B and C."""
    if not (a.any() or b.any() or c.any()):
        return np.zeros(registers, np.uint32)
    rows = _flagged(a, op.a_map[..., 0], 16)
    columns = _flagged(b, op.b_map[..., 1], 8)
    held = np.zeros((16, 8), np.bool_)
    held[op.c_map[..., 0], op.c_map[..., 1]] |= (words_of(c) != 0)[:, :, None]
    tile = rows[:, None] | columns[None, :] | held
    hit = np.asarray(tile[op.d_map[..., 0], op.d_map[..., 1]].any(axis=-1))
    return bits_of(hit.astype(np.uint32))


def _flagged(masks: Masks, index: NDArray[np.int32], size: int) -> NDArray[np.bool_]:
    """Rows (or columns) of which a tainted register holds an element."""
    flags = np.zeros(size, np.bool_)
    flags[index[words_of(masks) != 0].reshape(-1)] = True
    return flags


def multiply_warpgroup(op: Wgmma, smem: NDArray[np.uint8], d: Masks, a: Masks | None) -> Masks:
    """``wgmma``: taints uint32 [4, registers] of D from shadow memory, D's and A's taints."""
    base, table = op.tile("b")
    columns = np.zeros(op.n, np.uint8)
    found = poison_kernels.tile_rows(smem, base, table.offsets, op.b_mn_major, op.b.bits, columns)
    rows = np.zeros(64, np.uint8)
    if a is None:
        base, table = op.tile("a")
        found |= poison_kernels.tile_rows(smem, base, table.offsets, op.a_mn_major, op.a.bits, rows)
    elif a.any():
        found = True
        index = mma_sync.a_fragment(op.k, op.a)[..., 0]
        for w in range(4):
            rows[16 * w : 16 * w + 16] = _flagged(a[w], index, 16)
    held = d if op.scale_d else np.zeros_like(d)
    if not found:
        return held
    index = mma_sync.c_fragment(op.n, 16 if op.d == "f16" else 32)
    out = held.copy()
    for w in range(4):
        tile = rows[16 * w : 16 * w + 16, None] | columns[None, :]
        hit = np.asarray(tile[index[..., 0], index[..., 1]].any(axis=-1))
        out[w] |= bits_of(hit.astype(np.uint32))
    return out
