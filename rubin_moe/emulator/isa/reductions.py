"""Element-wise reductions of bulk and tensor copies (``cp.reduce.async.bulk``)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from .legality import refuse


@intrinsic
def _exchange(typingctx: Any, address: Any, old: Any, new: Any) -> Any:
    """Replace the integer at an address if it is ``old``, indivisibly; whether it was."""
    sig = types.boolean(types.intp, old, new)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], args[1].type.as_pointer())
        pair = builder.cmpxchg(pointer, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return sig, codegen


@njit(nogil=True, error_model="numpy", cache=True)
def _exchange_all(cells, old, new):
    """Replace elements until one is no longer ``old``; the number replaced."""
    address = cells.ctypes.data
    for i in range(old.size):
        if not _exchange(address + i * cells.itemsize, old[i], new[i]):
            return i
    return old.size


_DTYPES = {
    "u32": np.dtype("<u4"),
    "s32": np.dtype("<i4"),
    "b32": np.dtype("<u4"),
    "u64": np.dtype("<u8"),
    "s64": np.dtype("<i8"),
    "b64": np.dtype("<u8"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype("<f4"),
    "f64": np.dtype("<f8"),
}
_FLOATS = ("f16", "bf16", "f32", "f64")
_LEGAL = {
    "add": ("u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64", "u32", "s32", "u64", "s64"),
    "or": ("b32", "b64", "u32", "s32", "u64", "s64"),
    "xor": ("b32", "b64", "u32", "s32", "u64", "s64"),
}


def reduce_into(
    cells: NDArray[np.uint8], new: NDArray[np.uint8], operation: str, element: str
) -> None:
    """``cells = operation(cells, new)`` in place, each element indivisibly.

    ``cells`` may lie in global memory that other threads reduce into.
    """
    at = 0
    while at < cells.size:
        old = cells[at:].copy()
        result = reduce_bytes(old, new[at:], operation, element)
        word = f"u{_DTYPES[element].itemsize}"
        at += _DTYPES[element].itemsize * _exchange_all(
            cells[at:].view(word), old.view(word), result.view(word)
        )


def reduce_bytes(
    old: NDArray[np.uint8], new: NDArray[np.uint8], operation: str, element: str
) -> NDArray[np.uint8]:
    """``operation(old, new)`` on bytes seen as ``element``; sums of halves round to nearest even.

    float16 and bfloat16 keep subnormals (``.noftz``). min and max return the number where one
    operand is NaN, as PTX ``min`` and ``max`` do. A NaN result is the canonical one (seen on an
    H200).
    """
    if element not in _LEGAL.get(operation, ()):
        refuse("bulk reduction: type", f"{operation} on {element} is not defined")
    dtype = _DTYPES[element]
    a = np.ascontiguousarray(old).view(dtype)
    b = np.ascontiguousarray(new).view(dtype)
    wide = np.float32 if element in ("f16", "bf16") else dtype
    with np.errstate(all="ignore"):
        if operation == "add":
            out = (a.astype(wide) + b.astype(wide)).astype(dtype)
        elif operation in ("min", "max"):
            take = {"min": np.fmin, "max": np.fmax} if element in _FLOATS else _EXTREMES
            out = take[operation](a.astype(wide), b.astype(wide)).astype(dtype)
        elif operation == "inc":
            out = np.where(a >= b, 0, a + 1).astype(dtype)
        elif operation == "dec":
            out = np.where((a == 0) | (a > b), b, a - 1).astype(dtype)
        else:
            out = {"and": a & b, "or": a | b, "xor": a ^ b}[operation]
    out = np.asarray(out)
    if element in _CANONICAL_NAN:
        nan = np.isnan(out.astype(np.float32))
        out.view(f"u{dtype.itemsize}")[nan] = _CANONICAL_NAN[element]
    return out.view(np.uint8)


_CANONICAL_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF}
_EXTREMES = {"min": np.minimum, "max": np.maximum}
