"""Host side of the sm_90a backend: weights into blocks; one launch for up to 2048 pairs, four for
many tokens."""

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
from rubin_moe.kernels.launch import Argument, At, CompiledKernel, Launcher, launcher
from rubin_moe.kernels.sm90.calls import choices
from rubin_moe.kernels.sm90.choice import AnyPlan, choose, max_tokens, sizes_of
from rubin_moe.kernels.sm90.fp8_plan import Fp8Plan
from rubin_moe.kernels.sm90.plan import DecodePlan, Plan, WidePlan
from rubin_moe.kernels.sm90.prefill_host import Prefill, prefill_kernels
from rubin_moe.kernels.sm90.prefill_plan import PrefillPlan
from rubin_moe.kernels.sm90.scales import kernel_scales
from rubin_moe.layouts.fp4_hopper import HopperBlocks
from rubin_moe.layouts.gate_up import GateUpRows

PACKAGE = "rubin_moe.kernels.sm90"
MAX_COUNTERS = 32 + 4096
SCRATCH_ALIGN = 128
LOGITS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


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


@dataclass(frozen=True)
class _Launch:
    """What a number of tokens decides.

    Attributes:
        areas: first byte of each of the kernel's scratch arguments, and ``scratch_bytes`` of all.
        routed_bytes: of ids and weights of as many tokens.
    """

    kernel: CompiledKernel
    areas: tuple[int, ...]
    scratch_bytes: int
    routed_bytes: int

    @classmethod
    def of(cls, plan: Plan, kernel: CompiledKernel, num_tokens: int) -> _Launch:
        sizes, at, areas = plan.sizes, 0, []
        pairs = num_tokens * sizes.top_k
        for nbytes in (*plan.scratch_bytes(pairs), 4 * pairs * sizes.slabs * sizes.hidden):
            areas.append(at)
            at += -(-nbytes // SCRATCH_ALIGN) * SCRATCH_ALIGN
        return cls(kernel, tuple(areas), at, 8 * pairs)


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
        self._launches: dict[int, _Launch] = {}
        self._prefills: dict[int, Prefill | None] = {}
        self._step = max_tokens(problem)

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
        e, sizes = weights.num_experts, self.sizes
        rows = GateUpRows(stripe=8, half_multiple=64) if sizes.gated else None
        w13, alpha13 = self._blocks(weights, "w13", weights.halves, rows, sizes.hidden)
        w2, alpha2 = self._blocks(weights, "w2", 1, None, sizes.padded_intermediate)
        alphas = alpha13.expand(e, 2).contiguous(), alpha2.reshape(e)
        return Sm90Experts(w13, w2, *alphas, *self._biases(weights))

    def _biases(self, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
        """Of FC1 in the order of the blocks' rows, and of FC2."""
        e, sizes = weights.num_experts, self.sizes
        zeros = partial(torch.zeros, dtype=torch.float32, device=self.device)  # not the default's
        if not self.problem.has_bias:
            return zeros(1), zeros(1)
        bias13, bias2 = zeros(e, sizes.tiles13 * 16), zeros(e, sizes.hidden)
        if weights.w13.bias is not None:
            ordered = weights.w13.bias.to(self.device)
            if sizes.gated:
                ordered = GateUpRows(stripe=8, half_multiple=64, axis=-1).pack(ordered)
            bias13[:, : ordered.shape[1]] = ordered
        if weights.w2.bias is not None:
            bias2.copy_(weights.w2.bias)
        return bias13, bias2

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

    def warm_up(self, num_tokens: int) -> None:
        """See `rubin_moe.kernels.base.CompilesAhead.warm_up`; of `run`, not of `route`."""
        self._zeroed(self.device)
        for plan in choices(self.problem, num_tokens):
            for kernel in kernels_of(plan, self.problem.activation, self.problem.has_bias):
                self._launch.load(kernel)

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
        ids = topk_ids if topk_ids.dtype is torch.int32 else topk_ids.int()
        ids, weights = ids.contiguous(), topk_weights.contiguous()
        x, result = _readable(x), _writable(out, x)
        rows, step = (x, ids, weights, result), self._step
        prefill = self._prefill(x.shape[0])
        if prefill is not None:
            where = None if expert_map is None else expert_map.int().contiguous()
            prefill.run(prepared, x, ids, weights, where, result)
        elif x.shape[0] <= step:
            self._run(prepared, expert_map, *rows)
        else:
            for pieces in zip(*(t.split(step) for t in rows), strict=True):
                self._run(prepared, expert_map, *pieces)
        return result if out is None or out is result else out.copy_(result)

    def run_from_logits(
        self,
        prepared: Sm90Experts,
        x: Tensor,
        logits: Tensor,
        renormalize: bool = True,
        expert_map: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`route`, then `run`."""
        m = x.shape[0]
        whole = m <= self._step and self._prefill(m) is None
        if not whole or self.problem.router_weight_on_input:
            ids, weights = self.route(logits, renormalize)
            return self.run(prepared, x, ids, weights, expert_map, out)
        x, result = _readable(x), _writable(out, x)
        launch = self._chosen(m)
        nbytes = launch.scratch_bytes + launch.routed_bytes
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
        ids_at = At(scratch, launch.scratch_bytes)
        weights_at = At(scratch, launch.scratch_bytes + launch.routed_bytes // 2)
        self._route(logits, renormalize, ids_at, weights_at)
        self._run(prepared, expert_map, x, ids_at, weights_at, result, scratch)
        return result if out is None or out is result else out.copy_(result)

    def _run(
        self,
        w: Sm90Experts,
        expert_map: Tensor | None,
        x: Tensor,
        ids: Argument,
        weights: Argument,
        out: Tensor,
        scratch: Tensor | None = None,
    ) -> None:
        launch = self._chosen(x.shape[0])
        if scratch is None:
            scratch = torch.empty(launch.scratch_bytes, dtype=torch.uint8, device=x.device)
        if expert_map is not None:
            expert_map = expert_map.int().contiguous()
        self._launch.launch(
            launch.kernel,
            self._num_blocks,
            [
                w.w13, w.w2, w.alpha13, w.alpha2, w.bias13, w.bias2, x, ids, weights, expert_map,
                *[At(scratch, byte) for byte in launch.areas], out, self._zeroed(x.device),
                x.shape[0],
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
        shape = logits.shape[0], self.problem.top_k
        ids, weights = out or (
            torch.empty(shape, dtype=torch.int32, device=logits.device),
            torch.empty(shape, dtype=torch.float32, device=logits.device),
        )
        self._route(logits, renormalize, ids, weights)
        return ids, weights

    def _route(self, logits: Tensor, renormalize: bool, ids: Argument, weights: Argument) -> None:
        p, m = self.problem, logits.shape[0]
        kind = LOGITS.get(logits.dtype)
        if (
            kind is None
            or logits.shape[1:] != (p.global_num_experts,)
            or not logits.is_contiguous()
        ):
            raise ConfigError(
                f"logits {list(logits.shape)} {logits.dtype}: expected contiguous "
                f"[M, {p.global_num_experts}] of bfloat16, float16 or float32"
            )
        kernel = router_of(p.global_num_experts, p.top_k, kind, renormalize)
        self._launch.launch(kernel, -(-m // ROUTED_AT_ONCE), [logits, ids, weights, m])

    def _chosen(self, num_tokens: int) -> _Launch:
        found = self._launches.get(num_tokens)
        if found is None:
            plan = self._plan(num_tokens)
            assert isinstance(plan, Plan)
            kernel = kernel_of(plan, self.problem.activation, self.problem.has_bias)
            found = self._launches[num_tokens] = _Launch.of(plan, kernel, num_tokens)
        return found

    def _prefill(self, num_tokens: int) -> Prefill | None:
        """What computes as many tokens, if they are many."""
        if num_tokens not in self._prefills:
            plan = self._plan(num_tokens)
            found = None
            if isinstance(plan, PrefillPlan):
                kernels = prefill_kernels(plan, self.problem.activation, self.problem.has_bias)
                found = Prefill(plan, kernels, self._launch, self._num_blocks, self._zeroed)
            self._prefills[num_tokens] = found
        return self._prefills[num_tokens]

    def _plan(self, num_tokens: int) -> AnyPlan:
        return choose(self.problem, num_tokens)

    def _zeroed(self, device: torch.device) -> Tensor:
        """Counters that a launch leaves ready for the next; launches of a layer run in order."""
        if device not in self._counters:
            self._counters[device] = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
        return self._counters[device]


def _readable(x: Tensor) -> Tensor:
    """Contiguous, at an address that bulk copies read."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _writable(out: Tensor | None, x: Tensor) -> Tensor:
    """``out``, or a new tensor where that is none or no place for the kernel's stores."""
    if out is not None and out.is_contiguous() and out.data_ptr() % 16 == 0:
        return out
    return torch.empty_like(x)


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


def kernels_of(plan: AnyPlan, activation: Activation, bias: bool) -> tuple[CompiledKernel, ...]:
    """All kernels of a plan, from the cache or compiled now."""
    if isinstance(plan, Fp8Plan):
        from rubin_moe.kernels.sm90.fp8_host import fp8_kernels

        return fp8_kernels(plan, activation, bias).all
    if isinstance(plan, PrefillPlan):
        return prefill_kernels(plan, activation, bias).all
    return (kernel_of(plan, activation, bias),)


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
    if problem.activation_format == "fp8-e4m3":
        from rubin_moe.kernels.sm90.fp8_host import Fp8Kernel

        return Fp8Kernel(problem, launcher("driver"), count, device)
    return Sm90Kernel(problem, launcher("driver"), count, device)
