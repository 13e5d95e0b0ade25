"""A host function for FC1 kernels past their own pointer wrapper, which takes no output without
scales. CuTe DSL reads the annotations here, so they are not postponed."""

from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
from cutlass import cute

from tests.emulator.peers.routing import Sizes


def unquantized_fc1(kernel: Any, sizes: Sizes, rows: int, tile_m: int, block: int) -> Callable:
    """`host(x, w, x_sf, w_sf, out, alpha, tile_expert, tile_row_limit, mapping, num_tiles, stream)`
    that launches `kernel` with a 16-bit output [rows, n / 2]; the others are pointers."""
    scale_columns = sizes.k // block

    @cute.jit
    def host(
        x: cute.Pointer,
        w: cute.Pointer,
        x_sf: cute.Pointer,
        w_sf: cute.Pointer,
        out: cute.Pointer,
        alpha: cute.Pointer,
        tile_expert: cute.Pointer,
        tile_row_limit: cute.Pointer,
        mapping: cute.Pointer,
        num_tiles: cute.Pointer,
        stream: cuda.CUstream,
    ):
        swizzled = (32, 4, sizes.n // 128, 4, scale_columns // 4, sizes.num_experts)
        kernel(
            _matrix(x, sizes.num_tokens, sizes.k, 1),
            _matrix(w, sizes.n, sizes.k, sizes.num_experts),
            _matrix(out, rows, sizes.n // 2, 1),
            _matrix(x_sf, sizes.num_tokens, scale_columns, 1),
            cute.make_tensor(w_sf, cute.make_ordered_layout(swizzled, order=(2, 1, 4, 0, 3, 5))),
            None,
            None,
            None,
            _vector(tile_expert, rows // tile_m),
            _vector(tile_row_limit, rows // tile_m),
            _vector(mapping, rows),
            _vector(num_tiles, 1),
            _vector(alpha, sizes.num_experts),
            max_active_clusters=2,
            stream=stream,
        )

    return host


def _matrix(pointer: cute.Pointer, *shape: int) -> cute.Tensor:
    return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=(1, 0, 2)))


def _vector(pointer: cute.Pointer, size: int) -> cute.Tensor:
    return cute.make_tensor(pointer, cute.make_layout((size,)))
