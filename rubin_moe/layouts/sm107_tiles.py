"""Weights of the sm_107a kernels: one contiguous block for each stage of the mainloop.

A block is what one CTA's MMA reads of 128 rows and one K tile: 256 elements of NVFP4, 128 of MXFP4
(whose tokens have eight bits). First the packed codes as the swizzle of shared memory wants them:
rows of 128 bytes (64 for MXFP4), the 16-byte piece p of row r at ``p ^ (r % 8)`` (``p ^ (r / 2 %
4)``). Then the scales as 128 x 4 chunks of 512 bytes, four (one). So a stage is one bulk copy
without a tensor map, and HBM is read in long runs. Sources: PTX ISA, shared memory swizzling modes
and tcgen05 scale factor layouts; first seed, section 1.2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rubin_moe.errors import LayoutError
from rubin_moe.formats.spec import MXFP4, WEIGHT_FORMATS, BlockFormat

ROWS = 128
PIECE = 16


@dataclass(frozen=True)
class Sm107Tiles:
    """FP4 codes and scales of ``[E, N, K]`` as ``[E, N tiles, K tiles, block]`` bytes.

    Rows and K are padded to whole tiles with zero codes and zero scale bytes.
    """

    fmt: BlockFormat

    def __post_init__(self) -> None:
        if self.fmt not in WEIGHT_FORMATS:
            raise LayoutError(f"sm107_tiles: {self.fmt} is no format of weights")

    @property
    def key(self) -> str:
        return f"sm107_tiles_{ROWS}x{self.tile_k}"

    @property
    def tile_k(self) -> int:
        """Elements of a K tile."""
        return 128 if self.fmt == MXFP4 else 256

    @property
    def code_bytes(self) -> int:
        """Of a block."""
        return ROWS * self.tile_k // 2

    @property
    def scale_bytes(self) -> int:
        """Of a block."""
        return ROWS * self.tile_k // self.fmt.sf_vec_size

    def storage_shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """``logical``: (E, N, K) in elements."""
        vec = self.fmt.sf_vec_size
        if len(logical) != 3 or logical[2] % vec:
            raise LayoutError(f"{self.key}: {list(logical)}, expected [E, N, K], K of {vec}s")
        e, n, k = logical
        return e, -(-n // ROWS), -(-k // self.tile_k), self.code_bytes + self.scale_bytes

    def pack(self, qdata: Tensor, sf: Tensor) -> Tensor:
        """uint8 ``[E, N, K / 2]`` codes and ``[E, N, K / block]`` scales -> one tensor."""
        e, n, half_k = qdata.shape
        shape = self.storage_shape((e, n, 2 * half_k))
        if sf.shape != (e, n, self.fmt.scales_k(2 * half_k)):
            raise LayoutError(f"{self.key}: scales {list(sf.shape)} of codes {list(qdata.shape)}")
        out = torch.empty(shape, dtype=torch.uint8, device=qdata.device)
        for expert in range(e):
            codes = _padded(qdata[expert], shape, self.code_bytes // ROWS)
            scales = _padded(sf[expert], shape, self.scale_bytes // ROWS)
            out[expert, ..., : self.code_bytes] = _swizzle(codes)
            out[expert, ..., self.code_bytes :] = _chunks(scales)
        return out

    def unpack(self, stored: Tensor, logical: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The codes and scales of ``logical`` (E, N, K)."""
        e, n, k = logical
        _, nt, kt, _ = self.storage_shape(logical)
        swizzled, chunks = stored[..., : self.code_bytes], stored[..., self.code_bytes :]
        width = self.code_bytes // ROWS
        codes = _exchange(swizzled.reshape(e, nt, kt, ROWS, width // PIECE, PIECE))
        codes = codes.reshape(e, nt, kt, ROWS, width).transpose(2, 3)
        groups = self.scale_bytes // (4 * ROWS)
        scales = chunks.reshape(e, nt, kt, groups, 32, 4, 4)
        # (group, r % 32, r // 32, k) back to rows: r // 32, r % 32, K tile, group, k
        scales = scales.permute(0, 1, 5, 4, 2, 3, 6).reshape(e, nt * ROWS, kt * 4 * groups)
        return (
            codes.reshape(e, nt * ROWS, kt * width)[:, :n, : k // 2].contiguous(),
            scales[:, :n, : self.fmt.scales_k(k)].contiguous(),
        )


def _padded(matrix: Tensor, shape: tuple[int, ...], width: int) -> Tensor:
    """``[N, C]`` -> ``[N tiles, K tiles, 128, width]``, zeros where there was nothing."""
    _, nt, kt, _ = shape
    out = matrix.new_zeros(nt * ROWS, kt * width)
    out[: matrix.shape[0], : matrix.shape[1]] = matrix
    return out.view(nt, ROWS, kt, width).transpose(1, 2)


def _exchange(pieces: Tensor) -> Tensor:
    """Pieces of the rows ``[.., 128, P, 16]`` in the order of the swizzle, and back: bits 4 on of a
    byte's address are xored with its bits 7 on."""
    row = torch.arange(ROWS, device=pieces.device)[:, None]
    number = pieces.shape[-2]
    source = torch.arange(number, device=pieces.device)[None] ^ (row * number // 8 % number)
    return pieces.gather(-2, source[..., None].expand(pieces.shape))


def _swizzle(tiled: Tensor) -> Tensor:
    """``[N tiles, K tiles, 128, width]`` -> their bytes in shared memory."""
    nt, kt, _, width = tiled.shape
    pieces = tiled.reshape(nt, kt, ROWS, width // PIECE, PIECE)
    return _exchange(pieces).reshape(nt, kt, ROWS * width)


def _chunks(tiled: Tensor) -> Tensor:
    """``[.., 128, scales]`` -> chunks of four, row r's at ``16 (r % 32) + 4 (r // 32)``."""
    nt, kt, _, scales = tiled.shape
    chunks = tiled.reshape(nt, kt, 4, 32, scales // 4, 4).permute(0, 1, 4, 3, 2, 5)
    return chunks.reshape(nt, kt, ROWS * scales)
