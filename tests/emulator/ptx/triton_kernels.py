"""Small Triton kernels whose sm_90a PTX the emulator's tests load and run.

    python tests/emulator/ptx/triton_kernels.py

compiles each for sm_90a, with no GPU, and writes `<name>.ptx` and `<name>.json` (launch facts) next
to this file. Needs Triton; the tests only read the files.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # it names this machine's folders

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HERE = Path(__file__).parent


@triton.jit
def masked_add(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    y = tl.load(y_ptr + offsets, mask=inside, other=0.0)
    tl.store(out_ptr + offsets, x + y, mask=inside)


@triton.jit
def row_softmax(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + offsets, mask=offsets < columns, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * columns + offsets, e / tl.sum(e, axis=0), mask=offsets < columns)


@triton.jit
def fp8_round_trip(x_ptr, codes_ptr, back_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(x_ptr + offsets).to(tl.float8e4nv)
    tl.store(codes_ptr + offsets, code.to(tl.uint8, bitcast=True))
    tl.store(back_ptr + offsets, code.to(tl.bfloat16))


@triton.jit
def histogram(values_ptr, counts_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values_ptr + offsets, mask=offsets < count, other=0)
    tl.atomic_add(counts_ptr + value, 1, mask=offsets < count)


@triton.jit
def row_cumsum(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.cumsum(tl.load(x_ptr + offsets), axis=0))


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, m, n, k,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """C[m, n] = A[m, k] @ B[n, k].T: cp.async stages and wgmma, or mma.sync when TILE_M < 64."""
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    depth = tl.arange(0, TILE_K)
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for start in range(0, k, TILE_K):
        a = tl.load(
            a_ptr + rows[:, None] * k + (start + depth)[None, :],
            mask=(rows < m)[:, None] & (start + depth < k)[None, :],
            other=0.0,
        )
        b = tl.load(
            b_ptr + columns[None, :] * k + (start + depth)[:, None],
            mask=(columns < n)[None, :] & (start + depth < k)[:, None],
            other=0.0,
        )
        total = tl.dot(a, b, total)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(c_ptr + rows[:, None] * n + columns[None, :], total.to(tl.bfloat16), mask=inside)


@triton.jit
def matmul_upcast_fp4(
    a_ptr, b_ptr, c_ptr, n, k,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """B is E2M1, two codes a byte along k (low nibble first), decoded by a select chain."""
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    depth = tl.arange(0, TILE_K)
    packed = tl.arange(0, TILE_K // 2)
    for start in range(0, k, TILE_K):
        a = tl.load(a_ptr + rows[:, None] * k + (start + depth)[None, :])
        b = tl.load(b_ptr + columns[:, None] * (k // 2) + (start // 2 + packed)[None, :])
        code = tl.interleave(b & 15, b >> 4).to(tl.int32)
        exponent = (code >> 1) & 3
        mantissa = code & 1
        magnitude = tl.where(
            exponent == 0, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * tl.exp2(exponent - 1.0)
        )
        value = tl.where((code & 8) != 0, -magnitude, magnitude).to(tl.bfloat16)
        total = tl.dot(a, tl.trans(value), total)
    tl.store(c_ptr + rows[:, None] * n + columns[None, :], total)


@triton.jit
def matmul_tma(
    a_desc, b_desc, c_desc, k,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """The same product through host-side tensor descriptors: TMA loads and a TMA store."""
    row, column = tl.program_id(0) * TILE_M, tl.program_id(1) * TILE_N
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for start in range(0, k, TILE_K):
        a = a_desc.load([row, start])
        b = b_desc.load([column, start])
        total = tl.dot(a, b.T, total)
    c_desc.store([row, column], total.to(tl.bfloat16))


_GEMM = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*bf16", "m": "i32", "n": "i32", "k": "i32"}

#: name: (kernel, signature, constants, options)
KERNELS = {
    "masked_add": (
        masked_add,
        {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "count": "i32"},
        {"BLOCK": 512},
        {},
    ),
    "row_softmax": (
        row_softmax,
        {"x_ptr": "*fp32", "out_ptr": "*fp32", "columns": "i32"},
        {"BLOCK": 256},
        {},
    ),
    "fp8_round_trip": (
        fp8_round_trip,
        {"x_ptr": "*fp32", "codes_ptr": "*u8", "back_ptr": "*bf16"},
        {"BLOCK": 256},
        {},
    ),
    "histogram": (
        histogram,
        {"values_ptr": "*i32", "counts_ptr": "*i32", "count": "i32"},
        {"BLOCK": 256},
        {},
    ),
    "row_cumsum": (row_cumsum, {"x_ptr": "*i32", "out_ptr": "*i32"}, {"BLOCK": 256}, {}),
    "matmul_wgmma": (matmul, _GEMM, {"TILE_M": 64, "TILE_N": 64, "TILE_K": 64}, {"num_stages": 3}),
    "matmul_mma_sync": (
        matmul,
        _GEMM,
        {"TILE_M": 16, "TILE_N": 64, "TILE_K": 64},
        {"num_stages": 3},
    ),
    "matmul_wgmma_fp8": (
        matmul,
        {**_GEMM, "a_ptr": "*fp8e4nv", "b_ptr": "*fp8e4nv"},
        {"TILE_M": 64, "TILE_N": 64, "TILE_K": 64},
        {"num_stages": 3},
    ),
    "matmul_upcast_fp4": (
        matmul_upcast_fp4,
        {"a_ptr": "*bf16", "b_ptr": "*u8", "c_ptr": "*fp32", "n": "i32", "k": "i32"},
        {"TILE_M": 64, "TILE_N": 64, "TILE_K": 64},
        {"num_stages": 2},
    ),
    "matmul_tma": (
        matmul_tma,
        {
            "a_desc": "tensordesc<bf16[64,64]>",
            "b_desc": "tensordesc<bf16[64,64]>",
            "c_desc": "tensordesc<bf16[64,64]>",
            "k": "i32",
        },
        {"TILE_M": 64, "TILE_N": 64, "TILE_K": 64},
        {"num_stages": 3},
    ),
}


def main() -> None:
    for name, (kernel, signature, constants, options) in KERNELS.items():
        types = {**signature, **dict.fromkeys(constants, "constexpr")}
        # Pointers and k divide by 16: loads become vectors and, over stages, cp.async.
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, (argument, type_name) in enumerate(signature.items())
            if type_name.startswith("*") or argument == "k"
        }
        source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        (HERE / f"{name}.ptx").write_text(compiled.asm["ptx"])
        facts = {
            "entry": compiled.metadata.name,
            "block": [32 * compiled.metadata.num_warps, 1, 1],
            "dynamic_smem_bytes": compiled.metadata.shared,
            "constants": constants,
            "triton": triton.__version__,
        }
        (HERE / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
