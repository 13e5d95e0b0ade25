"""Block scales in the exponents of E4M3: exact, or refused by name."""

import pytest
import torch

from rubin_moe.errors import FormatError
from rubin_moe.formats import e2m1, e4m3
from rubin_moe.formats.quantize import dequantize
from rubin_moe.formats.spec import MXFP4
from rubin_moe.kernels.sm90.fp8_plan import EXPONENTS, table_words
from rubin_moe.kernels.sm90.fp8_scales import Fp8Scales, fp8_scales


def random_codes(n: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n + k)
    return torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)


def as_the_kernel_reads(qdata: torch.Tensor, scales: Fp8Scales) -> torch.Tensor:
    """float64 ``[N, K]``."""
    table = torch.tensor(
        [list(b"".join(w.to_bytes(4, "little") for w in pair)) for pair in table_words()],
        dtype=torch.uint8,
    )
    codes = e2m1.unpack(qdata).long()
    rows = (scales.entries // 8).long().repeat_interleave(32, -1)
    magnitude = e4m3.decode(table[rows, codes & 7], torch.float64)
    return torch.where(codes >= 8, -magnitude, magnitude) * scales.alpha.double()[:, None]


@pytest.mark.parametrize("top", [0, 20, 120, 254])
def test_every_exponent_is_exact(top):
    """15 neighbouring scales, each with all 16 codes in both places of a byte."""
    low = max(0, top - EXPONENTS + 1)
    sf = torch.arange(low, top + 1, dtype=torch.uint8)[None].repeat(4, 1)
    qdata = random_codes(4, 32 * sf.shape[1])
    qdata[0] = torch.arange(16, dtype=torch.uint8).repeat(sf.shape[1]) * 0x11
    expected = dequantize(qdata, sf, MXFP4, dtype=torch.float64)
    assert torch.equal(as_the_kernel_reads(qdata, fp8_scales(qdata, sf, "w")), expected)


def test_rows_have_windows_of_their_own_and_zeros_any_scale():
    sf = torch.tensor([[100, 114, 0], [200, 214, 1], [3, 4, 5]], dtype=torch.uint8)
    qdata = random_codes(3, 96) | 0x11
    qdata[:2, 32:] = 0x80  # zeros of both signs
    qdata[2] = 0
    expected = dequantize(qdata, sf, MXFP4, dtype=torch.float64)
    found = as_the_kernel_reads(qdata, fp8_scales(qdata, sf, "w"))
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


def test_a_row_that_does_not_fit_is_named():
    sf = torch.full((5, 2), 120, dtype=torch.uint8)
    sf[3] = torch.tensor([105, 120])
    qdata = random_codes(5, 64) | 0x22
    with pytest.raises(FormatError, match=r"w13 of expert 7: row 3 has .* 2\^-22 to 2\^-7; E4M3"):
        fp8_scales(qdata, sf, "w13 of expert 7")
    sf[3, 0] = 106
    fp8_scales(qdata, sf, "w13 of expert 7")
    sf[0, 0] = 255
    with pytest.raises(FormatError, match="expert 7: NaN"):
        fp8_scales(qdata, sf, "expert 7")


def test_nothing_is_fine():
    empty = fp8_scales(torch.zeros(4, 0).byte(), torch.zeros(4, 0).byte(), "w")
    assert empty.entries.shape == (4, 0)
