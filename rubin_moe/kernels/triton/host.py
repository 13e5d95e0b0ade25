"""Host side of the Triton backend: weights into tiles, four launches for up to 32768 pairs.

Routing, FC1 with its activation, FC2, and the weighted sum; their sizes follow from the number of
tokens alone, so that nothing waits for the GPU and a captured call replays with any routing. Each
sum has one order: runs are bit-equal, and a row alone equals that row in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rubin_moe.errors import FormatError
from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.triton.plan import TritonPlan, make_plan, max_tokens
from rubin_moe.kernels.triton.rules import interpreted
from rubin_moe.kernels.triton.scales import kernel_scales, unit
from rubin_moe.layouts.fp4_planes import ROWS, CodePlanes, ScaleTiles

SUM_COLUMNS = 1024  # of hidden, a program of the weighted sum
OPTIONS = {"enable_fp_fusion": True}  # the default differs between versions of Triton


@dataclass(frozen=True, eq=False)
class TritonExperts:
    """Weights in tiles, and what the epilogues need.

    Attributes:
        codes13: uint8 ``[E, halves, I tiles, K tiles, 64, 64]``, gate first; codes2: ``[E, hidden
            tiles, K tiles, 64, 64]`` (`layouts.fp4_planes`); scales13, scales2: their scales.
        alpha13: float32 ``[E, halves]``; alpha2: ``[E]``. bias13: float32 ``[E, halves, padded
            I]``; bias2: ``[E, hidden]``; of one element each where the layer has none.
    """

    codes13: Tensor
    scales13: Tensor
    alpha13: Tensor
    bias13: Tensor
    codes2: Tensor
    scales2: Tensor
    alpha2: Tensor
    bias2: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {n: getattr(self, n) for n in self.__dataclass_fields__}

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


class TritonKernel:
    """``ExpertsKernel`` for one layer; ``device`` holds its weights, wherever they come from."""

    def __init__(self, problem: MoEProblem, device: str) -> None:
        self.problem = problem
        self.device = torch.device(device)
        self.halves = 2 if problem.activation.gated else 1
        self.width = -(-problem.intermediate // ROWS) * ROWS
        self._plans: dict[int, TritonPlan] = {}
        self._format = {
            "UE8M0": problem.weight_format.scale == "ue8m0",
            "UNIT": unit(problem.weight_format.scale, problem.dtype),
        }
        # the interpreter knows no bfloat16: there tensors are float32, rounded on the host
        self._widened = interpreted() and problem.dtype == "bfloat16"

    def prepare(self, weights: ExpertWeights) -> TritonExperts:
        """Tiles of both projections, expert by expert.

        Raises:
            FormatError: another format than the problem's, or scales that `kernels.triton.scales`
                refuses.
        """
        p = self.problem
        if weights.fmt != p.weight_format:
            raise FormatError(f"{weights.name}: {weights.fmt} weights for {p.weight_format}")
        e, device = weights.num_experts, self.device
        # a server may have another default dtype
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        codes13, scales13, alpha13 = self._tiles(weights, "w13", self.halves)
        codes2, scales2, alpha2 = self._tiles(weights, "w2", 1)
        bias13 = bias2 = zeros(1)
        if p.has_bias:
            bias13 = zeros(e, self.halves, self.width)
            bias2 = zeros(e, p.hidden)
            if weights.w13.bias is not None:
                rows = weights.w13.bias.view(e, self.halves, p.intermediate)
                bias13[..., : p.intermediate] = rows.to(device)
            if weights.w2.bias is not None:
                bias2.copy_(weights.w2.bias)
        return TritonExperts(
            codes13, scales13, alpha13, bias13, codes2[:, 0], scales2[:, 0], alpha2[:, 0], bias2
        )

    def _tiles(
        self, weights: ExpertWeights, name: str, halves: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales ``[E, halves, ...]`` and alphas ``[E, halves]`` of one projection."""
        proj = getattr(weights, name)
        code_order, scale_order = CodePlanes(), ScaleTiles(weights.fmt.sf_vec_size)
        e, n = proj.qdata.shape[:2]
        q = proj.qdata.view(e, halves, n // halves, -1)
        sf = proj.sf.view(e, halves, n // halves, -1)
        shape = (e, halves, *code_order.storage_shape(tuple(q.shape[2:])))
        codes = q.new_empty(shape, device=self.device)
        shape = (e, halves, *scale_order.storage_shape(tuple(sf.shape[2:])))
        scales = sf.new_empty(shape, device=self.device)
        factors = torch.empty((e, halves), dtype=torch.float64)
        for expert in range(e):
            where = f"{weights.name}.{name} of expert {weights.expert_ids[expert]}"
            for half in range(halves):
                part, some = (t[expert, half].to(self.device) for t in (q, sf))
                read, factors[expert, half] = kernel_scales(
                    some, part, weights.fmt, self.problem.dtype, where
                )
                code_order.pack_into(part, codes[expert, half])
                scale_order.pack_into(read, scales[expert, half])
        alpha = proj.dec.cpu().double() * factors
        return codes, scales, alpha.float().to(self.device)

    def run(
        self,
        prepared: TritonExperts,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `rubin_moe.kernels.base.ExpertsKernel.run`. Tokens beyond one launch take more."""
        if self.problem.router_weight_on_input:
            x = (x.float() * topk_weights).to(x.dtype)
            topk_weights = torch.ones_like(topk_weights)
        x, ids, weights = x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
        where = None if expert_map is None else expert_map.int().contiguous()
        dtype = x.dtype
        if self._widened:
            x = x.float()
        fits = out is not None and out.is_contiguous() and out.dtype == x.dtype
        result = out if out is not None and fits else torch.empty_like(x)
        rows = (x, ids, weights, result)
        for pieces in zip(*(t.split(max_tokens(self.problem)) for t in rows), strict=True):
            self._run(prepared, where, *pieces)
        if out is None:
            return result.to(dtype)
        return out if out is result else out.copy_(result)

    def _run(
        self,
        w: TritonExperts,
        expert_map: Tensor | None,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        out: Tensor,
    ) -> None:
        from rubin_moe.kernels.triton import gemm, route

        p, plan = self.problem, self._plan(x.shape[0])
        m, pairs = x.shape[0], x.shape[0] * p.top_k
        local, groups = _groups(plan, pairs, x.device)
        route.route[(-(-pairs // plan.own),)](
            ids, expert_map, local, **groups, num_pairs=pairs, max_blocks=plan.max_groups,
            num_global=p.global_num_experts, num_experts=p.num_experts,
            HAS_MAP=expert_map is not None, BLOCK=plan.group, EXPERTS=plan.experts, OWN=plan.own,
            CHUNK=plan.chunk, num_warps=plan.route_warps, **OPTIONS,
        )  # fmt: skip
        h = torch.empty((pairs, self.width), dtype=x.dtype, device=x.device)
        y = torch.empty((pairs, p.hidden), dtype=torch.float32, device=x.device)
        common = {
            **groups, **self._format, "hidden": p.hidden, "width": self.width,
            "BIAS": p.has_bias, "BLOCK": plan.group, "num_warps": plan.num_warps,
            "num_stages": plan.num_stages, **OPTIONS,
        }  # fmt: skip
        act = p.activation
        gemm.fc1[(plan.max_groups, self.width // ROWS)](
            x, w.codes13, w.scales13.view(torch.int32), w.alpha13, w.bias13, h=h, TOP_K=p.top_k,
            GATED=act.gated, KIND=act.kind, LIMIT=act.limit or 0.0, ALPHA=act.alpha, BETA=act.beta,
            **common,
        )  # fmt: skip
        if self._widened:
            h = h.bfloat16().float()
        gemm.fc2[(plan.max_groups, -(-p.hidden // ROWS))](
            h, w.codes2, w.scales2.view(torch.int32), w.alpha2, w.bias2, y=y, **common
        )
        route.sum_choices[(m, -(-p.hidden // SUM_COLUMNS))](
            y, local, weights, out, p.hidden, p.num_experts, TOP_K=p.top_k, BLOCK=SUM_COLUMNS,
            **OPTIONS,
        )  # fmt: skip

    def _plan(self, num_tokens: int) -> TritonPlan:
        if num_tokens not in self._plans:
            self._plans[num_tokens] = make_plan(self.problem, num_tokens)
        return self._plans[num_tokens]


def _groups(
    plan: TritonPlan, num_pairs: int, device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """What `route.route` writes: each pair's expert, and the groups by argument name."""
    sizes = [num_pairs, plan.max_groups * plan.group, plan.max_groups, plan.max_groups]
    local, *groups = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    return local, dict(zip(("pairs", "block_expert", "block_count"), groups, strict=True))


def build(problem: MoEProblem) -> TritonKernel:
    """The kernel object of one layer on this machine's GPU, or in Triton's interpreter."""
    return TritonKernel(problem, "cpu" if interpreted() else "cuda")
