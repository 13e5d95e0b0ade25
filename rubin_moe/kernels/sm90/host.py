"""Host side of the sm_90a backend: weights into blocks, one launch for up to 2048 pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rubin_moe.arch import SM90A
from rubin_moe.errors import FormatError
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.compile_cache import compiled
from rubin_moe.kernels.launch import CompiledKernel, Launcher, launcher
from rubin_moe.kernels.sm90.choice import choose, max_tokens, sizes_of
from rubin_moe.kernels.sm90.plan import DecodePlan
from rubin_moe.kernels.sm90.scales import kernel_scales
from rubin_moe.layouts.fp4_hopper import HopperBlocks
from rubin_moe.layouts.gate_up import GateUpRows

SOURCES = ("kernels/cute", "kernels/sm90")
MAX_COUNTERS = 32 + 4096


@dataclass(frozen=True, eq=False)
class Sm90Experts:
    """Weights in blocks, and what the epilogues need.

    Attributes:
        w13, w2: uint8 ``[E, tiles, K blocks, bytes]`` (`layouts.fp4_hopper`). alpha13: float32
        ``[E, 2]`` gate and up, alpha2: ``[E]``. bias13: float32 ``[E, tiles13 * 16]`` in the order
        of the rows, bias2: ``[E, hidden]``; of one element each where the layer has none.
    """

    w13: Tensor
    w2: Tensor
    alpha13: Tensor
    alpha2: Tensor
    bias13: Tensor
    bias2: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {n: getattr(self, n) for n in self.__dataclass_fields__}

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


class Sm90Kernel:
    """``ExpertsKernel`` for one layer."""

    def __init__(self, problem: MoEProblem, launch: Launcher, num_blocks: int) -> None:
        self.problem = problem
        self.sizes = sizes_of(problem)
        self._launch = launch
        self._num_blocks = num_blocks
        self._counters: dict[torch.device, Tensor] = {}
        self._kernels: dict[int, CompiledKernel] = {}

    def prepare(self, weights: ExpertWeights) -> Sm90Experts:
        """Blocks of both projections, expert by expert.

        Raises:
            FormatError: another format than the problem's, NaN block scales, or more exponents
                than `kernels.sm90.scales` holds.
        """
        if weights.fmt != self.problem.weight_format:
            raise FormatError(
                f"{weights.name}: {weights.fmt} weights for {self.problem.weight_format}"
            )
        e, sizes, device = weights.num_experts, self.sizes, weights.w13.qdata.device
        rows = GateUpRows(stripe=8, half_multiple=64) if sizes.gated else None
        w13, alpha13 = self._blocks(weights, "w13", weights.halves, rows, sizes.hidden)
        w2, alpha2 = self._blocks(weights, "w2", 1, None, sizes.padded_intermediate)
        bias13 = bias2 = torch.zeros(1, device=device)
        if self.problem.has_bias:
            bias13 = torch.zeros(e, sizes.tiles13 * 16, device=device)
            bias2 = torch.zeros(e, sizes.hidden, device=device)
            if weights.w13.bias is not None:
                ordered = weights.w13.bias
                if sizes.gated:
                    ordered = GateUpRows(stripe=8, half_multiple=64, axis=-1).pack(ordered)
                bias13[:, : ordered.shape[1]] = ordered
            if weights.w2.bias is not None:
                bias2.copy_(weights.w2.bias)
        return Sm90Experts(
            w13, w2, alpha13.expand(e, 2).contiguous(), alpha2.reshape(e), bias13, bias2
        )

    def _blocks(
        self, weights: ExpertWeights, name: str, halves: int, rows: GateUpRows | None, k: int
    ) -> tuple[Tensor, Tensor]:
        proj: ProjectionWeights = getattr(weights, name)
        layout = HopperBlocks(weights.fmt.sf_vec_size)
        e, n, _ = proj.qdata.shape
        n = rows.storage_shape((n, 1))[0] if rows else -(-n // 64) * 64 if name == "w13" else n
        shape = layout.storage_shape((n, k))
        out = torch.zeros((e, *shape), dtype=torch.uint8, device=proj.qdata.device)
        factors = torch.empty((e, halves), dtype=torch.float64)
        for expert in range(e):
            codes, sf = proj.qdata[expert], proj.sf[expert].clone()
            for half, part in enumerate(sf.chunk(halves)):
                where = f"{weights.name}.{name} of expert {weights.expert_ids[expert]}"
                scales = kernel_scales(part, weights.fmt, self.sizes.kind, where)
                part.copy_(scales.scale_bytes)
                factors[expert, half] = scales.factor
                if scales.zero is not None:
                    keep = ~scales.zero.repeat_interleave(weights.fmt.sf_vec_size // 2, -1)
                    codes = codes.clone()
                    codes.chunk(halves)[half].mul_(keep)
            if rows is not None:
                codes, sf = rows.pack(codes), rows.pack(sf)
            packed = layout.pack(codes, sf)
            out[expert, : packed.shape[0], : packed.shape[1]] = packed
        alpha = proj.dec.double() * factors.to(proj.dec.device)
        return out, alpha.float()

    def run(
        self,
        prepared: Sm90Experts,
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
        x, ids, weights = x.contiguous(), topk_ids.int().contiguous(), topk_weights.contiguous()
        if x.data_ptr() % 16:  # bulk copies read it
            x = x.clone()
        where = None if expert_map is None else expert_map.int().contiguous()
        fits = out is not None and out.is_contiguous() and out.data_ptr() % 8 == 0
        result = out if out is not None and fits else torch.empty_like(x)
        step = max_tokens(self.problem)
        rows = (x, ids, weights, result)
        if x.shape[0] <= step:
            self._run(prepared, where, *rows)
        else:
            for pieces in zip(*(t.split(step) for t in rows), strict=True):
                self._run(prepared, where, *pieces)
        return result if out is None or out is result else out.copy_(result)

    def _run(
        self,
        w: Sm90Experts,
        expert_map: Tensor | None,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        out: Tensor,
    ) -> None:
        m, sizes = x.shape[0], self.sizes
        pairs = m * sizes.top_k
        h = torch.empty((pairs, sizes.padded_intermediate), dtype=x.dtype, device=x.device)
        shape = (pairs, sizes.slabs, sizes.hidden)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
        self._launch.launch(
            self._kernel(m),
            self._num_blocks,
            [
                w.w13, w.w2, w.alpha13, w.alpha2, w.bias13, w.bias2, x, ids, weights, expert_map,
                h, partial, out, self._zeroed(x.device), m,
            ],
        )  # fmt: skip

    def _plan(self, num_tokens: int) -> DecodePlan:
        return choose(self.problem, num_tokens)

    def _kernel(self, num_tokens: int) -> CompiledKernel:
        found = self._kernels.get(num_tokens)
        if found is None:
            plan = self._plan(num_tokens)
            found = decode_kernel(plan, self.problem.activation, self.problem.has_bias)
            self._kernels[num_tokens] = found
        return found

    def _zeroed(self, device: torch.device) -> Tensor:
        """Counters that a launch leaves ready for the next; launches of a layer run in order."""
        if device not in self._counters:
            self._counters[device] = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
        return self._counters[device]


def decode_kernel(plan: DecodePlan, activation: Activation, bias: bool) -> CompiledKernel:
    """The kernel of a plan, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from cutlass import Int32, Int64
        from cutlass.cute.runtime import make_fake_stream

        from rubin_moe.kernels.sm90.decode import DecodeMoe

        args = (*(Int64(0) for _ in range(14)), Int32(1), Int32(1), make_fake_stream())
        return DecodeMoe(plan, activation, bias), args

    constants = f"{plan!r} {activation!r} {bias}"
    return compiled(
        "sm90_decode", SM90A.name, constants, SOURCES, plan.threads, plan.smem_bytes, build
    )


def build(problem: MoEProblem) -> Sm90Kernel:
    """The kernel object of one layer on this machine's GPU."""
    count = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return Sm90Kernel(problem, launcher("driver"), count)
