"""Weights of the sm_107a kernels: one contiguous block for each stage of the mainloop.

A block is what one CTA's MMA reads of 128 rows and 256 elements of K: the codes as the 128-byte
swizzle of shared memory wants them (row r in bytes [128 r, 128 r + 128), its 16-byte piece p at
piece ``p ^ (r % 8)``; 16,384 bytes), then the scales as four 128 x 4 chunks (2,048 bytes). So a
stage is one bulk copy without a tensor map, and HBM is read in long runs. Sources: PTX ISA, shared
memory swizzling modes and tcgen05 scale factor layouts; first seed, section 1.2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rubin_moe.errors import LayoutError

ROWS = 128
TILE_K = 256
SF_VEC = 16
CODE_BYTES = ROWS * TILE_K // 2
SCALE_BYTES = ROWS * TILE_K // SF_VEC
BLOCK_BYTES = CODE_BYTES + SCALE_BYTES


def tiles(rows: int, k: int) -> tuple[int, int]:
    """Row tiles and K tiles of a matrix, padding included."""
    return -(-rows // ROWS), -(-k // TILE_K)


@dataclass(frozen=True)
class Sm107Tiles:
    """NVFP4 codes and scales of ``[E, N, K]`` as ``[E, N tiles, K tiles, 18432]`` bytes.

    Rows and K are padded to whole tiles with zero codes and zero scales.
    """

    @property
    def key(self) -> str:
        return f"sm107_tiles_{ROWS}x{TILE_K}"

    def storage_shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """``logical``: (E, N, K) in elements."""
        if len(logical) != 3 or logical[2] % SF_VEC:
            raise LayoutError(f"{self.key}: {list(logical)}, expected [E, N, K], K of 16s")
        return (logical[0], *tiles(logical[1], logical[2]), BLOCK_BYTES)

    def pack(self, qdata: Tensor, sf: Tensor) -> Tensor:
        """uint8 ``[E, N, K / 2]`` codes and ``[E, N, K / 16]`` scales -> one tensor."""
        e, n, half_k = qdata.shape
        shape = self.storage_shape((e, n, 2 * half_k))
        if sf.shape != (e, n, half_k // 8):
            raise LayoutError(f"{self.key}: scales {list(sf.shape)} of codes {list(qdata.shape)}")
        out = torch.empty(shape, dtype=torch.uint8, device=qdata.device)
        for expert in range(e):
            out[expert, ..., :CODE_BYTES] = _swizzle(_padded(qdata[expert], shape, TILE_K // 2))
            out[expert, ..., CODE_BYTES:] = _chunks(_padded(sf[expert], shape, TILE_K // SF_VEC))
        return out

    def unpack(self, stored: Tensor, logical: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The codes and scales of ``logical`` (E, N, K)."""
        e, n, k = logical
        _, nt, kt, _ = self.storage_shape(logical)
        codes = stored[..., :CODE_BYTES].reshape(e, nt, kt, ROWS, 8, 16)
        row = torch.arange(ROWS, device=stored.device)[:, None] % 8
        piece = torch.arange(8, device=stored.device)[None] ^ row
        codes = codes.gather(-2, piece[..., None].expand(e, nt, kt, ROWS, 8, 16))
        codes = codes.reshape(e, nt, kt, ROWS, TILE_K // 2).transpose(2, 3)
        codes = codes.reshape(e, nt * ROWS, kt * TILE_K // 2)
        scales = stored[..., CODE_BYTES:].reshape(e, nt, kt, 4, 32, 4, 4)
        # (group, r % 32, r // 32, k) back to rows: r // 32, r % 32, K tile, group, k
        scales = scales.permute(0, 1, 5, 4, 2, 3, 6).reshape(e, nt * ROWS, kt * 16)
        return (
            codes[:, :n, : k // 2].contiguous(),
            scales[:, :n, : k // SF_VEC].contiguous(),
        )


def _padded(matrix: Tensor, shape: tuple[int, ...], width: int) -> Tensor:
    """``[N, C]`` -> ``[N tiles, K tiles, 128, width]``, zeros where there was nothing."""
    _, nt, kt, _ = shape
    out = matrix.new_zeros(nt * ROWS, kt * width)
    out[: matrix.shape[0], : matrix.shape[1]] = matrix
    return out.view(nt, ROWS, kt, width).transpose(1, 2)


def _swizzle(tiled: Tensor) -> Tensor:
    """``[.., 128, 128]`` bytes: piece p of row r goes to piece ``p ^ (r % 8)``."""
    nt, kt = tiled.shape[:2]
    pieces = tiled.reshape(nt, kt, ROWS, 8, 16)
    row = torch.arange(ROWS, device=tiled.device)[:, None] % 8
    source = torch.arange(8, device=tiled.device)[None] ^ row
    index = source[..., None].expand(nt, kt, ROWS, 8, 16)
    return pieces.gather(-2, index).reshape(nt, kt, CODE_BYTES)


def _chunks(tiled: Tensor) -> Tensor:
    """``[.., 128, 16]`` scales -> four chunks, row r's at ``16 (r % 32) + 4 (r // 32)``."""
    nt, kt = tiled.shape[:2]
    return tiled.reshape(nt, kt, 4, 32, 4, 4).permute(0, 1, 4, 3, 2, 5).reshape(nt, kt, SCALE_BYTES)
