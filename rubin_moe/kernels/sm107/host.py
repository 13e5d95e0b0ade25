"""Host side of the sm_107a backend: weights into tiles, one routing, two launches, one sum."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rubin_moe.errors import FormatError
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.spec import FORMATS, NVFP4_UE4M3, BlockFormat
from rubin_moe.kernels import input_scales
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.launch import CompiledKernel, Launcher, launcher
from rubin_moe.kernels.sm107 import plan as plans
from rubin_moe.kernels.sm107.compiled import (
    fc1_kernel,
    fc2_kernel,
    quantize_kernel,
    route_kernel,
    sum_kernel,
)
from rubin_moe.kernels.sm107.work import Work
from rubin_moe.layouts.gate_up import GateUpRows
from rubin_moe.layouts.sm107_tiles import Sm107Tiles

DTYPES = ("bfloat16", "float16", "float32")
ROWS = GateUpRows(stripe=16, half_multiple=64)
BIAS = replace(ROWS, axis=-1)


@dataclass(frozen=True, eq=False)
class Sm107Experts:
    """Weights in tiles, and what the epilogues multiply.

    Attributes:
        w13, w2: uint8 tiles (`layouts.sm107_tiles`). alpha13: float32 ``[E, 2]`` gate and up,
        alpha2: ``[E]``, both with the activation's scale. bias13, bias2: float32 ``[E, rows]`` of
        the tiles, zeros where the layer has none. activation: float32 ``[3]`` limit, alpha, beta.
        norm: ``[E]`` scale of FC2's input; input_dec: ``[1]`` scale of FC1's input.
    """

    w13: Tensor
    w2: Tensor
    alpha13: Tensor
    alpha2: Tensor
    bias13: Tensor
    bias2: Tensor
    activation: Tensor
    norm: Tensor
    input_dec: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {n: getattr(self, n) for n in self.__dataclass_fields__}

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


class Sm107Kernel:
    """``ExpertsKernel`` for one layer; it computes on ``device``, wherever weights come from."""

    def __init__(
        self,
        problem: MoEProblem,
        launch: Launcher,
        num_ctas: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.problem = problem
        self.device = torch.device(device)
        self.act_fmt: BlockFormat = FORMATS[problem.activation_format]
        self.fmt = problem.activation_format
        self.operands = plans.OPERANDS[self.fmt]
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
        first, second = (scale.to(self.device) for scale in self._input_scales(weights))
        dec13, dec2 = (w.dec.to(self.device).double() for w in (weights.w13, weights.w2))
        w13, w2 = self._tiles(weights.w13, gated=True), self._tiles(weights.w2, gated=False)
        return Sm107Experts(
            w13=w13,
            w2=w2,
            alpha13=(dec13 * first.double()).float(),
            alpha2=(dec2[:, 0] * second.double()).float(),
            bias13=_bias(weights.w13.bias, w13, gated=True),
            bias2=_bias(weights.w2.bias, w2, gated=False),
            activation=_activation(self.problem.activation, self.device),
            norm=second,
            input_dec=first,
        )

    def _tiles(self, w: ProjectionWeights, gated: bool) -> Tensor:
        """One expert at a time, so that no copy of the layer lies beside the result."""
        layout = Sm107Tiles(self.problem.weight_format)
        experts, rows, half_k = w.qdata.shape
        rows = 2 * ROWS.padded_half(rows // 2) if gated else rows
        shape = layout.storage_shape((experts, rows, 2 * half_k))
        out = torch.empty(shape, dtype=torch.uint8, device=self.device)
        for expert in range(experts):
            one = [t[expert : expert + 1].to(self.device) for t in (w.qdata, w.sf)]
            codes, sf = (ROWS.pack(t) for t in one) if gated else one
            out[expert : expert + 1] = layout.pack(codes, sf)
        return out

    def _input_scales(self, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
        """float32 ``[1]`` for FC1, one for all experts since a token is quantized once, and
        ``[E]`` for FC2."""
        if self.act_fmt != NVFP4_UE4M3:
            ones = torch.ones_like(weights.w2.dec[:, 0])
            return ones[:1].clone(), ones
        first = input_scales.of_layer(weights, self.problem)
        return first, input_scales.of_experts(weights, "w2")

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
        m, dtype = len(x), x.dtype
        tile_n = plans.choose_tile_n(m, p.top_k, p.global_num_experts)
        plan = plans.plan_gemm(self.fmt, tile_n, self._cta_group(tile_n))
        on_input = topk_weights if p.router_weight_on_input else None
        on_output = None if p.router_weight_on_input else topk_weights
        work = make_work(self._launch, topk_ids, on_output, p.num_experts, tile_n, expert_map)
        codes, scales = self._quantized(x, prepared.input_dec, on_input)
        hidden = self._fc1(plan, prepared, work, codes, scales)
        summed = self._fc2(plan, prepared, work, *hidden, num_tokens=m)
        if not p.deterministic:
            return summed.to(dtype) if out is None else out.copy_(summed)
        total = self._sum(summed, dtype)
        return total if out is None else out.copy_(total)

    def _quantized(
        self, x: Tensor, dec: Tensor, factor: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Codes and scales of every token, once, with K padded by zeros to whole tiles; first
        times its ``factor`` ``[M, 1]``."""
        m, hidden = x.shape
        codes, scales = self._blocks(m, hidden, x.device)
        kernel, total = quantize_kernel(self.operands.scale, _dtype(x)), scales.numel()
        weights = None if factor is None else factor.contiguous()
        self._launch.launch(
            kernel,
            self._ctas(total, kernel),
            [
                _aligned(x), dec, weights, codes, scales,
                hidden // self.operands.sf_vec, scales.shape[1], total,
            ],
        )  # fmt: skip
        return codes, scales

    def _blocks(self, rows: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Room for codes and scales of ``rows`` x ``k`` activations, K padded to whole tiles."""
        tiles = plans.tiles_of(self.fmt, k)
        widths = (plans.TOKEN_ROW_BYTES * tiles, self.operands.scales_k * tiles)
        codes, scales = (torch.empty(rows, n, dtype=torch.uint8, device=device) for n in widths)
        return codes, scales

    def _cta_group(self, tile_n: int) -> int:
        """Pairs of CTAs where the planner wants them and the device has two."""
        return min(self._num_ctas, plans.choose_cta_group(self.fmt, tile_n))

    def _gemm_ctas(self, plan: plans.GemmPlan) -> int:
        """Blocks of a persistent grid: whole clusters."""
        return self._num_ctas // plan.cta_group * plan.cta_group

    def _ctas(self, threads: int, kernel: CompiledKernel) -> int:
        """Blocks of an elementwise kernel: a thread each, up to a few for every SM."""
        return max(1, min(-(-threads // kernel.block), 8 * self._num_ctas))

    def _fc1(
        self, plan: plans.GemmPlan, w: Sm107Experts, work: Work, codes: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        intermediate = self.problem.intermediate
        out_codes, out_scales = self._blocks(work.token.numel(), intermediate, codes.device)
        # the columns past the last feature tile are K padding of FC2, and nobody writes them
        out_codes.zero_()
        out_scales.zero_()
        self._launch.launch(
            fc1_kernel(plan),
            self._gemm_ctas(plan),
            [
                work.items, work.num_items, work.token, codes, scales, w.w13,
                w.alpha13, w.bias13, w.activation, out_codes, out_scales, w.norm,
                w.w13.shape[2], w.w13.shape[1], plans.tiles_of(self.fmt, intermediate),
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
        shape = (num_tokens, p.hidden) if atomic else (num_tokens, p.top_k, p.hidden)
        out = torch.zeros(shape, dtype=torch.float32, device=codes.device)
        self._launch.launch(
            fc2_kernel(plan, atomic),
            self._gemm_ctas(plan),
            [
                work.items, work.num_items, None, codes, scales, w.w2,
                w.alpha2, w.bias2, out, work.token if atomic else work.choice, work.weight,
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


def make_work(
    launch: Launcher,
    ids: Tensor,
    weights: Tensor | None,
    num_experts: int,
    tile_n: int,
    expert_map: Tensor | None = None,
) -> Work:
    """One launch: pairs by expert, in their order, and the tiles of ``tile_n`` rows of them.

    Args:
        ids: int32 or int64 ``[M, top_k]``; weights: float32 ``[M, top_k]``, None for ones.
        expert_map: int32, id -> local expert; None where ids are local ones. An id that is
            negative, or no local expert, has no row.
    """
    pairs, top_k = ids.numel(), ids.shape[1]
    work = Work.empty(pairs, num_experts, tile_n, ids.device)
    ids = ids.contiguous()
    launch.launch(
        route_kernel(),
        1,
        [
            ids, expert_map, None if weights is None else weights.contiguous(),
            work.items, work.num_items, work.token, work.choice, work.weight,
            pairs, top_k, ids.element_size(), num_experts, tile_n,
        ],
    )  # fmt: skip
    return work


def _bias(bias: Tensor | None, tiles: Tensor, gated: bool) -> Tensor:
    """float32 ``[E, rows]`` in the order of the tiles' rows, zeros in the padding."""
    experts, row_tiles = tiles.shape[:2]
    shape = (experts, plans.TILE_M * row_tiles)
    out = torch.zeros(shape, dtype=torch.float32, device=tiles.device)
    if bias is not None:
        rows = BIAS.pack(bias) if gated else bias
        out[:, : rows.shape[1]] = rows
    return out


def _activation(activation: Activation, device: torch.device) -> Tensor:
    """float32 ``[3]``: limit (infinity for none), alpha, beta of FC1's epilogue."""
    limit = torch.inf if activation.limit is None else activation.limit
    silu = activation.kind == "silu"
    slope, beta = (1.0, 0.0) if silu else (activation.alpha, activation.beta)
    return torch.tensor([limit, slope, beta], dtype=torch.float32, device=device)


def _aligned(x: Tensor) -> Tensor:
    """Contiguous from a multiple of 16 bytes on, as it is loaded; a copy where it is not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _dtype(tensor: Tensor) -> str:
    """As torch names it. Raises FormatError for one that the kernels do not read or write."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise FormatError(f"hidden states of {name}; the kernels take {', '.join(DTYPES)}")
    return name


def build(problem: MoEProblem) -> Sm107Kernel:
    """The kernel object of one layer on this machine's current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return Sm107Kernel(problem, launcher("driver"), count, device)
