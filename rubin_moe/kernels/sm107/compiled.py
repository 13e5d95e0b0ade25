"""The kernels of this backend, from the cache or compiled now.

One of each serves layers of any size; what is compiled in is a tile, a scale type or a dtype. The
DSL is imported only to compile.
"""

from __future__ import annotations

from collections.abc import Callable

from rubin_moe.arch import SM107A
from rubin_moe.kernels.compile_cache import compiled
from rubin_moe.kernels.launch import CompiledKernel
from rubin_moe.kernels.sm107 import plan as plans
from rubin_moe.kernels.sm107 import work

SOURCES = ("kernels/cute", "kernels/sm107")


def fc1_kernel(plan: plans.GemmPlan) -> CompiledKernel:
    """FC1 for layers of any size, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from rubin_moe.kernels.sm107.gather_gemm_swiglu import GatherGemmSwiglu

        return GatherGemmSwiglu(plan), _gemm_args(6)

    return _compiled("sm107_gather_gemm_swiglu", f"{plan!r}", plan, build)


def fc2_kernel(plan: plans.GemmPlan, atomic: bool) -> CompiledKernel:
    """FC2 for layers of any size, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from rubin_moe.kernels.sm107.gemm_finalize import GemmFinalize

        return GemmFinalize(plan, atomic), _gemm_args(5)

    return _compiled("sm107_gemm_finalize", f"{plan!r} {atomic}", plan, build)


def quantize_kernel(scale: str, dtype: str) -> CompiledKernel:
    """Tokens to NVFP4 or MXFP8, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from rubin_moe.kernels.sm107.quantize_tokens import QuantizeTokens

        return QuantizeTokens(scale, dtype), _example_args(5)

    constants = f"{scale} {dtype}"
    return compiled("sm107_quantize_tokens", SM107A.name, constants, SOURCES, 128, 0, build)


def route_kernel() -> CompiledKernel:
    """Routing to work, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from rubin_moe.kernels.sm107.front import RouteTokens

        return RouteTokens(), _example_args(8, 5)

    name, threads, smem_bytes = "sm107_route_tokens", work.THREADS, work.SMEM_BYTES
    return compiled(name, SM107A.name, "", SOURCES, threads, smem_bytes, build)


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
    return compiled(
        name, SM107A.name, constants, SOURCES, plans.THREADS, plan.smem_bytes, build, plan.cta_group
    )


def _example_args(addresses: int, sizes: int = 3) -> tuple[object, ...]:
    """Addresses, sizes, the grid, a stream."""
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_stream

    numbers = (Int32(1) for _ in range(sizes + 1))
    return (*(Int64(0) for _ in range(addresses)), *numbers, make_fake_stream())


def _gemm_args(own: int) -> tuple[object, ...]:
    """Of a `GroupedGemm`, whose epilogue has ``own`` addresses."""
    both = _example_args(6 + own)
    return (*both[:6], both[6 : 6 + own], *both[6 + own :])
