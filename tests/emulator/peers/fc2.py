"""FlashInfer's FC2 kernels: grouped GEMM whose rows are summed, or put, in token order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.emulator.peers import flashinfer_sources
from tests.emulator.peers.case import (
    Comparison,
    PeerCase,
    PreparedPeer,
    compare_equal,
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
)
from tests.emulator.peers.routing import (
    TOP_K,
    Routing,
    Sizes,
    finalize,
    grouped_product,
    route,
)

_ALPHA = 2.0**-4
_SIZES = Sizes(num_tokens=170, num_experts=4, n=256, k=1024)


@dataclass(frozen=True)
class Fc2:
    """out[token] = sum over its rows of scale * alpha * h[row] @ w2[expert(row)].T, in bfloat16.

    Not fused: each product goes to its own row `token * top_k + choice`, unscaled.
    """

    name: str
    target: str
    fmt: Format
    tile: tuple[int, ...]
    cluster: tuple[int, int] = (1, 1)
    inst: tuple[int, int, int] | None = None
    fused: bool = True
    sizes: Sizes = _SIZES

    def case(self) -> PeerCase:
        shape = f"{self.sizes}, tile {self.tile}, cluster {self.cluster}"
        return PeerCase(
            self.name, self.target, f"{describe(self.fmt)} -> bfloat16", shape, self.prepare
        )

    def prepare(self) -> PreparedPeer:
        flashinfer_sources.install()
        rng = np.random.default_rng(13)
        s = self.sizes
        routing = route(
            rng,
            num_tokens=s.num_tokens,
            num_experts=s.num_experts,
            tile_m=self.tile[0],
        )
        h = draw(rng, routing.rows, s.k, self.fmt)
        experts = [draw(rng, s.n, s.k, self.fmt) for _ in range(s.num_experts)]
        weights = np.exp2(-rng.integers(0, 4, (s.num_tokens, TOP_K)).astype(np.float64))
        rows = grouped_product(
            h.values[routing.valid], [w.values for w in experts], routing, _ALPHA
        )
        want = finalize(rows, routing, weights if self.fused else None)
        memory = _Memory.of(self, routing, h, experts, weights, want.shape)

        def check() -> Comparison:
            how = "every row's product rounded to bfloat16, their sum rounded again"
            return compare_equal(memory.out, want, f"bfloat16 output with float64: {how}")

        return PreparedPeer(
            (_launch_sm107 if self.target == "sm_107a" else _launch_sm100)(self, memory),
            memory.inputs(),
            [memory.out],
            # The fused kernel adds to what is there.
            lambda: memory.out.fill_(0.0 if self.fused else float("nan")),
            check,
        )


@dataclass(frozen=True)
class _Memory:
    routing: Routing
    mapping: torch.Tensor
    h: torch.Tensor
    h_sf: torch.Tensor
    w: torch.Tensor
    w_sf: torch.Tensor
    alpha: torch.Tensor
    token_scales: torch.Tensor
    out: torch.Tensor

    @classmethod
    def of(
        cls,
        case: Fc2,
        routing: Routing,
        h: Operand,
        experts: Sequence[Operand],
        weights: np.ndarray,
        out_shape: tuple[int, ...],
    ) -> _Memory:
        return cls(
            routing,
            routing.mapping(),
            device_tensor(h.qdata),
            device_tensor(h.swizzled_sf()),
            stack([w.qdata for w in experts]),
            stack([w.swizzled_sf() for w in experts]),
            torch.full((len(experts),), _ALPHA),
            device_tensor(weights.astype(np.float32)),
            torch.zeros(out_shape, dtype=torch.bfloat16),
        )

    def inputs(self) -> list[torch.Tensor]:
        return [
            *(self.mapping, self.h, self.h_sf, self.w, self.w_sf, self.alpha, self.token_scales),
            *self.routing.tensors(),
        ]


def _arguments(case: Fc2, memory: _Memory, extra: Sequence[Any] = ()) -> list[Any]:
    import cutlass

    element, scale = DSL_TYPE[case.fmt.element], DSL_TYPE[case.fmt.scale]
    routing, s = memory.routing, case.sizes
    return [
        pointer(element, memory.h, 32),
        pointer(element, memory.w, 32),
        pointer(scale, memory.h_sf, 16),
        pointer(scale, memory.w_sf, 16),
        pointer("BFloat16", memory.out, 32),
        pointer("Float32", memory.alpha, 4),
        pointer("Int32", routing.tile_expert, 4),
        pointer("Int32", routing.tile_row_limit, 4),
        pointer("Int32", memory.mapping, 4),
        pointer("Int32", routing.num_tiles, 4),
        pointer("Float32", memory.token_scales, 16),
        *extra,
        *(cutlass.Int64(v) for v in (routing.rows, s.n, s.k, s.num_experts, s.num_tokens, TOP_K)),
    ]


def _launch_sm107(case: Fc2, memory: _Memory) -> Any:
    import cuda.bindings.driver as cuda
    import cutlass
    from flashinfer.fused_moe.cute_dsl.rubin import (
        blockscaled_contiguous_grouped_gemm_finalize_fusion as fc2,
    )

    kernel = fc2.Sm107BlockScaledContiguousGroupedGemmFinalizeFusionKernel(
        case.fmt.block,
        case.inst,
        case.tile,
        case.cluster,
        topK=TOP_K,
        use_fused_finalize=case.fused,
    )
    arguments = _arguments(case, memory)
    runtime = {"stream": cuda.CUstream(0), "c_stride_row": cutlass.Int64(0)}
    compiled = cutlass.cute.compile(
        kernel.wrapper,
        *arguments,
        tile_size=case.tile[0],
        scaling_vector_size=case.fmt.block,
        max_active_clusters=2,
        **runtime,
    )
    return lambda: compiled(*arguments, **runtime)


def _launch_sm100(case: Fc2, memory: _Memory) -> Any:
    import cuda.bindings.driver as cuda
    import cutlass
    from flashinfer.fused_moe.cute_dsl.blackwell import (
        blockscaled_contiguous_grouped_gemm_finalize_fusion as fc2,
    )

    kernel = fc2.Sm100BlockScaledContiguousGroupedGemmFinalizeFusionKernel(
        case.fmt.block, case.tile, case.cluster, use_fused_finalize=case.fused
    )
    per_token_scale = None
    arguments = _arguments(case, memory, [per_token_scale])
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
        Fc2("fc2_finalize", _S7, NVFP4, _T1, inst=_I1),
        Fc2("fc2_finalize_2cta_ue5m3", _S7, NVFP4_UE5M3, _T2, (2, 1), _I2),
        Fc2("fc2_rows", _S7, NVFP4, _T1, inst=_I1, fused=False),
        Fc2("fc2_finalize", _S0, NVFP4, (128, 128)),
        Fc2("fc2_finalize_2cta", _S0, NVFP4, (256, 128), (2, 1)),
    )
]
