"""Compiled inner loops of the copy units: boxes between global and shared memory.

A box is rows of ``chunks`` 16-byte pieces, ``pitch`` bytes apart in shared memory; a piece takes
``width`` bytes of global memory (16; 8 or 12 for padded sub-byte formats, whose padding is written
as zeros). The swizzle XORs bits 4-6 (or fewer) of the shared address with bits 7-9. All release the
GIL.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


@intrinsic
def _copy16(typingctx: Any, to: Any, from_: Any) -> Any:
    """Copy 16 bytes between addresses of any alignment."""
    sig = types.void(types.intp, types.intp)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.VectorType(ir.IntType(64), 2).as_pointer()
        value = builder.load(builder.inttoptr(args[1], pointer), align=1)
        builder.store(value, builder.inttoptr(args[0], pointer), align=1)
        return context.get_dummy_value()

    return sig, codegen


@njit(nogil=True, error_model="numpy", cache=True)
def load_rows(source, offsets, smem, start, pitch, chunks, width, mask):
    """Copy rows of global memory (``source[offsets[r]:]``) to the swizzled box at ``start``."""
    from_, to = source.ctypes.data, smem.ctypes.data
    if width == 16:
        for r in range(offsets.size):
            src = from_ + offsets[r]
            dst = start + r * pitch
            for c in range(chunks):
                at = dst + 16 * c
                at ^= ((at >> 7) & mask) << 4
                _copy16(to + at, src + 16 * c)
        return
    for r in range(offsets.size):
        src = offsets[r]
        dst = start + r * pitch
        for c in range(chunks):
            at = dst + 16 * c
            at ^= ((at >> 7) & mask) << 4
            s = src + c * width
            for i in range(width):
                smem[at + i] = source[s + i]
            for i in range(width, 16):
                smem[at + i] = 0


@njit(nogil=True, error_model="numpy", cache=True)
def load_clipped(
    source, offsets, valid, first, last, smem, start, pitch, chunks, width, mask, fill
):
    """As ``load_rows``; outside ``valid`` rows and the byte columns ``first``..``last`` the pattern
    ``fill`` (uint8 [16]) is written instead."""
    from_, to, blank = source.ctypes.data, smem.ctypes.data, fill.ctypes.data
    for r in range(offsets.size):
        src = offsets[r]
        dst = start + r * pitch
        for c in range(chunks):
            at = dst + 16 * c
            at ^= ((at >> 7) & mask) << 4
            left = c * width
            if width == 16 and valid[r] and first <= left and left + 16 <= last:
                _copy16(to + at, from_ + src + left)
                continue
            if width == 16 and (not valid[r] or last <= left or left + 16 <= first):
                _copy16(to + at, blank)
                continue
            for i in range(16):
                column = left + i
                if i >= width:
                    smem[at + i] = 0
                elif valid[r] and first <= column < last:
                    smem[at + i] = source[src + column]
                else:
                    smem[at + i] = fill[i]


@njit(nogil=True, error_model="numpy", cache=True)
def gather_box(smem, start, pitch, chunks, mask, out):
    """Undo the swizzle: the box's bytes into ``out`` uint8 [rows, 16 * chunks]."""
    for r in range(out.shape[0]):
        src = start + r * pitch
        for c in range(chunks):
            at = src + 16 * c
            at ^= ((at >> 7) & mask) << 4
            for i in range(16):
                out[r, c * 16 + i] = smem[at + i]


@njit(nogil=True, error_model="numpy", cache=True)
def store_rows(smem, start, pitch, chunks, mask, first, last, valid, offsets, target):
    """Copy byte columns ``first``..``last`` of the valid rows of a swizzled box to global rows."""
    from_, out = smem.ctypes.data, target.ctypes.data
    for r in range(offsets.size):
        if not valid[r]:
            continue
        src = start + r * pitch
        to = offsets[r]
        for c in range(chunks):
            at = src + 16 * c
            at ^= ((at >> 7) & mask) << 4
            low, high = 16 * c, 16 * c + 16
            if first <= low and high <= last:
                _copy16(out + to + low, from_ + at)
            else:
                for i in range(16):
                    if first <= low + i < last:
                        target[to + low + i] = smem[at + i]
