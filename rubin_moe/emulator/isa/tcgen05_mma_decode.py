"""Decoding of ``tcgen05.mma``: operands and modifiers to a :class:`Tcgen05Mma`, or a refusal.

The unit's semantics are in :mod:`.tcgen05_mma`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from .descriptors import (
    BLOCK_SCALED,
    ChunkTable,
    InstructionDescriptor,
    SmemDescriptor,
    decode_instruction,
    decode_tcgen05_smem,
)
from .elements import Element
from .footprint import Footprint, rectangle
from .legality import require

COLUMNS = {"sm_100a": 512, "sm_103a": 512, "sm_107a": 576}
"""Tensor-memory columns of an SM."""

COLLECTOR = ("discard", "fill", "use", "lastuse")


@dataclass(frozen=True)
class Tcgen05Mma:
    """One decoded ``tcgen05.mma``. ``a`` is None where A comes from tensor memory at ``a_tmem``."""

    idesc: InstructionDescriptor
    ranks: tuple[int, ...]
    d: int
    a: SmemDescriptor | None
    a_tmem: int
    b: SmemDescriptor
    sfa: int
    sfb: int
    accumulate: bool
    collector_a: str
    collector_b: str
    disabled_lanes: tuple[int, ...]
    scale_d: int

    @cached_property
    def rows(self) -> int:
        """Rows of A and D in one CTA."""
        return self.idesc.m // len(self.ranks)

    @cached_property
    def plain(self) -> bool:
        """Whether A lies in shared memory and no collector buffer is kept or used."""
        return self.a is not None and self.collector_a == self.collector_b == "discard"

    @cached_property
    def tile_a(self) -> tuple[int, ChunkTable]:
        """Where A's chunks lie in each CTA's shared memory."""
        assert self.a is not None
        return _tile(self.idesc, self.a, self.rows, self.idesc.a, self.idesc.a_mn_major)

    @cached_property
    def tile_b(self) -> tuple[int, ChunkTable]:
        """Where each CTA's share of B's chunks lies in its shared memory."""
        rows = self.idesc.n // len(self.ranks)
        return _tile(self.idesc, self.b, rows, self.idesc.b, self.idesc.b_mn_major)

    @property
    def macs(self) -> int:
        """Multiply-adds that the instruction performs (padding included)."""
        return self.idesc.m * self.idesc.n * self.idesc.k

    def useful_macs(self, rows: int, columns: int, depth: int) -> int:
        """Multiply-adds inside a problem of ``rows`` x ``columns`` x ``depth`` from this tile."""
        i = self.idesc
        return min(rows, i.m) * min(columns, i.n) * min(depth, i.k)

    def reads(self) -> list[Footprint]:
        """Shared memory of A and B, tensor memory of A, the scales and (accumulating) D."""
        return self._footprints[0]

    def writes(self) -> list[Footprint]:
        """Tensor memory of D."""
        return self._footprints[1]

    @cached_property
    def _footprints(self) -> tuple[list[Footprint], list[Footprint]]:
        blocks = d_blocks(self)
        ranges = np.concatenate([rectangle(*block[:4]) for block in blocks])
        writes = [Footprint("tmem", rank, ranges) for rank in self.ranks]
        reads = []
        for rank in self.ranks:
            if self.a is None:
                columns = self.idesc.k * self.idesc.a.bits // 32
                lane, column = _lane(self.a_tmem), self.a_tmem & 0xFFFF
                reads.append(Footprint("tmem", rank, rectangle(lane, 128 - lane, column, columns)))
            elif self.collector_a not in ("use", "lastuse"):
                reads.append(_smem_footprint(rank, *self.tile_a))
            if self.collector_b not in ("use", "lastuse"):
                reads.append(_smem_footprint(rank, *self.tile_b))
            if self.idesc.sf_vec:
                for address, rows in ((self.sfa, self.rows), (self.sfb, self.idesc.n)):
                    scales = _scale_ranges(self, address & 0xFFFF, rows, address >> 30)
                    reads.append(Footprint("tmem", rank, scales))
        return reads + (writes if self.accumulate else []), writes


def decode_mma(
    *,
    arch: str,
    kind: str,
    cta_group: int,
    rank: int,
    d: int,
    a: int,
    b: int,
    idesc: int,
    enable_input_d: bool,
    a_in_tmem: bool = False,
    sf_vec: int = 0,
    sfa: int = 0,
    sfb: int = 0,
    collector_a: str = "discard",
    collector_b: str = "discard",
    disable_output_lane: Sequence[int] = (),
    scale_input_d: int = 0,
) -> Tcgen05Mma:
    """Decode one instruction as the issuing thread of CTA ``rank`` sees it (cached by value).

    ``a`` is a shared-memory descriptor, or a tensor-memory address with ``a_in_tmem``; ``sf_vec``
    is the number of elements a scale covers as the opcode says it (``.block16``, ``.block32``,
    ``.scale_vec``; 0 for kinds without); ``sfa`` and ``sfb`` are tensor-memory addresses with the
    scale-factor id in bits 30-31. Raises :class:`~.legality.IllegalOperationError`.
    """
    return _decode_mma(
        arch,
        kind,
        cta_group,
        rank,
        d,
        a,
        b,
        idesc,
        enable_input_d,
        a_in_tmem,
        sf_vec,
        sfa,
        sfb,
        collector_a,
        collector_b,
        tuple(disable_output_lane),
        scale_input_d,
    )


@lru_cache(maxsize=16384)
def _decode_mma(
    arch: str,
    kind: str,
    cta_group: int,
    rank: int,
    d: int,
    a: int,
    b: int,
    idesc: int,
    enable_input_d: bool,
    a_in_tmem: bool,
    sf_vec: int,
    sfa: int,
    sfb: int,
    collector_a: str,
    collector_b: str,
    disable_output_lane: tuple[int, ...],
    scale_input_d: int,
) -> Tcgen05Mma:
    desc = decode_instruction(idesc, kind, arch, cta_group, sf_vec)
    require(
        collector_a in COLLECTOR and collector_b in COLLECTOR,
        "tcgen05.mma: collector",
        f"collector usage {collector_a}, {collector_b}",
    )
    require(
        collector_b == "discard" or arch == "sm_107a",
        "tcgen05.mma: collector",
        f"collector::b is not defined on {arch}",
    )
    ranks = (rank,) if cta_group == 1 else (rank & ~1, rank | 1)
    op = Tcgen05Mma(
        desc,
        ranks,
        d,
        None if a_in_tmem else decode_tcgen05_smem(a, arch),
        a if a_in_tmem else 0,
        decode_tcgen05_smem(b, arch),
        sfa,
        sfb,
        enable_input_d,
        collector_a,
        collector_b,
        disable_output_lane,
        scale_input_d,
    )
    _check_accumulator(op)
    if a_in_tmem:
        _check_a_in_tmem(op)
    if desc.sf_vec:
        _check_scales(op)
    if op.disabled_lanes:
        require(
            len(op.disabled_lanes) == 4 * cta_group and kind not in BLOCK_SCALED,
            "tcgen05.mma: disable-output-lane",
            f"{len(op.disabled_lanes)} words for kind::{kind} with cta_group::{cta_group}",
        )
    if scale_input_d:
        require(
            kind in ("f16", "tf32") and 0 <= scale_input_d <= 15,
            "tcgen05.mma: scale-input-d",
            f"2^-{scale_input_d} for kind::{kind} (0..15, kinds f16 and tf32)",
        )
    return op


def _lane(address: int) -> int:
    return (address >> 16) & 0x7F


def _check_columns(op: Tcgen05Mma, column: int, columns: int, what: str) -> None:
    limit = COLUMNS[op.idesc.arch]
    require(
        column + columns <= limit,
        "tensor memory: column",
        f"{what} takes columns {column}..{column + columns - 1} of {limit}",
    )


def _check_accumulator(op: Tcgen05Mma) -> None:
    lane = _lane(op.d)
    legal = (0, 16) if op.rows == 64 and op.idesc.cta_group == 1 else (0,)
    require(
        lane in legal and op.d >> 23 == 0,
        "tcgen05.mma: accumulator lane",
        f"D at {op.d:#010x} starts in lane {op.d >> 16}; M = {op.idesc.m} takes {legal}",
    )
    for _, _, column, columns, _ in d_blocks(op):
        _check_columns(op, column, columns, "D")


def _check_a_in_tmem(op: Tcgen05Mma) -> None:
    d = op.idesc
    require(
        not d.a_mn_major and (d.a.bits >= 8 or d.kind.startswith("mxf4")),
        "tcgen05.mma: A in tensor memory",
        f"{d.a.label} of kind::{d.kind} (major {int(d.a_mn_major)}) is not modelled there",
    )
    require(
        op.rows == 128 or (op.rows == 64 and d.cta_group == 1),
        "tcgen05.mma: A in tensor memory",
        f"M = {d.m} over {d.cta_group} CTAs is not modelled there",
    )
    require(
        op.a_tmem >> 30 == 0 and _lane(op.a_tmem) == _lane(op.d),
        "tcgen05.mma: A in tensor memory",
        f"A starts in lane {_lane(op.a_tmem)}, D in lane {_lane(op.d)}",
    )
    _check_columns(op, op.a_tmem & 0xFFFF, d.k * d.a.bits // 32, "A")


def _check_scales(op: Tcgen05Mma) -> None:
    d = op.idesc
    for side, address, sf_id, rows in (
        ("A", op.sfa, d.a_sf_id, op.rows),
        ("B", op.sfb, d.b_sf_id, d.n),
    ):
        require(
            address >> 30 == sf_id,
            "tcgen05.mma: scale factor id",
            f"SF{side} address {address:#010x} holds id {address >> 30}, the descriptor {sf_id}",
        )
        if d.k != 96:
            legal = {1: (0, 1, 2, 3), 2: (0, 2)}.get(d.num_scales, (0,))
            require(
                sf_id in legal,
                "tcgen05.mma: scale factor id",
                f"id {sf_id} of SF{side} with {d.num_scales} scales a row (legal: {legal})",
            )
        require(
            (address >> 16) & 0x3FFF == 0,
            "tcgen05.mma: scale factor lane",
            f"SF{side} at {address:#010x} does not start in lane 0",
        )
        last = _scale_ranges(op, address & 0xFFFF, rows, sf_id)[:, 3].max()
        _check_columns(op, int(last) - 1, 1, f"SF{side}")


def _scale_ranges(op: Tcgen05Mma, column: int, rows: int, first: int) -> NDArray[np.int64]:
    step = 4 * -(-rows // 128)
    words = range(first // 4, (first + op.idesc.num_scales - 1) // 4 + 1)
    return np.concatenate([rectangle(0, 128, column + step * w, -(-rows // 32)) for w in words])


def d_blocks(op: Tcgen05Mma) -> list[tuple[int, int, int, int, int]]:
    """Rectangles of D in one CTA: lane, lanes, column, columns, first column of the product."""
    column, n = op.d & 0xFFFF, op.idesc.n
    if op.rows == 128:
        return [(0, 128, column, n, 0)]
    if op.idesc.cta_group == 1:
        return [(32 * q + _lane(op.d), 16, column, n, 0) for q in range(4)]
    return [(0, 64, column, n // 2, 0), (64, 64, column, n // 2, n // 2)]


def _tile(
    desc: InstructionDescriptor, smem: SmemDescriptor, rows: int, element: Element, mn: bool
) -> tuple[int, ChunkTable]:
    if mn:
        return smem.chunks(desc.k, rows * element.bits // 128, True)
    return smem.chunks(rows, desc.row_bytes(element) // 16)


def _smem_footprint(rank: int, base: int, table: ChunkTable) -> Footprint:
    return Footprint("smem", rank, table.ranges + base)
