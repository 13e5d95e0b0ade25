"""FP8 activations on a GPU: sizes that an emulator has no time for."""

import numpy as np
import pytest
import torch

from rubin_moe.formats.e4m3 import decode
from rubin_moe.formats.fp8_rows import quantize_rows
from rubin_moe.formats.quantize import dequantize
from rubin_moe.kernels.epilogue import activate
from rubin_moe.kernels.sm90.fp8_choice import choose_fp8
from rubin_moe.kernels.sm90.fp8_plan import Fp8Tiles
from tests.layers.backends import weights_of
from tests.oracles import moe, problems

from .layers import GPU
from .test_fp8_layer import kernel_of

pytestmark = pytest.mark.hw


def rounded(x: torch.Tensor) -> torch.Tensor:
    rows = quantize_rows(x)
    return decode(rows.codes) * rows.scale[:, None]


def by_torch(
    kernel, layer: moe.Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The layer in float32, activations rounded as the kernels do; on the GPU."""
    held = weights_of(layer)
    out = torch.zeros(x.shape, dtype=torch.float32, device="cuda")

    def gemm(rows, proj, expert):
        w = dequantize(proj.qdata[expert].cuda(), proj.sf[expert].cuda(), held.fmt)
        y = rounded(rows) @ w.T
        return y if proj.bias is None else y + proj.bias[expert].cuda()

    for expert in range(held.num_experts):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        h = activate(kernel.problem.activation, gemm(x[token], held.w13, expert))
        y = gemm(h.to(x.dtype), held.w2, expert)
        out.index_add_(0, token, y * weights[token, choice][:, None])
    return out


@pytest.mark.parametrize("kind", ["uniform", "power_law", "one_expert"])
@pytest.mark.parametrize(
    "tiles",
    [
        pytest.param(Fp8Tiles(), id="promoted"),
        pytest.param(Fp8Tiles(144, stages13=4, stages2=4), id="wide"),
        pytest.param(None, id="served"),
    ],
)
def test_sizes_of_gpt_oss(tiles, kind):
    """Long sums, promoted or as served; two to 3000 tokens an expert. An element that falls to the
    other side of a rounding boundary moves by 6 %, and about one in fifty does."""
    layer = problems.layer(
        3, "mxfp4", 6, 2880, 2880, "swigluoai", True, limit=7.0, act_fmt="fp8-e4m3"
    )
    kernel = kernel_of(layer, tiles=tiles or Fp8Tiles(), machine=GPU)
    if tiles is None:
        kernel.tiles = choose_fp8(kernel.problem, 3000).tiles
    prepared = kernel.prepare(weights_of(layer))
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(3000, 2880, generator=generator, device="cuda").bfloat16()
    routed = problems.routing(1, kind, 3000, 6, 2)
    ids, weights = (torch.from_numpy(np.ascontiguousarray(t)).cuda() for t in routed)
    out = kernel.run(prepared, x, ids, weights)
    assert torch.equal(kernel.run(prepared, x, ids, weights), out)
    expected = by_torch(kernel, layer, x, ids, weights)
    error = (out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.max()) < 0.02
    alone = kernel.run(prepared, x[-1:], ids[-1:], weights[-1:])
    assert torch.equal(alone[0], out[-1])


def test_rows_that_begin_beyond_2_to_the_31():
    """Bytes of x and of the result; the last rows equal those rows alone."""
    layer = problems.layer(4, "mxfp4", 4, 2880, 64, act_fmt="fp8-e4m3")
    kernel = kernel_of(layer, top_k=1, tiles=Fp8Tiles(), machine=GPU)
    prepared = kernel.prepare(weights_of(layer))
    m = 400_000
    assert 2 * m * 2880 > 2**31
    x = torch.randn(m, 2880, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, 4, (m, 1), device="cuda", dtype=torch.int32)
    weights = torch.rand(m, 1, device="cuda")
    out = kernel.run(prepared, x, ids, weights)
    tail = kernel.run(prepared, x[-64:], ids[-64:], weights[-64:])
    assert torch.equal(out[-64:], tail)
    assert bool(out[-64:].ne(0).any())
