"""Routed problems in the padded, permuted form that the grouped MoE kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


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
    top_k: int,
    tile_m: int,
    tiles_multiple_of: int = 1,
) -> Routing:
    """Each token chooses top_k experts; the last expert is chosen by nobody.

    At least one tile is spare, and the number of tiles is a multiple of `tiles_multiple_of`.
    """
    assert num_experts > top_k
    choices = np.stack([rng.permutation(num_experts - 1)[:top_k] for _ in range(num_tokens)])
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
        top_k,
        tile_m,
        np.array(expanded, np.int32),
        np.array(expert, np.int32),
        ints(tile_expert + unused),
        ints(limit + unused),
        ints([used]),
    )
