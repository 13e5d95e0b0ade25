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


def fc1_kernel(plan: plans.GemmPlan) -> CompiledKernel:
    """FC1 for layers of any size, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from rubin_moe.kernels.sm107.gather_gemm_swiglu import GatherGemmSwiglu

        return GatherGemmSwiglu(plan), _gemm_args(6)

    threads, smem_bytes = plans.THREADS, plan.smem_bytes
    name, cluster = "gather_gemm_swiglu", plan.cta_group
    return _compiled(name, f"{plan!r}", threads, smem_bytes, build, cluster)


def fc2_kernel(plan: plans.GemmPlan, atomic: bool) -> CompiledKernel:
    """FC2 for layers of any size, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from rubin_moe.kernels.sm107.gemm_finalize import GemmFinalize

        return GemmFinalize(plan, atomic), _gemm_args(5)

    threads, smem_bytes = plans.THREADS, plan.smem_bytes
    name, cluster = "gemm_finalize", plan.cta_group
    return _compiled(name, f"{plan!r} {atomic}", threads, smem_bytes, build, cluster)


def quantize_kernel(scale: str, dtype: str) -> CompiledKernel:
    """Tokens to NVFP4 or MXFP8, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from rubin_moe.kernels.sm107.quantize_tokens import QuantizeTokens

        return QuantizeTokens(scale, dtype), _example_args(5)

    return _compiled("quantize_tokens", f"{scale} {dtype}", 128, 0, build)


def route_kernel() -> CompiledKernel:
    """Routing to work, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from rubin_moe.kernels.sm107.front import RouteTokens

        return RouteTokens(), _example_args(8, 5)

    return _compiled("route_tokens", "", work.THREADS, work.SMEM_BYTES, build, file="front")


def sum_kernel(dtype: str) -> CompiledKernel:
    """The sum over choices, from the cache or compiled now."""

    def build() -> tuple[object, tuple[object, ...]]:
        from rubin_moe.kernels.sm107.sum_choices import SumChoices

        return SumChoices(dtype), _example_args(2)

    return _compiled("sum_choices", dtype, 128, 0, build)


def _compiled(
    name: str,
    constants: str,
    threads: int,
    smem_bytes: int,
    build: Callable[[], tuple[object, tuple[object, ...]]],
    cluster: int = 1,
    file: str | None = None,
) -> CompiledKernel:
    """The kernel of that name in a file of this package, by default of the same name."""
    module = f"rubin_moe.kernels.sm107.{file or name}"
    return compiled(
        f"sm107_{name}", SM107A.name, constants, module, threads, smem_bytes, build, cluster
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
