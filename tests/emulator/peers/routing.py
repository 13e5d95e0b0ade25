"""Routed problems in the padded, permuted form that the grouped MoE kernels take, and the float64
references of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tests.emulator.peers.operands import check_exact

#: Experts a token is sent to.
TOP_K = 2


@dataclass(frozen=True)
class Sizes:
    """Of a routed problem; every expert has n rows of k weights."""

    num_tokens: int
    num_experts: int
    n: int
    k: int

    def __str__(self) -> str:
        tokens = f"tokens={self.num_tokens} experts={self.num_experts} top_k={TOP_K}"
        return f"{tokens} N={self.n} K={self.k}"


@dataclass(frozen=True)
class Routing:
    """Which rows of the permuted activations belong to which expert.

    Rows of one expert are consecutive and padded to whole tiles of `tile_m` rows; `spare_tiles`
    more tiles exist that no expert uses. expanded: int32 [rows], `token * top_k + choice` of each
    permuted row, -1 for padding. expert: int [rows], -1 for padding.
    """

    num_tokens: int
    num_experts: int
    top_k: int
    tile_m: int
    expanded: np.ndarray
    expert: np.ndarray
    tile_expert: torch.Tensor  # int32 [tiles]
    tile_row_limit: torch.Tensor  # int32 [tiles], one past the last valid permuted row
    num_tiles: torch.Tensor  # int32 [1], tiles in use

    @property
    def rows(self) -> int:
        return self.expanded.size

    @property
    def valid(self) -> np.ndarray:
        return self.expanded >= 0

    @property
    def token(self) -> np.ndarray:
        """Token of each valid permuted row."""
        return self.expanded[self.valid] // self.top_k

    def mapping(self) -> torch.Tensor:
        """`expanded` as the kernels read it, int32 [rows]."""
        return torch.from_numpy(self.expanded.copy())

    def tensors(self) -> list[torch.Tensor]:
        return [self.tile_expert, self.tile_row_limit, self.num_tiles]


def route(
    rng: np.random.Generator,
    *,
    num_tokens: int,
    num_experts: int,
    tile_m: int,
    tiles_multiple_of: int = 1,
) -> Routing:
    """Each token chooses TOP_K experts; the last expert is chosen by nobody.

    At least one tile is spare, and the number of tiles is a multiple of `tiles_multiple_of`.
    """
    assert num_experts > TOP_K
    choices = np.stack([rng.permutation(num_experts - 1)[:TOP_K] for _ in range(num_tokens)])
    expanded, expert, tile_expert, limit = [], [], [], []
    for e in range(num_experts):
        members = np.flatnonzero(choices.reshape(-1) == e)
        first, padded = len(expanded), -(-members.size // tile_m) * tile_m
        expanded += [*members, *[-1] * (padded - members.size)]
        expert += [*[e] * members.size, *[-1] * (padded - members.size)]
        for tile in range(padded // tile_m):
            tile_expert.append(e)
            limit.append(first + min((tile + 1) * tile_m, members.size))
    used = len(tile_expert)
    spare_tiles = 1 + -(used + 1) % tiles_multiple_of
    expanded += [-1] * (spare_tiles * tile_m)
    expert += [-1] * (spare_tiles * tile_m)
    unused = [-2_000_000_000] * spare_tiles  # nothing may read these

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return Routing(
        num_tokens,
        num_experts,
        TOP_K,
        tile_m,
        np.array(expanded, np.int32),
        np.array(expert, np.int32),
        ints(tile_expert + unused),
        ints(limit + unused),
        ints([used]),
    )


def grouped_product(
    rows: np.ndarray, experts: Sequence[np.ndarray], routing: Routing, alpha: float
) -> np.ndarray:
    """alpha * rows @ experts[expert of the row].T for the valid rows, exact."""
    expert = routing.expert[routing.valid]
    out = np.empty((rows.shape[0], experts[0].shape[0]))
    for e, weight in enumerate(experts):
        mine = rows[expert == e]
        if mine.size:
            check_exact(mine, weight)
            out[expert == e] = alpha * (mine @ weight.T)
    return out


def swiglu(product: np.ndarray, interleave: int) -> np.ndarray:
    """[rows, n] of interleaved up and gate -> [rows, n / 2]."""
    blocks = product.reshape(product.shape[0], -1, 2, interleave)
    up, gate = blocks[:, :, 0], blocks[:, :, 1]
    return (up * gate / (1 + np.exp(-gate))).reshape(product.shape[0], -1)


def finalize(rows: np.ndarray, routing: Routing, weights: np.ndarray | None) -> np.ndarray:
    """Rows back in token order; bfloat16 after each step, as the kernels' reductions do.

    With two rows a token the order of the additions makes no difference: 0 + x is x.
    """
    expanded = routing.expanded[routing.valid]
    slots = np.zeros((routing.num_tokens * routing.top_k, rows.shape[1]))
    slots[expanded] = rows
    if weights is None:
        return slots
    scaled = _bfloat16(slots * weights.reshape(-1, 1)).reshape(routing.num_tokens, 2, -1)
    return _bfloat16(scaled[:, 0] + scaled[:, 1])


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).to(torch.bfloat16).double().numpy()


# --- host calls ---------------------------------------------------------------------------------
