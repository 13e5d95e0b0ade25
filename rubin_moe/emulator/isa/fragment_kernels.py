"""Compiled inner loops of ``wgmma`` on registers: A's fragments to rows, products to accumulators.

Fragments as in ``mma_sync`` (PTX ISA, "register fragments for wgmma.m64nNk..."): ``registers`` is
uint32 ``[count, 32]`` of one warp, whose rows of the product start at ``first``. All functions
release the GIL.
"""

from __future__ import annotations

import numpy as np
from numba import njit


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
def accumulate_f32(product, first, sign, keep, registers):
    """``sign`` times 16 rows of ``product``, plus the accumulator if ``keep``, rounded once."""
    d = registers.view(np.float32)
    for j in range(0, registers.shape[0], 4):
        for lane in range(32):
            row, column = first + lane // 4, 2 * j + 2 * (lane % 4)
            for i in range(4):
                total = sign * product[row + 8 * (i // 2), column + i % 2]
                held = np.float64(d[j + i, lane]) if keep else 0.0
                d[j + i, lane] = np.float32(total + held)
