"""Tensor maps: the 128-byte descriptor of a tensor in global memory that TMA instructions take.

``decode_tensormap(raw)`` reads little-endian 64-bit words w0..w7 (w8..w15 are not looked at):

* w0 base address
* w1 bits 4-6 rank - 1; 7-10 element format; 11-12 interleave; 13-14 swizzle (0 none, 1 32 B,
  2 64 B, 3 128 B); 15 out-of-bounds fill (0 zero, 1 NaN); 16 TF32
* w1 high half, w2 low, w2 high, w3 low: strides of dimensions 1-4 in units of 16 bytes; w3 high
  half holds their upper four bits each
* w4, w5, w6 low: sizes - 1 of dimensions 0-4
* w6 bits 32-46: traversal strides - 1, three bits a dimension (that of dimension 0 means nothing)
* w6 bits 56-63, w7 bytes 0-3: box sizes - 1

Read off launches of compiled kernels whose tensors are known, then held against what the driver
encodes on an H200 (``tests/emulator/silicon``).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..isa.footprint import intervals
from ..isa.legality import refuse, require


@dataclass(frozen=True)
class TensorFormat:
    """An element format: bits in global memory, and bytes of global per 16 bytes of shared."""

    name: str
    bits: int
    chunk: int = 16

    @property
    def shared_bits(self) -> int:
        """Bits an element takes in shared memory, padding included."""
        return self.bits * 16 // self.chunk


FORMATS: Final[dict[int, TensorFormat]] = {
    0: TensorFormat("u8", 8),
    1: TensorFormat("u16", 16),
    2: TensorFormat("u32", 32),
    3: TensorFormat("s32", 32),
    4: TensorFormat("u64", 64),
    5: TensorFormat("s64", 64),
    6: TensorFormat("f16", 16),
    7: TensorFormat("f32", 32),
    8: TensorFormat("f32.ftz", 32),
    9: TensorFormat("f64", 64),
    10: TensorFormat("bf16", 16),
    11: TensorFormat("b4x16", 4),
    12: TensorFormat("b4x16_p64", 4, 8),
    13: TensorFormat("b6x16_p32", 6, 12),
}
"""Code in bits 7-10 -> format; padded ones hold sixteen elements in 16 bytes of shared memory."""


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map: sizes and box in elements, strides in bytes, dimension 0 innermost."""

    base: int
    format: TensorFormat
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    fill_nan: bool = False

    @property
    def rank(self) -> int:
        """Number of dimensions, 1 to 5."""
        return len(self.dims)

    @cached_property
    def inner_bytes(self) -> int:
        """Bytes of shared memory that one row of the box takes."""
        return self.box[0] * self.format.shared_bits // 8

    @cached_property
    def rows(self) -> int:
        """Rows of the box."""
        return int(np.prod(self.box[1:], dtype=np.int64))

    @cached_property
    def pitch(self) -> int:
        """Bytes from row to row in shared memory: a swizzled row takes the swizzle's whole width,
        however narrow the box (seen on an H200)."""
        return self.swizzle or self.inner_bytes

    @cached_property
    def nbytes(self) -> int:
        """Bytes of shared memory that the box writes, padding of sub-byte formats included."""
        return self.inner_bytes * self.rows

    @cached_property
    def counted(self) -> int:
        """Bytes that a barrier counts: padding not included (FlashInfer's mixed kernels expect
        four bits an element)."""
        return self.nbytes * self.format.chunk // 16

    @cached_property
    def coordinate_step(self) -> int:
        """Elements of dimension 0 in 16 bytes, in 128 elements for padded formats: coordinates
        must be multiples."""
        return 128 if self.format.chunk != 16 else max(128 // self.format.bits, 1)

    @cached_property
    def fill(self) -> NDArray[np.uint8]:
        """Sixteen bytes of what elements outside the tensor read as.

        NaN is 0x7FF7 in 16-bit and 0x7FF77FF7 in 32-bit formats (seen on an H200).
        """
        pattern = [0xF7, 0x7F] if self.fill_nan else [0, 0]
        return np.array(pattern * 8, np.uint8)

    @cached_property
    def extent(self) -> int:
        """Bytes of shared memory from the first to past the last byte of the box."""
        return (self.rows - 1) * self.pitch + self.inner_bytes

    @cached_property
    def inner_source(self) -> int:
        """Bytes of global memory that one row of the box takes."""
        return self.box[0] * self.format.bits // 8

    @cached_property
    def span(self) -> int:
        """Bytes from the first to past the last byte of an inside box in global memory."""
        steps = sum((b - 1) * s for b, s in zip(self.box[1:], self.strides, strict=True))
        return self.inner_source + steps

    @cached_property
    def row_offsets(self) -> NDArray[np.int64]:
        """Byte offset of every row of the box from its first, int64 [rows]."""
        offset = np.zeros(1, np.int64)
        for size, stride in zip(self.box[1:], self.strides, strict=True):
            offset = (np.arange(size, dtype=np.int64)[:, None] * stride + offset).reshape(-1)
        return offset

    @cached_property
    def every_row(self) -> NDArray[np.bool_]:
        """True for every row of the box."""
        return np.ones(self.rows, np.bool_)

    @cached_property
    def box_ranges(self) -> NDArray[np.int64]:
        """Merged byte intervals of a box inside the tensor, relative to its first byte, [n, 2]."""
        return intervals(self.row_offsets, self.inner_source)

    @cached_property
    def row_coordinates(self) -> NDArray[np.int64]:
        """Coordinates (dimensions 1 and up) of every row relative to the box, [rows, rank - 1]."""
        grids = np.indices(self.box[:0:-1]).reshape(self.rank - 1, self.rows)
        return np.ascontiguousarray(grids[::-1].T).astype(np.int64)

    @cached_property
    def shared_layout(self) -> tuple[int, int, int, int]:
        """Pitch, 16-byte chunks a row, bytes of global memory a chunk, the swizzle's XOR mask."""
        mask = max(self.swizzle // 16 - 1, 0)
        return self.pitch, self.inner_bytes // 16, self.format.chunk, mask

    @cached_property
    def last_inside(self) -> tuple[int, ...]:
        """The largest coordinates at which the box still lies inside the tensor."""
        return tuple(d - b for d, b in zip(self.dims, self.box, strict=True))

    def offset(self, coordinates: tuple[int, ...]) -> int:
        """Byte address of the element at ``coordinates`` (first bit of it, for packed formats)."""
        address = self.base + coordinates[0] * self.format.bits // 8
        for i, stride in enumerate(self.strides, 1):
            address += coordinates[i] * stride
        return address

    def inside(self, coordinates: tuple[int, ...]) -> bool:
        """Whether the whole box at ``coordinates`` lies inside the tensor."""
        if min(coordinates) < 0:
            return False
        return not any(map(operator.gt, coordinates, self.last_inside))


@lru_cache(maxsize=4096)
def decode_tensormap(raw: bytes) -> TensorMap:
    """Decode the first 64 bytes of a tensor map; raises ``IllegalOperationError``."""
    require(len(raw) >= 64, "tensor map: size", f"{len(raw)} bytes, at least 64 are needed")
    w = [int(x) for x in np.frombuffer(raw[:64], "<u8")]
    flags = w[1] & 0xFFFFFFFF
    rank = (flags >> 4 & 7) + 1
    require(rank <= 5, "tensor map: rank", f"rank {rank}")
    code = flags >> 7 & 15
    if code not in FORMATS:
        refuse("tensor map: element format", f"format code {code} is not known")
    require(flags >> 11 & 3 == 0, "tensor map: interleave", "interleaved layouts are not modelled")
    low = [w[1] >> 32, w[2] & 0xFFFFFFFF, w[2] >> 32, w[3] & 0xFFFFFFFF]
    high = w[3] >> 32
    strides = [(value | (high >> 4 * i & 15) << 32) * 16 for i, value in enumerate(low)]
    sizes = [w[4] & 0xFFFFFFFF, w[4] >> 32, w[5] & 0xFFFFFFFF, w[5] >> 32, w[6] & 0xFFFFFFFF]
    boxes = [w[6] >> 56, *(w[7] >> 8 * i & 255 for i in range(4))]
    swizzle = (0, 32, 64, 128)[flags >> 13 & 3]
    result = TensorMap(
        base=w[0],
        format=FORMATS[code],
        dims=tuple(size + 1 for size in sizes[:rank]),
        strides=tuple(strides[: rank - 1]),
        box=tuple(size + 1 for size in boxes[:rank]),
        swizzle=swizzle,
        fill_nan=bool(flags >> 15 & 1),
    )
    require(
        w[6] >> 35 & (1 << 3 * (rank - 1)) - 1 == 0,
        "tensor map: traversal stride",
        "traversal strides other than one are not modelled",
    )
    _check(result)
    return result


def _check(t: TensorMap) -> None:
    require(t.base % 16 == 0, "tensor map: base address", f"{t.base:#x} is not 16-byte aligned")
    require(
        t.box[0] * t.format.shared_bits % 128 == 0,
        "tensor map: inner box",
        f"{t.box[0]} elements of {t.format.name} are not a multiple of 16 bytes",
    )
    require(
        t.swizzle == 0 or t.inner_bytes <= t.swizzle,
        "tensor map: swizzle",
        f"inner box of {t.inner_bytes} bytes exceeds the {t.swizzle}-byte swizzle",
    )
    if t.format.chunk != 16:
        require(
            t.base % 32 == 0 and t.box[0] % 128 == 0,
            "tensor map: padded format",
            f"{t.format.name} takes 32-byte aligned tensors and boxes of 128 elements, "
            f"not {t.box[0]}",
        )
