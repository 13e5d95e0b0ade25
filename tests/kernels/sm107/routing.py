"""What `rubin_moe.kernels.sm107.front` makes, in torch: the reference of its tests."""

import torch
from torch import Tensor

from rubin_moe.kernels.sm107.work import Work


def reference_work(
    ids: Tensor,
    weights: Tensor | None,
    num_experts: int,
    tile_n: int,
    expert_map: Tensor | None = None,
) -> Work:
    """As `rubin_moe.kernels.sm107.host.make_work`; holds only the rows and items that are work."""
    top_k = ids.shape[1]
    flat = ids.flatten().long()
    if expert_map is not None:
        flat = torch.where(flat >= 0, expert_map.long()[flat.clamp(min=0)], flat)
    flat = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    expert, order = torch.sort(flat, stable=True)
    order = order[expert < num_experts]
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    first = (counts.cumsum(0) - counts).tolist()
    items = [
        [e, first[e] + at, min(tile_n, count - at), 0]
        for e, count in enumerate(counts.tolist())
        for at in range(0, count, tile_n)
    ]
    given = torch.ones(flat.shape) if weights is None else weights.flatten()
    return Work(
        items=torch.tensor(items, dtype=torch.int32).reshape(-1, 4),
        num_items=torch.tensor([len(items)], dtype=torch.int32),
        token=(order // top_k).to(torch.int32),
        choice=order.to(torch.int32),
        weight=given[order].contiguous(),
    )
