"""FC1 and FC2 of the prefill kernels with tables made on the host: what the routing launches make,
the sum that follows, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.launch import Launcher
from rubin_moe.kernels.sm90.host import Sm90Experts
from rubin_moe.kernels.sm90.plan import BLOCK_K
from rubin_moe.kernels.sm90.prefill_host import gemm_kernel
from rubin_moe.kernels.sm90.prefill_plan import PrefillPlan

MODULE = "rubin_moe.kernels.sm90.prefill"


def order_of_k(x: Tensor, k_blocks: int) -> Tensor:
    """Rows ``[M, hidden]`` as ``[M, 64 k_blocks]`` in the kernels' order, zeros behind."""
    padded = x.new_zeros(x.shape[0], k_blocks * BLOCK_K)
    padded[:, : x.shape[1]] = x
    t, j, e, i = torch.meshgrid(*(torch.arange(n) for n in (4, 4, 2, 2)), indexing="ij")
    where = torch.empty(BLOCK_K, dtype=torch.long)
    where[(16 * j + 8 * e + 2 * t + i).flatten()] = (16 * t + 4 * j + 2 * e + i).flatten()
    return padded.view(x.shape[0], k_blocks, BLOCK_K)[:, :, where.to(x.device)].flatten(1)


@dataclass(frozen=True)
class Tables:
    """``passes`` int32 ``[1 + n, 4]`` and ``pairs`` of the sorted rows."""

    passes: Tensor
    pairs: Tensor


def tables_of(ids: Tensor, num_experts: int, pass_tokens: int) -> Tables:
    """Experts by descending number of tokens, each one's tokens evenly over its passes."""
    flat = ids.flatten().cpu()
    rows, records = [], []
    counts = torch.bincount(flat[flat >= 0], minlength=num_experts)
    first = 0
    for expert in torch.sort(counts, descending=True, stable=True).indices.tolist():
        mine = torch.nonzero(flat == expert).flatten()
        if len(mine):
            rows.append(mine)
            for part in torch.tensor_split(mine, -(-len(mine) // pass_tokens)):
                records.append((expert, first, len(part), 0))
                first += len(part)
    head = (len(records), first, 0, 0)
    passes = torch.tensor([head, *records], dtype=torch.int32, device=ids.device)
    pairs = torch.cat([*rows, torch.zeros(0, dtype=torch.long)]).int().to(ids.device)
    return Tables(passes, pairs)


@dataclass(frozen=True)
class Gemms:
    """Both kernels of a layer."""

    plan: PrefillPlan
    activation: Activation
    bias: bool
    launch: Launcher
    blocks: int

    def fc1(self, w: Sm90Experts, x: Tensor, tables: Tables, h: Tensor) -> None:
        """``x``: from `order_of_k`."""
        kernel = gemm_kernel(self.plan, True, self.activation, self.bias)
        args = (w.w13, w.alpha13, w.bias13, x, tables.passes, tables.pairs, None, h)
        self.launch.launch(kernel, self.blocks, args)

    def fc2(self, w: Sm90Experts, h: Tensor, tables: Tables, weights: Tensor, out: Tensor) -> None:
        kernel = gemm_kernel(self.plan, False, self.activation, self.bias)
        args = (w.w2, w.alpha2, w.bias2, h, tables.passes, tables.pairs, weights, out)
        self.launch.launch(kernel, self.blocks, args)

    def scratch(self, x: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
        """h, and FC2's rows."""
        h = torch.empty(self.plan.h_bytes(num_pairs), dtype=torch.uint8, device=x.device)
        return h, x.new_zeros(num_pairs, self.plan.sizes.hidden)

    def layer(self, w: Sm90Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The whole layer; rows are summed in float32."""
        sizes = self.plan.sizes
        tables = tables_of(ids, sizes.num_experts, self.plan.tiles.pass_tokens)
        h, rows = self.scratch(x, ids.numel())
        self.fc1(w, order_of_k(x, sizes.k_blocks13), tables, h)
        self.fc2(w, h, tables, weights.contiguous(), rows)
        return rows.view(*ids.shape, -1).float().sum(1).to(x.dtype)
