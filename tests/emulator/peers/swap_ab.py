"""FlashInfer's swap-AB MoE kernels for sm_100 and sm_103: weights are A, routed tokens are B.

Their MMA has N of the live tokens, set in the descriptor at run time; on sm_100 mixed operands are
FP4 weights unpacked to bytes, on sm_103 NVFP4 runs with K = 96. FC1 interleaves 16 rows of `up` and
16 of `gate`; every tile of routed rows owns whole 128-row atoms of scale factors.
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
    device_tensor,
    pointer,
    stack,
)
from tests.emulator.peers.operands import (
    DSL_TYPE,
    MXFP4,
    MXFP8,
    NVFP4,
    Format,
    describe,
    draw,
    swizzle_128x4,
    unswizzle_128x4,
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

_INTERLEAVE = 16
_ALPHA = 2.0**-7
_SIZES = Sizes(num_tokens=90, num_experts=4, n=512, k=768)
_EVICT_LAST = 0x14F0000000000000  # the kernels' cache hint for activations
_SWIGLU = 3  # ActivationType.Swiglu


@dataclass(frozen=True)
class SwapAb:
    """FC1 (gather, SwiGLU, NVFP4) or FC2 (each routed row, or their weighted sum by token).

    tile: output channels and routed rows of a tile; channels over 128 take a CTA pair.
    """

    name: str
    target: str
    weights: Format
    activations: Format
    tile: tuple[int, int]
    fused: bool = True
    sizes: Sizes = _SIZES

    @property
    def is_fc1(self) -> bool:
        return "fc1" in self.name

    def case(self) -> PeerCase:
        a, b = describe(self.weights), describe(self.activations)
        formats = f"{a if a == b else f'{a} x {b}'} -> {'NVFP4' if self.is_fc1 else 'bfloat16'}"
        shape = f"{self.sizes}, tile {self.tile}"
        return PeerCase(self.name, self.target, formats, shape, self.prepare)

    def prepare(self) -> PreparedPeer:
        flashinfer_sources.install()
        rng, s = np.random.default_rng(31), self.sizes
        routing = route(
            rng, num_tokens=s.num_tokens, num_experts=s.num_experts, tile_m=self.tile[1]
        )
        experts = [draw(rng, s.n, s.k, self.weights) for _ in range(s.num_experts)]
        values = [w.values for w in experts]
        w, w_sf = stack([w.qdata for w in experts]), stack([w.swizzled_sf() for w in experts])
        alpha = torch.full((s.num_experts,), _ALPHA)
        mapping = routing.mapping()
        common = [w, w_sf, alpha, mapping, *routing.tensors()]
        if self.is_fc1:
            x = draw(rng, s.num_tokens, s.k, self.activations)
            product = grouped_product(x.values[routing.token], values, routing, _ALPHA)
            return self._fc1(routing, common, x.qdata, x.sf, swiglu(product, _INTERLEAVE))
        h = draw(rng, routing.rows, s.k, self.activations)
        scales = np.exp2(-rng.integers(0, 4, (s.num_tokens, TOP_K)).astype(np.float64))
        rows = grouped_product(h.values[routing.valid], values, routing, _ALPHA)
        want = finalize(rows, routing, scales) if self.fused else rows
        return self._fc2(routing, common, h.qdata, h.sf, scales, want)

    def _fc1(
        self,
        routing: Routing,
        common: list[torch.Tensor],
        x: np.ndarray,
        x_sf: np.ndarray,
        want: np.ndarray,
    ) -> PreparedPeer:
        half = self.sizes.n // 2
        out = torch.zeros((routing.rows, half // 2), dtype=torch.uint8)
        atoms = routing.rows // self.tile[1] * 128
        out_sf = torch.zeros(atoms * (half // 16), dtype=torch.uint8)
        norm = torch.ones(1)
        memory = [device_tensor(x), device_tensor(x_sf), norm]
        launch = self._launcher(common, memory[0], memory[1], out, out_sf, norm, None)

        def check() -> Comparison:
            spread = unswizzle_128x4(out_sf.numpy(), atoms, half // 16)
            sf = spread.reshape(-1, 128, half // 16)[:, : self.tile[1]]
            sf = sf.reshape(routing.rows, -1)[routing.valid]
            return compare_nvfp4(out.numpy()[routing.valid], sf, want, self.weights.scale)

        def reset() -> None:
            out.fill_(0x77)
            out_sf.fill_(0xFF)

        return PreparedPeer(launch, [*common, *memory], [out, out_sf], reset, check)

    def _fc2(
        self,
        routing: Routing,
        common: list[torch.Tensor],
        h: np.ndarray,
        h_sf: np.ndarray,
        scales: np.ndarray,
        want: np.ndarray,
    ) -> PreparedPeer:
        rows = self.tile[1]
        spread = np.zeros((routing.rows // rows, max(rows, 128), h_sf.shape[1]), np.uint8)
        spread[:, :rows] = h_sf.reshape(-1, rows, h_sf.shape[1])
        memory = [
            device_tensor(h),
            device_tensor(swizzle_128x4(spread.reshape(-1, h_sf.shape[1]))),
            device_tensor(scales.astype(np.float32)),
        ]
        height = self.sizes.num_tokens if self.fused else routing.rows
        out = torch.zeros((height, self.sizes.n), dtype=torch.bfloat16)
        wanted = slice(None) if self.fused else torch.from_numpy(routing.valid)
        launch = self._launcher(common, memory[0], memory[1], out, None, None, memory[2])
        text = "bfloat16 output with float64: every row's product rounded, their sum rounded again"
        return PreparedPeer(
            launch,
            [*common, *memory],
            [out],
            lambda: out.fill_(0.0 if self.fused else float("nan")),
            lambda: compare_equal(out[wanted], want, text),
        )

    def _launcher(
        self,
        common: Sequence[torch.Tensor],
        x: torch.Tensor,
        x_sf: torch.Tensor,
        out: torch.Tensor,
        out_sf: torch.Tensor | None,
        norm: torch.Tensor | None,
        token_scales: torch.Tensor | None,
    ) -> Any:
        import cuda.bindings.driver as cuda
        import cutlass

        w, w_sf, alpha, mapping, tile_expert, row_limit, num_tiles = common
        scale, s = DSL_TYPE[self.weights.scale], self.sizes

        def optional(dtype: str, tensor: torch.Tensor | None) -> Any:
            return None if tensor is None else pointer(dtype, tensor, 16)

        pointers = [
            pointer(DSL_TYPE[self.weights.element], w, 32),
            pointer(scale, w_sf, 16),
            pointer(DSL_TYPE[self.activations.element], x, 32),
            pointer(scale, x_sf, 4 if self.is_fc1 else 16),
            pointer("Float4E2M1FN" if self.is_fc1 else "BFloat16", out, 32),
            optional(scale, out_sf),
            pointer("Float32", alpha, 16),
            optional("Float32", norm),
            *(pointer("Int32", t, 16) for t in (mapping, tile_expert, row_limit, num_tiles)),
            optional("Float32", token_scales),
            None,  # no scale per token
            None,  # no limit of a clamped activation
        ]
        rows, tokens = cutlass.Int64(mapping.numel()), cutlass.Int64(s.num_tokens)
        stream = cuda.CUstream(0)
        kernel = self._kernel()
        compiled = cutlass.cute.compile(
            kernel.wrapper, *pointers, s.n, rows, s.k, s.num_experts, tokens, stream=stream
        )
        return lambda: compiled(*pointers, rows, tokens, stream=stream)

    def _kernel(self) -> Any:
        import cutlass
        from flashinfer.fused_moe.cute_dsl.blackwell.moe_swap_ab_kernel import (
            Sm100BlockScaledGroupedGemmKernel,
        )

        both_fp4 = self.weights.element == self.activations.element == "e2m1"
        tile_k, native_k = (256, 64) if both_fp4 else (128, 32)
        if both_fp4 and self.weights.block == 16 and self.target == "sm_103a":
            native_k = 96
        fc1 = self.is_fc1
        return Sm100BlockScaledGroupedGemmKernel(
            activation_dtype=getattr(cutlass, DSL_TYPE[self.activations.element]),
            weight_dtype=getattr(cutlass, DSL_TYPE[self.weights.element]),
            sf_dtype=getattr(cutlass, DSL_TYPE[self.weights.scale]),
            sf_vec_size=self.weights.block,
            native_mma_k=native_k,
            scatter_output=not fc1,
            gather_input=fc1,
            per_token_scale_is_routed=not fc1,
            k_steps=None,
            num_stages=None,
            overlap_activation_accumulators=None if fc1 else False,
            pdl_signal_at="startup" if fc1 else "producer_exit",
            use_clc_scheduler=False,
            num_tile_info_stages=1,
            mma_tiler_mnk=(*self.tile, tile_k),
            activation_type=_SWIGLU if fc1 else None,
            top_k=TOP_K,
            swiglu_alpha=1.0,
            swiglu_beta=0.0,
            swiglu_limit=float("inf"),
            use_fused_finalize=not fc1 and self.fused,
            enable_pdl=True,
            output_dtype=cutlass.Float4E2M1FN if fc1 else cutlass.BFloat16,
            max_active_clusters=4,
            generate_sfc=fc1,
            prefetch_weights_before_wait=not fc1,
            publish_routing_before_signal=fc1,
            activation_cache_policy=_EVICT_LAST,
        )


_S0, _S3 = "sm_100a", "sm_103a"

CASES = [
    case.case()
    for case in (
        SwapAb("swap_ab_fc1_nvfp4_128x64", _S0, NVFP4, NVFP4, (128, 64)),
        SwapAb("swap_ab_fc1_nvfp4_2cta_256x32", _S0, NVFP4, NVFP4, (256, 32)),
        SwapAb("swap_ab_fc2_nvfp4_2cta_256x64", _S0, NVFP4, NVFP4, (256, 64)),
        SwapAb("swap_ab_fc2_rows_mxfp4_x_mxfp8_128x128", _S0, MXFP4, MXFP8, (128, 128), False),
        SwapAb("swap_ab_fc2_mxfp8_512x32", _S0, MXFP8, MXFP8, (512, 32)),
        SwapAb("swap_ab_fc1_nvfp4_k96_128x64", _S3, NVFP4, NVFP4, (128, 64)),
        SwapAb("swap_ab_fc2_nvfp4_k96_2cta_256x32", _S3, NVFP4, NVFP4, (256, 32)),
    )
]
