"""Block scales in chunks of 128 rows x 4 scales, 512 bytes each: what tcgen05.cp reads.

Row r, scale k of a chunk is byte ``(r % 32) * 16 + (r // 32) * 4 + k``: four scales of a row are
neighbours, and rows 32 apart sit side by side, so that 32 lanes read 16 bytes each. Chunks follow
one another along K, then along the rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rubin_moe.errors import LayoutError

CHUNK_ROWS = 128
CHUNK_SCALES = 4
CHUNK_BYTES = CHUNK_ROWS * CHUNK_SCALES


@dataclass(frozen=True)
class Sf128x4:
    """Logical uint8 ``[..., rows, scales]`` -> ``[..., row chunks, K chunks, 512]``.

    Rows and scales are padded to whole chunks with byte 0.
    """

    @property
    def key(self) -> str:
        return "sf-128x4"

    def storage_shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """Raises LayoutError for fewer than two axes."""
        if len(logical) < 2:
            raise LayoutError(f"{self.key}: scales are [..., rows, scales], got {list(logical)}")
        *lead, rows, scales = logical
        return (*lead, -(-rows // CHUNK_ROWS), -(-scales // CHUNK_SCALES), CHUNK_BYTES)

    def pack(self, logical: Tensor) -> Tensor:
        """A new contiguous tensor; the input is left alone."""
        *lead, m, k, _ = self.storage_shape(tuple(logical.shape))
        rows, scales = logical.shape[-2:]
        padded = logical.new_zeros((*lead, m * CHUNK_ROWS, k * CHUNK_SCALES))
        padded[..., :rows, :scales] = logical
        blocks = padded.view(*lead, m, 4, 32, k, CHUNK_SCALES)  # row = 32 * quarter + lane
        order = blocks.movedim(-2, -4)  # [..., m, k, quarter, lane, scale]
        return order.transpose(-3, -2).reshape(*lead, m, k, CHUNK_BYTES).contiguous()

    def unpack(self, stored: Tensor, logical: tuple[int, ...]) -> Tensor:
        """A new tensor of shape ``logical``. Raises LayoutError for another storage shape."""
        expected = self.storage_shape(logical)
        if tuple(stored.shape) != expected:
            raise LayoutError(
                f"{self.key}: stored {list(stored.shape)}, expected {list(expected)} for "
                f"{list(logical)}"
            )
        *lead, m, k, _ = expected
        rows, scales = logical[-2:]
        order = stored.view(*lead, m, k, 32, 4, CHUNK_SCALES).transpose(-3, -2)
        padded = order.movedim(-4, -2).reshape(*lead, m * CHUNK_ROWS, k * CHUNK_SCALES)
        return torch.clone(padded[..., :rows, :scales], memory_format=torch.contiguous_format)
