"""Routing to work: what `front` makes in one launch and both GEMMs walk. Needs no DSL."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rubin_moe.kernels.sm107.rules import MAX_EXPERTS

WARPS = 32
THREADS = 32 * WARPS
COUNTS_BYTES = 4 * WARPS * MAX_EXPERTS
ENDS_BYTES = 4 * (MAX_EXPERTS + 1)
SMEM_BYTES = COUNTS_BYTES + 2 * ENDS_BYTES + 2 * 4 * WARPS
assert THREADS >= MAX_EXPERTS, "a thread sums one expert's counts"


@dataclass(frozen=True)
class Work:
    """Tiles and sorted rows. ``P`` is tokens x top_k; sizes do not depend on the routing.

    Attributes:
        items: int32 ``[W, 4]``: expert, first sorted row, rows, 0; num_items: int32 ``[1]``.
            Items from there on are not written.
        token: int32 ``[P]`` token of each sorted row; choice: int32 ``[P]`` its ``token * top_k +
            k``; weight: float32 ``[P]`` its router weight. Rows past the last item's are not
            written.
    """

    items: Tensor
    num_items: Tensor
    token: Tensor
    choice: Tensor
    weight: Tensor

    @staticmethod
    def empty(num_pairs: int, num_experts: int, tile_n: int, device: torch.device) -> Work:
        """Room for the work of any routing of so many pairs."""
        # every expert with pairs has one tile that is not full
        items = num_pairs // tile_n + min(num_pairs, num_experts)

        def int32(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        weight = torch.empty(num_pairs, dtype=torch.float32, device=device)
        return Work(int32(items, 4), int32(1), int32(num_pairs), int32(num_pairs), weight)
