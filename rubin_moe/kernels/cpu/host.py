"""The CPU backend's entry: weights into tiles, workspaces, and the order of the stages.

Hidden states stay as they are (fp32 ones are never rounded), products are summed in fp32, and
what goes from FC1 to FC2 is rounded to the hidden states' dtype. Each output element is computed
by one thread in an order that depends on its own row alone: runs are bit-equal for any number of
threads, and a row alone equals that row in any batch.

Tokens are taken in chunks (see `rules`), so that the workspace has a bound and no index exceeds
what its type holds.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from rubin_moe.errors import FormatError
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.spec import BlockFormat
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.cpu import decode, isa, rules, threads
from rubin_moe.kernels.cpu.arguments import COUNTERS, Block
from rubin_moe.kernels.cpu.gemm import gemm_module
from rubin_moe.kernels.cpu.isa import LANES, Isa
from rubin_moe.kernels.cpu.jit import Library
from rubin_moe.kernels.cpu.memory import weight_memory, workspace
from rubin_moe.kernels.cpu.panel import Product
from rubin_moe.kernels.cpu.stages import Variant, stages_module
from rubin_moe.layouts.fp4_cpu import RowTiles

CODES = RowTiles(unit=4, rows=LANES)
SCALES = RowTiles(unit=1, rows=LANES)

SERIAL_REDUCE = 1 << 16
"""Below this many elements the last stage is not worth waking threads for."""


@dataclass(frozen=True, eq=False)
class Projection:
    """One projection in tiles.

    Attributes:
        codes: uint8 ``[E, N / 16, K / 8, 16, 4]``; scales: uint8 ``[E, N / 16, K / block, 16, 1]``.
        dec: float32 ``[E, halves]``, times what the scale decoder leaves out.
        bias: float32 ``[E, N]`` or None.
    """

    codes: Tensor
    scales: Tensor
    dec: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class CpuExperts:
    """``PreparedExperts`` of this backend; the tensors are all the weights it needs."""

    w13: Projection
    w2: Projection

    def tensors(self) -> dict[str, Tensor]:
        projections = {"w13": self.w13, "w2": self.w2}
        parts = {f"{p}_{n}": t for p, w in projections.items() for n, t in vars(w).items()}
        return {name: t for name, t in parts.items() if t is not None}

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


@dataclass(frozen=True, eq=False)
class Code:
    """Linked functions of a variant; the table holds the address for each number of tokens."""

    libraries: tuple[Library, Library]
    stages: dict[str, int]
    gemm_table: np.ndarray


@cache
def _gemm_library(target: Isa, fmt: BlockFormat, product: Product) -> Library:
    return Library(gemm_module(target, fmt, product), target)


@cache
def _stages_library(variant: Variant) -> Library:
    return Library(stages_module(variant), variant.isa)


def code_for(variant: Variant, fmt: BlockFormat) -> Code:
    """Generates, compiles or finds, and links; once a process."""
    target = variant.isa
    gemm = _gemm_library(target, fmt, variant.product)
    stages = _stages_library(variant)
    names = ("group", "pack", "fc1", "fc2", "reduce")
    table = [gemm.address(f"gemm{t}") for t in range(1, target.max_tokens + 1)]
    return Code(
        (gemm, stages), {n: stages.address(n) for n in names}, np.array(table, dtype=np.int64)
    )


class CpuKernel:
    """``ExpertsKernel`` for one layer; ``target`` is the instruction set, by default the best."""

    def __init__(self, problem: MoEProblem, target: Isa | None = None) -> None:
        self.problem = problem
        self.isa = target or isa.detect()
        self.variant = _variant(problem, self.isa)
        self._dtype: torch.dtype = getattr(torch, self.variant.dtype)
        self._code = code_for(self.variant, problem.weight_format)
        self._zeros = torch.zeros(
            max(problem.hidden, 2 * problem.intermediate), dtype=torch.float32
        )
        self._constants = self._problem_block()

    def _problem_block(self) -> Block:
        """What is the same in every call."""
        p, act = self.problem, self.problem.activation
        return Block(
            top_k=p.top_k,
            hidden=p.hidden,
            intermediate=p.intermediate,
            num_experts=p.num_experts,
            num_global=p.global_num_experts,
            block=p.weight_format.sf_vec_size,
            weight_on_input=p.router_weight_on_input,
            gemm=self._code.gemm_table.ctypes.data,
            zeros=self._zeros.data_ptr(),
            limit=float("inf") if act.limit is None else act.limit,
            alpha=act.alpha,
            beta=act.beta,
        )

    def prepare(self, weights: ExpertWeights) -> CpuExperts:
        p = self.problem
        if weights.fmt != p.weight_format:
            raise FormatError(f"{weights.name}: {weights.fmt} weights for {p.weight_format}")
        found = (weights.num_experts, weights.hidden, weights.intermediate, weights.gated)
        wanted = (p.num_experts, p.hidden, p.intermediate, p.activation.gated)
        if found != wanted:
            raise FormatError(
                f"{weights.name}: (experts, hidden, intermediate, gated) are {found}, "
                f"the kernel was built for {wanted}"
            )
        factor = decode.scale_factor(self.isa, weights.fmt.scale)
        return CpuExperts(
            _tiles(weights, "w13", weights.w13, factor), _tiles(weights, "w2", weights.w2, factor)
        )

    def run(
        self,
        prepared: CpuExperts,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `ExpertsKernel.run`. Raises ValueError for an id that is no expert and not -1."""
        self._check(x, topk_ids, topk_weights, expert_map)
        if out is not None and out.dtype == self._dtype and out.is_contiguous():
            result = out
        else:
            result = x.new_empty(x.shape, dtype=self._dtype)
        step = rules.chunk_tokens(self.problem)
        expert_map = None if expert_map is None else expert_map.contiguous()
        for first in range(0, x.shape[0], step):
            rows = slice(first, first + step)
            self._run_chunk(
                prepared,
                x[rows].to(self._dtype).contiguous(),
                topk_ids[rows].contiguous(),
                topk_weights[rows].to(torch.float32).contiguous(),
                expert_map,
                result[rows],
            )
        if out is None:
            return result.to(x.dtype)
        return out if result is out else out.copy_(result)

    def _check(self, x: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None) -> None:
        p = self.problem
        if x.dtype != getattr(torch, p.dtype) or x.dim() != 2 or x.shape[1] != p.hidden:
            raise ValueError(
                f"hidden states are {x.dtype} {list(x.shape)}, "
                f"the kernel was built for {p.dtype} [M, {p.hidden}]"
            )
        shape = (x.shape[0], p.top_k)
        if ids.dtype not in (torch.int32, torch.int64) or ids.shape != shape:
            raise ValueError(f"topk_ids: {ids.dtype} {list(ids.shape)}, expected int {list(shape)}")
        if weights.shape != shape:
            raise ValueError(f"topk_weights: {list(weights.shape)}, expected {list(shape)}")
        if expert_map is not None and (
            expert_map.dtype != torch.int32 or expert_map.shape != (p.global_num_experts,)
        ):
            raise ValueError(
                f"expert_map: {expert_map.dtype} {list(expert_map.shape)}, "
                f"expected int32 [{p.global_num_experts}]"
            )

    def _workspace(self, pairs: int) -> dict[str, int]:
        p = self.problem
        return workspace(
            {
                "cursor": 8 * p.num_experts,
                "order": 8 * pairs,
                "position": 8 * pairs,
                "active": 8 * (p.num_experts + 1),
                "first_group": 8 * (p.num_experts + 1),
                "group_start": 8 * (pairs + 1),
                "panel13": pairs * self.variant.panel_bytes(p.hidden),
                "panel2": pairs * self.variant.panel_bytes(p.intermediate),
                "y": 4 * pairs * p.hidden,
            }
        )

    def _run_chunk(
        self,
        prepared: CpuExperts,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        expert_map: Tensor | None,
        out: Tensor,
    ) -> None:
        p, m = self.problem, x.shape[0]
        block = Block.from_buffer_copy(self._constants)
        block.num_tokens = m
        block.x, block.out = x.data_ptr(), out.data_ptr()
        block.ids, block.weights = ids.data_ptr(), weights.data_ptr()
        block.ids_wide = ids.dtype == torch.int64
        if expert_map is not None:
            block.expert_map = expert_map.data_ptr()
        w13, w2 = prepared.w13, prepared.w2
        block.codes13, block.scales13 = w13.codes.data_ptr(), w13.scales.data_ptr()
        block.codes2, block.scales2 = w2.codes.data_ptr(), w2.scales.data_ptr()
        block.dec13, block.dec2 = w13.dec.data_ptr(), w2.dec.data_ptr()
        block.bias13 = block.bias2 = block.zeros
        if w13.bias is not None:
            block.bias13, block.bias13_stride = w13.bias.data_ptr(), w13.bias.shape[1]
        if w2.bias is not None:
            block.bias2, block.bias2_stride = w2.bias.data_ptr(), w2.bias.shape[1]
        for name, address in self._workspace(m * p.top_k).items():
            setattr(block, name, address)
        self._run_stages(block)

    def _run_stages(self, block: Block) -> None:
        p, stages, count = self.problem, self._code.stages, threads.num_threads()
        address = ctypes.addressof(block)
        threads.call(stages["group"], address)
        if block.bad_count:
            raise ValueError(
                f"topk_ids: {block.bad_count} ids are no expert, such as {block.bad_id}; ids are "
                f"-1 or below {p.global_num_experts}, and this rank has {p.num_experts} experts"
            )
        m, active = block.num_tokens, block.num_active
        block.tiles_per_item13 = rules.tiles_per_item(p.intermediate, active, count)
        block.tiles_per_item2 = rules.tiles_per_item(p.hidden, active, count)
        serial = {"pack": m == 1, "reduce": m * p.hidden < SERIAL_REDUCE}
        for stage in COUNTERS:
            if count == 1 or serial.get(stage, False):
                threads.call(stages[stage], address)
            else:
                threads.launcher()(stages[stage], address, count)


def _variant(problem: MoEProblem, target: Isa) -> Variant:
    # a CPU that cannot convert fp16 computes in fp32, which is what fp16 is summed in anyway
    widen = problem.dtype == "float16" and not target.half
    product: Product = "f32"
    if problem.activation_format == "int8":
        product = "int8"
    elif problem.dtype == "bfloat16" and target.bf16_dot:
        product = "bf16"
    dtype = "float32" if widen else problem.dtype
    return Variant(target, dtype, problem.activation.kind, product)


def _tiles(weights: ExpertWeights, name: str, w: ProjectionWeights, factor: float) -> Projection:
    """One projection in tiles, expert by expert."""
    bad = _BAD_SCALE[weights.fmt.scale]
    codes = weight_memory(CODES.storage_shape(tuple(w.qdata.shape)))
    scales = weight_memory(SCALES.storage_shape(tuple(w.sf.shape)))
    for e in range(weights.num_experts):
        if bool((w.sf[e] >= bad).any()):
            raise FormatError(
                f"{weights.name}.{name}: expert {weights.expert_ids[e]} has a block scale that is "
                f"no {weights.fmt.scale} number (code {int(w.sf[e].max()):#04x})"
            )
        CODES.pack_into(w.qdata[e], codes[e])
        SCALES.pack_into(w.sf[e], scales[e])
    bias = None if w.bias is None else w.bias.clone()
    return Projection(codes, scales, w.dec * factor, bias)


_BAD_SCALE = {"ue4m3": 0x7F, "ue5m3": 0xFF, "ue8m0": 0xFF}
"""The NaN code and, for UE4M3, all with a sign bit."""


def build(problem: MoEProblem) -> CpuKernel:
    """The kernel object of one layer."""
    return CpuKernel(problem)
