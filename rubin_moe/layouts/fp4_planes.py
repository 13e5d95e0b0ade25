"""Weights of the portable GPU kernels: 64 x 128 tiles whose bytes hold two far elements.

A byte's low nibble is an element of the tile's first 64 of K, its high nibble the one 64 further
on. Masking and shifting a tile of bytes then gives two tiles that are contiguous in K, each a
matrix operand as it is, without interleaving. A tile of codes is 4096 contiguous bytes; its scales
lie elsewhere, a row's (8 for blocks of 16, 4 for blocks of 32) side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rubin_moe.errors import LayoutError

ROWS, BLOCK_K = 64, 128


@dataclass(frozen=True)
class CodePlanes:
    """E2M1 codes ``[N, K / 2]`` (even K in the low nibble) of one matrix as uint8
    ``[N tiles, K tiles, 64, 64]``, padded with zeros."""

    @property
    def key(self) -> str:
        return f"code-planes-{ROWS}x{BLOCK_K}"

    def storage_shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """``logical``: (N, bytes of a row)."""
        return _tiles(self.key, logical, BLOCK_K // 2)

    def pack(self, logical: Tensor) -> Tensor:
        stored = logical.new_empty(self.storage_shape(tuple(logical.shape)))
        self.pack_into(logical, stored)
        return stored

    def pack_into(self, logical: Tensor, stored: Tensor) -> None:
        """``pack`` into memory that is there: one expert's slice of a layer."""
        tiles = _padded_tiles(logical, stored)
        low, high = tiles[..., :32], tiles[..., 32:]
        out = stored.view(*stored.shape[:-1], 32, 2)
        out[..., 0] = (low & 15) | (high << 4)
        out[..., 1] = (low >> 4) | (high & 0xF0)

    def unpack(self, stored: Tensor, logical: tuple[int, ...]) -> Tensor:
        _check_stored(self.key, stored, self.storage_shape(logical), logical)
        even, odd = stored.view(*stored.shape[:-1], 32, 2).unbind(-1)
        tiles = stored.new_empty(stored.shape)
        tiles[..., :32] = (even & 15) | (odd << 4)
        tiles[..., 32:] = (even >> 4) | (odd & 0xF0)
        return _untiled(tiles, logical)


@dataclass(frozen=True)
class ScaleTiles:
    """Block scales ``[N, K / sf_vec_size]`` of one matrix as uint8
    ``[N tiles, K tiles, 64, 128 / sf_vec_size]``, padded with zeros.

    Attributes:
        sf_vec_size: 16 or 32 elements a scale.
    """

    sf_vec_size: int

    @property
    def key(self) -> str:
        return f"scale-tiles-{ROWS}x{BLOCK_K}/{self.sf_vec_size}"

    def storage_shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """``logical``: (N, scales of a row)."""
        return _tiles(self.key, logical, BLOCK_K // self.sf_vec_size)

    def pack(self, logical: Tensor) -> Tensor:
        stored = logical.new_empty(self.storage_shape(tuple(logical.shape)))
        self.pack_into(logical, stored)
        return stored

    def pack_into(self, logical: Tensor, stored: Tensor) -> None:
        """``pack`` into memory that is there: one expert's slice of a layer."""
        stored.copy_(_padded_tiles(logical, stored))

    def unpack(self, stored: Tensor, logical: tuple[int, ...]) -> Tensor:
        _check_stored(self.key, stored, self.storage_shape(logical), logical)
        return _untiled(stored, logical)


def _tiles(key: str, logical: tuple[int, ...], width: int) -> tuple[int, ...]:
    if len(logical) != 2:
        raise LayoutError(f"{key}: a matrix expected, got shape {list(logical)}")
    return (-(-logical[0] // ROWS), -(-logical[1] // width), ROWS, width)


def _padded_tiles(matrix: Tensor, stored: Tensor) -> Tensor:
    """``[N, W]`` as ``[N tiles, K tiles, 64, width]``; a view where nothing is padded."""
    tiles_n, tiles_k, _, width = stored.shape
    shape = (tiles_n * ROWS, tiles_k * width)
    if tuple(matrix.shape) != shape:
        padded = matrix.new_zeros(shape)
        padded[: matrix.shape[0], : matrix.shape[1]] = matrix
        matrix = padded
    return matrix.reshape(tiles_n, ROWS, tiles_k, width).transpose(1, 2)


def _untiled(tiles: Tensor, logical: tuple[int, ...]) -> Tensor:
    tiles_n, tiles_k, _, width = tiles.shape
    matrix = tiles.transpose(1, 2).reshape(tiles_n * ROWS, tiles_k * width)
    return matrix[: logical[0], : logical[1]].clone()


def _check_stored(
    key: str, stored: Tensor, expected: tuple[int, ...], logical: tuple[int, ...]
) -> None:
    if tuple(stored.shape) != expected:
        raise LayoutError(
            f"{key}: stored {list(stored.shape)}, expected {list(expected)} for {list(logical)}"
        )
