"""FlashInfer's persistent dense block-scaled GEMMs for sm_100, sm_103 and sm_107."""

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
    device_tensor,
    pointer,
)
from tests.emulator.peers.operands import (
    DSL_TYPE,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_UE5M3,
    Format,
    Operand,
    describe,
    draw,
    exact_product,
)

_DSL_OUT = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}
_ALPHA = 0.5  # a power of two: the epilogue's product is exact


@dataclass(frozen=True)
class Dense:
    """C[m, n] = alpha * A[m, k] @ B[n, k].T.

    tile: (M, N) of a CTA pair or single CTA on sm_100 and sm_103, (M, N, K) on sm_107, where
    `inst` is the MMA instruction's (M, N, K); cluster: (M, N).
    """

    name: str
    target: str
    a: Format
    b: Format
    mnk: tuple[int, int, int]
    tile: tuple[int, ...]
    cluster: tuple[int, int] = (1, 1)
    inst: tuple[int, int, int] | None = None
    out: torch.dtype = torch.bfloat16
    clusters_at_once: int = 2
    swap_ab: bool = False

    def case(self) -> PeerCase:
        formats = describe(self.a) if self.a == self.b else (
            f"{describe(self.a)} x {describe(self.b)}"
        )  # fmt: skip
        m, n, k = self.mnk
        shape = f"M={m} N={n} K={k}, tile {self.tile}, cluster {self.cluster}"
        return PeerCase(self.name, self.target, formats, shape, self.prepare)

    def prepare(self) -> PreparedPeer:
        flashinfer_sources.install()
        m, n, k = self.mnk
        rng = np.random.default_rng(7)
        a, b = draw(rng, m, k, self.a), draw(rng, n, k, self.b)
        product = exact_product(a, b)
        want = _ALPHA * (product.T if self.swap_ab else product)
        memory = _Memory.of(a, b, torch.full(want.shape, float("nan"), dtype=self.out))
        launch = (_launch_sm107 if self.target == "sm_107a" else _launch_sm100)(self, memory)

        def check() -> Comparison:
            text = f"{self.out} output with alpha * A @ B.T in float64, rounded once"
            return compare_equal(memory.c, want, text.removeprefix("torch."))

        return PreparedPeer(
            launch=launch,
            inputs=[memory.a, memory.b, memory.sfa, memory.sfb, memory.alpha],
            outputs=[memory.c],
            reset=lambda: memory.c.fill_(float("nan")),
            check=check,
        )


@dataclass(frozen=True)
class _Memory:
    a: torch.Tensor
    b: torch.Tensor
    sfa: torch.Tensor
    sfb: torch.Tensor
    c: torch.Tensor
    alpha: torch.Tensor

    @classmethod
    def of(cls, a: Operand, b: Operand, c: torch.Tensor) -> _Memory:
        arrays = (a.qdata, b.qdata, a.swizzled_sf(), b.swizzled_sf())
        tensors = [device_tensor(array) for array in arrays]
        return cls(*tensors, c, torch.full((1,), _ALPHA))


def _scale_tiles(case: Dense) -> list[Any]:
    import cutlass

    m, n, k = case.mnk
    counts = (-(-m // 128), -(-n // 128), -(-k // case.a.block // 4))
    return [cutlass.Int64(count) for count in counts]


def _launch_sm107(case: Dense, memory: _Memory) -> Any:
    import cuda.bindings.driver as cuda
    import cutlass
    from cutlass.cute.runtime import from_dlpack
    from flashinfer.gemm.kernels.dense_blockscaled_gemm_sm107 import (
        Sm107BlockScaledPersistentDenseGemmKernel as Kernel,
    )

    assert case.inst is not None
    kernel = Kernel(case.a.block, case.inst, case.tile, case.cluster)
    sizes = [*(cutlass.Int64(size) for size in case.mnk), *_scale_tiles(case)]
    tensors = [
        pointer(DSL_TYPE[case.a.element], memory.a, 32),
        pointer(DSL_TYPE[case.b.element], memory.b, 32),
        pointer(DSL_TYPE[case.a.scale], memory.sfa, 16),
        pointer(DSL_TYPE[case.b.scale], memory.sfb, 16),
        pointer(_DSL_OUT[case.out], memory.c, 32),
        from_dlpack(memory.alpha, assumed_align=4),
        cutlass.Int64(0),  # leading dimension of C: contiguous
    ]
    batch, stream = 1, cuda.CUstream(0)
    compiled = cutlass.cute.compile(
        kernel.wrapper_ptrs, *sizes, batch, *tensors, case.clusters_at_once, stream, case.swap_ab
    )
    return lambda: compiled(*sizes, *tensors, stream)


def _launch_sm100(case: Dense, memory: _Memory) -> Any:
    import cuda.bindings.driver as cuda
    import cutlass
    from cutlass.cute.runtime import from_dlpack

    if case.target == "sm_103a":
        from flashinfer.gemm.kernels.dense_blockscaled_gemm_sm103 import (
            Sm103BlockScaledPersistentDenseGemmKernel,
        )

        kernel = Sm103BlockScaledPersistentDenseGemmKernel(
            case.a.block, case.tile, case.cluster, use_tma_store=True
        )
    else:
        from flashinfer.gemm.kernels.dense_blockscaled_gemm_sm100 import (
            Sm100BlockScaledPersistentDenseGemmKernel,
        )

        kernel = Sm100BlockScaledPersistentDenseGemmKernel(case.a.block, case.tile, case.cluster)

    def matrix(tensor: torch.Tensor, element: str | None = None) -> Any:
        view = from_dlpack(tensor, assumed_align=32)
        if element == "e4m3":
            view.element_type = cutlass.Float8E4M3FN
        return view.mark_layout_dynamic(leading_dim=1)

    arguments = [
        matrix(memory.a, case.a.element),
        matrix(memory.b, case.b.element),
        matrix(memory.c),
        *_scale_tiles(case),
    ]
    scales = [
        pointer(DSL_TYPE[case.a.scale], memory.sfa, 16),
        pointer(DSL_TYPE[case.b.scale], memory.sfb, 16),
        from_dlpack(memory.alpha, assumed_align=4),
    ]
    batch, stream = 1, cuda.CUstream(0)
    compiled = cutlass.cute.compile(
        kernel.wrapper, *arguments, batch, *scales, case.clusters_at_once, stream, case.swap_ab
    )
    return lambda: compiled(*arguments, *scales, stream)


_F = (NVFP4, NVFP4)
_S7, _S3, _S0 = "sm_107a", "sm_103a", "sm_100a"

DENSE = [
    Dense(
        "dense_nvfp4_ue4m3_128x64", _S7, *_F, (256, 192, 2048), (128, 64, 256), inst=(128, 64, 128)
    ),
    Dense(
        "dense_nvfp4_ue5m3_2cta_256x128",
        _S7,
        NVFP4_UE5M3,
        NVFP4_UE5M3,
        (400, 320, 2048),
        (256, 128, 256),
        (2, 1),
        (256, 128, 128),
    ),
    Dense(
        "dense_nvfp4_ue4m3_2cta_256x256",
        _S7,
        *_F,
        (256, 512, 2048),
        (256, 256, 256),
        (2, 1),
        (256, 256, 128),
    ),
    Dense(
        "dense_nvfp4_ue5m3_2cta_256x64_cluster4x2",
        _S7,
        NVFP4_UE5M3,
        NVFP4_UE5M3,
        (512, 128, 2048),
        (256, 64, 256),
        (4, 2),
        (256, 64, 128),
    ),
    Dense(
        "dense_nvfp4_ue4m3_breuse_256x128",
        _S7,
        *_F,
        (512, 128, 2048),
        (256, 128, 256),
        inst=(128, 128, 128),
    ),
    Dense(
        "dense_nvfp4_ue5m3_2cta_breuse_512x128",
        _S7,
        NVFP4_UE5M3,
        NVFP4_UE5M3,
        (512, 256, 2048),
        (512, 128, 256),
        (2, 1),
        (256, 128, 128),
    ),
    Dense(
        "dense_nvfp4_ue4m3_128x256_swap_ab_f16",
        _S7,
        *_F,
        (256, 256, 2048),
        (128, 256, 256),
        inst=(128, 256, 128),
        out=torch.float16,
        swap_ab=True,
    ),
    Dense(
        "dense_mxfp4_128x128",
        _S7,
        MXFP4,
        MXFP4,
        (200, 256, 2048),
        (128, 128, 256),
        inst=(128, 128, 128),
    ),
    Dense(
        "dense_mxfp8_128x128",
        _S7,
        MXFP8,
        MXFP8,
        (256, 128, 1152),
        (128, 128, 128),
        inst=(128, 128, 64),
    ),
    Dense(
        "dense_mxfp4_x_mxfp8_2cta_256x128",
        _S7,
        MXFP4,
        MXFP8,
        (256, 256, 1152),
        (256, 128, 128),
        (2, 1),
        (256, 128, 64),
    ),
    Dense(
        "dense_mxfp8_x_mxfp4_128x128",
        _S7,
        MXFP8,
        MXFP4,
        (128, 256, 1152),
        (128, 128, 128),
        inst=(128, 128, 64),
    ),
    Dense("dense_nvfp4_128x128", _S0, *_F, (256, 256, 2048), (128, 128)),
    Dense("dense_nvfp4_2cta_256x128", _S0, *_F, (400, 256, 2048), (256, 128), (2, 1)),
    Dense("dense_nvfp4_128x64", _S0, *_F, (256, 192, 2048), (128, 64)),
    Dense("dense_nvfp4_2cta_256x256_cluster2x2", _S0, *_F, (256, 512, 2048), (256, 256), (2, 2)),
    Dense("dense_nvfp4_128x32", _S0, *_F, (256, 32, 2048), (128, 32)),
    Dense("dense_mxfp4_128x192", _S0, MXFP4, MXFP4, (256, 384, 2048), (128, 192)),
    Dense("dense_mxfp8_2cta_256x192", _S0, MXFP8, MXFP8, (256, 384, 1152), (256, 192), (2, 1)),
    Dense("dense_mxfp8_128x128", _S0, MXFP8, MXFP8, (256, 128, 1152), (128, 128)),
    Dense("dense_nvfp4_128x128", _S3, *_F, (256, 256, 3072), (128, 128)),
    Dense("dense_nvfp4_2cta_256x128", _S3, *_F, (256, 256, 3072), (256, 128), (2, 1)),
    Dense("dense_mxfp4_128x256", _S3, MXFP4, MXFP4, (200, 512, 3072), (128, 256)),
]

CASES = [dense.case() for dense in DENSE]
