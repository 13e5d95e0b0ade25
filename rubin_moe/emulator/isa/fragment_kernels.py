"""Compiled inner loops of ``wgmma``: A's fragments to rows, sums as the tensor core forms them,
accumulators from and to registers.

Fragments as in ``mma_sync`` (PTX ISA, "register fragments for wgmma.m64nNk..."): ``registers`` is
uint32 ``[count, 32]`` of one warp, whose rows of the tile start at ``first``. All functions
release the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

#: Elements of a row that one step adds up.
LANES = 8
#: Power of two below all that numbers of the operands have.
LEAST = 2.0**-800
#: Exponent of infinities and NaN in a float64.
NOT_FINITE = 1024


@njit(nogil=True, error_model="numpy", cache=True)
def decode_fragment(registers, bits, table, first, out):
    """A's registers into 16 rows of float64 ``out`` [rows, K].

    ``table`` (float32) maps codes of 8 or 16 bits to values; of 32 bits (TF32) the upper 19 count.
    """
    each = 32 // bits
    mask = np.uint32((1 << bits) - 1)
    word = np.empty(1, np.uint32)
    for j in range(registers.shape[0]):
        for lane in range(32):
            row = first + lane // 4 + 8 * (j % 2)
            depth = each * (lane % 4) + 4 * each * (j // 2)
            held = registers[j, lane]
            if bits == 32:
                word[0] = held & np.uint32(0xFFFFE000)
                out[row, depth] = np.float64(word.view(np.float32)[0])
                continue
            for i in range(each):
                out[row, depth + i] = np.float64(table[(held >> np.uint32(bits * i)) & mask])


@njit(nogil=True, error_model="numpy", cache=True)
def read_f32(registers, first, out):
    """A float32 accumulator into 16 rows of float64 ``out`` [rows, N]."""
    d = registers.view(np.float32)
    for j in range(0, registers.shape[0], 4):
        for lane in range(32):
            row, column = first + lane // 4, 2 * j + 2 * (lane % 4)
            for i in range(4):
                out[row + 8 * (i // 2), column + i % 2] = np.float64(d[j + i, lane])


@njit(nogil=True, error_model="numpy", cache=True)
def write_f32(total, first, bits, registers):
    """16 rows of ``total``, truncated to ``bits`` of fraction, to a float32 accumulator."""
    d = registers.view(np.float32)
    word = np.empty(1, np.float64)
    low = word.view(np.int64)
    for j in range(0, registers.shape[0], 4):
        for lane in range(32):
            row, column = first + lane // 4, 2 * j + 2 * (lane % 4)
            for i in range(4):
                word[0] = total[row + 8 * (i // 2), column + i % 2]
                exponent = ((low[0] >> 52) & 0x7FF) - 1023
                if exponent < NOT_FINITE:
                    drop = min(52 - bits + max(-126 - exponent, 0), 63)
                    if drop > 52:
                        word[0] = 0.0
                    else:
                        low[0] &= np.int64(-1) << drop
                d[j + i, lane] = np.float32(word[0])


@intrinsic
def _aligned_step(  # type: ignore[no-untyped-def]
    typingctx: Any, left, left_powers, right, right_powers, depth, n, one, total
):
    """LANES sums of one row: see `aligned_sums`. All arguments but ``one``, which is 2^bits, are
    integers or addresses of float64; ``right`` has rows of ``n``."""
    sig = types.void(*([types.intp] * 6), types.float64, types.intp)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, left_powers, right, right_powers, depth, n, one, total = args
        i32, i64, f64 = ir.IntType(32), ir.IntType(64), ir.DoubleType()
        v = ir.VectorType(f64, LANES)
        trunc, most_of = (
            cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(v, [v] * count), f"llvm.{name}.v{LANES}f64"
            )
            for name, count in (("trunc", 1), ("maxnum", 2))
        )

        def splat(value: Any) -> Any:
            first = builder.insert_element(ir.Constant(v, ir.Undefined), value, ir.Constant(i32, 0))
            zeros = ir.Constant(ir.VectorType(i32, LANES), [0] * LANES)
            return builder.shuffle_vector(first, ir.Constant(v, ir.Undefined), zeros)

        def at(address: Any, index: Any, type_: Any) -> Any:
            place = builder.add(address, builder.shl(index, ir.Constant(i64, 3)))
            return builder.load(builder.inttoptr(place, type_.as_pointer()), align=8)

        zero = ir.Constant(i64, 0)
        held = at(total, zero, v)
        bits = builder.bitcast(held, ir.VectorType(i64, LANES))
        mask = ir.Constant(ir.VectorType(i64, LANES), [0x7FF << 52] * LANES)
        least = ir.Constant(v, [LEAST] * LANES)
        power = builder.bitcast(builder.and_(bits, mask), v)
        most = cgutils.alloca_once_value(builder, builder.call(most_of, [power, least]))
        with cgutils.for_range(builder, depth) as loop:
            k = loop.index
            powers = at(right_powers, builder.mul(k, n), v)
            powers = builder.fmul(splat(at(left_powers, k, f64)), powers)
            builder.store(builder.call(most_of, [builder.load(most), powers]), most)
        largest = builder.load(most)
        scale = builder.fdiv(splat(one), largest)
        first = builder.call(trunc, [builder.fmul(held, scale)])
        sums = cgutils.alloca_once_value(builder, first)
        with cgutils.for_range(builder, depth) as loop:
            k = loop.index
            product = builder.fmul(splat(at(left, k, f64)), at(right, builder.mul(k, n), v))
            term = builder.call(trunc, [builder.fmul(product, scale)])
            builder.store(builder.fadd(builder.load(sums), term), sums)
        result = builder.fmul(builder.load(sums), builder.fdiv(largest, splat(one)))
        builder.store(result, builder.inttoptr(total, v.as_pointer()), align=8)
        return context.get_dummy_value()

    return sig, codegen


@njit(nogil=True, error_model="numpy", cache=True)
def _powers(values, out):
    """2^floor(log2(abs)) of float64 ``values``, 0 of 0; returns whether all are finite."""
    bits, to = values.view(np.int64), out.view(np.int64)
    most = 0
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            field = bits[i, j] & (0x7FF << 52)
            to[i, j] = field
            most = max(most, field)
    return most < 0x7FF << 52


@njit(nogil=True, error_model="numpy", cache=True)
def _sum_rows(left, left_powers, right, right_powers, one, total):
    """All rows, by addresses: the caller holds the arrays, numba frees its own after their last
    use by name."""
    rows, depth = left.shape
    n = right.shape[1]
    a, pa, b, pb, t = (
        left.ctypes.data, left_powers.ctypes.data, right.ctypes.data, right_powers.ctypes.data,
        total.ctypes.data,
    )  # fmt: skip
    for m in range(rows):
        row = 8 * depth * m
        for j in range(0, n, LANES):
            _aligned_step(
                a + row, pa + row, b + 8 * j, pb + 8 * j, depth, n, one, t + 8 * (n * m + j)
            )


@njit(nogil=True, error_model="numpy", cache=True)
def _sum_not_finite(left, right, before, total):
    """Elements with an infinity or NaN among their operands, by plain arithmetic."""
    for m in range(total.shape[0]):
        row = np.isfinite(left[m]).all()
        for n in range(total.shape[1]):
            value, column = before[m, n], right[:, n]
            if not (row and np.isfinite(value) and np.isfinite(column).all()):
                for k in range(left.shape[1]):
                    value += left[m, k] * column[k]
                total[m, n] = value


@njit(nogil=True, error_model="numpy", cache=True)
def aligned_sums(left, right, bits, total):
    """Adds the K products of each element to ``total`` [M, N], in place, N a multiple of LANES.

    As measured on an H200, to the bit: the accumulator and the products of one instruction are
    truncated to a multiple of 2^(e - bits), e the largest exponent among them (that of a product
    being the sum of its factors'), and added exactly.
    """
    left_powers, right_powers = np.empty_like(left), np.empty_like(right)
    finite = _powers(left, left_powers)
    finite &= _powers(right, right_powers)
    finite &= np.isfinite(total).all()
    before = total if finite else total.copy()
    _sum_rows(left, left_powers, right, right_powers, 2.0**bits, total)
    if not finite:  # rows of a tile that nothing reads may hold anything
        _sum_not_finite(left, right, before, total)
