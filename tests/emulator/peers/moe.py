"""FlashInfer's MoE kernels: gather + FC1 + SwiGLU (+ NVFP4), and FC2 + finalize.

Weights of FC1 interleave 64 rows of `up` with the 64 rows of `gate` that belong to them.
"""

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
    compare_nvfp4,
    compare_rounded,
    device_tensor,
    pointer,
)
from tests.emulator.peers.operands import (
    DSL_TYPE,
    NVFP4,
    NVFP4_UE5M3,
    Format,
    Operand,
    check_exact,
    describe,
    draw,
    unswizzle_128x4,
)
from tests.emulator.peers.routing import Routing, route

_INTERLEAVE = 64
TOP_K = 2
_ALPHA_FC1 = 2.0**-7  # keeps |gate| near one, and the product exact
_ALPHA_FC2 = 2.0**-4


@dataclass(frozen=True)
class Sizes:
    num_tokens: int
    num_experts: int
    n: int
    k: int

    def __str__(self) -> str:
        tokens = f"tokens={self.num_tokens} experts={self.num_experts} top_k={TOP_K}"
        return f"{tokens} N={self.n} K={self.k}"


_SIZES = Sizes(num_tokens=170, num_experts=4, n=256, k=512)


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
            top_k=TOP_K,
            tile_m=self.tile[0],
        )
        x = draw(rng, s.num_tokens, s.k, self.fmt)
        experts = [draw(rng, s.n, s.k, self.fmt) for _ in range(s.num_experts)]
        weights = [w.values for w in experts]
        want = swiglu(grouped_product(x.values[routing.token], weights, routing, _ALPHA_FC1))
        memory = _Fc1Memory.of(self, routing, x, experts)

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
        launch = (_launch_fc1_sm107 if self.target == "sm_107a" else _launch_fc1_sm100)(
            self, memory
        )
        return PreparedPeer(launch, memory.inputs(), outputs, reset, check)


@dataclass(frozen=True)
class _Fc1Memory:
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
    def of(cls, case: Fc1, routing: Routing, x: Operand, experts: Sequence[Operand]) -> _Fc1Memory:
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
            _stack([w.qdata for w in experts]),
            _stack([w.swizzled_sf() for w in experts]),
            torch.full((len(experts),), _ALPHA_FC1),
            torch.ones(1),
            out,
            torch.zeros(-(-routing.rows // 128) * 128 * (half // 16), dtype=torch.uint8),
        )

    def inputs(self) -> list[torch.Tensor]:
        return [
            *(self.mapping, self.x, self.x_sf, self.w, self.w_sf, self.alpha, self.norm),
            *self.routing.tensors(),
        ]


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
            top_k=TOP_K,
            tile_m=self.tile[0],
        )
        h = draw(rng, routing.rows, s.k, self.fmt)
        experts = [draw(rng, s.n, s.k, self.fmt) for _ in range(s.num_experts)]
        weights = np.exp2(-rng.integers(0, 4, (s.num_tokens, TOP_K)).astype(np.float64))
        rows = grouped_product(
            h.values[routing.valid], [w.values for w in experts], routing, _ALPHA_FC2
        )
        want = finalize(rows, routing, weights if self.fused else None)
        memory = _Fc2Memory.of(self, routing, h, experts, weights, want.shape)

        def check() -> Comparison:
            how = "every row's product rounded to bfloat16, their sum rounded again"
            return compare_equal(memory.out, want, f"bfloat16 output with float64: {how}")

        return PreparedPeer(
            (_launch_fc2_sm107 if self.target == "sm_107a" else _launch_fc2_sm100)(self, memory),
            memory.inputs(),
            [memory.out],
            # The fused kernel adds to what is there.
            lambda: memory.out.fill_(0.0 if self.fused else float("nan")),
            check,
        )


@dataclass(frozen=True)
class _Fc2Memory:
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
    ) -> _Fc2Memory:
        return cls(
            routing,
            routing.mapping(),
            device_tensor(h.qdata),
            device_tensor(h.swizzled_sf()),
            _stack([w.qdata for w in experts]),
            _stack([w.swizzled_sf() for w in experts]),
            torch.full((len(experts),), _ALPHA_FC2),
            device_tensor(weights.astype(np.float32)),
            torch.zeros(out_shape, dtype=torch.bfloat16),
        )

    def inputs(self) -> list[torch.Tensor]:
        return [
            *(self.mapping, self.h, self.h_sf, self.w, self.w_sf, self.alpha, self.token_scales),
            *self.routing.tensors(),
        ]


# --- references, float64 -----------------------------------------------------------------------


def _stack(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return device_tensor(np.stack(arrays))


def grouped_product(
    rows: np.ndarray, experts: Sequence[np.ndarray], routing: Routing, alpha: float
) -> np.ndarray:
    """alpha * rows @ experts[expert of the row].T for the valid rows, exact."""
    expert = routing.expert[routing.valid]
    out = np.empty((rows.shape[0], experts[0].shape[0]))
    for e, weight in enumerate(experts):
        mine = rows[expert == e]
        if mine.size:
            check_exact(mine, weight)
            out[expert == e] = alpha * (mine @ weight.T)
    return out


def swiglu(product: np.ndarray, interleave: int = _INTERLEAVE) -> np.ndarray:
    """[rows, n] of interleaved up and gate -> [rows, n / 2]."""
    blocks = product.reshape(product.shape[0], -1, 2, interleave)
    up, gate = blocks[:, :, 0], blocks[:, :, 1]
    return (up * gate / (1 + np.exp(-gate))).reshape(product.shape[0], -1)


def finalize(rows: np.ndarray, routing: Routing, weights: np.ndarray | None) -> np.ndarray:
    """Rows back in token order; bfloat16 after each step, as the kernels' reductions do.

    With two rows a token the order of the additions makes no difference: 0 + x is x.
    """
    expanded = routing.expanded[routing.valid]
    slots = np.zeros((routing.num_tokens * routing.top_k, rows.shape[1]))
    slots[expanded] = rows
    if weights is None:
        return slots
    scaled = _bfloat16(slots * weights.reshape(-1, 1)).reshape(routing.num_tokens, 2, -1)
    return _bfloat16(scaled[:, 0] + scaled[:, 1])


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).to(torch.bfloat16).double().numpy()


# --- host calls ---------------------------------------------------------------------------------


def _fc1_pointers(case: Fc1, memory: _Fc1Memory) -> list[Any]:
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


def _fc1_sizes(case: Fc1, memory: _Fc1Memory) -> list[Any]:
    import cutlass

    s = case.sizes
    return [cutlass.Int64(v) for v in (s.num_tokens, memory.routing.rows, s.n, s.k, s.num_experts)]


def _launch_fc1_sm107(case: Fc1, memory: _Fc1Memory) -> Any:
    import cuda.bindings.driver as cuda
    import cutlass
    from flashinfer.fused_moe.cute_dsl.rubin import (
        blockscaled_contiguous_gather_grouped_gemm_swiglu_fusion as fc1,
    )

    kernel = fc1.Sm107BlockScaledContiguousGatherGroupedGemmSwigluFusionKernel(
        case.fmt.block, case.inst, case.tile, case.cluster, True, TOP_K, a_path=case.a_path
    )
    arguments = [*_fc1_pointers(case, memory), *_fc1_sizes(case, memory)]
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


def _launch_fc1_sm100(case: Fc1, memory: _Fc1Memory) -> Any:
    import cuda.bindings.driver as cuda
    import cutlass
    from flashinfer.fused_moe.cute_dsl.blackwell import (
        blockscaled_contiguous_gather_grouped_gemm_act_fusion as fc1,
    )

    kernel = fc1.BlockScaledContiguousGatherGroupedGemmKernel(
        case.fmt.block, case.tile, case.cluster, True, TOP_K
    )
    per_token_scale, relu2_limit = None, None
    pointers = [*_fc1_pointers(case, memory), per_token_scale, relu2_limit]
    arguments = [*pointers, *_fc1_sizes(case, memory)]
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


def _fc2_arguments(case: Fc2, memory: _Fc2Memory, extra: Sequence[Any] = ()) -> list[Any]:
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


def _launch_fc2_sm107(case: Fc2, memory: _Fc2Memory) -> Any:
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
    arguments = _fc2_arguments(case, memory)
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


def _launch_fc2_sm100(case: Fc2, memory: _Fc2Memory) -> Any:
    import cuda.bindings.driver as cuda
    import cutlass
    from flashinfer.fused_moe.cute_dsl.blackwell import (
        blockscaled_contiguous_grouped_gemm_finalize_fusion as fc2,
    )

    kernel = fc2.Sm100BlockScaledContiguousGroupedGemmFinalizeFusionKernel(
        case.fmt.block, case.tile, case.cluster, use_fused_finalize=case.fused
    )
    per_token_scale = None
    arguments = _fc2_arguments(case, memory, [per_token_scale])
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
        Fc2("fc2_finalize", _S7, NVFP4, _T1, inst=_I1),
        Fc2("fc2_finalize_2cta_ue5m3", _S7, NVFP4_UE5M3, _T2, (2, 1), _I2),
        Fc2("fc2_rows", _S7, NVFP4, _T1, inst=_I1, fused=False),
        Fc1("fc1_gather_swiglu", _S0, NVFP4, (128, 128)),
        Fc1("fc1_gather_swiglu_2cta_256x256", _S0, NVFP4, (256, 256), (2, 1)),
        Fc2("fc2_finalize", _S0, NVFP4, (128, 128)),
        Fc2("fc2_finalize_2cta", _S0, NVFP4, (256, 128), (2, 1)),
    )
]
