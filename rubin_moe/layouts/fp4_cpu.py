"""Weight orders of the CPU backend: tiles of rows, so that a vector holds several rows' next codes.

A kernel then multiplies a vector with one activation and needs no sum across lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rubin_moe.errors import LayoutError


@dataclass(frozen=True)
class RowTiles:
    """``[..., N, B]`` bytes as ``[..., ceil(N / rows), ceil(B / unit), rows, unit]``.

    ``unit`` consecutive bytes of a row stay together and lie beside those of the tile's other
    rows: 4 for codes (8 of a row make a 32-bit lane), 1 for block scales. Missing rows and bytes
    are zero.
    """

    unit: int
    rows: int

    @property
    def key(self) -> str:
        return f"row_tiles:{self.rows}x{self.unit}"

    def storage_shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        if len(logical) < 2:
            raise LayoutError(f"{self.key}: rows of bytes expected, got shape {list(logical)}")
        *lead, n, b = logical
        return (*lead, -(-n // self.rows), -(-b // self.unit), self.rows, self.unit)

    def pack(self, logical: Tensor) -> Tensor:
        stored = logical.new_empty(self.storage_shape(tuple(logical.shape)))
        self.pack_into(logical, stored)
        return stored

    def pack_into(self, logical: Tensor, stored: Tensor) -> None:
        """``pack`` into memory that is there: one expert's slice of a layer."""
        *lead, n, b = logical.shape
        tiles, units = stored.shape[-4], stored.shape[-3]
        if (n, b) != (tiles * self.rows, units * self.unit):
            padded = logical.new_zeros((*lead, tiles * self.rows, units * self.unit))
            padded[..., :n, :b] = logical
            logical = padded
        if logical.numel() == 0:
            return
        wide = _WIDE[self.unit]
        source = logical.contiguous().view(*lead, tiles, self.rows, units * self.unit)
        target = stored.view(*lead, tiles, units, self.rows * self.unit)
        # NumPy transposes small blocks 2 times faster than torch does
        np.copyto(target.view(wide).numpy(), source.view(wide).numpy().swapaxes(-1, -2))

    def unpack(self, stored: Tensor, logical: tuple[int, ...]) -> Tensor:
        if tuple(stored.shape) != self.storage_shape(logical):
            raise LayoutError(
                f"{self.key}: {list(stored.shape)} does not hold {list(logical)}, "
                f"which takes {list(self.storage_shape(logical))}"
            )
        *lead, n, b = logical
        tiles, units = stored.shape[-4], stored.shape[-3]
        rows = stored.transpose(-3, -2).reshape(*lead, tiles * self.rows, units * self.unit)
        return rows[..., :n, :b].contiguous()


_WIDE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
