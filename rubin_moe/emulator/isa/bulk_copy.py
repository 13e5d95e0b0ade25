"""Asynchronous copies: TMA tiles, bulk copies and ``cp.async``.

Use: a ``decode_...`` function when the instruction issues, ``op.perform(cluster, memory)`` when it
completes; then, for loads, arrive with ``op.signals``: ``(rank, mbarrier offset, bytes)`` per copy.
Stores and reductions carry no signal: their bulk group completes.

``cluster`` gives ``smem(rank)`` (uint8 [bytes]); ``memory`` gives ``view(address, nbytes)``, a
bounds-checked uint8 view of global memory. Shared addresses are shared::cluster addresses
(``offset | rank << 24``).

Rules (PTX ISA, "tensor copies"): a box lies in shared memory row after row, dimension 0 innermost,
the swizzle XORs the address; elements outside the tensor read as zero and are not written.
Multicast writes the same offset in every CTA of the mask and signals there; with ``cta_group::2``
each copy signals the member of its CTA's pair that the mbarrier operand names (seen with compiled
kernels). gather4 takes four row coordinates of a two-dimensional tensor; im2col is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from ..state.tensormap import TensorMap, decode_tensormap
from . import copy_kernels as kernels
from .footprint import Footprint, intervals
from .legality import refuse, require
from .reductions import reduce_into

_NO_ROWS: tuple[int, ...] = ()
Signals = tuple[tuple[int, int, int], ...]
OFFSET = (1 << 24) - 1


class Shared(Protocol):
    """What the unit needs of the cluster."""

    def smem(self, rank: int) -> NDArray[np.uint8]:
        """Shared memory of a CTA."""


class Global(Protocol):
    """What the unit needs of global memory."""

    def view(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes ``address`` .. ``address + nbytes``, writable; raises where they are not mapped."""


class TensorLoad(NamedTuple):
    """``cp.async.bulk.tensor`` to shared memory; ``rows``: the four of gather4, or empty."""

    map: TensorMap
    coordinates: tuple[int, ...]
    rows: tuple[int, ...]
    offset: int
    ranks: tuple[int, ...]
    signals: Signals

    @property
    def nbytes(self) -> int:
        """Bytes that one copy writes to shared memory."""
        return self.map.nbytes * (len(self.rows) or 1)

    @property
    def extent(self) -> int:
        """Bytes of shared memory from the first to past the last that one copy writes."""
        return self.map.extent + (len(self.rows) - 1) * self.map.pitch * bool(self.rows)

    def perform(self, cluster: Shared, memory: Global) -> None:
        """Copy the box into every destination."""
        extent = self.extent
        for rank in self.ranks:
            smem = cluster.smem(rank)
            _check_shared(smem, self.offset, extent)
            _load(self.map, self.coordinates, self.rows, memory, smem, self.offset)

    def reads(self) -> list[Footprint]:
        """Global memory inside the tensor."""
        return [Footprint("gmem", 0, _global_ranges(self.map, self.coordinates, self.rows))]

    def writes(self) -> list[Footprint]:
        """The box in each destination (with the gaps, where the swizzle is wider than the box)."""
        return [_span("smem", rank, self.offset, self.extent) for rank in self.ranks]


@dataclass(frozen=True)
class TensorStore:
    """``cp.async.bulk.tensor`` from shared memory, or ``cp.reduce.async.bulk.tensor``."""

    map: TensorMap
    coordinates: tuple[int, ...]
    rows: tuple[int, ...]
    rank: int
    offset: int
    reduction: str

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that the box holds."""
        return self.map.nbytes * (len(self.rows) or 1)

    @property
    def extent(self) -> int:
        """Bytes of shared memory from the first to past the last of the box."""
        return self.map.extent + (len(self.rows) - 1) * self.map.pitch * bool(self.rows)

    def perform(self, cluster: Shared, memory: Global) -> None:
        """Write (or reduce) the part of the box inside the tensor."""
        smem = cluster.smem(self.rank)
        _check_shared(smem, self.offset, self.extent)
        clip = clip_box(self.map, self.coordinates, self.rows)
        if clip is None:
            return
        t = self.map
        pitch, chunks, _, mask = t.shared_layout
        target = memory.view(clip.address, clip.span)
        if not self.reduction:
            kernels.store_rows(
                smem,
                self.offset,
                pitch,
                chunks,
                mask,
                clip.first,
                clip.last,
                clip.valid,
                clip.offsets,
                target,
            )
            return
        box = np.empty((clip.valid.size, t.inner_source), np.uint8)
        kernels.gather_box(smem, self.offset, pitch, chunks, mask, box)
        for row in np.flatnonzero(clip.valid):
            at = int(clip.offsets[row])
            cells = target[at + clip.first : at + clip.last]
            new = box[row, clip.first : clip.last]
            reduce_into(cells, new, self.reduction, t.format.name)

    def reads(self) -> list[Footprint]:
        """The box in shared memory (and, reducing, its place in global memory)."""
        out = [_span("smem", self.rank, self.offset, self.extent)]
        return out + (self.writes() if self.reduction else [])

    def writes(self) -> list[Footprint]:
        """Global memory inside the tensor."""
        return [Footprint("gmem", 0, _global_ranges(self.map, self.coordinates, self.rows))]


@dataclass(frozen=True)
class BulkCopy:
    """``cp.async.bulk`` and ``cp.reduce.async.bulk`` of ``nbytes`` contiguous bytes.

    ``source`` and ``target`` are ``("gmem", address)`` or ``("smem", rank, offset)``.
    """

    source: tuple[Any, ...]
    targets: tuple[tuple[Any, ...], ...]
    nbytes: int
    signals: Signals
    reduction: str = ""
    element: str = ""

    def perform(self, cluster: Shared, memory: Global) -> None:
        """Copy, or reduce into the target."""
        data = _bytes(self.source, self.nbytes, cluster, memory)
        for target in self.targets:
            cells = _bytes(target, self.nbytes, cluster, memory)
            if self.reduction:
                reduce_into(cells, data, self.reduction, self.element)
            else:
                cells[:] = data

    def reads(self) -> list[Footprint]:
        """The source (and, reducing, the target)."""
        out = [_place(self.source, self.nbytes)]
        return out + (self.writes() if self.reduction else [])

    def writes(self) -> list[Footprint]:
        """The targets."""
        return [_place(target, self.nbytes) for target in self.targets]


@dataclass(frozen=True)
class AsyncCopy:
    """``cp.async`` of one thread: ``size`` bytes written, ``source_size`` read, the rest zeros."""

    rank: int
    offset: int
    address: int
    size: int
    source_size: int

    def perform(self, cluster: Shared, memory: Global) -> None:
        """Copy and zero-fill."""
        smem = cluster.smem(self.rank)
        _check_shared(smem, self.offset, self.size)
        middle, stop = self.offset + self.source_size, self.offset + self.size
        if self.source_size:
            smem[self.offset : middle] = memory.view(self.address, self.source_size)
        smem[middle:stop] = 0

    def reads(self) -> list[Footprint]:
        """``source_size`` bytes of global memory."""
        return [_span("gmem", 0, self.address, self.source_size)] if self.source_size else []

    def writes(self) -> list[Footprint]:
        """``size`` bytes of shared memory."""
        return [_span("smem", self.rank, self.offset, self.size)]


# ---- decoding


def decode_tensor_load(
    raw: bytes,
    coordinates: Sequence[int],
    destination: int,
    mbarrier: int,
    *,
    mode: str = "tile",
    multicast: int | None = None,
    cta_group: int = 1,
) -> TensorLoad:
    """Decode ``cp.async.bulk.tensor.Nd.shared.global``.

    ``coordinates`` are signed, innermost first; for ``tile::gather4`` the column and four rows.
    ``multicast`` is the CTA mask or None.
    """
    t = decode_tensormap(raw)
    place, rows = _coordinates(t, coordinates, mode, "tile::gather4")
    rank, offset = destination >> 24, destination & OFFSET
    barrier_rank, barrier = mbarrier >> 24, mbarrier & OFFSET
    if offset % 128:
        _misaligned(offset, 128, "tensor copy destination")
    if barrier % 8:
        _misaligned(barrier, 8, "mbarrier")
    nbytes = t.counted * (len(rows) or 1)
    if multicast is None:
        if barrier_rank != rank and not (cta_group == 2 and barrier_rank >> 1 == rank >> 1):
            refuse(
                "tensor copy: mbarrier",
                f"the mbarrier of CTA {barrier_rank} cannot count a copy into CTA {rank}",
            )
        ranks: tuple[int, ...] = (rank,)
        signals: Signals = ((barrier_rank, barrier, nbytes),)
    else:
        require(multicast != 0, "tensor copy: multicast", "the CTA mask is empty")
        ranks = tuple(r for r in range(16) if multicast >> r & 1)
        member = barrier_rank & 1
        signals = tuple(
            ((r & ~1) | member if cta_group == 2 else r, barrier, nbytes) for r in ranks
        )
    return TensorLoad(t, place, rows, offset, ranks, signals)


def decode_tensor_store(
    raw: bytes,
    coordinates: Sequence[int],
    source: int,
    *,
    mode: str = "tile",
    reduction: str = "",
) -> TensorStore:
    """Decode ``cp.async.bulk.tensor.Nd.global.shared`` and its reducing form.

    ``reduction`` is ``""`` or one of add, min, max, inc, dec, and, or, xor.
    """
    t = decode_tensormap(raw)
    place, rows = _coordinates(t, coordinates, mode, "tile::scatter4")
    # an H200 answers with an illegal instruction; loads may start before the tensor
    require(
        min(place) >= 0,
        "tensor copy: negative store coordinate",
        f"a store to {place} starts before the tensor",
    )
    if source % 128:
        _misaligned(source & OFFSET, 128, "tensor copy source")
    require(
        t.format.chunk == 16,
        "tensor copy: padded format",
        f"{t.format.name} cannot be stored from shared memory",
    )
    return TensorStore(t, place, rows, source >> 24, source & OFFSET, reduction)


def _coordinates(
    t: TensorMap, coordinates: Sequence[int], mode: str, four: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    signed = tuple([((c & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 for c in coordinates])
    if mode == "tile":
        if len(signed) != len(t.dims):
            refuse(
                "tensor copy: rank",
                f"{len(signed)} coordinates for a tensor map of rank {t.rank}",
            )
        place, rows = signed, _NO_ROWS
    elif mode == four:
        require(
            t.rank == 2 and len(signed) == 5 and t.box[1] == 1,
            "tensor copy: rows of four",
            f"{four} takes a tensor of rank 2 and boxes of one row, not rank {t.rank}, box {t.box}",
        )
        place, rows = (signed[0], 0), signed[1:]
    else:
        refuse("tensor copy: mode", f"{mode} is not modelled")
    step = t.coordinate_step
    if place[0] % step:
        # an H200 answers with an illegal instruction
        refuse(
            "tensor copy: coordinate",
            f"coordinate {place[0]} of {t.format.name} is not a multiple of {step}",
        )
    return place, rows


def decode_bulk_copy(
    source_space: str,
    source: int,
    target_space: str,
    target: int,
    nbytes: int,
    *,
    mbarrier: int | None = None,
    multicast: int | None = None,
    reduction: str = "",
    element: str = "",
) -> BulkCopy:
    """Decode ``cp.async.bulk`` or ``cp.reduce.async.bulk``; spaces are ``gmem`` and ``smem``."""
    for what, address in (("source", source), ("destination", target), ("size", nbytes)):
        _check_aligned("bulk copy: alignment", address & OFFSET, 16, what)
    from_ = ("gmem", source) if source_space == "gmem" else ("smem", source >> 24, source & OFFSET)
    if target_space == "gmem":
        return BulkCopy(from_, (("gmem", target),), nbytes, (), reduction, element)
    assert mbarrier is not None
    ranks: tuple[int, ...] = (target >> 24,)
    if multicast is not None:
        ranks = tuple(r for r in range(16) if multicast >> r & 1)
    targets = tuple(("smem", r, target & OFFSET) for r in ranks)
    signals = tuple(
        (r if multicast is not None else mbarrier >> 24, mbarrier & OFFSET, nbytes) for r in ranks
    )
    return BulkCopy(from_, targets, nbytes, signals, reduction, element)


def decode_async_copy(
    target: int, address: int, size: int, source_size: int | None = None, bypass_l1: bool = False
) -> AsyncCopy:
    """Decode ``cp.async`` of one thread; ``source_size`` below ``size`` zero-fills the rest."""
    legal = (16,) if bypass_l1 else (4, 8, 16)
    require(size in legal, "cp.async: size", f"{size} bytes (legal: {legal})")
    read = size if source_size is None else source_size
    require(0 <= read <= size, "cp.async: source size", f"{read} of {size} bytes")
    _check_aligned("cp.async: alignment", target & OFFSET, size, "destination")
    _check_aligned("cp.async: alignment", address, size, "source")
    return AsyncCopy(target >> 24, target & OFFSET, address, size, read)


# ---- boxes


@dataclass(frozen=True)
class Clip:
    """The part of a box inside its tensor, in bytes of global memory.

    Row r is at ``address + offsets[r] + first .. + last`` where ``valid[r]``.
    """

    address: int
    span: int
    offsets: NDArray[np.int64]
    valid: NDArray[np.bool_]
    first: int
    last: int


def clip_box(t: TensorMap, place: tuple[int, ...], rows: tuple[int, ...]) -> Clip | None:
    """The part of a box (of rows, for gather4 and scatter4) inside the tensor, None if empty."""
    if not rows and t.inside(place):
        return Clip(t.offset(place), t.span, t.row_offsets, t.every_row, 0, t.inner_source)
    if rows:
        relative = np.array(rows, np.int64) * t.strides[0]
        inside = np.array([0 <= r < t.dims[1] for r in rows], np.bool_)
    else:
        relative = t.row_offsets + sum(c * s for c, s in zip(place[1:], t.strides, strict=True))
        at = t.row_coordinates + np.array(place[1:], np.int64)
        inside = np.asarray(((at >= 0) & (at < np.array(t.dims[1:], np.int64))).all(axis=1))
    bits = t.format.bits
    first = max(0, -place[0]) * bits // 8
    last = min(t.box[0], t.dims[0] - place[0]) * bits // 8
    if last <= first or not inside.any():
        return None
    start = t.base + place[0] * bits // 8
    low = int(relative[inside].min()) + first
    high = int(relative[inside].max()) + last
    return Clip(start + low, high - low, relative - low, inside, first, last)


def _load(
    t: TensorMap,
    place: tuple[int, ...],
    rows: tuple[int, ...],
    memory: Global,
    smem: NDArray[np.uint8],
    offset: int,
) -> None:
    layout = t.shared_layout
    if not rows and t.inside(place):
        source = memory.view(t.offset(place), t.span)
        kernels.load_rows(source, t.row_offsets, smem, offset, *layout)
        return
    clip = clip_box(t, place, rows)
    if clip is None:
        count = len(rows) or t.rows
        clip = Clip(0, 1, np.zeros(count, np.int64), np.zeros(count, np.bool_), 0, 0)
        source = np.zeros(1, np.uint8)
    else:
        source = memory.view(clip.address, clip.span)
    kernels.load_clipped(
        source,
        clip.offsets,
        clip.valid,
        clip.first,
        clip.last,
        smem,
        offset,
        *layout,
        t.fill,
    )


def _global_ranges(
    t: TensorMap, place: tuple[int, ...], rows: tuple[int, ...]
) -> NDArray[np.int64]:
    if not rows and t.inside(place):
        return t.box_ranges + t.offset(place)
    clip = clip_box(t, place, rows)
    if clip is None:
        return np.zeros((0, 2), np.int64)
    starts = clip.address + clip.offsets[clip.valid] + clip.first
    return intervals(starts, clip.last - clip.first)


# ---- places


def _check_aligned(rule: str, value: int, alignment: int, what: str) -> None:
    require(value % alignment == 0, rule, f"{what} {value:#x} is not a multiple of {alignment}")


def _misaligned(value: int, alignment: int, what: str) -> NoReturn:
    refuse("shared memory: alignment", f"{what} {value:#x} is not a multiple of {alignment}")


def _check_shared(smem: NDArray[np.uint8], offset: int, nbytes: int) -> None:
    if offset < 0 or offset + nbytes > smem.size:
        refuse(
            "shared memory: out of bounds",
            f"bytes {offset:#x}..{offset + nbytes - 1:#x} of {smem.size}",
        )


def _bytes(
    place: tuple[Any, ...], nbytes: int, cluster: Shared, memory: Global
) -> NDArray[np.uint8]:
    if place[0] == "gmem":
        return memory.view(place[1], nbytes)
    smem = cluster.smem(place[1])
    _check_shared(smem, place[2], nbytes)
    return smem[place[2] : place[2] + nbytes]


def _place(place: tuple[Any, ...], nbytes: int) -> Footprint:
    if place[0] == "gmem":
        return _span("gmem", 0, place[1], nbytes)
    return _span("smem", place[1], place[2], nbytes)


def _span(space: Any, rank: int, start: int, nbytes: int) -> Footprint:
    return Footprint(space, rank, np.array([[start, start + nbytes]], np.int64))
