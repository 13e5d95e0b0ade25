"""Orders of the rows of ``w13``, and padding of the expert width.

The canonical order is ``[gate; up]``, two halves. Kernels want others: halves the other way round,
stripes of 16 or 64 rows in turn (``up_0:64, gate_0:64, up_64:128, ...`` on Rubin), or single rows
in turn (gpt-oss: gate in the even rows). Whatever happens to the codes happens to the scales and
the bias. Each half is padded for itself: rows appended behind both would move the boundary.
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import Literal

import torch
from torch import Tensor

from rubin_moe.errors import LayoutError
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights


@dataclass(frozen=True)
class GateUpRows:
    """Gate and up rows in turns.

    Attributes:
        stripe: rows of one half before the other's turn; None: whole halves.
        first: whose turn comes first.
        half_multiple: each half is padded with zero rows to a multiple of it (and of the stripe).
        axis: of the rows, from the end: -2 for codes and scales, -1 for a bias.
    """

    stripe: int | None = None
    first: Literal["gate", "up"] = "gate"
    half_multiple: int = 1
    axis: int = -2

    def __post_init__(self) -> None:
        if (self.stripe is not None and self.stripe < 1) or self.half_multiple < 1:
            raise LayoutError(f"{self.key}: stripes and multiples are at least 1")
        if self.axis not in (-2, -1):
            raise LayoutError(f"{self.key}: rows are axis -2 or -1, not {self.axis}")

    @property
    def key(self) -> str:
        stripe = "halves" if self.stripe is None else f"stripe{self.stripe}"
        return f"gate-up-{stripe}-{self.first}-x{self.half_multiple}"

    def padded_half(self, half: int) -> int:
        """Rows of one half after padding."""
        multiple = lcm(self.stripe or 1, self.half_multiple)
        return -(-half // multiple) * multiple

    def storage_shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """Raises LayoutError for an odd number of rows."""
        if len(logical) < -self.axis or logical[self.axis] % 2:
            raise LayoutError(f"{self.key}: gate and up rows expected, got {list(logical)}")
        shape = list(logical)
        shape[self.axis] = 2 * self.padded_half(logical[self.axis] // 2)
        return tuple(shape)

    def pack(self, logical: Tensor) -> Tensor:
        """A new contiguous tensor; the input is left alone."""
        self.storage_shape(tuple(logical.shape))
        rows = self._rows_last_but_one(logical)
        *lead, n, width = rows.shape
        half, padded_half = n // 2, self.padded_half(n // 2)
        padded = rows.new_zeros((*lead, 2, padded_half, width))
        padded[..., :half, :] = rows.reshape(*lead, 2, half, width)
        if self.first == "up":
            padded = padded.flip(-3)
        stripe = self.stripe or max(1, padded_half)
        turns = padded.reshape(*lead, 2, padded_half // stripe, stripe, width).transpose(-4, -3)
        stored = turns.reshape(*lead, 2 * padded_half, width)
        return (stored.squeeze(-1) if self.axis == -1 else stored).contiguous()

    def unpack(self, stored: Tensor, logical: tuple[int, ...]) -> Tensor:
        """A new tensor of shape ``logical``. Raises LayoutError for another storage shape."""
        expected = self.storage_shape(logical)
        if tuple(stored.shape) != expected:
            raise LayoutError(
                f"{self.key}: stored {list(stored.shape)}, expected {list(expected)} for "
                f"{list(logical)}"
            )
        rows = self._rows_last_but_one(stored)
        *lead, n, width = rows.shape
        padded_half, half = n // 2, logical[self.axis] // 2
        stripe = self.stripe or max(1, padded_half)
        turns = rows.reshape(*lead, padded_half // stripe, 2, stripe, width).transpose(-4, -3)
        padded = turns.reshape(*lead, 2, padded_half, width)
        if self.first == "up":
            padded = padded.flip(-3)
        return padded[..., :half, :].reshape(logical).clone()

    def _rows_last_but_one(self, tensor: Tensor) -> Tensor:
        return tensor[..., None] if self.axis == -1 else tensor


def pad_intermediate(weights: ExpertWeights, multiple: int) -> ExpertWeights:
    """The same experts with the width I rounded up to ``multiple``.

    Gate and up get zero rows each, ``w2`` zero columns; codes, scales and bias are zero there, so
    the added channels are zero before and after every activation and add nothing.

    Raises:
        LayoutError: ``multiple`` is not made of whole scale blocks.
    """
    vec = weights.fmt.sf_vec_size
    if multiple % vec:
        raise LayoutError(f"{weights.name}: {multiple} is no multiple of {vec} ({weights.fmt})")
    padded = -(-weights.intermediate // multiple) * multiple
    if padded == weights.intermediate:
        return weights
    w13 = _pad_rows(weights.w13, weights.halves, padded)
    columns = padded - weights.intermediate
    w2 = replace(
        weights.w2,
        qdata=_pad_last(weights.w2.qdata, weights.fmt.packed_k(columns)),
        sf=_pad_last(weights.w2.sf, weights.fmt.scales_k(columns)),
    )
    return replace(weights, intermediate=padded, w13=w13, w2=w2)


def _pad_rows(proj: ProjectionWeights, halves: int, padded: int) -> ProjectionWeights:
    def grown(tensor: Tensor) -> Tensor:
        e, n, *rest = tensor.shape
        out = tensor.new_zeros((e, halves, padded, *rest))
        out[:, :, : n // halves] = tensor.reshape(e, halves, n // halves, *rest)
        return out.reshape(e, halves * padded, *rest)

    bias = None if proj.bias is None else grown(proj.bias)
    return replace(proj, qdata=grown(proj.qdata), sf=grown(proj.sf), bias=bias)


def _pad_last(tensor: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, columns))
