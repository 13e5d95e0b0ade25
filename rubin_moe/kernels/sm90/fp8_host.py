"""Host side of FP8 activations on sm_90a: weights with an alpha a row, six launches a call.

Routing and sum are the prefill's; between them tokens are rounded to E4M3, FC1 writes 16-bit rows,
which are rounded when they are whole, and FC2 reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rubin_moe.arch import SM90A
from rubin_moe.errors import FormatError
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.compile_cache import compiled
from rubin_moe.kernels.launch import At, CompiledKernel
from rubin_moe.kernels.sm90.fp8_choice import choose_fp8
from rubin_moe.kernels.sm90.fp8_plan import STAGE_K, Fp8Plan, check_fp8
from rubin_moe.kernels.sm90.fp8_scales import fp8_scales
from rubin_moe.kernels.sm90.host import Sm90Experts, Sm90Kernel
from rubin_moe.kernels.sm90.prefill_host import (
    DTYPES,
    SORT_COUNTER,
    Prefill,
    PrefillKernels,
    areas_of,
    sort_plan_of,
    workspace_bytes,
)
from rubin_moe.kernels.sm90.sort_host import PACKAGE, sort_kernel, sum_blocks, sum_kernel
from rubin_moe.layouts.fp4_hopper import HopperBlocks
from rubin_moe.layouts.gate_up import GateUpRows

ROW_THREADS = 256
ROW_WARPS = ROW_THREADS // 32
ROW_BLOCKS = 4  # of a multiprocessor


@dataclass(frozen=True)
class Fp8Kernels(PrefillKernels):
    """Of one plan."""

    tokens: CompiledKernel
    rows: CompiledKernel


class Fp8Kernel(Sm90Kernel):
    """``ExpertsKernel`` for one layer with ``fp8-e4m3`` activations, whatever the number of
    tokens."""

    def prepare(self, weights: ExpertWeights) -> Sm90Experts:
        """Blocks of both projections; ``alpha13`` and ``alpha2`` have the shapes of the biases.

        Raises:
            FormatError: another format than the problem's, NaN block scales, or a row over more
                exponents than `kernels.sm90.fp8_scales` holds.
        """
        if weights.fmt != self.problem.weight_format:
            raise FormatError(
                f"{weights.name}: {weights.fmt} weights for {self.problem.weight_format}"
            )
        sizes = self.sizes
        rows = GateUpRows(stripe=8, half_multiple=64) if sizes.gated else None
        w13, alpha13 = self._fp8_blocks(weights, "w13", rows, sizes.tiles13, sizes.hidden)
        w2, alpha2 = self._fp8_blocks(weights, "w2", None, sizes.tiles2, sizes.padded_intermediate)
        return Sm90Experts(w13, w2, alpha13, alpha2, *self._biases(weights))

    def _fp8_blocks(
        self, weights: ExpertWeights, name: str, rows: GateUpRows | None, tiles: int, k: int
    ) -> tuple[Tensor, Tensor]:
        proj: ProjectionWeights = getattr(weights, name)
        layout = HopperBlocks(weights.fmt.sf_vec_size, "fp8")
        e, n, _ = proj.qdata.shape
        shape = layout.storage_shape((tiles * 16, -(-k // STAGE_K) * STAGE_K))
        out = torch.zeros((e, *shape), dtype=torch.uint8, device=self.device)
        alpha = torch.zeros((e, tiles * 16), dtype=torch.float32, device=self.device)
        for expert in range(e):
            where = f"{weights.name}.{name} of expert {weights.expert_ids[expert]}"
            codes, sf = proj.qdata[expert].to(self.device), proj.sf[expert].to(self.device)
            scales = fp8_scales(codes, sf, where)
            dec = proj.dec[expert].to(self.device)
            factors = scales.alpha * dec.repeat_interleave(n // len(dec))
            entries = scales.entries
            if rows is not None:
                codes, entries = rows.pack(codes), rows.pack(entries)
                factors = rows.pack(factors[:, None])[:, 0]
            packed = layout.pack(codes, entries)
            out[expert, : packed.shape[0], : packed.shape[1]] = packed
            alpha[expert, : len(factors)] = factors
        return out, alpha

    def _prefill(self, num_tokens: int) -> Prefill | None:
        if num_tokens not in self._prefills:
            plan = self._fp8_plan(num_tokens)
            kernels = fp8_kernels(plan, self.problem.activation, self.problem.has_bias)
            found = Fp8Prefill(plan, kernels, self._launch, self._num_blocks, self._zeroed)
            self._prefills[num_tokens] = found
        return self._prefills[num_tokens]

    def _fp8_plan(self, num_tokens: int) -> Fp8Plan:
        return choose_fp8(self.problem, num_tokens)


class Fp8Prefill(Prefill):
    """Calls of one plan on one GPU."""

    plan: Fp8Plan
    kernels: Fp8Kernels

    def _round(
        self,
        w: Sm90Experts,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        expert_map: Tensor | None,
        out: Tensor,
    ) -> None:
        m, blocks = x.shape[0], self._num_blocks
        areas = areas_of(fp8_workspace_bytes(self.plan, m, blocks), x.device)
        counts, passes, pairs, tokens, h, y, x8, x_scale, h8, h_scale = areas
        counter = At(self._counters(x.device), 4 * SORT_COUNTER)
        k, launch = self.kernels, self._launch
        launch(k.sort, blocks, [ids, expert_map, x, counts, passes, pairs, tokens, counter, m])
        launch(k.tokens, self._row_blocks(m), [tokens, passes, x8, x_scale, m])
        launch(k.fc1, blocks, [w.w13, w.alpha13, w.bias13, x8, x_scale, passes, pairs, weights, h])
        launch(k.rows, self._row_blocks(ids.numel()), [h, passes, h8, h_scale, 0])
        launch(k.fc2, blocks, [w.w2, w.alpha2, w.bias2, h8, h_scale, passes, pairs, weights, y])
        launch(k.total, sum_blocks(m, x.shape[1], blocks), [y, ids, expert_map, out, m])

    def _row_blocks(self, rows: int) -> int:
        return max(1, min(-(-rows // ROW_WARPS), ROW_BLOCKS * self._num_blocks))


def fp8_workspace_bytes(plan: Fp8Plan, num_tokens: int, num_blocks: int) -> dict[str, int]:
    """Device memory of one call, by name: `workspace_bytes`, and tokens and rows as E4M3 with
    their scales."""
    pairs = num_tokens * plan.sizes.top_k
    return {
        **workspace_bytes(plan, num_tokens, num_blocks),
        "x8": num_tokens * plan.sizes.chunks13 * STAGE_K,
        "x_scale": 4 * num_tokens,
        "h8": plan.passes_of(pairs) * plan.codes_bytes,
        "h_scale": 4 * pairs,
    }


@lru_cache(maxsize=256)
def fp8_kernels(plan: Fp8Plan, activation: Activation, bias: bool) -> Fp8Kernels:
    """From the cache or compiled now. Raises PlanError."""
    check_fp8(plan)
    sizes = plan.sizes
    dtype = DTYPES[sizes.kind]
    return Fp8Kernels(
        sort_kernel(sort_plan_of(plan)),
        fp8_gemm(plan, True, activation, bias),
        fp8_gemm(plan, False, Activation(), bias),
        sum_kernel(sizes.num_experts, sizes.top_k, sizes.hidden, dtype),
        rows_kernel(sizes.k_blocks13, dtype),
        rows_kernel(sizes.k_blocks2, dtype, plan.tiles.pass_tokens),
    )


@lru_cache(maxsize=512)
def fp8_gemm(plan: Fp8Plan, fc1: bool, activation: Activation, bias: bool) -> CompiledKernel:
    """`fp8_prefill.Fp8Gemm`, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from cutlass import Int32, Int64
        from cutlass.cute.runtime import make_fake_stream

        from rubin_moe.kernels.sm90.fp8_prefill import Fp8Gemm

        args = (*(Int64(0) for _ in range(9)), Int32(1), make_fake_stream())
        return Fp8Gemm(plan, fc1, activation, bias), args

    name, smem = ("sm90_fp8_fc1", plan.smem13) if fc1 else ("sm90_fp8_fc2", plan.smem2)
    constants = f"{plan!r} {fc1} {activation!r} {bias}"
    return compiled(
        name, SM90A.name, constants, f"{PACKAGE}.fp8_prefill", plan.threads, smem, build
    )


@lru_cache(maxsize=64)
def rows_kernel(k_blocks: int, dtype: str, pass_tokens: int = 0) -> CompiledKernel:
    """`fp8_rows.Fp8Rows`, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from cutlass import Int32, Int64
        from cutlass.cute.runtime import make_fake_stream

        from rubin_moe.kernels.sm90.fp8_rows import Fp8Rows

        addresses = (Int64(0) for _ in range(4))
        args = (*addresses, Int32(1), Int32(1), make_fake_stream())
        return Fp8Rows(k_blocks, dtype, pass_tokens), args

    constants = f"{k_blocks} {dtype} {pass_tokens}"
    return compiled(
        "sm90_fp8_rows", SM90A.name, constants, f"{PACKAGE}.fp8_rows", ROW_THREADS, 0, build
    )
