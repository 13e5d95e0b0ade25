"""Host side of the prefill: routing, FC1, FC2 and the weighted sum, a launch each.

What they hand on lies in a tensor of the call, from torch's allocator (`workspace_bytes`); nothing
is read by the host, so that a graph may be replayed with another routing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rubin_moe.arch import SM90A
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.compile_cache import compiled
from rubin_moe.kernels.launch import At, CompiledKernel, Launcher
from rubin_moe.kernels.sm90.prefill_plan import PrefillPlan, check_prefill
from rubin_moe.kernels.sm90.sort_host import PACKAGE, sort_kernel, sum_blocks, sum_kernel
from rubin_moe.kernels.sm90.sort_plan import SortPlan

if TYPE_CHECKING:
    from rubin_moe.kernels.sm90.host import Sm90Experts

DTYPES = {"bf16": "bfloat16", "f16": "float16"}
AREA_ALIGN = 256
SORT_COUNTER = 16  # word of the counters of its own; `finish` has the first and those from 32 on


@dataclass(frozen=True)
class PrefillKernels:
    """Of one plan."""

    sort: CompiledKernel
    fc1: CompiledKernel
    fc2: CompiledKernel
    total: CompiledKernel

    @property
    def all(self) -> tuple[CompiledKernel, ...]:
        return tuple(getattr(self, each.name) for each in fields(self))


def sort_plan_of(plan: PrefillPlan) -> SortPlan:
    sizes = plan.sizes
    return SortPlan(sizes.num_experts, sizes.top_k, sizes.hidden, plan.tiles.pass_tokens)


def workspace_bytes(plan: PrefillPlan, num_tokens: int, num_blocks: int) -> dict[str, int]:
    """Device memory of one call, by name.

    ``tokens``: M x hidden of 16 bits, ``h``: the passes' rows of the intermediate size, ``y``: M x
    top_k x hidden of 16 bits; the rest is small.
    """
    sort, pairs = sort_plan_of(plan), num_tokens * plan.sizes.top_k
    return {
        "counts": sort.counts_bytes(num_blocks),
        "passes": sort.passes_bytes(pairs),
        "pairs": 4 * pairs,
        "tokens": sort.tokens_bytes(num_tokens),
        "h": plan.h_bytes(pairs),
        "y": 2 * pairs * plan.sizes.hidden,
    }


class Prefill:
    """Calls of one plan on one GPU.

    Args:
        num_blocks: multiprocessors; every block of routing and of a GEMM has one.
        counters: gives a device's int32 counters, 0 before the first call; calls that share them
            run one after another.
    """

    def __init__(
        self,
        plan: PrefillPlan,
        kernels: PrefillKernels,
        launch: Launcher,
        num_blocks: int,
        counters: Callable[[torch.device], Tensor],
    ) -> None:
        self.plan = plan
        self.kernels = kernels
        self.max_tokens = sort_plan_of(plan).max_tokens(num_blocks)
        self._launch = launch.launch
        self._num_blocks = num_blocks
        self._counters = counters

    def run(
        self,
        w: Sm90Experts,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        expert_map: Tensor | None,
        out: Tensor,
    ) -> None:
        """``out`` ``[M, hidden]`` from x and the int32 ids and float32 weights ``[M, top_k]``, all
        contiguous, x and out at addresses of whole 16 bytes. More than ``max_tokens`` take several
        rounds of nearly the same size."""
        m = x.shape[0]
        if m == 0:
            return
        rounds = -(-m // self.max_tokens)
        if rounds < 2:
            self._round(w, x, ids, weights, expert_map, out)
            return
        rows = (t.split(-(-m // rounds)) for t in (x, ids, weights, out))
        for x_part, ids_part, weights_part, out_part in zip(*rows, strict=True):
            self._round(w, x_part, ids_part, weights_part, expert_map, out_part)

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
        areas = areas_of(workspace_bytes(self.plan, m, blocks), x.device)
        counts, passes, pairs, tokens, h, y = areas
        counter = At(self._counters(x.device), 4 * SORT_COUNTER)
        k, launch = self.kernels, self._launch
        launch(k.sort, blocks, [ids, expert_map, x, counts, passes, pairs, tokens, counter, m])
        launch(k.fc1, blocks, [w.w13, w.alpha13, w.bias13, tokens, passes, pairs, None, h])
        launch(k.fc2, blocks, [w.w2, w.alpha2, w.bias2, h, passes, pairs, weights, y])
        launch(k.total, sum_blocks(m, x.shape[1], blocks), [y, ids, expert_map, out, m])


def areas_of(nbytes: Mapping[str, int], device: torch.device) -> list[At]:
    """Areas of these sizes in bytes, in order, of one allocation; what is in them is undefined."""
    starts, end = [], 0
    for size in nbytes.values():
        starts.append(end)
        end += -(-size // AREA_ALIGN) * AREA_ALIGN
    work = torch.empty(end, dtype=torch.uint8, device=device)
    return [At(work, start) for start in starts]


@lru_cache(maxsize=256)
def prefill_kernels(plan: PrefillPlan, activation: Activation, bias: bool) -> PrefillKernels:
    """From the cache or compiled now. Raises PlanError."""
    check_prefill(plan)
    sizes = plan.sizes
    return PrefillKernels(
        sort_kernel(sort_plan_of(plan)),
        gemm_kernel(plan, True, activation, bias),
        gemm_kernel(plan, False, Activation(), bias),
        sum_kernel(sizes.num_experts, sizes.top_k, sizes.hidden, DTYPES[sizes.kind]),
    )


@lru_cache(maxsize=512)
def gemm_kernel(plan: PrefillPlan, fc1: bool, activation: Activation, bias: bool) -> CompiledKernel:
    """`prefill.PrefillGemm`, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from cutlass import Int32, Int64
        from cutlass.cute.runtime import make_fake_stream

        from rubin_moe.kernels.sm90.prefill import PrefillGemm

        addresses = (Int64(0) for _ in range(8))
        return PrefillGemm(plan, fc1, activation, bias), (
            *addresses, Int32(1), make_fake_stream(),
        )  # fmt: skip

    constants = f"{plan!r} {fc1} {activation!r} {bias}"
    smem = plan.smem13 if fc1 else plan.smem2
    name = "sm90_prefill_fc1" if fc1 else "sm90_prefill_fc2"
    return compiled(name, SM90A.name, constants, f"{PACKAGE}.prefill", plan.threads, smem, build)
