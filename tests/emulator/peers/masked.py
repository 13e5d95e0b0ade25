"""FlashInfer's masked batched GEMM for sm_107: per batch, only the first rows are wanted."""

from __future__ import annotations

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
    pointer,
    stack,
)
from tests.emulator.peers.operands import (
    DSL_TYPE,
    NVFP4,
    Format,
    describe,
    draw,
    exact_product,
)

_ROWS_WANTED = (130, 0, 77)
_M, _N, _K = 256, 256, 1024


@dataclass(frozen=True)
class Masked:
    """C[l, :rows[l]] = alpha[l] * A[l, :rows[l]] @ B[l].T."""

    name: str
    fmt: Format
    tile: tuple[int, int, int]
    inst: tuple[int, int, int]
    cluster: tuple[int, int] = (1, 1)

    def case(self) -> PeerCase:
        shape = f"rows={_ROWS_WANTED} of M={_M} N={_N} K={_K}, tile {self.tile}"
        return PeerCase(
            self.name,
            "sm_107a",
            describe(self.fmt),
            f"{shape}, cluster {self.cluster}",
            self.prepare,
        )

    def prepare(self) -> PreparedPeer:
        flashinfer_sources.install()
        rng = np.random.default_rng(29)
        batch = len(_ROWS_WANTED)
        a = [draw(rng, _M, _K, self.fmt) for _ in range(batch)]
        b = [draw(rng, _N, _K, self.fmt) for _ in range(batch)]
        alpha = [2.0**-i for i in range(batch)]
        products = [scale * exact_product(x, y) for scale, x, y in zip(alpha, a, b, strict=True)]
        want = np.concatenate([p[:rows] for p, rows in zip(products, _ROWS_WANTED, strict=True)])
        inputs = [
            stack([x.qdata for x in a]),
            stack([y.qdata for y in b]),
            stack([x.swizzled_sf() for x in a]),
            stack([y.swizzled_sf() for y in b]),
            torch.tensor(_ROWS_WANTED, dtype=torch.int32),
            torch.tensor(alpha),
        ]
        c = torch.zeros((batch, _M, _N), dtype=torch.bfloat16)

        def check() -> Comparison:
            got = torch.cat([c[i, :rows] for i, rows in enumerate(_ROWS_WANTED)])
            assert torch.isnan(c[1]).all(), "a batch without rows was written"
            return compare_equal(got, want, "bfloat16 output with alpha * A @ B.T in float64")

        return PreparedPeer(
            self._launcher(inputs, c), inputs, [c], lambda: c.fill_(float("nan")), check
        )

    def _launcher(self, inputs: list[torch.Tensor], c: torch.Tensor) -> Any:
        import cuda.bindings.driver as cuda
        import cutlass
        from flashinfer.gemm.kernels.grouped_gemm_masked_rubin import (
            MaskedBatchedMatmulCuteDSLRubin,
        )

        a, b, sfa, sfb, rows, alpha = inputs
        element, scale = DSL_TYPE[self.fmt.element], DSL_TYPE[self.fmt.scale]
        host = MaskedBatchedMatmulCuteDSLRubin(
            m=_M,
            n=_N,
            k=_K,
            l=len(_ROWS_WANTED),
            a_major="k",
            b_major="k",
            c_major="n",
            ab_dtype=getattr(cutlass, element),
            sf_dtype=getattr(cutlass, scale),
            c_dtype=cutlass.BFloat16,
            alpha_dtype=cutlass.Float32,
            sf_vec_size=self.fmt.block,
            mma_tiler=self.tile,
            mma_inst_shape=self.inst,
            cluster_shape_mn=self.cluster,
            sm_count=4,
        )
        signals = None
        arguments = [
            pointer(element, a, 16),
            pointer(element, b, 16),
            pointer(scale, sfa, 16),
            pointer(scale, sfb, 16),
            pointer("BFloat16", c, 16),
            pointer("Int32", rows, 16),
            signals,
            pointer("Float32", alpha, 16),
            cuda.CUstream(0),
        ]
        compiled = cutlass.cute.compile(host, *arguments)
        return lambda: compiled(*arguments)


CASES = [
    case.case()
    for case in (
        Masked("masked_nvfp4_128x128", NVFP4, (128, 128, 256), (128, 128, 128)),
        Masked("masked_nvfp4_2cta_256x128", NVFP4, (256, 128, 256), (256, 128, 128), (2, 1)),
    )
]
