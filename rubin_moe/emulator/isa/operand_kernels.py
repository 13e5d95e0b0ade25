"""Compiled inner loops of the matrix units: operand decoding and the exact FP4 product.

Everything here works on flat buffers and precomputed chunk offsets (``descriptors.ChunkTable``);
what the bits mean is decided by the callers. All functions release the GIL.

``fp4_product`` computes, for E2M1 operands with one scale for ``vec`` elements,

    D[m, n] = float32( sum_q sa[m, q] * sb[q, n] * dot_q(m, n)  (+ D[m, n]) )

``dot_q`` is an integer dot product (E2M1 values are multiples of one half), every product of the
sum is exact in float64 and there is one rounding to float32. It needs AVX-512 VNNI; where the host
has none, ``HAS_VNNI`` is False and callers take the float64 matrix product, with the same result.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

HAS_VNNI = bool(
    llvm.get_host_cpu_features().get("avx512vnni") and llvm.get_host_cpu_features().get("avx512bw")
)

ROWS = 4
"""Rows of A that one step of the FP4 product handles."""

LANES = 16
"""Columns of D that one step of the FP4 product handles."""

# modes of decode_elements: how many elements 16 bytes hold and where they lie
BITS8, PACKED4, PADDED4, PADDED6, BITS16, TF32 = range(6)


def _fp4_bytes(offset: int) -> np.ndarray:
    """E2M1 code -> the byte ``2 * value + offset``."""
    magnitude = np.array([0, 1, 2, 3, 4, 6, 8, 12])
    doubled = np.concatenate([magnitude, -magnitude]) + offset
    return np.asarray(doubled & 255, np.uint8)


FP4_SIGNED = _fp4_bytes(0)
FP4_OFFSET = _fp4_bytes(12)


@intrinsic
def _fp4_step(  # type: ignore[no-untyped-def]
    typingctx: Any, a, a_stride, b, corr, corr_stride, sa, sb, blocks, quads, n, out
):
    """ROWS x LANES outputs into ``out`` (float64): every argument an integer or an address.

    ``a`` int8 rows of ``a_stride`` bytes; ``b`` uint32 [blocks * quads, n] of four unsigned bytes;
    ``corr`` int32 and ``sa`` float64 rows of ``corr_stride`` entries; ``sb`` float64 [blocks, n].
    """
    sig = types.void(*([types.intp] * 11))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, a_stride, b, corr, corr_stride, sa, sb, blocks, quads, n, out = args
        i32, i64, f64 = ir.IntType(32), ir.IntType(64), ir.DoubleType()
        v16, d8 = ir.VectorType(i32, LANES), ir.VectorType(f64, 8)
        dot_fn = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(v16, [v16, v16, v16]),
            "llvm.x86.avx512.vpdpbusd.512",
        )
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(d8, [d8, d8, d8]), "llvm.fma.v8f64"
        )

        def at(address: Any, index: Any, scale: int, type_: Any) -> Any:
            offset = builder.mul(index, ir.Constant(i64, scale))
            return builder.inttoptr(builder.add(address, offset), type_.as_pointer())

        def load(address: Any, index: Any, scale: int, type_: Any) -> Any:
            return builder.load(at(address, index, scale, type_), align=min(scale, 8))

        def splat(value: Any, type_: Any, count: int) -> Any:
            vector = ir.VectorType(type_, count)
            first = builder.insert_element(
                ir.Constant(vector, ir.Undefined), value, ir.Constant(i32, 0)
            )
            zeros = ir.Constant(ir.VectorType(i32, count), [0] * count)
            return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)

        halves = [
            ir.Constant(ir.VectorType(i32, 8), list(range(h * 8, h * 8 + 8))) for h in range(2)
        ]
        zero = ir.Constant(d8, [0.0] * 8)
        acc = [[cgutils.alloca_once_value(builder, zero) for _ in range(2)] for _ in range(ROWS)]
        dots = [cgutils.alloca_once(builder, v16) for _ in range(ROWS)]
        row_index = [ir.Constant(i64, r) for r in range(ROWS)]
        with cgutils.for_range(builder, blocks) as loop:
            q = loop.index
            for r in range(ROWS):
                at_corr = builder.add(builder.mul(row_index[r], corr_stride), q)
                start = splat(load(corr, at_corr, 4, i32), i32, LANES)
                builder.store(start, dots[r])
            first = builder.mul(q, quads)
            with cgutils.for_range(builder, quads) as inner:
                k = builder.add(first, inner.index)
                bv = builder.load(at(b, builder.mul(k, n), 4, v16), align=4)
                for r in range(ROWS):
                    offset = builder.add(
                        builder.mul(row_index[r], a_stride), builder.mul(k, ir.Constant(i64, 4))
                    )
                    av = builder.load(at(a, offset, 1, i32), align=4)
                    dot = builder.call(dot_fn, [builder.load(dots[r]), bv, splat(av, i32, LANES)])
                    builder.store(dot, dots[r])
            at_sb = builder.mul(q, n)
            scale_b = [
                builder.load(at(sb, builder.add(at_sb, ir.Constant(i64, 8 * h)), 8, d8), align=8)
                for h in range(2)
            ]
            for r in range(ROWS):
                dot = builder.load(dots[r])
                at_sa = builder.add(builder.mul(row_index[r], corr_stride), q)
                scale_a = splat(load(sa, at_sa, 8, f64), f64, 8)
                for h in range(2):
                    half = builder.shuffle_vector(dot, ir.Constant(v16, ir.Undefined), halves[h])
                    value = builder.fmul(builder.sitofp(half, d8), scale_b[h])
                    total = builder.call(fma, [value, scale_a, builder.load(acc[r][h])])
                    builder.store(total, acc[r][h])
        for r in range(ROWS):
            for h in range(2):
                place = ir.Constant(i64, r * LANES + 8 * h)
                builder.store(builder.load(acc[r][h]), at(out, place, 8, d8), align=8)
        return context.get_dummy_value()

    return sig, codegen


@intrinsic
def _fp4_unpack(typingctx: Any, source: Any, table: Any, to: Any) -> Any:
    """16 packed bytes to 32 bytes through a table of 16 bytes; all three are addresses.

    Returns the sums of the first and the second 16 results, as signed bytes, in the halves of 64
    bits.
    """
    sig = types.int64(types.intp, types.intp, types.intp)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i8, i16, i32, i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
        v16 = ir.VectorType(i8, 16)
        shuffle = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(v16, [v16, v16]), "llvm.x86.ssse3.pshuf.b.128"
        )
        add = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(i16, [ir.VectorType(i16, 16)]),
            "llvm.vector.reduce.add.v16i16",
        )
        packed, values = (
            builder.load(builder.inttoptr(x, v16.as_pointer()), align=1) for x in args[:2]
        )
        four, low = (ir.Constant(v16, [x] * 16) for x in (4, 15))
        even = builder.call(shuffle, [values, builder.and_(packed, low)])
        odd = builder.call(shuffle, [values, builder.lshr(packed, four)])
        sums = []
        for half in range(2):
            order = [x for i in range(8 * half, 8 * half + 8) for x in (i, i + 16)]
            mask = ir.Constant(ir.VectorType(i32, 16), order)
            mixed = builder.shuffle_vector(even, odd, mask)
            at = builder.add(args[2], ir.Constant(i64, 16 * half))
            builder.store(mixed, builder.inttoptr(at, v16.as_pointer()), align=1)
            total = builder.call(add, [builder.sext(mixed, ir.VectorType(i16, 16))])
            sums.append(builder.sext(total, i64))
        upper = builder.shl(sums[1], ir.Constant(i64, 32))
        return builder.or_(upper, builder.and_(sums[0], ir.Constant(i64, 0xFFFFFFFF)))

    return sig, codegen


@njit(nogil=True, error_model="numpy", cache=True)
def fp4_decode_a(smem, base, offsets, vec, table, a, corr):
    """Packed E2M1 rows to int8 ``a`` [rows, K] of doubled values and the correction of the offset.

    ``corr`` int32 [rows, K / vec] is -12 times the sum of each block.
    """
    rows, chunks = offsets.shape
    from_, to, lut = smem.ctypes.data, a.ctypes.data, table.ctypes.data
    for r in range(rows):
        for c in range(chunks):
            sums = _fp4_unpack(from_ + base + offsets[r, c], lut, to + (r * chunks + c) * 32)
            low = np.int32(sums & 0xFFFFFFFF)
            high = np.int32(sums >> 32)
            if vec == 16:
                corr[r, 2 * c] = -12 * low
                corr[r, 2 * c + 1] = -12 * high
            else:
                corr[r, c] = -12 * (low + high)


@njit(nogil=True, error_model="numpy", cache=True)
def fp4_decode_b(smem, base, offsets, table, first, b):
    """Packed E2M1 rows to uint32 ``b`` [K / 4, N] from column ``first``: doubled values + 12."""
    rows, chunks = offsets.shape
    piece = np.empty(8, np.uint32)
    from_, to, lut = smem.ctypes.data, piece.ctypes.data, table.ctypes.data
    for r in range(rows):
        for c in range(chunks):
            _fp4_unpack(from_ + base + offsets[r, c], lut, to)
            for i in range(8):
                b[c * 8 + i, first + r] = piece[i]


@njit(nogil=True, error_model="numpy", cache=True)
def read_scales(tmem, column, rows, first, table, factor, out):
    """Block scales of ``rows`` rows from tensor memory into float64 ``out`` [rows, scales].

    Row r lies in lane r % 32, column ``column + 4 * ceil(rows / 128) * (k // 4) + r // 32``, byte
    k % 4, with k counted from the scale-factor id ``first``; all four lane quarters hold a copy.
    Returns a row whose copies differ, or -1.
    """
    step = 4 * ((rows + 127) // 128)
    count = out.shape[1]
    words = (first + count + 3) // 4
    bad = -1
    for w in range(words):
        low = max(0, first - 4 * w)
        high = min(4, first + count - 4 * w)
        used = np.uint32(0)
        for byte in range(low, high):
            used |= np.uint32(255) << np.uint32(8 * byte)
        for r in range(rows):
            lane = r % 32
            col = column + step * w + r // 32
            word = tmem[lane, col]
            differ = (
                (word ^ tmem[lane + 32, col])
                | (word ^ tmem[lane + 64, col])
                | (word ^ tmem[lane + 96, col])
            )
            if differ & used:
                bad = r
            for byte in range(low, high):
                code = (word >> np.uint32(8 * byte)) & np.uint32(255)
                out[r, 4 * w + byte - first] = table[code] * factor
    return bad


@njit(nogil=True, error_model="numpy", cache=True)
def _fp4_product(a, corr, sa, b, sb, vec, tmem, column, columns, accumulate):
    rows = a.shape[0]
    padded = b.shape[1]
    quads = vec // 4
    blocks = corr.shape[1]
    tile = np.empty((ROWS, LANES), np.float64)
    d = tmem.view(np.float32)
    a_at, b_at, corr_at = a.ctypes.data, b.ctypes.data, corr.ctypes.data
    sa_at, sb_at, tile_at = sa.ctypes.data, sb.ctypes.data, tile.ctypes.data
    k = a.shape[1]
    for n in range(0, padded, LANES):
        width = min(LANES, columns - n)
        for r in range(0, rows, ROWS):
            _fp4_step(
                a_at + r * k,
                k,
                b_at + 4 * n,
                corr_at + 4 * r * blocks,
                blocks,
                sa_at + 8 * r * blocks,
                sb_at + 8 * n,
                blocks,
                quads,
                padded,
                tile_at,
            )
            for i in range(ROWS):
                row = d[r + i, column + n : column + n + width]
                if accumulate:
                    for j in range(width):
                        row[j] = np.float32(tile[i, j] + np.float64(row[j]))
                else:
                    for j in range(width):
                        row[j] = np.float32(tile[i, j] + 0.0)


@njit(nogil=True, error_model="numpy", cache=True)
def fp4_multiply(a, corr, b, vec, tmem, d, n, sfa, sfb, table, factor, accumulate):
    """One CTA's share of D, in place in ``tmem`` as float32; see the module's docstring.

    ``a``, ``corr`` and ``b`` as the decoders leave them, ``b`` padded to a multiple of LANES
    columns of which ``n`` are written from column ``d``; ``sfa`` and ``sfb`` are addresses with
    the scale-factor id in bits 30-31; ``factor`` multiplies everything. Returns -1, or the row of
    A (the row of B plus 1000) whose scale copies differ: then nothing is written.
    """
    rows, blocks = corr.shape
    padded = b.shape[1]
    sa = np.empty((rows, blocks), np.float64)
    sb = np.empty((padded, blocks), np.float64)
    bad = read_scales(tmem, sfa & 0xFFFF, rows, sfa >> 30, table, factor, sa)
    if bad >= 0:
        return bad
    bad = read_scales(tmem, sfb & 0xFFFF, n, sfb >> 30, table, 1.0, sb)
    if bad >= 0:
        return bad + 1000
    by_block = np.zeros((blocks, padded), np.float64)
    for q in range(blocks):
        for j in range(n):
            by_block[q, j] = sb[j, q]
    _fp4_product(a, corr, sa, b, by_block, vec, tmem, d, n, accumulate)
    return -1


@njit(nogil=True, error_model="numpy", cache=True)
def fp4_single(
    smem, a_base, a_offsets, b_base, b_offsets, vec, tmem, d, sfa, sfb, table, factor, accumulate
):
    """A whole instruction of one CTA with both operands in its shared memory."""
    rows, chunks = a_offsets.shape
    n = b_offsets.shape[0]
    padded = (n + LANES - 1) // LANES * LANES
    a = np.empty((rows, 32 * chunks), np.int8)
    corr = np.empty((rows, 32 * chunks // vec), np.int32)
    b = np.empty((8 * chunks, padded), np.uint32)
    if padded != n:
        b[:, n:] = np.uint32(0x0C0C0C0C)
    fp4_decode_a(smem, a_base, a_offsets, vec, FP4_SIGNED, a, corr)
    fp4_decode_b(smem, b_base, b_offsets, FP4_OFFSET, 0, b)
    return fp4_multiply(a, corr, b, vec, tmem, d, n, sfa, sfb, table, factor, accumulate)


@njit(nogil=True, error_model="numpy", cache=True)
def decode_elements(smem, base, offsets, mode, table, mn_major, out):
    """Decode a tile into float64 ``out`` [rows, K] (rows along M or N).

    ``mode`` says how a 16-byte chunk is read; ``table`` (float32) maps codes to values and is not
    used for TF32. MN-major chunks run along the rows of ``out``.
    """
    lines, chunks = offsets.shape
    word = np.empty(1, np.uint32)
    for line in range(lines):
        for c in range(chunks):
            src = base + offsets[line, c]
            if mode == PACKED4:
                count = 32
            elif mode == BITS16:
                count = 8
            elif mode == TF32:
                count = 4
            else:
                count = 16
            for i in range(count):
                if mode == BITS8:
                    value = np.float64(table[smem[src + i]])
                elif mode in (PACKED4, PADDED4):
                    code = (smem[src + (i >> 1)] >> np.uint8(4 * (i & 1))) & np.uint8(15)
                    value = np.float64(table[code])
                elif mode == PADDED6:
                    bit = 6 * i
                    pair = np.uint32(smem[src + (bit >> 3)])
                    pair |= np.uint32(smem[src + (bit >> 3) + 1]) << np.uint32(8)
                    code6 = (pair >> np.uint32(bit & 7)) & np.uint32(63)
                    value = np.float64(table[code6])
                elif mode == BITS16:
                    code16 = np.uint32(smem[src + 2 * i])
                    code16 |= np.uint32(smem[src + 2 * i + 1]) << np.uint32(8)
                    value = np.float64(table[code16])
                else:
                    bits = np.uint32(smem[src + 4 * i + 1]) << np.uint32(8)
                    bits |= np.uint32(smem[src + 4 * i + 2]) << np.uint32(16)
                    bits |= np.uint32(smem[src + 4 * i + 3]) << np.uint32(24)
                    word[0] = bits & np.uint32(0xFFFFE000)
                    value = np.float64(word.view(np.float32)[0])
                at = c * count + i
                if mn_major:
                    if at < out.shape[0]:
                        out[at, line] = value
                else:
                    out[line, at] = value


@njit(nogil=True, error_model="numpy", fastmath={"contract"}, cache=True)
def multiply(a, b, sa, sb, vec, out):
    """``out[m, n] = sum_q sa[m, q] * sb[n, q] * dot_q(m, n)`` in float64.

    ``a`` [M, K], ``b`` [K, N], M and ``vec`` multiples of 4, blocks of ``vec`` along K. A library
    product would start threads of its own, which costs milliseconds on a busy machine.
    """
    n = b.shape[1]
    block = np.empty((4, n), np.float64)
    for m in range(0, a.shape[0], 4):
        for q in range(sa.shape[1]):
            for k in range(q * vec, (q + 1) * vec, 4):
                a00, a01, a02, a03 = a[m, k], a[m, k + 1], a[m, k + 2], a[m, k + 3]
                a10, a11, a12, a13 = a[m + 1, k], a[m + 1, k + 1], a[m + 1, k + 2], a[m + 1, k + 3]
                a20, a21, a22, a23 = a[m + 2, k], a[m + 2, k + 1], a[m + 2, k + 2], a[m + 2, k + 3]
                a30, a31, a32, a33 = a[m + 3, k], a[m + 3, k + 1], a[m + 3, k + 2], a[m + 3, k + 3]
                if k == q * vec:
                    block[:] = 0.0
                for j in range(n):
                    b0, b1, b2, b3 = b[k, j], b[k + 1, j], b[k + 2, j], b[k + 3, j]
                    block[0, j] += a00 * b0 + a01 * b1 + a02 * b2 + a03 * b3
                    block[1, j] += a10 * b0 + a11 * b1 + a12 * b2 + a13 * b3
                    block[2, j] += a20 * b0 + a21 * b1 + a22 * b2 + a23 * b3
                    block[3, j] += a30 * b0 + a31 * b1 + a32 * b2 + a33 * b3
            for i in range(4):
                scale = sa[m + i, q]
                if q == 0:
                    for j in range(n):
                        out[m + i, j] = block[i, j] * (scale * sb[j, q])
                else:
                    for j in range(n):
                        out[m + i, j] += block[i, j] * (scale * sb[j, q])


@njit(nogil=True, error_model="numpy", cache=True)
def store_f32(product, tmem, lane, column, sign, accumulate, factor):
    """Rows of ``product`` to lanes from ``lane``, plus ``factor`` times what is there, rounded."""
    d = tmem.view(np.float32)
    for r in range(product.shape[0]):
        row = d[lane + r, column : column + product.shape[1]]
        if accumulate:
            for j in range(product.shape[1]):
                row[j] = np.float32(sign * product[r, j] + factor * np.float64(row[j]))
        else:
            for j in range(product.shape[1]):
                row[j] = np.float32(sign * product[r, j] + 0.0)
