"""``tcgen05.mma``: D = A * B (+ D) on tensor memory, by one CTA or a pair.

Use: ``op = decode_mma(...)`` when the instruction issues (everything illegal is refused there),
``perform(op, cluster)`` when it completes. ``cluster`` gives ``smem(rank)`` (uint8 [bytes]),
``tmem(rank)`` (uint32 [128, 576], lanes by columns) and ``collectors``, a dict that this module
owns (empty when the cluster starts).

Arithmetic. Operands decode exactly; all products and their sum with the accumulator are formed in
float64, and the result is rounded once to the accumulator's format (float32 and float16 to nearest
even; int32 wraps, or saturates where the descriptor says so). A sum of at most 128 such products
is exact in float64 unless exponents spread over more than 53 bits. Hardware does not document its
internal width; every result that it can represent exactly agrees.

Data paths (PTX ISA, "data path layout organization"): M = 128 and M = 256 over two CTAs hold row r
of the CTA in lane r; M = 64 holds row r in lane 32 * (r // 16) + r % 16 (+ 16 where the address
says lane 16); M = 128 over two CTAs holds rows of 64 with the columns of the second half of N in
lanes 64-127. Two CTAs: each holds its rows of A, SFA and D, its half of B's rows, and all of SFB.

Collector buffers hold decoded operands: ``fill`` keeps what was read, ``use`` and ``lastuse`` take
what is there whatever the descriptor points to, every other instruction empties the buffer. So a
reuse of stale contents computes with the stale contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from . import operand_kernels as kernels
from .descriptors import ChunkTable, InstructionDescriptor
from .elements import ELEMENT_VALUES, SCALE_VALUES, Element, decode_codes
from .legality import refuse, require
from .tcgen05_mma_decode import Tcgen05Mma, d_blocks, decode_mma

__all__ = ["Cluster", "Tcgen05Mma", "decode_mma", "perform"]


class Cluster(Protocol):
    """What the unit needs of the cluster it runs in."""

    collectors: dict[tuple[int, str], Any]

    def smem(self, rank: int) -> NDArray[np.uint8]:
        """Shared memory of a CTA."""

    def tmem(self, rank: int) -> NDArray[np.uint32]:
        """Tensor memory of a CTA, [128, 576]."""


def _bounded(smem: NDArray[np.uint8], base: int, table: ChunkTable, side: str) -> None:
    if base + table.top > smem.size or base + table.bottom < 0:
        refuse(
            "shared memory: out of bounds",
            f"{side} takes bytes {base + table.bottom}..{base + table.top - 1} of {smem.size}",
        )


def _code_table(element: Element) -> NDArray[np.float32]:
    table = _CODE_TABLES.get(element)
    if table is None:
        if element is Element.TF32:
            table = np.zeros(1, np.float32)
        else:
            table = np.ascontiguousarray(decode_codes(np.arange(1 << 16), element))
        _CODE_TABLES[element] = table
    return table


_CODE_TABLES: dict[Element, NDArray[np.float32]] = {
    key: np.array(table) for key, table in ELEMENT_VALUES.items()
}


def _mode(desc: InstructionDescriptor, element: Element) -> int:
    if element.bits == 32:
        return kernels.TF32
    if element.bits == 16:
        return kernels.BITS16
    if element.bits == 8:
        return kernels.BITS8
    if element.bits == 6:
        return kernels.PADDED6
    return kernels.PACKED4 if desc.packed(element) else kernels.PADDED4


_NO_SCALES = np.ones((1, 1))


def _decode(
    desc: InstructionDescriptor,
    memory: NDArray[np.uint8],
    base: int,
    offsets: NDArray[np.int32],
    rows: int,
    element: Element,
    mn_major: bool,
) -> NDArray[np.float64]:
    out = np.empty((rows, desc.k))
    kernels.decode_elements(
        memory,
        base,
        offsets,
        _mode(desc, element),
        _code_table(element),
        mn_major,
        _NO_SCALES,
        0,
        out,
    )
    return out


def _a_bytes_from_tmem(op: Tcgen05Mma, tmem: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """A's rows as the packed bytes of tensor memory, [rows, K * bits / 8]."""
    column, columns = op.a_tmem & 0xFFFF, op.idesc.k * op.idesc.a.bits // 32
    lanes = np.concatenate([np.arange(b[0], b[0] + b[1]) for b in d_blocks(op)])
    return np.ascontiguousarray(tmem[lanes, column : column + columns]).view(np.uint8)


def _a_source(op: Tcgen05Mma, cluster: Cluster, rank: int):
    """``(memory, base, offsets)`` of A's rows in one CTA."""
    if op.a is None:
        rows = _a_bytes_from_tmem(op, cluster.tmem(rank))
        offsets = np.arange(0, rows.size, 16, dtype=np.int32).reshape(rows.shape[0], -1)
        return rows.reshape(-1), 0, offsets
    base, table = op.tile_a
    smem = cluster.smem(rank)
    _bounded(smem, base, table, "A")
    return smem, base, table.offsets


def _collected(cluster: Cluster, op: Tcgen05Mma, side: str, usage: str, key: tuple, read: Any):
    """The operand, from the collector buffer or from ``read()``, and the buffer's new contents."""
    buffers, slot = cluster.collectors, (op.ranks[0], side)
    if usage in ("use", "lastuse"):
        held = buffers.get(slot)
        if held is None:
            # FlashInfer's second instruction of a reuse pair says lastuse; nothing kept: refused
            refuse(
                "tcgen05.mma: collector",
                f"collector::{side}::{usage} finds an empty buffer (no fill came before)",
            )
        require(
            held[0] == key,
            "tcgen05.mma: collector",
            f"collector::{side}::{usage} of {key} finds a buffer filled as {held[0]}",
        )
        value = held[1]
    else:
        value = read()
    if usage in ("fill", "use"):
        buffers[slot] = (key, value)
    else:
        buffers.pop(slot, None)
    return value


def perform(op: Tcgen05Mma, cluster: Cluster) -> None:
    """Read the operands, multiply, and write D in every CTA of the group."""
    if kernels.HAS_VNNI and op.idesc.kind.startswith("mxf4") and op.idesc.k % 32 == 0:
        _perform_fp4(op, cluster)
    else:
        _perform_generic(op, cluster)


# ---- block-scaled FP4, exact integer dot products


def _check_copies(bad: int) -> None:
    if bad >= 0:
        side, row = ("B", bad - 1000) if bad >= 1000 else ("A", bad)
        refuse(
            "tcgen05.mma: scale factor copies",
            f"SF{side} of row {row}: the four lane quarters hold different scales",
        )


_SCALE_TABLES = {key: np.array(table) for key, table in SCALE_VALUES.items()}


def _perform_fp4(op: Tcgen05Mma, cluster: Cluster) -> None:
    desc = op.idesc
    blocks, rows, n = desc.num_scales, op.rows, desc.n
    padded = -(-n // kernels.LANES) * kernels.LANES
    share = n // len(op.ranks)

    def read_b() -> NDArray[np.uint32]:
        base, table = op.tile_b
        out = np.empty((desc.k // 4, padded), np.uint32)
        if padded != n:
            out[:, n:] = 0x0C0C0C0C
        for i, rank in enumerate(op.ranks):
            smem = cluster.smem(rank)
            _bounded(smem, base, table, "B")
            kernels.fp4_decode_b(smem, base, table.offsets, kernels.FP4_OFFSET, i * share, out)
        return out

    def read_a() -> list[tuple[NDArray[np.int8], NDArray[np.int32]]]:
        out = []
        for rank in op.ranks:
            memory, base, offsets = _a_source(op, cluster, rank)
            a = np.empty((rows, desc.k), np.int8)
            corr = np.empty((rows, blocks), np.int32)
            kernels.fp4_decode_a(memory, base, offsets, desc.sf_vec, kernels.FP4_SIGNED, a, corr)
            out.append((a, corr))
        return out

    b = _collected(cluster, op, "b", op.collector_b, ("fp4", n, desc.k), read_b)
    a = _collected(cluster, op, "a", op.collector_a, ("fp4", desc.m, desc.k, desc.sf_vec), read_a)
    # both operands are doubled, so products are four times their value
    factor = -0.25 if desc.a_negate != desc.b_negate else 0.25
    assert desc.scale is not None
    table = _SCALE_TABLES[desc.scale]
    for rank, (a_rows, corr) in zip(op.ranks, a, strict=True):
        bad = kernels.fp4_multiply(
            a_rows,
            corr,
            b,
            desc.sf_vec,
            cluster.tmem(rank),
            op.d & 0xFFFF,
            n,
            op.sfa,
            op.sfb,
            table,
            factor,
            op.accumulate,
        )
        _check_copies(bad)


# ---- every other kind, in float64


def _perform_generic(op: Tcgen05Mma, cluster: Cluster) -> None:
    desc = op.idesc
    share = desc.n // len(op.ranks)

    def read_b() -> NDArray[np.float64]:
        base, table = op.tile_b
        parts = []
        for rank in op.ranks:
            smem = cluster.smem(rank)
            _bounded(smem, base, table, "B")
            parts.append(_decode(desc, smem, base, table.offsets, share, desc.b, desc.b_mn_major))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def read_a() -> list[NDArray[np.float64]]:
        out = []
        for rank in op.ranks:
            memory, base, offsets = _a_source(op, cluster, rank)
            out.append(_decode(desc, memory, base, offsets, op.rows, desc.a, desc.a_mn_major))
        return out

    b = _collected(cluster, op, "b", op.collector_b, (desc.b, desc.n, desc.k), read_b)
    a = _collected(cluster, op, "a", op.collector_a, (desc.a, desc.m, desc.k), read_a)
    sign = -1.0 if desc.a_negate != desc.b_negate else 1.0
    for index, rank in enumerate(op.ranks):
        tmem = cluster.tmem(rank)
        left, right = a[index], b
        if desc.sf_vec:
            left, right = left.copy(), right.copy()
            _apply_scales(op, tmem, left, op.sfa, 0)
            _apply_scales(op, tmem, right, op.sfb, 1000)
        product = left @ right.T
        if sign < 0:
            product = -product
        mask = op.disabled_lanes[4 * index : 4 * index + 4]
        _store(op, tmem, product, mask)


def _apply_scales(
    op: Tcgen05Mma,
    tmem: NDArray[np.uint32],
    values: NDArray[np.float64],
    address: int,
    report: int,
) -> None:
    assert op.idesc.scale is not None
    scales = np.empty((values.shape[0], op.idesc.num_scales))
    table = _SCALE_TABLES[op.idesc.scale]
    column, first = address & 0xFFFF, address >> 30
    bad = kernels.read_scales(tmem, column, values.shape[0], first, table, 1.0, scales)
    _check_copies(bad + report if bad >= 0 else -1)
    blocks = values.reshape(values.shape[0], scales.shape[1], op.idesc.sf_vec)
    blocks *= scales[:, :, None]


def _store(
    op: Tcgen05Mma,
    tmem: NDArray[np.uint32],
    product: NDArray[np.float64],
    disabled: Sequence[int],
) -> None:
    """Add D where asked and round once into tensor memory, one 32-bit cell an element."""
    row = 0
    for lane, lanes, column, columns, first in d_blocks(op):
        if op.rows == 64 and op.idesc.cta_group == 2:
            row = 0
        cells = tmem[lane : lane + lanes, column : column + columns]
        value = product[row : row + lanes, first : first + columns]
        row += lanes
        bits = _rounded(op, cells, value)
        if disabled:
            word = np.array(disabled, np.uint32)
            index = np.arange(lane, lane + lanes)
            keep = (word[index >> 5] >> (index & 31).astype(np.uint32)) & 1
            bits = np.where(keep[:, None] == 1, cells, bits)
        cells[...] = bits


def _rounded(
    op: Tcgen05Mma, cells: NDArray[np.uint32], value: NDArray[np.float64]
) -> NDArray[np.uint32]:
    form = op.idesc.d
    with np.errstate(over="ignore", invalid="ignore"):
        if form == "f32":
            if op.accumulate:
                held = cells.view(np.float32).astype(np.float64)
                value = value + held * 2.0**-op.scale_d
            return value.astype(np.float32).view(np.uint32)
        if form == "f16":
            # float16 accumulators lie in the low half of a 32-bit cell
            if op.accumulate:
                held = cells.astype(np.uint16).view(np.float16).astype(np.float64)
                value = value + held * 2.0**-op.scale_d
            return value.astype(np.float16).view(np.uint16).astype(np.uint32)
    total = value.astype(np.int64)
    if op.accumulate:
        total = total + cells.view(np.int32)
    if op.idesc.saturate:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return (total & 0xFFFFFFFF).astype(np.uint32)
