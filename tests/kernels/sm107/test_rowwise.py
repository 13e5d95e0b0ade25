"""Quantization of tokens and the sum over choices, executed on the emulator, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rubin_moe.emulation import EmulatorLauncher
from rubin_moe.formats import e4m3
from rubin_moe.formats.quantize import quantize
from rubin_moe.formats.spec import FORMATS
from rubin_moe.kernels.cpu_tcgen05.host import Tcgen05Kernel
from rubin_moe.kernels.sm107.host import Sm107Kernel

from .layers import ACT, Case
from .test_emulated import kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEC = torch.tensor([0.0371])


def a_kernel(fmt: str) -> Sm107Kernel:
    return kernel(Case(fmt, 1, 1, 64, 32, top_k=1))


def awkward(rows: int, columns: int) -> torch.Tensor:
    """Every magnitude, zeros of both signs, blocks of zeros, values at and beside boundaries."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(rows, columns)) * np.exp2(rng.integers(-20, 12, (rows, columns // 16)))[
        :, :, None
    ].repeat(16, 2).reshape(rows, columns)
    x = torch.from_numpy(x).float()
    x[0, :16] = 0.0
    x[0, 16:32] = -0.0
    x[1, :16] = torch.tensor([6.0, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 2) * DEC
    x[1, 16:32] = x[1, :16].nextafter(torch.tensor(9.0))
    x[1, 32:48] = -x[1, :16].nextafter(torch.tensor(0.0))
    x[2, :16] = 1e-30
    x[2, 16:32] = 3e38
    x[3, 5] = float("nan")
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", ACT)
def test_tokens_are_quantized_as_the_reference_does(fmt, dtype):
    x = awkward(40, 320).to(dtype)
    codes, scales = a_kernel(fmt)._quantized(x, DEC)
    expected = quantize(x, FORMATS[ACT[fmt]], DEC if fmt == "nvfp4-ue4m3" else None)
    for got, want in ((scales, expected.sf), (codes, expected.qdata)):
        assert torch.equal(got[:, : want.shape[1]], want)
        assert not got[:, want.shape[1] :].any()


def test_mxfp8_scales_beside_every_power_of_two():
    """448 times a power of two is the last magnitude of its scale, the next one the next's."""
    edge = 448 * torch.exp2(torch.arange(-126, 119).float())
    amax = torch.cat(
        [edge, edge.nextafter(torch.tensor(torch.inf)), torch.tensor([0.0, 2.0**-126])]
    )
    x = torch.zeros(len(amax), 64)
    x[:, 37] = -amax
    codes, scales = a_kernel("mxfp4")._quantized(x, DEC)
    expected = quantize(x, FORMATS["mxfp8"])
    assert torch.equal(scales[:, :2], expected.sf)
    assert torch.equal(codes[:, :64], expected.qdata)


def test_scales_at_every_rounding_boundary_of_ue4m3():
    """Quotients at midpoints of neighbouring scales, and a float32 step beside them."""
    values = e4m3.decode(torch.arange(0x7F, dtype=torch.uint8)).double()
    middle = ((values[1:] + values[:-1]) / 2 * 6 * DEC.double()).float()
    amax = torch.cat([middle, middle.nextafter(DEC * 0), middle.nextafter(DEC * 1e9)])
    x = torch.zeros(len(amax), 64)
    x[:, 3] = -amax
    _, scales = a_kernel("nvfp4-ue4m3")._quantized(x, DEC)
    assert torch.equal(scales[:, :4], quantize(x, FORMATS["nvfp4-ue4m3"], DEC).sf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_choices_are_summed_in_order_and_rounded_once(dtype):
    slots = torch.randn(7, 3, 64, generator=torch.Generator().manual_seed(1)) * 1e3
    got = a_kernel("nvfp4-ue5m3")._sum(slots, dtype)
    assert torch.equal(got, ((slots[:, 0] + slots[:, 1]) + slots[:, 2]).to(dtype))


def test_one_input_scale_for_all_experts_of_a_token():
    """A token is quantized once, with the largest scale of the layer's experts."""
    case = Case("nvfp4-ue4m3", 7, 4, 256, 256)
    weights = case.weights()
    scales = torch.tensor([0.011, 0.02, 0.017, 0.013])[:, None].expand(-1, 2)
    weights = replace(weights, w13=replace(weights.w13, input_dec=scales.contiguous()))
    ours = kernel(case)
    slow = Tcgen05Kernel(ours.problem)
    prepared = ours.prepare(weights)
    assert prepared.input_dec.tolist() == [scales.max()]
    largest = torch.full_like(weights.w13.input_dec, scales.max())
    reference = slow.prepare(replace(weights, w13=replace(weights.w13, input_dec=largest)))
    got = ours.run(prepared, *case.batch())
    torch.testing.assert_close(got, slow.run(reference, *case.batch()), rtol=1e-5, atol=1e-5)


def test_other_dtypes_are_refused():
    with pytest.raises(Exception, match="hidden states of float64"):
        a_kernel("nvfp4-ue5m3")._quantized(torch.zeros(1, 64, dtype=torch.float64), DEC)


def test_launcher_runs_the_rowwise_kernels():
    """Routing, quantize, FC1, FC2, sum: five launches a layer."""
    case = Case("nvfp4-ue5m3", 3, 4, 256, 64)
    k = kernel(case)
    assert isinstance(k._launch, EmulatorLauncher)
    k.run(k.prepare(case.weights()), *case.batch())
    assert len(k._launch.reports) == 5
