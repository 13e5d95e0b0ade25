"""Host side of the sm_90a backend: weights into blocks, one launch for up to 2048 pairs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from rubin_moe.arch import SM90A
from rubin_moe.errors import ConfigError, FormatError
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.compile_cache import compiled
from rubin_moe.kernels.launch import CompiledKernel, Launcher, launcher
from rubin_moe.kernels.sm90.choice import KINDS, choose, max_tokens, sizes_of
from rubin_moe.kernels.sm90.plan import DecodePlan, Plan, WidePlan
from rubin_moe.kernels.sm90.scales import kernel_scales
from rubin_moe.layouts.fp4_hopper import HopperBlocks
from rubin_moe.layouts.gate_up import GateUpRows

PACKAGE = "rubin_moe.kernels.sm90"
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
    """``ExpertsKernel`` for one layer; it computes on ``device``, wherever weights come from."""

    def __init__(
        self,
        problem: MoEProblem,
        launch: Launcher,
        num_blocks: int,
        device: torch.device | str = "cuda",
    ) -> None:
        self.problem = problem
        self.sizes = sizes_of(problem)
        self._launch = launch
        self._num_blocks = num_blocks
        self.device = torch.device(device)
        self._counters: dict[torch.device, Tensor] = {}
        self._kernels: dict[int, tuple[Plan, CompiledKernel]] = {}

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
        e, sizes, device = weights.num_experts, self.sizes, self.device
        rows = GateUpRows(stripe=8, half_multiple=64) if sizes.gated else None
        w13, alpha13 = self._blocks(weights, "w13", weights.halves, rows, sizes.hidden)
        w2, alpha2 = self._blocks(weights, "w2", 1, None, sizes.padded_intermediate)
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)  # not the default dtype
        bias13 = bias2 = zeros(1)
        if self.problem.has_bias:
            bias13 = zeros(e, sizes.tiles13 * 16)
            bias2 = zeros(e, sizes.hidden)
            if weights.w13.bias is not None:
                ordered = weights.w13.bias.to(device)
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
        out = torch.zeros((e, *shape), dtype=torch.uint8, device=self.device)
        factors = torch.empty((e, halves), dtype=torch.float64, device="cpu")
        for expert in range(e):
            codes = proj.qdata[expert].to(self.device)
            sf = proj.sf[expert].to(self.device, copy=True)
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
        alpha = proj.dec.double().cpu() * factors
        return out, alpha.float().to(self.device)

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
        pairs, (plan, kernel) = m * sizes.top_k, self._chosen(m)
        shape = (pairs, sizes.slabs, sizes.hidden)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
        scratch = [
            torch.empty(n, dtype=torch.uint8, device=x.device) for n in plan.scratch_bytes(pairs)
        ]
        self._launch.launch(
            kernel,
            self._num_blocks,
            [
                w.w13, w.w2, w.alpha13, w.alpha2, w.bias13, w.bias2, x, ids, weights, expert_map,
                *scratch, partial, out, self._zeroed(x.device), m,
            ],
        )  # fmt: skip

    def route(
        self,
        logits: Tensor,
        renormalize: bool = True,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Softmax and the best ``top_k`` experts of each token, in one launch before `run`'s.

        Args:
            logits: bfloat16, float16 or float32 ``[M, global experts]``, contiguous.
            renormalize: divide the chosen scores by their sum.
            out: int32 ids and float32 weights ``[M, top_k]``; default new ones.

        Returns:
            ids, best first (ties: the lower one), and weights.
        """
        p, m = self.problem, logits.shape[0]
        if logits.shape[1:] != (p.global_num_experts,) or not logits.is_contiguous():
            raise ConfigError(
                f"logits {list(logits.shape)}: expected contiguous [M, {p.global_num_experts}]"
            )
        kind = KINDS.get(str(logits.dtype).removeprefix("torch."), "f32")
        ids, weights = out or (
            torch.empty((m, p.top_k), dtype=torch.int32, device=logits.device),
            torch.empty((m, p.top_k), dtype=torch.float32, device=logits.device),
        )
        kernel = router_of(p.global_num_experts, p.top_k, kind, renormalize)
        self._launch.launch(kernel, -(-m // ROUTED_AT_ONCE), [logits, ids, weights, m])
        return ids, weights

    def _chosen(self, num_tokens: int) -> tuple[Plan, CompiledKernel]:
        if num_tokens not in self._kernels:
            plan = self._plan(num_tokens)
            kernel = kernel_of(plan, self.problem.activation, self.problem.has_bias)
            self._kernels[num_tokens] = plan, kernel
        return self._kernels[num_tokens]

    def _plan(self, num_tokens: int) -> Plan:
        return choose(self.problem, num_tokens)

    def _zeroed(self, device: torch.device) -> Tensor:
        """Counters that a launch leaves ready for the next; launches of a layer run in order."""
        if device not in self._counters:
            self._counters[device] = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
        return self._counters[device]


@lru_cache(maxsize=1024)
def kernel_of(plan: Plan, activation: Activation, bias: bool) -> CompiledKernel:
    """The kernel of a plan, from the cache or compiled now."""
    wide = isinstance(plan, WidePlan)

    def build() -> tuple[object, tuple[object, ...]]:
        from cutlass import Int32, Int64
        from cutlass.cute.runtime import make_fake_stream

        addresses = (Int64(0) for _ in range(15 if wide else 14))
        args = (*addresses, Int32(1), Int32(1), make_fake_stream())
        if isinstance(plan, WidePlan):
            from rubin_moe.kernels.sm90.wide import WideMoe

            return WideMoe(plan, activation, bias), args
        from rubin_moe.kernels.sm90.decode import DecodeMoe

        assert isinstance(plan, DecodePlan)
        return DecodeMoe(plan, activation, bias), args

    name, constants = "wide" if wide else "decode", f"{plan!r} {activation!r} {bias}"
    return compiled(
        f"sm90_{name}", SM90A.name, constants, f"{PACKAGE}.{name}", plan.threads, plan.smem_bytes,
        build,
    )  # fmt: skip


ROUTED_AT_ONCE = 4  # tokens of a block, a warp each


@lru_cache(maxsize=64)
def router_of(num_experts: int, top_k: int, kind: str, renormalize: bool) -> CompiledKernel:
    """The kernel of `Sm90Kernel.route`, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from cutlass import Int32, Int64
        from cutlass.cute.runtime import make_fake_stream

        from rubin_moe.kernels.sm90.top_k import TopK

        args = (Int64(0), Int64(0), Int64(0), Int32(1), Int32(1), make_fake_stream())
        return TopK(num_experts, top_k, kind, renormalize, ROUTED_AT_ONCE), args

    constants = f"{num_experts} {top_k} {kind} {renormalize} {ROUTED_AT_ONCE}"
    threads, module = 32 * ROUTED_AT_ONCE, f"{PACKAGE}.top_k"
    return compiled("sm90_top_k", SM90A.name, constants, module, threads, 0, build)


def build(problem: MoEProblem) -> Sm90Kernel:
    """The kernel object of one layer on this machine's GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return Sm90Kernel(problem, launcher("driver"), count, device)
