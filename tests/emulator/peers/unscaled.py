"""FlashInfer's Hopper MoE kernels (wgmma, cp.async, TMA) and its FP8 batched GEMM for sm_107.

Their operands are unscaled: bfloat16, float16 or E4M3 values on a grid of quarters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.emulator.peers import flashinfer_sources
from tests.emulator.peers.case import (
    PeerCase,
    PreparedPeer,
    compare_equal,
    compare_rounded,
    device_tensor,
    pointer,
)
from tests.emulator.peers.routing import (
    TOP_K,
    Routing,
    Sizes,
    finalize,
    grouped_product,
    route,
    swiglu,
)

_TARGET = "sm_90a"
_TYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}
_INTERLEAVE = 32
_SIZES = Sizes(num_tokens=120, num_experts=4, n=256, k=512)


@dataclass(frozen=True)
class Grouped:
    """FC1 (gather, SwiGLU) or FC2 (finalize, or plain rows) with 16-bit weights."""

    name: str
    dtype: torch.dtype
    tile: tuple[int, int]
    cluster: tuple[int, int] = (1, 1)
    fused: bool = True
    sizes: Sizes = _SIZES

    def case(self) -> PeerCase:
        shape = f"{self.sizes}, tile {self.tile}, cluster {self.cluster}"
        prepare = self._fc1 if self.name.startswith("fc1") else self._fc2
        return PeerCase(self.name, _TARGET, str(self.dtype).removeprefix("torch."), shape, prepare)

    def _route(self, rng: np.random.Generator) -> Routing:
        s = self.sizes
        return route(
            rng,
            num_tokens=s.num_tokens,
            num_experts=s.num_experts,
            tile_m=self.tile[0],
            tiles_multiple_of=self.cluster[0],
        )

    def _pointers(
        self, routing: Routing, mapping: torch.Tensor, *matrices: torch.Tensor
    ) -> list[Any]:
        return [
            *(pointer(_TYPES[self.dtype], matrix, 16) for matrix in matrices),
            pointer("Int32", routing.tile_expert, 4),
            pointer("Int32", routing.tile_row_limit, 4),
            pointer("Int32", mapping, 4),
            pointer("Int32", routing.num_tiles, 4),
        ]

    def _fc1(self) -> PreparedPeer:
        import cuda.bindings.driver as cuda
        import cutlass

        flashinfer_sources.install()
        from flashinfer.fused_moe.cute_dsl.hopper import (
            contiguous_gather_grouped_gemm_act_fusion as fc1,
        )

        rng, s = np.random.default_rng(17), self.sizes
        routing = self._route(rng)
        x, w = _grid(rng, s.num_tokens, s.k), _grid(rng, s.num_experts, s.n, s.k)
        product = grouped_product(x[routing.token] / 32, list(w), routing, 1.0)
        want = swiglu(product, _INTERLEAVE)
        x_memory, w_memory = (device_tensor(v).to(self.dtype) for v in (x / 32, w))
        out = torch.zeros((routing.rows, s.n // 2), dtype=self.dtype)
        mapping = routing.mapping()
        kernel = fc1.Sm90ContiguousGatherGroupedGemmActFusionKernel(
            acc_dtype=cutlass.Float32,
            tile_shape_mn=self.tile,
            topk=TOP_K,
            cluster_shape_mn=self.cluster,
        )
        arguments = [
            *self._pointers(routing, mapping, x_memory, w_memory, out),
            *(s.num_tokens, routing.rows, s.n, s.k, s.num_experts),
        ]
        stream = cuda.CUstream(0)
        compiled = cutlass.cute.compile(
            kernel.wrapper, *arguments, max_active_clusters=2, stream=stream
        )
        valid = torch.from_numpy(routing.valid)
        return PreparedPeer(
            launch=lambda: compiled(*arguments, stream=stream),
            inputs=[x_memory, w_memory, mapping, *routing.tensors()],
            outputs=[out],
            reset=lambda: out.fill_(float("nan")),
            check=lambda: compare_rounded(out[valid], want),
        )

    def _fc2(self) -> PreparedPeer:
        import cuda.bindings.driver as cuda
        import cutlass

        flashinfer_sources.install()
        from flashinfer.fused_moe.cute_dsl.hopper import (
            contiguous_grouped_gemm_finalize_fusion as fc2,
        )

        rng, s = np.random.default_rng(19), self.sizes
        routing = self._route(rng)
        h, w = _grid(rng, routing.rows, s.k), _grid(rng, s.num_experts, s.n, s.k)
        weights = np.exp2(-rng.integers(0, 4, (s.num_tokens, TOP_K)).astype(np.float64))
        rows = grouped_product(h[routing.valid], list(w), routing, 1.0)
        want = finalize(rows, routing, weights if self.fused else None)
        h_memory, w_memory = (device_tensor(v).to(self.dtype) for v in (h, w))
        scales = device_tensor(weights.astype(np.float32))
        out = torch.zeros(want.shape, dtype=self.dtype)
        mapping = routing.mapping()
        kernel = fc2.Sm90ContiguousGroupedGemmFinalizeFusionKernel(
            acc_dtype=cutlass.Float32,
            tile_shape_mn=self.tile,
            topk=TOP_K,
            cluster_shape_mn=self.cluster,
            use_fused_finalize=self.fused,
        )
        sizes = (routing.rows, s.n, s.k, s.num_experts, s.num_tokens, want.shape[0])
        arguments = [
            *self._pointers(routing, mapping, h_memory, w_memory, out),
            pointer("Float32", scales, 4),
            *(cutlass.Int64(size) for size in sizes),
        ]
        stream = cuda.CUstream(0)
        compiled = cutlass.cute.compile(
            kernel.wrapper, *arguments, max_active_clusters=2, stream=stream
        )
        text = f"{_TYPES[self.dtype]} output with float64, rounded after each step"
        return PreparedPeer(
            launch=lambda: compiled(*arguments, stream=stream),
            inputs=[h_memory, w_memory, mapping, scales, *routing.tensors()],
            outputs=[out],
            reset=lambda: out.fill_(0.0 if self.fused else float("nan")),
            check=lambda: compare_equal(out, want, text),
        )


@dataclass(frozen=True)
class BatchedFp8:
    """C[l] = scale_a * scale_b * A[l] @ B[l].T for unscaled E4M3, `tcgen05.mma.kind::f8f6f4`."""

    name: str
    tile: tuple[int, int, int]
    inst: tuple[int, int, int]
    cluster: tuple[int, int]
    mnkl: tuple[int, int, int, int] = (256, 256, 1024, 2)

    def case(self) -> PeerCase:
        m, n, k, batch = self.mnkl
        shape = f"M={m} N={n} K={k} batch={batch}, tile {self.tile}, cluster {self.cluster}"
        return PeerCase(self.name, "sm_107a", "E4M3", shape, self.prepare)

    def prepare(self) -> PreparedPeer:
        import cuda.bindings.driver as cuda
        import cutlass
        from cutlass.cute.runtime import from_dlpack

        flashinfer_sources.install()
        from flashinfer.gemm.kernels.bmm_fp8_rubin import SM107PersistentDenseGemmKernel

        rng = np.random.default_rng(23)
        m, n, k, batch = self.mnkl
        a, b = _grid(rng, batch, m, k), _grid(rng, batch, n, k)
        want = 0.5 * (a @ b.transpose(0, 2, 1))
        a_memory, b_memory = (
            device_tensor(v).to(torch.float8_e4m3fn).view(torch.uint8) for v in (a, b)
        )
        c = torch.zeros(want.shape, dtype=torch.bfloat16)
        scales = [torch.full((1,), 0.25), torch.full((1,), 2.0)]

        def matrix(tensor: torch.Tensor, dtype: Any) -> Any:
            view = from_dlpack(tensor.permute(1, 2, 0), assumed_align=16)
            view.element_type = dtype
            return view.mark_layout_dynamic(leading_dim=1)

        kernel = SM107PersistentDenseGemmKernel(
            cutlass.Float32, self.inst[0] == 256, self.tile, self.inst, self.cluster, True
        )
        matrices = [
            matrix(a_memory, cutlass.Float8E4M3FN),
            matrix(b_memory, cutlass.Float8E4M3FN),
            matrix(c, cutlass.BFloat16),
        ]
        scale_views = [from_dlpack(scale, assumed_align=4) for scale in scales]
        stream = cuda.CUstream(0)
        compiled = cutlass.cute.compile(kernel, *matrices, 2, stream, *scale_views)
        text = "bfloat16 output with scale * A @ B.T in float64, rounded once"
        return PreparedPeer(
            launch=lambda: compiled(*matrices, stream, *scale_views),
            inputs=[a_memory, b_memory, *scales],
            outputs=[c],
            reset=lambda: c.fill_(float("nan")),
            check=lambda: compare_equal(c, want, text),
        )


def _grid(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Multiples of 1/4 up to 2: exact in every operand type, and so are sums of 2^14 products."""
    return rng.integers(-8, 9, shape) / 4


_BF16, _F16 = torch.bfloat16, torch.float16

CASES: list[PeerCase] = [
    case.case()
    for case in (
        Grouped("fc1_gather_swiglu_128x128", _BF16, (128, 128)),
        Grouped("fc1_gather_swiglu_64x128_f16", _F16, (64, 128)),
        Grouped("fc1_gather_swiglu_128x128_cluster2x1", _BF16, (128, 128), (2, 1)),
        Grouped("fc2_finalize_128x128", _BF16, (128, 128)),
        Grouped("fc2_rows_64x128", _BF16, (64, 128), fused=False),
        BatchedFp8("bmm_fp8_128x128", (128, 128, 128), (128, 128, 64), (1, 1)),
        BatchedFp8("bmm_fp8_2cta_256x128", (256, 128, 128), (256, 128, 64), (2, 1)),
    )
]
