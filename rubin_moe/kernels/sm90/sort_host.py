"""Host side of what is around the prefill's multiplications: the kernels of routing and sum."""

from __future__ import annotations

from functools import lru_cache

from rubin_moe.arch import SM90A
from rubin_moe.kernels.compile_cache import compiled
from rubin_moe.kernels.launch import CompiledKernel
from rubin_moe.kernels.sm90.sort_plan import SortPlan, check

PACKAGE = "rubin_moe.kernels.sm90"
SUM_THREADS, SUM_FEATURES = 256, 8  # of `finalize`
SUM_BLOCKS = 16  # of a multiprocessor


@lru_cache(maxsize=64)
def sort_kernel(plan: SortPlan) -> CompiledKernel:
    """`sort.Sort` of a plan, from the cache or compiled now. Raises PlanError."""
    check(plan)

    def build() -> tuple[object, tuple[object, ...]]:
        from cutlass import Int32, Int64
        from cutlass.cute.runtime import make_fake_stream

        from rubin_moe.kernels.sm90.sort import Sort

        addresses = (Int64(0) for _ in range(8))
        return Sort(plan), (*addresses, Int32(1), Int32(1), make_fake_stream())

    return compiled(
        "sm90_sort", SM90A.name, repr(plan), f"{PACKAGE}.sort", plan.threads, plan.smem_bytes, build
    )


@lru_cache(maxsize=64)
def sum_kernel(num_experts: int, top_k: int, hidden: int, dtype: str) -> CompiledKernel:
    """`finalize.Finalize`, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from cutlass import Int32, Int64
        from cutlass.cute.runtime import make_fake_stream

        from rubin_moe.kernels.sm90.finalize import Finalize

        addresses = (Int64(0) for _ in range(4))
        args = (*addresses, Int32(1), Int32(1), make_fake_stream())
        return Finalize(num_experts, top_k, hidden, dtype), args

    constants = f"{num_experts} {top_k} {hidden} {dtype}"
    return compiled(
        "sm90_finalize", SM90A.name, constants, f"{PACKAGE}.finalize", SUM_THREADS, 0, build
    )


def sum_blocks(num_tokens: int, hidden: int, num_multiprocessors: int) -> int:
    """Blocks of a launch of `sum_kernel`: as many as run at once, if there is work for them."""
    items = num_tokens * (hidden // SUM_FEATURES)
    return max(1, min(-(-items // SUM_THREADS), SUM_BLOCKS * num_multiprocessors))
