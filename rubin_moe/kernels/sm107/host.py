"""Host side of the sm_107a backend: weights into tiles, one routing, two launches, one sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rubin_moe.arch import SM107A
from rubin_moe.errors import CheckpointError, FormatError
from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.formats.spec import FORMATS, NVFP4_UE4M3, BlockFormat
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.compile_cache import compiled
from rubin_moe.kernels.launch import CompiledKernel, Launcher, launcher
from rubin_moe.kernels.sm107 import plan as plans
from rubin_moe.kernels.sm107.front import Work, make_work
from rubin_moe.kernels.sm107.rules import SCALES
from rubin_moe.layouts.gate_up import GateUpRows
from rubin_moe.layouts.sm107_tiles import Sm107Tiles

SOURCES = ("kernels/cute", "kernels/sm107")
DTYPES = ("bfloat16", "float16", "float32")
ROWS = GateUpRows(stripe=16, half_multiple=64)


@dataclass(frozen=True, eq=False)
class Sm107Experts:
    """Weights in tiles, and what the epilogues multiply.

    Attributes:
        w13, w2: uint8 tiles (`layouts.sm107_tiles`). alpha13: float32 ``[E, 2]`` gate and up,
        alpha2: ``[E]``, both with the activation's scale. norm: ``[E]`` scale of FC2's input;
        input_dec: ``[1]`` scale of FC1's input.
    """

    w13: Tensor
    w2: Tensor
    alpha13: Tensor
    alpha2: Tensor
    norm: Tensor
    input_dec: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {n: getattr(self, n) for n in self.__dataclass_fields__}

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


class Sm107Kernel:
    """``ExpertsKernel`` for one layer."""

    def __init__(self, problem: MoEProblem, launch: Launcher, num_ctas: int) -> None:
        self.problem = problem
        self.act_fmt: BlockFormat = FORMATS[problem.activation_format]
        self.scale = SCALES[problem.activation_format]
        self._launch = launch
        self._num_ctas = num_ctas

    def prepare(self, weights: ExpertWeights) -> Sm107Experts:
        """Tiles of both projections.

        Raises:
            CheckpointError: UE4M3 activations without a usable input scale.
        """
        if weights.fmt != self.problem.weight_format:
            raise FormatError(
                f"{weights.name}: {weights.fmt} weights for {self.problem.weight_format}"
            )
        first, second = self._input_scales(weights)
        w13, w2, tiles = weights.w13, weights.w2, Sm107Tiles()
        return Sm107Experts(
            w13=tiles.pack(ROWS.pack(w13.qdata), ROWS.pack(w13.sf)),
            w2=tiles.pack(w2.qdata, w2.sf),
            alpha13=(w13.dec.double() * first.double()).float(),
            alpha2=(w2.dec[:, 0].double() * second.double()).float(),
            norm=second,
            input_dec=first,
        )

    def _input_scales(self, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
        """float32 ``[1]`` for FC1, one for all experts since a token is quantized once, and
        ``[E]`` for FC2."""
        e, device = weights.num_experts, weights.w13.qdata.device
        if self.act_fmt != NVFP4_UE4M3:
            return torch.ones(1, device=device), torch.ones(e, device=device)
        found = []
        for proj in ("w13", "w2"):
            dec = getattr(weights, proj).input_dec
            scales = None if dec is None else dec.amax(-1)
            if scales is None or not bool((torch.isfinite(scales) & (scales > 0)).all()):
                raise CheckpointError(
                    f"{weights.name}.{proj}: nvfp4-ue4m3 activations need an input scale for "
                    "every expert; nvfp4-ue5m3 activations need none"
                )
            found.append(scales)
        return found[0].amax().reshape(1), found[1]

    def run(
        self,
        prepared: Sm107Experts,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `rubin_moe.kernels.base.ExpertsKernel.run`."""
        p = self.problem
        m, top_k = topk_ids.shape
        dtype = x.dtype
        ids = topk_ids.long()
        if expert_map is not None:
            ids = torch.where(ids >= 0, expert_map.long()[ids.clamp(min=0)], ids)
        tile_n = plans.choose_tile_n(m, top_k, p.num_experts)
        plan = plans.plan_gemm(tile_n, self.scale)
        work = make_work(ids, topk_weights, p.num_experts, tile_n)
        if p.router_weight_on_input:
            x = x.float() * topk_weights
            work = replace(work, weight=torch.ones_like(work.weight))
        codes, scales = self._quantized(x, prepared.input_dec)
        hidden = self._fc1(plan, prepared, work, codes, scales)
        summed = self._fc2(plan, prepared, work, *hidden, num_tokens=m)
        if not p.deterministic:
            return summed.to(dtype) if out is None else out.copy_(summed)
        total = self._sum(summed, dtype)
        return total if out is None else out.copy_(total)

    def _quantized(self, x: Tensor, dec: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of every token, once, with K padded by zeros to whole tiles."""
        m, hidden = x.shape
        tiles = plans.tiles_of(hidden)
        codes = torch.empty(m, 128 * tiles, dtype=torch.uint8, device=x.device)
        scales = torch.empty(m, 16 * tiles, dtype=torch.uint8, device=x.device)
        kernel = quantize_kernel(self.scale, _dtype(x))
        self._launch.launch(
            kernel,
            self._ctas(scales.numel(), kernel),
            [x.contiguous(), dec, codes, scales, hidden // 16, 16 * tiles, scales.numel()],
        )
        return codes, scales

    def _ctas(self, threads: int, kernel: CompiledKernel) -> int:
        """Blocks of an elementwise kernel: a thread each, up to a few for every SM."""
        return max(1, min(-(-threads // kernel.block), 8 * self._num_ctas))

    def _fc1(
        self, plan: plans.GemmPlan, w: Sm107Experts, work: Work, codes: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        p = self.problem
        tiles = plans.tiles_of(p.intermediate)
        rows = work.token.numel()
        # the columns past the last feature tile are K padding of FC2, and nobody writes them
        out_codes = torch.zeros(rows, tiles * 128, dtype=torch.uint8, device=codes.device)
        out_scales = torch.zeros(rows, tiles * 16, dtype=torch.uint8, device=codes.device)
        self._launch.launch(
            fc1_kernel(plan),
            self._num_ctas,
            [
                work.items, work.num_items, work.token, codes, scales, w.w13, w.alpha13,
                out_codes, out_scales, w.norm, w.w13.shape[2], w.w13.shape[1], tiles,
            ],
        )  # fmt: skip
        return out_codes, out_scales

    def _fc2(
        self,
        plan: plans.GemmPlan,
        w: Sm107Experts,
        work: Work,
        codes: Tensor,
        scales: Tensor,
        num_tokens: int,
    ) -> Tensor:
        """float32 ``[M, hidden]``; deterministic: ``[M, top_k, hidden]``, a slot a choice."""
        p = self.problem
        atomic = not p.deterministic
        rows = torch.arange(work.token.numel(), dtype=torch.int32, device=codes.device)
        shape = (num_tokens, p.hidden) if atomic else (num_tokens, p.top_k, p.hidden)
        out = torch.zeros(shape, dtype=torch.float32, device=codes.device)
        self._launch.launch(
            fc2_kernel(plan, atomic),
            self._num_ctas,
            [
                work.items, work.num_items, rows, codes, scales, w.w2, w.alpha2, out,
                work.token if atomic else work.choice, work.weight,
                w.w2.shape[2], w.w2.shape[1], p.hidden,
            ],
        )  # fmt: skip
        return out

    def _sum(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Each token's choices in their order."""
        m, top_k, hidden = slots.shape
        out = torch.empty(m, hidden, dtype=dtype, device=slots.device)
        kernel, total = sum_kernel(_dtype(out)), m * hidden // 4
        self._launch.launch(
            kernel, self._ctas(total, kernel), [slots, out, hidden // 4, top_k, total]
        )
        return out


def _dtype(tensor: Tensor) -> str:
    """As torch names it. Raises FormatError for one that the kernels do not read or write."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise FormatError(f"hidden states of {name}; the kernels take {', '.join(DTYPES)}")
    return name


def fc1_kernel(plan: plans.GemmPlan) -> CompiledKernel:
    """FC1 for layers of any size, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from rubin_moe.kernels.sm107.gather_gemm_swiglu import GatherGemmSwiglu

        return GatherGemmSwiglu(plan), _example_args()

    return _compiled("sm107_gather_gemm_swiglu", f"{plan!r}", plan, build)


def fc2_kernel(plan: plans.GemmPlan, atomic: bool) -> CompiledKernel:
    """FC2 for layers of any size, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from rubin_moe.kernels.sm107.gemm_finalize import GemmFinalize

        return GemmFinalize(plan, atomic), _example_args()

    return _compiled("sm107_gemm_finalize", f"{plan!r} {atomic}", plan, build)


def quantize_kernel(scale: str, dtype: str) -> CompiledKernel:
    """Tokens to NVFP4, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from rubin_moe.kernels.sm107.quantize_tokens import QuantizeTokens

        return QuantizeTokens(scale, dtype), _example_args(4)

    constants = f"{scale} {dtype}"
    return compiled("sm107_quantize_tokens", SM107A.name, constants, SOURCES, 128, 0, build)


def sum_kernel(dtype: str) -> CompiledKernel:
    """The sum over choices, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from rubin_moe.kernels.sm107.sum_choices import SumChoices

        return SumChoices(dtype), _example_args(2)

    return compiled("sm107_sum_choices", SM107A.name, dtype, SOURCES, 128, 0, build)


def _compiled(
    name: str,
    constants: str,
    plan: plans.GemmPlan,
    build: Callable[[], tuple[object, tuple[object, ...]]],
) -> CompiledKernel:
    return compiled(name, SM107A.name, constants, SOURCES, plans.THREADS, plan.smem_bytes, build)


def _example_args(addresses: int = 10) -> tuple[object, ...]:
    """Addresses, three sizes, the grid, a stream."""
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_stream

    sizes = (Int32(1) for _ in range(4))
    return (*(Int64(0) for _ in range(addresses)), *sizes, make_fake_stream())


def build(problem: MoEProblem) -> Sm107Kernel:
    """The kernel object of one layer on this machine's GPU."""
    count = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return Sm107Kernel(problem, launcher("driver"), count)
