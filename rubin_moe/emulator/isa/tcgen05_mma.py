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
from .elements import SCALE_VALUES
from .legality import refuse, require
from .operands import check_bounds, decode_rows, multiply
from .tcgen05_mma_decode import Tcgen05Mma, d_blocks, decode_mma

__all__ = ["Cluster", "Tcgen05Mma", "decode_mma", "perform"]


class Cluster(Protocol):
    """What the unit needs of the cluster it runs in."""

    collectors: dict[tuple[int, str], Any]

    def smem(self, rank: int) -> NDArray[np.uint8]:
        """Shared memory of a CTA."""

    def tmem(self, rank: int) -> NDArray[np.uint32]:
        """Tensor memory of a CTA, [128, 576]."""


def _a_bytes_from_tmem(op: Tcgen05Mma, tmem: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """A's rows as the packed bytes of tensor memory, [rows, K * bits / 8]."""
    column, columns = op.a_tmem & 0xFFFF, op.idesc.k * op.idesc.a.bits // 32
    lanes = np.concatenate([np.arange(b[0], b[0] + b[1]) for b in d_blocks(op)])
    return np.ascontiguousarray(tmem[lanes, column : column + columns]).view(np.uint8)


def _a_source(
    op: Tcgen05Mma, cluster: Cluster, rank: int
) -> tuple[NDArray[np.uint8], int, NDArray[np.int32]]:
    """``(memory, base, offsets)`` of A's rows in one CTA."""
    if op.a is None:
        rows = _a_bytes_from_tmem(op, cluster.tmem(rank))
        offsets = np.arange(0, rows.size, 16, dtype=np.int32).reshape(rows.shape[0], -1)
        return rows.reshape(-1), 0, offsets
    base, table = op.tile_a
    smem = cluster.smem(rank)
    check_bounds(smem, base, table, "A")
    return smem, base, table.offsets


def _collected(
    cluster: Cluster, op: Tcgen05Mma, side: str, usage: str, key: tuple[Any, ...], read: Any
) -> Any:
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


def _empty_collectors(op: Tcgen05Mma, cluster: Cluster) -> None:
    for side in "ab":
        cluster.collectors.pop((op.ranks[0], side), None)


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
    n, vec, column = desc.n, desc.sf_vec, op.d & 0xFFFF
    # both operands are doubled, so products are four times their value
    factor = -0.25 if desc.a_negate != desc.b_negate else 0.25
    assert desc.scale is not None
    table = _SCALE_TABLES[desc.scale]
    scales = (op.sfa, op.sfb, table, factor, op.accumulate)
    if op.plain and len(op.ranks) == 1:
        rank = op.ranks[0]
        smem = cluster.smem(rank)
        (a_base, a_table), (b_base, b_table) = op.tile_a, op.tile_b
        check_bounds(smem, a_base, a_table, "A")
        check_bounds(smem, b_base, b_table, "B")
        tiles = (a_base, a_table.offsets, b_base, b_table.offsets)
        if cluster.collectors:
            _empty_collectors(op, cluster)
        _check_copies(kernels.fp4_single(smem, *tiles, vec, cluster.tmem(rank), column, *scales))
        return
    key: tuple[object, ...] = ("fp4", n, desc.k)
    b = _collected(cluster, op, "b", op.collector_b, key, lambda: _fp4_b(op, cluster))
    key = ("fp4", desc.m, desc.k, vec)
    a = _collected(cluster, op, "a", op.collector_a, key, lambda: _fp4_a(op, cluster))
    for rank, (rows, corr) in zip(op.ranks, a, strict=True):
        tmem = cluster.tmem(rank)
        _check_copies(kernels.fp4_multiply(rows, corr, b, vec, tmem, column, n, *scales))


def _fp4_b(op: Tcgen05Mma, cluster: Cluster) -> NDArray[np.uint32]:
    """B of the whole instruction as ``fp4_multiply`` takes it."""
    n = op.idesc.n
    padded = -(-n // kernels.LANES) * kernels.LANES
    base, table = op.tile_b
    out = np.empty((op.idesc.k // 4, padded), np.uint32)
    if padded != n:
        out[:, n:] = 0x0C0C0C0C
    for i, rank in enumerate(op.ranks):
        smem = cluster.smem(rank)
        check_bounds(smem, base, table, "B")
        first = i * (n // len(op.ranks))
        kernels.fp4_decode_b(smem, base, table.offsets, kernels.FP4_OFFSET, first, out)
    return out


def _fp4_a(op: Tcgen05Mma, cluster: Cluster) -> list[tuple[NDArray[np.int8], NDArray[np.int32]]]:
    """Each CTA's rows of A and their offset corrections."""
    desc, out = op.idesc, []
    for rank in op.ranks:
        memory, base, offsets = _a_source(op, cluster, rank)
        a = np.empty((op.rows, desc.k), np.int8)
        corr = np.empty((op.rows, desc.num_scales), np.int32)
        kernels.fp4_decode_a(memory, base, offsets, desc.sf_vec, kernels.FP4_SIGNED, a, corr)
        out.append((a, corr))
    return out


# ---- every other kind, in float64


def _perform_generic(op: Tcgen05Mma, cluster: Cluster) -> None:
    desc = op.idesc
    share = desc.n // len(op.ranks)

    def read_b() -> NDArray[np.float64]:
        base, table = op.tile_b
        parts = []
        for rank in op.ranks:
            smem = cluster.smem(rank)
            check_bounds(smem, base, table, "B")
            packed = desc.packed(desc.b)
            where = (smem, base, table.offsets, share, desc.k, desc.b, desc.b_mn_major)
            parts.append(decode_rows(*where, packed, transposed=True))
        return np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]

    def read_a() -> list[NDArray[np.float64]]:
        out = []
        for rank in op.ranks:
            memory, base, offsets = _a_source(op, cluster, rank)
            packed = desc.packed(desc.a)
            where = (memory, base, offsets, op.rows, desc.k, desc.a, desc.a_mn_major)
            out.append(decode_rows(*where, packed))
        return out

    b = _collected(cluster, op, "b", op.collector_b, (desc.b, desc.n, desc.k), read_b)
    a = _collected(cluster, op, "a", op.collector_a, (desc.a, desc.m, desc.k), read_a)
    for index, rank in enumerate(op.ranks):
        tmem = cluster.tmem(rank)
        scales = None
        if desc.sf_vec:
            sa = _read_scales(op, tmem, op.sfa, op.rows, 0)
            scales = sa, _read_scales(op, tmem, op.sfb, desc.n, 1000)
        product = multiply(a[index], b, scales)
        sign = -1.0 if desc.a_negate != desc.b_negate else 1.0
        if desc.d == "f32" and not op.disabled_lanes and op.rows == 128:
            factor, column = 2.0**-op.scale_d, op.d & 0xFFFF
            kernels.store_f32(product, tmem, 0, column, sign, op.accumulate, factor)
        else:
            mask = op.disabled_lanes[4 * index : 4 * index + 4]
            _store(op, tmem, sign * product + 0.0, mask)


def _read_scales(
    op: Tcgen05Mma, tmem: NDArray[np.uint32], address: int, rows: int, report: int
) -> NDArray[np.float64]:
    assert op.idesc.scale is not None
    scales = np.empty((rows, op.idesc.num_scales))
    table = _SCALE_TABLES[op.idesc.scale]
    bad = kernels.read_scales(tmem, address & 0xFFFF, rows, address >> 30, table, 1.0, scales)
    _check_copies(bad + report if bad >= 0 else -1)
    return scales


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
