"""Block scales as int32 words of four along K, MN-major, rows aligned for TMA.

The pipeline of DeepGEMM's block-scaled kernels after folding: four scales of a row that follow one
another along K form one int32 (the first in the low byte), the matrix is transposed so that rows
are innermost, and the row count is rounded up to 16 bytes, the TMA stride unit. ``utccp`` further
reorders each 128 rows from 4 x 32 to 32 x 4, the order in which tcgen05.cp's 32x128b copy spreads
them over the lanes; rows are then rounded up to 128.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rubin_moe.errors import LayoutError

SCALES_PER_WORD = 4
TMA_WORDS = 16 // 4
UTCCP_ROWS = 128


@dataclass(frozen=True)
class SfInt32Mn:
    """Logical uint8 ``[..., rows, scales]`` -> int32 ``[..., words along K, aligned rows]``.

    Attributes:
        utccp: rows in tcgen05.cp's order. Padding is zero words.
    """

    utccp: bool = True

    @property
    def key(self) -> str:
        return "sf-int32-mn-utccp" if self.utccp else "sf-int32-mn"

    @property
    def row_multiple(self) -> int:
        return UTCCP_ROWS if self.utccp else TMA_WORDS

    def storage_shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """Raises LayoutError for fewer than two axes."""
        if len(logical) < 2:
            raise LayoutError(f"{self.key}: scales are [..., rows, scales], got {list(logical)}")
        *lead, rows, scales = logical
        aligned = -(-rows // self.row_multiple) * self.row_multiple
        return (*lead, -(-scales // SCALES_PER_WORD), aligned)

    def pack(self, logical: Tensor) -> Tensor:
        """A new contiguous tensor; the input is left alone."""
        *lead, words, aligned = self.storage_shape(tuple(logical.shape))
        rows, scales = logical.shape[-2:]
        padded = logical.new_zeros((*lead, aligned, words * SCALES_PER_WORD))
        padded[..., :rows, :scales] = logical
        packed = _as_words(padded)  # [..., aligned, words]
        if self.utccp:
            packed = _swap_rows(packed, 4, 32)
        return packed.transpose(-1, -2).contiguous()

    def unpack(self, stored: Tensor, logical: tuple[int, ...]) -> Tensor:
        """A new tensor of shape ``logical``. Raises LayoutError for another storage shape."""
        expected = self.storage_shape(logical)
        if tuple(stored.shape) != expected or stored.dtype != torch.int32:
            raise LayoutError(
                f"{self.key}: stored {stored.dtype} {list(stored.shape)}, expected torch.int32 "
                f"{list(expected)} for {list(logical)}"
            )
        rows, scales = logical[-2:]
        packed = stored.transpose(-1, -2)
        if self.utccp:
            packed = _swap_rows(packed, 32, 4)
        padded = packed.contiguous().view(torch.uint8)
        return torch.clone(padded[..., :rows, :scales], memory_format=torch.contiguous_format)


def _as_words(scales: Tensor) -> Tensor:
    """uint8 ``[..., 4 w]`` -> int32 ``[..., w]``, the first of four in the low byte."""
    if scales.numel() == 0:
        return scales.new_zeros((*scales.shape[:-1], scales.shape[-1] // 4), dtype=torch.int32)
    return scales.contiguous().view(torch.int32)


def _swap_rows(words: Tensor, outer: int, inner: int) -> Tensor:
    """Each 128 rows seen as ``outer x inner`` -> ``inner x outer``."""
    *lead, rows, k = words.shape
    tiles = words.reshape(*lead, rows // UTCCP_ROWS, outer, inner, k)
    return tiles.transpose(-3, -2).reshape(*lead, rows, k)
