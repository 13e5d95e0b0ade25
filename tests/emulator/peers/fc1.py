"""FlashInfer's FC1 kernels: gather, grouped GEMM, SwiGLU, quantization to NVFP4.

The weights interleave 64 rows of `up` with the 64 rows of `gate` that belong to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.emulator.peers import flashinfer_sources
from tests.emulator.peers.case import (
    Comparison,
    PeerCase,
    PreparedPeer,
    compare_nvfp4,
    compare_rounded,
    device_tensor,
    pointer,
    stack,
)
from tests.emulator.peers.operands import (
    DSL_TYPE,
    NVFP4,
    NVFP4_UE5M3,
    Format,
    Operand,
    describe,
    draw,
    unswizzle_128x4,
)
from tests.emulator.peers.routing import (
    TOP_K,
    Routing,
    Sizes,
    grouped_product,
    route,
    swiglu,
)

_INTERLEAVE = 64
_ALPHA = 2.0**-7  # keeps |gate| near one, and the product exact
_SIZES = Sizes(num_tokens=170, num_experts=4, n=256, k=1024)


@dataclass(frozen=True)
class Fc1:
    """out[row] = up * silu(gate), [up, gate] = alpha * x[token(row)] @ w13[expert(row)].T."""

    name: str
    target: str
    fmt: Format
    tile: tuple[int, ...]
    cluster: tuple[int, int] = (1, 1)
    inst: tuple[int, int, int] | None = None
    a_path: str = "cpasync"
    quantized: bool = True
    sizes: Sizes = _SIZES

    def case(self) -> PeerCase:
        shape = f"{self.sizes}, tile {self.tile}, cluster {self.cluster}"
        formats = describe(self.fmt) + (" -> NVFP4" if self.quantized else " -> bfloat16")
        return PeerCase(self.name, self.target, formats, shape, self.prepare)

    def prepare(self) -> PreparedPeer:
        flashinfer_sources.install()
        rng = np.random.default_rng(11)
        s = self.sizes
        routing = route(
            rng,
            num_tokens=s.num_tokens,
            num_experts=s.num_experts,
            tile_m=self.tile[0],
        )
        x = draw(rng, s.num_tokens, s.k, self.fmt)
        experts = [draw(rng, s.n, s.k, self.fmt) for _ in range(s.num_experts)]
        weights = [w.values for w in experts]
        want = swiglu(
            grouped_product(x.values[routing.token], weights, routing, _ALPHA), _INTERLEAVE
        )
        memory = _Memory.of(self, routing, x, experts)

        def check() -> Comparison:
            valid = torch.from_numpy(routing.valid)
            if not self.quantized:
                return compare_rounded(memory.out[valid], want)
            columns = s.n // 2 // 16
            sf = unswizzle_128x4(memory.out_sf.numpy(), routing.rows, columns)[routing.valid]
            return compare_nvfp4(memory.out[valid].numpy(), sf, want, self.fmt.scale)

        def reset() -> None:
            memory.out.fill_(0x77 if self.quantized else float("nan"))
            memory.out_sf.fill_(0xFF)

        outputs = [memory.out, memory.out_sf] if self.quantized else [memory.out]
        return PreparedPeer(self._launcher()(self, memory), memory.inputs(), outputs, reset, check)

    def _launcher(self) -> Callable[[Fc1, _Memory], Any]:
        if self.target == "sm_100a":
            return _launch_sm100
        return _launch_sm107 if self.quantized else _launch_sm107_bfloat16


@dataclass(frozen=True)
class _Memory:
    routing: Routing
    mapping: torch.Tensor
    x: torch.Tensor
    x_sf: torch.Tensor  # rows stay in token order, not swizzled: the kernel gathers them
    w: torch.Tensor
    w_sf: torch.Tensor
    alpha: torch.Tensor
    norm: torch.Tensor
    out: torch.Tensor
    out_sf: torch.Tensor

    @classmethod
    def of(cls, case: Fc1, routing: Routing, x: Operand, experts: Sequence[Operand]) -> _Memory:
        half = case.sizes.n // 2
        if case.quantized:
            out = torch.zeros((routing.rows, half // 2), dtype=torch.uint8)
        else:
            out = torch.zeros((routing.rows, half), dtype=torch.bfloat16)
        return cls(
            routing,
            routing.mapping(),
            device_tensor(x.qdata),
            device_tensor(x.sf),
            stack([w.qdata for w in experts]),
            stack([w.swizzled_sf() for w in experts]),
            torch.full((len(experts),), _ALPHA),
            torch.ones(1),
            out,
            torch.zeros(-(-routing.rows // 128) * 128 * (half // 16), dtype=torch.uint8),
        )

    def inputs(self) -> list[torch.Tensor]:
        return [
            *(self.mapping, self.x, self.x_sf, self.w, self.w_sf, self.alpha, self.norm),
            *self.routing.tensors(),
        ]


def _pointers(case: Fc1, memory: _Memory) -> list[Any]:
    element, scale = DSL_TYPE[case.fmt.element], DSL_TYPE[case.fmt.scale]
    routing = memory.routing
    return [
        pointer(element, memory.x, 32),
        pointer(element, memory.w, 32),
        pointer(scale, memory.x_sf, 16),
        pointer(scale, memory.w_sf, 16),
        pointer("Float4E2M1FN" if case.quantized else "BFloat16", memory.out, 32),
        pointer(scale, memory.out_sf, 16) if case.quantized else None,
        pointer("Float32", memory.alpha, 4),
        pointer("Int32", routing.tile_expert, 4),
        pointer("Int32", routing.tile_row_limit, 4),
        pointer("Int32", memory.mapping, 4),
        pointer("Int32", routing.num_tiles, 4),
        pointer("Float32", memory.norm, 4) if case.quantized else None,
    ]


def _sizes(case: Fc1, memory: _Memory) -> list[Any]:
    import cutlass

    s = case.sizes
    return [cutlass.Int64(v) for v in (s.num_tokens, memory.routing.rows, s.n, s.k, s.num_experts)]


def _launch_sm107(case: Fc1, memory: _Memory) -> Any:
    import cuda.bindings.driver as cuda
    import cutlass
    from flashinfer.fused_moe.cute_dsl.rubin import (
        blockscaled_contiguous_gather_grouped_gemm_swiglu_fusion as fc1,
    )

    kernel = fc1.Sm107BlockScaledContiguousGatherGroupedGemmSwigluFusionKernel(
        case.fmt.block, case.inst, case.tile, case.cluster, True, TOP_K, a_path=case.a_path
    )
    arguments = [*_pointers(case, memory), *_sizes(case, memory)]
    runtime = {
        "stream": cuda.CUstream(0),
        "c_stride_m": cutlass.Int64(0),
        "c_sf_n_tile_offset": cutlass.Int64(0),
    }
    compiled = cutlass.cute.compile(
        kernel.wrapper,
        *arguments,
        tile_size=case.tile[0],
        scaling_vector_size=case.fmt.block,
        max_active_clusters=2,
        **runtime,
    )
    return lambda: compiled(*arguments, **runtime)


def _launch_sm107_bfloat16(case: Fc1, memory: _Memory) -> Any:
    import cuda.bindings.driver as cuda
    import cutlass
    from flashinfer.fused_moe.cute_dsl.rubin import (
        blockscaled_contiguous_gather_grouped_gemm_swiglu_fusion as fc1,
    )

    from tests.emulator.peers.fc1_host import unquantized_fc1

    kernel = fc1.Sm107BlockScaledContiguousGatherGroupedGemmSwigluFusionKernel(
        case.fmt.block, case.inst, case.tile, case.cluster, True, TOP_K, a_path=case.a_path
    )
    host = unquantized_fc1(kernel, case.sizes, memory.routing.rows, case.tile[0], case.fmt.block)
    pointers = [pointer for pointer in _pointers(case, memory) if pointer is not None]
    stream = cuda.CUstream(0)
    compiled = cutlass.cute.compile(host, *pointers, stream)
    return lambda: compiled(*pointers, stream)


def _launch_sm100(case: Fc1, memory: _Memory) -> Any:
    import cuda.bindings.driver as cuda
    import cutlass
    from flashinfer.fused_moe.cute_dsl.blackwell import (
        blockscaled_contiguous_gather_grouped_gemm_act_fusion as fc1,
    )

    kernel = fc1.BlockScaledContiguousGatherGroupedGemmKernel(
        case.fmt.block, case.tile, case.cluster, True, TOP_K
    )
    per_token_scale, relu2_limit = None, None
    pointers = [*_pointers(case, memory), per_token_scale, relu2_limit]
    arguments = [*pointers, *_sizes(case, memory)]
    stream = cuda.CUstream(0)
    compiled = cutlass.cute.compile(
        kernel.wrapper,
        *arguments,
        tile_size=case.tile[0],
        scaling_vector_size=case.fmt.block,
        max_active_clusters=2,
        stream=stream,
    )
    return lambda: compiled(*arguments, stream=stream)


_S7, _S0 = "sm_107a", "sm_100a"
_I1, _I2 = (128, 128, 128), (256, 128, 128)
_T1, _T2 = (128, 128, 256), (256, 128, 256)

CASES = [
    case.case()
    for case in (
        Fc1("fc1_gather_swiglu_cpasync", _S7, NVFP4, _T1, inst=_I1),
        Fc1("fc1_gather_swiglu_cpasync_2cta_ue5m3", _S7, NVFP4_UE5M3, _T2, (2, 1), _I2),
        Fc1("fc1_gather_swiglu_tma", _S7, NVFP4, _T1, inst=_I1, a_path="tma"),
        Fc1("fc1_gather_swiglu_tma_2cta_ue5m3", _S7, NVFP4_UE5M3, _T2, (2, 1), _I2, "tma"),
        Fc1("fc1_gather_swiglu_bfloat16", _S7, NVFP4, _T1, inst=_I1, quantized=False),
        Fc1("fc1_gather_swiglu", _S0, NVFP4, (128, 128)),
        Fc1("fc1_gather_swiglu_2cta_256x256", _S0, NVFP4, (256, 256), (2, 1)),
    )
]
