"""A MoE layer in readable torch, expert by expert: what the slow CPU modes have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.epilogue import activate


class ExpertByExpert(ABC):
    """``ExpertsKernel`` but for ``prepare``; a subclass says what one GEMM is."""

    def __init__(self, problem: MoEProblem) -> None:
        self.problem = problem

    @abstractmethod
    def gemm(self, prepared: Any, rows: Tensor, which: str, expert: int) -> Tensor:
        """float32 ``[m, K]`` -> ``[m, N]`` in real units, bias added; ``which``: w13 or w2."""

    def run(
        self,
        prepared: Any,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `rubin_moe.kernels.base.ExpertsKernel.run`."""
        ids = topk_ids.long()
        if expert_map is not None:
            ids = torch.where(ids >= 0, expert_map.long()[ids.clamp(min=0)], ids)
        total = torch.zeros(x.shape, dtype=torch.float32)
        for expert in ids.unique().tolist():
            if expert < 0:
                continue
            token, slot = (ids == expert).nonzero(as_tuple=True)
            weight = topk_weights[token, slot, None]
            rows = x[token].float()
            if self.problem.router_weight_on_input:
                rows = rows * weight
            h = self.gemm(prepared, rows, "w13", expert)
            y = self.gemm(prepared, activate(self.problem.activation, h), "w2", expert)
            total.index_add_(0, token, y if self.problem.router_weight_on_input else y * weight)
        if out is None:
            return total.to(x.dtype)
        return out.copy_(total)


def tiled_product(a: Tensor, w: Tensor, tile: int) -> Tensor:
    """``a @ w``, always ``tile`` rows at once: a row's result has nothing to do with how many
    others came along."""
    m = a.shape[0]
    padded = torch.nn.functional.pad(a, (0, 0, 0, -m % tile))
    return torch.cat([rows @ w for rows in padded.split(tile)])[:m]
