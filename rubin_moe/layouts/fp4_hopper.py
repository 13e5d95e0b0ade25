"""Weights of the sm_90a kernels: 16 x 64 blocks whose words dequantize in a few instructions.

A block is 512 bytes of codes, then its scales. Lane ``4 g + t`` of a warp reads 16 bytes: rows g
and g + 8, elements ``16 t .. 16 t + 15``, a word for each four of K. In a word a code's bits lie
where one mask, rotation or select brings them to a bfloat16's sign, exponent and mantissa
(`kernels.sm90.dequant`). Scales: two bytes a lane (rows g and g + 8) for blocks of 16; for blocks
of 32, which two lanes share, ``[t // 2, g, row]``. A tile, 16 rows over all of K, is contiguous.

For FP8 products (``fp8``) a word holds what two byte permutations need (`kernels.sm90.fp8`): the
magnitudes of row g's four codes in its low nibbles, of row g + 8's in the high ones; the signs of
row g at bits 7, 15, 23 and 31, of row g + 8 at 3, 11, 19 and 27.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from rubin_moe.errors import LayoutError

ROWS, BLOCK_K, CODE_BYTES = 16, 64, 512

# Of the four pairs of a word (rows g and g + 8, elements 0 and 1, then 2 and 3): where the low
# element's sign, exponent (high, low) and mantissa bits are in the low half; the other's are
# 16 bits on. True: stored in the other half.
_PLACES = (
    ((15, False), (8, False), (7, False), (6, False)),
    ((3, True), (12, False), (11, False), (10, False)),
    ((9, False), (2, False), (1, False), (0, False)),
    ((13, False), (14, True), (5, False), (4, False)),
)


Products = Literal["16bit", "fp8"]


@dataclass(frozen=True)
class HopperBlocks:
    """Codes ``[N, K / 2]`` and scale bytes ``[N, K / sf_vec_size]`` of one expert as ``[N tiles, K
    blocks, 512 + scales]`` bytes, padded with zeros.

    Attributes:
        sf_vec_size: 16 or 32 elements a scale. products: what words are dequantized to.
    """

    sf_vec_size: int
    products: Products = "16bit"

    @property
    def key(self) -> str:
        return f"hopper_blocks_{ROWS}x{BLOCK_K}_{self.sf_vec_size}_{self.products}"

    @property
    def block_bytes(self) -> int:
        return CODE_BYTES + ROWS * self.scales_k

    @property
    def scales_k(self) -> int:
        """Scales of a row of a block."""
        return BLOCK_K // self.sf_vec_size

    def storage_shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """``logical``: (N, K) in elements."""
        if len(logical) != 2 or logical[1] % self.sf_vec_size:
            raise LayoutError(f"{self.key}: {list(logical)}, expected [N, K], K of whole scales")
        return (-(-logical[0] // ROWS), -(-logical[1] // BLOCK_K), self.block_bytes)

    def pack(self, qdata: Tensor, sf: Tensor) -> Tensor:
        """A new uint8 tensor of ``storage_shape``."""
        n, half_k = qdata.shape
        tiles, blocks, _ = self.storage_shape((n, 2 * half_k))
        if sf.shape != (n, 2 * half_k // self.sf_vec_size):
            raise LayoutError(f"{self.key}: scales {list(sf.shape)} of codes {list(qdata.shape)}")
        q = _padded(qdata, tiles * ROWS, blocks * BLOCK_K // 2)
        # tile, row half, g, block, t, word, pair of elements
        q = q.view(tiles, 2, 8, blocks, 4, 4, 2)
        words = torch.zeros((tiles, 8, blocks, 4, 4), dtype=torch.int32, device=q.device)
        table = _table(self.products).to(q.device)
        for pair in range(4):
            words += (
                table[pair]
                .index_select(0, q[:, pair % 2, ..., pair // 2].int().flatten())
                .view(words.shape)
            )
        codes = words.permute(0, 2, 1, 3, 4).contiguous().view(torch.uint8)
        s = _padded(sf, tiles * ROWS, blocks * self.scales_k)
        s = s.view(tiles, 2, 8, blocks, self.scales_k)
        order = (0, 3, 2, 4, 1) if self.sf_vec_size == 16 else (0, 3, 4, 2, 1)
        scales = s.permute(order).reshape(tiles, blocks, ROWS * self.scales_k)
        return torch.cat([codes.reshape(tiles, blocks, CODE_BYTES), scales], dim=-1)

    def unpack(self, stored: Tensor, logical: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The codes and scale bytes of ``logical`` (N, K)."""
        tiles, blocks, _ = expected = self.storage_shape(logical)
        if tuple(stored.shape) != expected:
            raise LayoutError(f"{self.key}: stored {list(stored.shape)}, expected {list(expected)}")
        n, k = logical
        words = stored[..., :CODE_BYTES].contiguous().view(torch.int32).view(tiles, blocks, 8, 4, 4)
        q = stored.new_zeros((tiles, 2, 8, blocks, 4, 4, 2))
        for pair in range(4):
            byte = torch.zeros_like(words)
            for element in range(2):
                for bit, position in zip(
                    (3, 2, 1, 0), _positions(self.products, pair, element), strict=True
                ):
                    byte |= ((words >> position) & 1) << (bit + 4 * element)
            q[:, pair % 2, ..., pair // 2] = byte.permute(0, 2, 1, 3, 4).to(torch.uint8)
        s = stored[..., CODE_BYTES:]
        if self.sf_vec_size == 16:
            s = s.reshape(tiles, blocks, 8, 4, 2).permute(0, 4, 2, 1, 3)
        else:
            s = s.reshape(tiles, blocks, 2, 8, 2).permute(0, 4, 3, 1, 2)
        return (
            q.reshape(tiles * ROWS, blocks * 32)[:n, : k // 2].contiguous(),
            s.reshape(tiles * ROWS, blocks * self.scales_k)[:n, : k // self.sf_vec_size].clone(),
        )


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    if matrix.shape == (rows, columns):
        return matrix.contiguous()
    out = matrix.new_zeros(rows, columns)
    out[: matrix.shape[0], : matrix.shape[1]] = matrix
    return out


def _positions(products: Products, pair: int, element: int) -> list[int]:
    """Of a code's sign and magnitude bits, high to low."""
    if products == "fp8":
        half, at = pair % 2, 2 * (pair // 2) + element
        low = 16 * half + 4 * at
        return [8 * at + (3 if half else 7), low + 2, low + 1, low]
    return [place + 16 * (element ^ int(other)) for place, other in _PLACES[pair]]


@cache
def _table(products: Products) -> Tensor:
    """int32 ``[4, 256]``: what a byte (two codes) adds to a word as its pair ``p``."""
    rows = []
    for pair in range(4):
        row = []
        for byte in range(256):
            word = 0
            for element in range(2):
                code = byte >> (4 * element) & 15
                places = _positions(products, pair, element)
                for bit, position in zip((3, 2, 1, 0), places, strict=True):
                    word |= (code >> bit & 1) << position
            row.append(word - (1 << 32) if word >> 31 else word)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int32)
