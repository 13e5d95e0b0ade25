"""FC1, activation and FC2 with quantized activations, in readable torch.

Both operands of both GEMMs are the codes that a tcgen05 backend multiplies: activations are
quantized before FC1, and the activation's float32 result again before FC2. Products accumulate in
float32; the global scales (``alpha``) multiply the accumulator, then comes the bias. One expert at
a time is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rubin_moe.errors import FormatError
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.quantize import dequantize, quantize
from rubin_moe.formats.spec import FORMATS, BlockFormat
from rubin_moe.kernels import input_scales
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.cpu_tcgen05.rules import ROWS_PER_TILE
from rubin_moe.kernels.epilogue import activate


@dataclass(frozen=True, eq=False)
class Tcgen05Experts:
    """The stored bytes, and one input scale an expert and GEMM.

    Attributes:
        input_dec13, input_dec2: float32 ``[E]``; ones where the activation format needs none.
    """

    weights: ExpertWeights
    input_dec13: Tensor
    input_dec2: Tensor

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name; `Tcgen05Kernel.run` reads these very tensors."""
        named = {"w13": self.weights.w13, "w2": self.weights.w2}
        stored = {f"{p}_{n}": t for p, w in named.items() for n, t in w.tensors().items()}
        return {**stored, "input_dec13": self.input_dec13, "input_dec2": self.input_dec2}


class Tcgen05Kernel:
    """``ExpertsKernel`` for one layer."""

    def __init__(self, problem: MoEProblem) -> None:
        self.problem = problem
        self.act_fmt: BlockFormat = FORMATS[problem.activation_format]

    def prepare(self, weights: ExpertWeights) -> Tcgen05Experts:
        """Keeps the weights as they are.

        Raises:
            CheckpointError: UE4M3 activations without a usable input scale for every expert.
        """
        if weights.fmt != self.problem.weight_format:
            raise FormatError(
                f"{weights.name}: {weights.fmt} weights for {self.problem.weight_format}"
            )
        if not self.act_fmt.has_global:
            ones = torch.ones(weights.num_experts, dtype=torch.float32)
            return Tcgen05Experts(weights, ones, ones.clone())
        first, second = (input_scales.of_experts(weights, w) for w in ("w13", "w2"))
        if self.problem.input_scale == "layer":
            first = input_scales.of_layer(weights, self.problem).expand_as(first).clone()
        return Tcgen05Experts(weights, first, second)

    def run(
        self,
        prepared: Tcgen05Experts,
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
            y = self._expert(prepared, expert, rows)
            total.index_add_(0, token, y if self.problem.router_weight_on_input else y * weight)
        if out is None:
            return total.to(x.dtype)
        return out.copy_(total)

    def _expert(self, prepared: Tcgen05Experts, expert: int, rows: Tensor) -> Tensor:
        """One expert on float32 ``[m, hidden]``."""
        w = prepared.weights
        h = self._gemm(rows, w.w13, expert, float(prepared.input_dec13[expert]))
        act = activate(self.problem.activation, h)
        return self._gemm(act, w.w2, expert, float(prepared.input_dec2[expert]))

    def _gemm(self, rows: Tensor, proj: ProjectionWeights, expert: int, input_dec: float) -> Tensor:
        """``[m, K]`` -> ``[m, N]`` in real units, bias added."""
        dec = input_dec if self.act_fmt.has_global else None
        q = quantize(rows, self.act_fmt, dec)
        a = dequantize(q.qdata, q.sf, self.act_fmt)
        w = dequantize(proj.qdata[expert], proj.sf[expert], self.problem.weight_format)
        accumulator = _tiled_product(a, w.T)
        n, halves = w.shape[0], proj.dec.shape[1]
        alpha = (proj.dec[expert].double() * input_dec).float()
        result = accumulator * alpha.repeat_interleave(n // halves)
        return result if proj.bias is None else result + proj.bias[expert]


def _tiled_product(a: Tensor, w: Tensor) -> Tensor:
    """``a @ w`` in tiles of a fixed number of rows."""
    m = a.shape[0]
    padded = torch.nn.functional.pad(a, (0, 0, 0, -m % ROWS_PER_TILE))
    return torch.cat([tile @ w for tile in padded.split(ROWS_PER_TILE)])[:m]


def build(problem: MoEProblem) -> Tcgen05Kernel:
    """The kernel object of one layer."""
    return Tcgen05Kernel(problem)
