"""FC1, activation and FC2 with E4M3 activations, in readable torch.

A token is rounded to E4M3 with a scale of its own before FC1 (`formats.fp8_rows`), and the
activation's result, which the kernels keep in the hidden states' dtype, again before FC2. Products
are exact and accumulate in float32 (the tensor cores keep fewer bits of a sum: docs/notes/hopper.md
says how many); then come the token's scale and the bias. One expert at a time is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rubin_moe.errors import FormatError
from rubin_moe.formats import e4m3
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.fp8_rows import quantize_rows
from rubin_moe.formats.quantize import dequantize
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.by_expert import ExpertByExpert, tiled_product
from rubin_moe.kernels.cpu_wgmma.rules import ROWS_PER_TILE


@dataclass(frozen=True, eq=False)
class WgmmaExperts:
    """The stored bytes."""

    weights: ExpertWeights

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name; `WgmmaKernel.run` reads these very tensors."""
        named = {"w13": self.weights.w13, "w2": self.weights.w2}
        return {f"{p}_{n}": t for p, w in named.items() for n, t in w.tensors().items()}


class WgmmaKernel(ExpertByExpert):
    """``ExpertsKernel`` for one layer."""

    def prepare(self, weights: ExpertWeights) -> WgmmaExperts:
        """Keeps the weights as they are."""
        if weights.fmt != self.problem.weight_format:
            raise FormatError(
                f"{weights.name}: {weights.fmt} weights for {self.problem.weight_format}"
            )
        return WgmmaExperts(weights)

    def gemm(self, prepared: WgmmaExperts, rows: Tensor, which: str, expert: int) -> Tensor:
        """See `ExpertByExpert.gemm`."""
        proj: ProjectionWeights = getattr(prepared.weights, which)
        if which == "w2":
            rows = rows.to(getattr(torch, self.problem.dtype))
        q = quantize_rows(rows)
        w = dequantize(proj.qdata[expert], proj.sf[expert], self.problem.weight_format)
        accumulator = tiled_product(e4m3.decode(q.codes), w.T, ROWS_PER_TILE)
        halves = proj.dec.shape[1]
        alpha = proj.dec[expert].repeat_interleave(w.shape[0] // halves)
        result = accumulator * alpha * q.scale[:, None]
        return result if proj.bias is None else result + proj.bias[expert]


def build(problem: MoEProblem) -> WgmmaKernel:
    """The kernel object of one layer."""
    return WgmmaKernel(problem)
