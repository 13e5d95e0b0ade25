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
from rubin_moe.kernels.by_expert import ExpertByExpert, tiled_product
from rubin_moe.kernels.cpu_tcgen05.rules import ROWS_PER_TILE


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


class Tcgen05Kernel(ExpertByExpert):
    """``ExpertsKernel`` for one layer."""

    def __init__(self, problem: MoEProblem) -> None:
        super().__init__(problem)
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

    def gemm(self, prepared: Tcgen05Experts, rows: Tensor, which: str, expert: int) -> Tensor:
        """See `ExpertByExpert.gemm`."""
        proj: ProjectionWeights = getattr(prepared.weights, which)
        scales = prepared.input_dec13 if which == "w13" else prepared.input_dec2
        input_dec = float(scales[expert])
        dec = input_dec if self.act_fmt.has_global else None
        q = quantize(rows, self.act_fmt, dec)
        a = dequantize(q.qdata, q.sf, self.act_fmt)
        w = dequantize(proj.qdata[expert], proj.sf[expert], self.problem.weight_format)
        accumulator = tiled_product(a, w.T, ROWS_PER_TILE)
        n, halves = w.shape[0], proj.dec.shape[1]
        alpha = (proj.dec[expert].double() * input_dec).float()
        result = accumulator * alpha.repeat_interleave(n // halves)
        return result if proj.bias is None else result + proj.bias[expert]


def build(problem: MoEProblem) -> Tcgen05Kernel:
    """The kernel object of one layer."""
    return Tcgen05Kernel(problem)
