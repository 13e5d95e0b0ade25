"""Compiled inner loops that move poison: shadow memory in, shadow memory or row flags out.

A byte of shadow memory that is not zero is poisoned. All release the GIL.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, error_model="numpy", cache=True)
def define_box(smem, start, rows, pitch, chunks, mask):
    """Clear the shadow of a swizzled box of ``rows`` rows."""
    for r in range(rows):
        first = start + r * pitch
        for c in range(chunks):
            at = first + 16 * c
            at ^= ((at >> 7) & mask) << 4
            for i in range(16):
                smem[at + i] = 0


@njit(nogil=True, error_model="numpy", cache=True)
def find_stored(smem, start, pitch, chunks, mask, first, last, valid):
    """Offset of a poisoned byte among those that a tensor store writes, or -1."""
    for r in range(valid.size):
        if not valid[r]:
            continue
        src = start + r * pitch
        for c in range(chunks):
            at = src + 16 * c
            at ^= ((at >> 7) & mask) << 4
            for i in range(16):
                if first <= 16 * c + i < last and smem[at + i]:
                    return at + i
    return -1


@njit(nogil=True, error_model="numpy", cache=True)
def tile_rows(smem, base, offsets, mn_major, bits, out):
    """Rows of a multiplicand with a poisoned byte into ``out`` uint8; whether there is one.

    ``offsets`` are a chunk table's; MN-major chunks run along the rows.
    """
    lines, chunks = offsets.shape
    found = False
    words = smem[: smem.size & ~7].view(np.uint64)
    for line in range(lines):
        for c in range(chunks):
            at = base + offsets[line, c]
            if not words[at >> 3] | words[(at >> 3) + 1]:
                continue
            found = True
            if not mn_major:
                out[line] = 1
                continue
            for i in range(16):
                if smem[at + i]:
                    row = (c * 128 + 8 * i) // bits
                    if row < out.size:
                        out[row] = 1
                    if bits < 8 and row + 1 < out.size:
                        out[row + 1] = 1
    return found


@njit(nogil=True, error_model="numpy", cache=True)
def scale_rows(tmem, column, rows, first, count, out):
    """Rows with a poisoned scale into ``out``; the layout is ``operand_kernels.read_scales``'s."""
    step = 4 * ((rows + 127) // 128)
    found = False
    for w in range((first + count + 3) // 4):
        used = np.uint32(0)
        for byte in range(max(0, first - 4 * w), min(4, first + count - 4 * w)):
            used |= np.uint32(255) << np.uint32(8 * byte)
        for r in range(rows):
            lane = r % 32
            col = column + step * w + r // 32
            word = tmem[lane, col] | tmem[lane + 32, col]
            word |= tmem[lane + 64, col] | tmem[lane + 96, col]
            if word & used:
                out[r] = 1
                found = True
    return found


@njit(nogil=True, error_model="numpy", cache=True)
def spread(tmem, lane, column, rows, columns, keep):
    """D's shadow: poisoned where its row or column is, else as it was (``keep``) or defined."""
    for r in range(rows.size):
        for c in range(columns.size):
            if rows[r] or columns[c]:
                tmem[lane + r, column + c] = np.uint32(0xFFFFFFFF)
            elif not keep:
                tmem[lane + r, column + c] = np.uint32(0)
