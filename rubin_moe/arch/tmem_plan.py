"""Columns of tensor memory: accumulators, and the block scales of both operands.

Sources: first seed, sections 3.1, 3.2 and 4.1; scale layout as the toolchain's kernels use it: row
r of a 128-row group sits in lane r % 32 of column ``4 * group + r / 32`` of each 4 scales of K.
"""

from dataclasses import dataclass

from rubin_moe.arch.spec import ArchSpec
from rubin_moe.errors import PlanError

LANES = 128
ALLOC_STEP = 32


@dataclass(frozen=True)
class Columns:
    """A field's columns ``[start, start + count)``."""

    name: str
    start: int
    count: int

    def __str__(self) -> str:
        return f"{self.name} {self.start}-{self.start + self.count - 1}"


@dataclass(frozen=True)
class TmemRequest:
    """What one CTA keeps in tensor memory.

    Attributes:
        tile_n: accumulator columns of one stage and one M half (float32).
        tile_k, sf_vec_size: scales of one K tile.
        sfa_rows, sfb_rows: rows that the scales cover in this CTA.
        m_halves: 2 with B-reuse (two instructions share B), else 1.
        acc_stages: accumulators that mainloop and epilogue want; sfa_stages, sfb_stages: K tiles of
            scales in flight.
        overlap_step: columns by which two accumulators may share space: the epilogue's subtile.
    """

    tile_n: int
    tile_k: int
    sf_vec_size: int
    sfa_rows: int = 128
    sfb_rows: int = 128
    m_halves: int = 1
    acc_stages: int = 2
    sfa_stages: int = 1
    sfb_stages: int = 1
    overlap_step: int = 64


@dataclass(frozen=True)
class TmemPlan:
    """Where everything is.

    Attributes:
        fields: in column order; accumulators of a plan with ``overlap`` share columns.
        overlap: columns that accumulator stages 0 and 1 share; the epilogue must release them
            early, and no transpose may touch them after that.
        used: columns up to the last field; allocated: what ``tcgen05.alloc`` is asked for.
    """

    fields: tuple[Columns, ...]
    overlap: int
    used: int
    allocated: int

    def start(self, name: str) -> int:
        return next(f.start for f in self.fields if f.name == name)

    def __str__(self) -> str:
        shared = f", {self.overlap} shared" if self.overlap else ""
        return f"{', '.join(map(str, self.fields))}: {self.used} of {self.allocated}{shared}"


def scale_columns(rows: int, tile_k: int, sf_vec_size: int) -> int:
    """Columns of one stage of scales: 4 per 128 rows and 4 scales of K."""
    return 4 * -(-rows // 128) * -(-tile_k // (4 * sf_vec_size))


def round_allocation(arch: ArchSpec, used: int) -> int:
    """Columns to allocate: a power of two of at least 32 up to 512, above it a multiple of 32.

    Raises PlanError above the capacity.
    """
    if used <= 512:
        columns = max(ALLOC_STEP, 1 << (used - 1).bit_length() if used else 0)
    else:
        columns = -(-used // ALLOC_STEP) * ALLOC_STEP
    if columns > arch.tmem_columns:
        raise PlanError(f"{columns} TMEM columns, {arch.name} has {arch.tmem_columns}")
    return columns


def plan_tmem(arch: ArchSpec, request: TmemRequest) -> TmemPlan:
    """Disjoint accumulators where they fit, else two that overlap by whole epilogue subtiles.

    Raises:
        PlanError: nothing fits; the message has each field's columns.
    """
    acc = request.tile_n * request.m_halves
    sfa = request.m_halves * request.sfa_stages * _scales(request, request.sfa_rows)
    sfb = request.sfb_stages * _scales(request, request.sfb_rows)
    wanted = acc * request.acc_stages + sfa + sfb
    missing = wanted - arch.tmem_columns
    overlap = 0
    if missing > 0:
        overlap = -(-missing // request.overlap_step) * request.overlap_step
        if request.acc_stages != 2 or request.m_halves != 1 or overlap >= request.tile_n:
            raise PlanError(
                f"{arch.name} has {arch.tmem_columns} TMEM columns, the plan wants {wanted}: "
                f"accumulators {request.acc_stages} x {acc}, SFA {sfa}, SFB {sfb}"
            )
    fields = [
        Columns(f"acc{stage}", stage * (acc - overlap), acc) for stage in range(request.acc_stages)
    ]
    at = request.acc_stages * acc - overlap * (request.acc_stages - 1)
    for name, count in (("sfa", sfa), ("sfb", sfb)):
        fields.append(Columns(name, at, count))
        at += count
    return TmemPlan(tuple(fields), overlap, at, round_allocation(arch, at))


def _scales(request: TmemRequest, rows: int) -> int:
    return scale_columns(rows, request.tile_k, request.sf_vec_size)
