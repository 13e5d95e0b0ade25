"""``wgmma.mma_async`` of sm_90a: D = A * B (+ D) of four warps.

``op = decode_wgmma(...)`` when the instruction issues, ``multiply(op, smem, d, a)`` when it
completes. ``d`` are the accumulators uint32 ``[registers, 32]`` of the four warps of the warpgroup;
``a`` those of A, ``[4, 32]`` each, where A comes from registers, else None. ``smem`` is the CTA's
own shared memory.

Fragments (PTX ISA, "register fragments for wgmma.m64nNk..."): warp w of the group holds rows
16 w .. 16 w + 15 of D and A exactly as ``mma.sync`` does (``mma_sync.c_fragment``,
``mma_sync.a_fragment``). K is 16 for 16-bit types, 8 for tf32, 32 for 8-bit types.

Arithmetic: as an H200 does it, to the bit (`fragment_kernels.aligned_sums`). Of the products of one
instruction and D, all below 2^-25 of the largest's power of two is dropped (2^-13 with FP8); the
sum is truncated to float32 (with FP8 to 13 bits of fraction) or rounded to float16. Integers are
exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from . import fragment_kernels as kernels
from . import mma_sync
from .descriptors import ChunkTable, SmemDescriptor, decode_wgmma_smem
from .elements import Element
from .footprint import Footprint
from .legality import refuse, require
from .operands import check_bounds, decode_rows, value_table
from .operands import multiply as product_of

_DEPTH = {32: 8, 16: 16, 8: 32}


@dataclass(frozen=True)
class Wgmma:
    """One decoded ``wgmma``; ``a_desc`` is None where A comes from registers."""

    n: int
    k: int
    a: Element
    b: Element
    d: str
    a_desc: SmemDescriptor | None
    b_desc: SmemDescriptor
    scale_d: bool
    negate: bool
    a_mn_major: bool
    b_mn_major: bool
    saturate: bool

    @property
    def macs(self) -> int:
        """Multiply-adds of the instruction."""
        return 64 * self.n * self.k

    @property
    def registers(self) -> int:
        """Accumulator registers of each thread."""
        return self.n // 4 if self.d == "f16" else self.n // 2

    @property
    def alignment(self) -> int:
        """Bits below the largest exponent that take part in a sum."""
        return 13 if self.a.bits == 8 else mma_sync.ALIGNMENT

    def tile(self, side: str) -> tuple[int, ChunkTable]:
        """Where the chunks of ``"a"`` or ``"b"`` lie in shared memory."""
        if side == "a":
            assert self.a_desc is not None
            desc, rows, element, mn = self.a_desc, 64, self.a, self.a_mn_major
        else:
            desc, rows, element, mn = self.b_desc, self.n, self.b, self.b_mn_major
        if mn:
            return desc.chunks(self.k, rows * element.bits // 128, True)
        return desc.chunks(rows, self.k * element.bits // 128)

    def reads(self, rank: int) -> list[Footprint]:
        """The tiles in the shared memory of CTA ``rank``."""
        sides = ["b"] if self.a_desc is None else ["a", "b"]
        tiles = [self.tile(side) for side in sides]
        return [Footprint("smem", rank, table.ranges + base) for base, table in tiles]


@lru_cache(maxsize=16384)
def decode_wgmma(
    shape: str,
    d: str,
    a: str,
    b: str,
    b_desc: int,
    a_desc: int | None = None,
    scale_d: bool = True,
    scale_a: int = 1,
    scale_b: int = 1,
    trans_a: int = 0,
    trans_b: int = 0,
    saturate: bool = False,
) -> Wgmma:
    """Decode ``wgmma.mma_async.sync.aligned.<shape>.<d>.<a>.<b>`` and its operands.

    ``a_desc`` is None where A comes from registers; ``scale_a`` and ``scale_b`` are 1 or -1.
    """
    require(shape.startswith("m64n"), "wgmma: shape", f"{shape} is not modelled")
    n, k = (int(x) for x in shape.removeprefix("m64n").split("k"))
    if a not in mma_sync.TYPES or b not in mma_sync.TYPES:
        refuse("wgmma: type", f"{a} x {b} is not modelled")
    left, right = mma_sync.TYPES[a], mma_sync.TYPES[b]
    pair = {a, b}
    integer = pair <= {"s8", "u8"}
    require(
        len(pair) == 1 or integer or pair <= {"e4m3", "e5m2"},
        "wgmma: type",
        f"{a} x {b} cannot be mixed",
    )
    require(k == _DEPTH[left.bits], "wgmma: shape", f"{shape} of {a} (K is {_DEPTH[left.bits]})")
    step = 16 if integer and n > 32 else 8
    require(8 <= n <= 256 and n % step == 0, "wgmma: N", f"N = {n} of {a} (multiples of {step})")
    half = pair <= {"f16"} or pair <= {"e4m3", "e5m2"}
    legal = ("s32",) if integer else ("f16", "f32") if half else ("f32",)
    require(d in legal, "wgmma: accumulator", f"{d} for {a} x {b} (legal: {legal})")
    require(
        scale_a in (1, -1) and scale_b in (1, -1) and not (integer and -1 in (scale_a, scale_b)),
        "wgmma: scale",
        f"scale-a {scale_a}, scale-b {scale_b} for {a}",
    )
    require(
        left.bits == 16 or not (trans_a or trans_b),
        "wgmma: transpose",
        f"{a} x {b} must be K-major",
    )
    require(
        not (trans_a and a_desc is None), "wgmma: transpose", "A in registers cannot be transposed"
    )
    return Wgmma(
        n=n,
        k=k,
        a=left,
        b=right,
        d=d,
        a_desc=None if a_desc is None else decode_wgmma_smem(a_desc),
        b_desc=decode_wgmma_smem(b_desc),
        scale_d=scale_d,
        negate=scale_a != scale_b,
        a_mn_major=bool(trans_a),
        b_mn_major=bool(trans_b),
        saturate=saturate,
    )


def multiply(
    op: Wgmma,
    smem: NDArray[np.uint8],
    d: Sequence[NDArray[np.uint32]],
    a: Sequence[NDArray[np.uint32]] | None = None,
) -> None:
    """Perform the instruction on D's registers, in place: uint32 ``[registers, 32]`` of each of
    the four warps; ``a`` likewise, where A comes from registers."""
    base, table = op.tile("b")
    check_bounds(smem, base, table, "B")
    where = (smem, base, table.offsets, op.n, op.k, op.b, op.b_mn_major)
    right = decode_rows(*where, transposed=True)
    if a is None:
        base, table = op.tile("a")
        check_bounds(smem, base, table, "A")
        left = decode_rows(smem, base, table.offsets, 64, op.k, op.a, op.a_mn_major)
    else:
        left = np.empty((64, op.k))
        for w in range(4):
            kernels.decode_fragment(a[w], op.a.bits, value_table(op.a), 16 * w, left)
    if op.negate:
        left = -left
    index = mma_sync.c_fragment(op.n, 16 if op.d == "f16" else 32)
    total = _accumulators(op, d, index)
    with np.errstate(invalid="ignore", over="ignore"):
        if op.d == "s32":
            total += product_of(left, right)
        else:
            kernels.aligned_sums(left, right, op.alignment, total)
        for w in range(4):
            if op.d == "f32":
                kernels.write_f32(total, 16 * w, min(op.alignment, 23), d[w])
            else:
                rows = total[16 * w : 16 * w + 16]
                d[w][:] = mma_sync.write_accumulator(rows, index, op.d, op.saturate)


def _accumulators(
    op: Wgmma, d: Sequence[NDArray[np.uint32]], index: NDArray[np.int32]
) -> NDArray[np.float64]:
    """D before the instruction, float64 [64, N]."""
    total = np.zeros((64, op.n))
    for w in range(4 if op.scale_d else 0):
        if op.d == "f32":
            kernels.read_f32(d[w], 16 * w, total)
        else:
            held = mma_sync.read_accumulator(d[w], index, (16, op.n), op.d)
            total[16 * w : 16 * w + 16] = held
    return total
