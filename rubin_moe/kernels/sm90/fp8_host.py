"""Host side of FP8 activations on sm_90a: the kernel that rounds rows."""

from __future__ import annotations

from functools import lru_cache

from rubin_moe.arch import SM90A
from rubin_moe.kernels.compile_cache import compiled
from rubin_moe.kernels.launch import CompiledKernel

ROW_THREADS = 256
ROW_BLOCKS = 4  # of a multiprocessor


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

    return compiled(
        "sm90_fp8_rows",
        SM90A.name,
        f"{k_blocks} {dtype} {pass_tokens}",
        "rubin_moe.kernels.sm90.fp8_rows",
        ROW_THREADS,
        0,
        build,
    )
