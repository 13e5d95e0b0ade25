"""Routing to work: sorted rows and the list of tiles, made on the device without a host sync."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Work:
    """What both GEMMs walk. ``P`` is tokens x top_k; sizes do not depend on the routing.

    Attributes:
        items: int32 ``[W, 4]``: expert, first sorted row, rows, 0; num_items: int32 ``[1]``.
        token: int32 ``[P]`` token of each sorted row; choice: int32 ``[P]`` its ``token * top_k +
            k``; weight: float32 ``[P]`` its router weight. Rows past the last item are unused.
    """

    items: Tensor
    num_items: Tensor
    token: Tensor
    choice: Tensor
    weight: Tensor


def make_work(ids: Tensor, weights: Tensor, num_experts: int, tile_n: int) -> Work:
    """Sorts (token, choice) pairs by expert, keeps their order within one.

    Args:
        ids: int64 ``[M, top_k]`` local ids, -1 for none. weights: float32 ``[M, top_k]``.
    """
    top_k = ids.shape[1]
    flat = torch.where(ids < 0, num_experts, ids).flatten()
    expert, order = torch.sort(flat, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add(0, expert, torch.ones_like(expert))[:num_experts]
    first_row = counts.cumsum(0) - counts
    tiles = (counts + tile_n - 1) // tile_n
    last_tile = tiles.cumsum(0)
    number = flat.numel() // tile_n + min(flat.numel(), num_experts)
    index = torch.arange(number, device=ids.device)
    owner = torch.searchsorted(last_tile, index, right=True).clamp(max=max(0, num_experts - 1))
    within = (index - (last_tile - tiles)[owner]) * tile_n
    rows = (counts[owner] - within).clamp(0, tile_n)
    items = torch.stack([owner, first_row[owner] + within, rows, torch.zeros_like(rows)], dim=1)
    return Work(
        items=items.to(torch.int32).contiguous(),
        num_items=last_tile[-1:].to(torch.int32),
        token=(order // top_k).to(torch.int32),
        choice=order.to(torch.int32),
        weight=weights.flatten()[order].contiguous(),
    )
