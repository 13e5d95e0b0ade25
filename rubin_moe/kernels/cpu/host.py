"""The CPU backend: routed experts are decoded one at a time, nobody else's are touched.

FP32 accumulation; what goes from FC1 to FC2 is rounded to the dtype of the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rubin_moe.errors import FormatError
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.spec import BlockFormat
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import MoEProblem

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, eq=False)
class CpuExperts:
    """The stored bytes as they are."""

    weights: ExpertWeights

    def nbytes(self) -> int:
        return self.weights.nbytes()

    def tensors(self) -> dict[str, Tensor]:
        projections = {"w13": self.weights.w13, "w2": self.weights.w2}
        return {f"{p}_{n}": t for p, w in projections.items() for n, t in w.tensors().items()}


def _scale_table(fmt: BlockFormat) -> Tensor:
    codes = torch.arange(256, dtype=torch.int32)
    if fmt.scale == "ue8m0":
        table = torch.ldexp(torch.ones(256, dtype=torch.float64), codes - 127)
    else:
        exponent_bias = 7 if fmt.scale == "ue4m3" else 15
        e, m = codes >> 3, (codes & 7).double()
        normal = torch.ldexp(1 + m / 8, e - exponent_bias)
        table = torch.where(e > 0, normal, torch.ldexp(m / 8, torch.tensor(1 - exponent_bias)))
        if fmt.scale == "ue4m3":
            table[127:] = float("nan")
    table[255] = float("nan")
    return table.float()


def _dense(w: ProjectionWeights, e: int, codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """float32 ``[N, K]`` of one expert, dec included."""
    q = w.qdata[e].int()
    values = torch.stack([codes[q & 15], codes[q >> 4]], dim=-1)
    n = q.shape[0]
    blocks = values.view(n, -1, block) * scales[w.sf[e].int()][..., None]
    halves = w.dec.shape[1]
    return (blocks.view(halves, n // halves, -1) * w.dec[e].view(halves, 1, 1)).view(n, -1)


def _activate(act: Activation, h: Tensor) -> Tensor:
    if not act.gated:
        return torch.relu(h) ** 2
    gate, up = h.chunk(2, dim=-1)
    if act.limit is not None:
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    if act.kind == "swigluoai":
        return (up + act.beta) * gate * torch.sigmoid(act.alpha * gate)
    if act.kind == "gelu_tanh":
        return up * torch.nn.functional.gelu(gate, approximate="tanh")
    return up * torch.nn.functional.silu(gate)


class CpuKernel:
    """``ExpertsKernel`` for one layer."""

    def __init__(self, problem: MoEProblem) -> None:
        self.problem = problem
        self._codes = torch.tensor(_E2M1 + tuple(-v for v in _E2M1))
        self._scales = _scale_table(problem.weight_format)

    def prepare(self, weights: ExpertWeights) -> CpuExperts:
        p = self.problem
        if weights.fmt != p.weight_format:
            raise FormatError(f"{weights.name}: {weights.fmt} weights for {p.weight_format}")
        return CpuExperts(weights)

    def run(
        self,
        prepared: CpuExperts,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        w, p = prepared.weights, self.problem
        ids = topk_ids.long()
        if expert_map is not None:
            ids = torch.where(ids >= 0, expert_map.long()[ids.clamp(min=0)], ids)
        total = torch.zeros(x.shape, dtype=torch.float32)
        for e in ids.unique().tolist():
            if e < 0:
                continue
            token, slot = (ids == e).nonzero(as_tuple=True)
            weight = topk_weights[token, slot, None].float()
            a = x[token].float()
            if p.router_weight_on_input:
                a = (a * weight).to(x.dtype).float()
            block = w.fmt.sf_vec_size
            h = a @ _dense(w.w13, e, self._codes, self._scales, block).T
            h = h if w.w13.bias is None else h + w.w13.bias[e]
            act = _activate(p.activation, h).to(x.dtype).float()
            y = act @ _dense(w.w2, e, self._codes, self._scales, block).T
            y = y if w.w2.bias is None else y + w.w2.bias[e]
            total.index_add_(0, token, y if p.router_weight_on_input else y * weight)
        if out is None:
            return total.to(x.dtype)
        out.copy_(total)
        return out


def build(problem: MoEProblem) -> CpuKernel:
    """The kernel object of one layer."""
    return CpuKernel(problem)
