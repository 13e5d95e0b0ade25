"""MXFP4 -> NVFP4: exact in a range of exponents, reported outside, never clamped silently."""

import dataclasses

import pytest
import torch

from rubin_moe.errors import FoldError, FormatError
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.quantize import dequantize
from rubin_moe.formats.spec import MXFP4
from rubin_moe.loader.mxfp4_cast import mxfp4_to_nvfp4
from tests.loader.fold_cases import decoded, random_weights


def with_scales(scale_bytes: list[int], up_bytes: list[int] | None = None) -> ExpertWeights:
    """One expert whose rows have these E8M0 bytes; nibbles of every value."""
    k = 32 * len(scale_bytes)
    nibbles = torch.arange(k // 2, dtype=torch.int64).mul(37).remainder(251).to(torch.uint8)

    def proj(byte_rows, halves):
        sf = torch.tensor(byte_rows, dtype=torch.uint8)[None]
        qdata = nibbles.expand(1, sf.shape[1], -1).clone()
        return ProjectionWeights(qdata, sf, torch.ones(1, halves))

    w13 = proj([scale_bytes] * k + [up_bytes or scale_bytes] * k, 2)
    return ExpertWeights(
        MXFP4, k, k, True, w13, proj([scale_bytes] * k, 1), (3,), "layers.1.experts"
    )


def stored(w: ExpertWeights, which: str = "w13") -> torch.Tensor:
    p: ProjectionWeights = getattr(w, which)
    return dequantize(p.qdata, p.sf, MXFP4, dtype=torch.float64)


def test_a_random_layer_keeps_every_value_and_every_code():
    w = random_weights(0, "mxfp4")
    out, report = mxfp4_to_nvfp4(w)
    assert out.fmt.name == "nvfp4-ue5m3"
    assert report.lossless
    assert (report.source, report.target) == ("mxfp4", "nvfp4-ue5m3")
    for which in ("w13", "w2"):
        assert torch.equal(decoded(out, which), stored(w, which))
        assert getattr(out, which).qdata is getattr(w, which).qdata
        assert getattr(out, which).dec.eq(1).all()


def test_the_ends_of_the_range_are_exact_without_alpha():
    """2^k for k in [-17, 16]: bytes 110 to 143."""
    w = with_scales([110, 143])
    out, report = mxfp4_to_nvfp4(w)
    assert report.lossless
    assert out.w13.sf[0, 0].tolist() == [1, 1, 0xF8, 0xF8]
    assert torch.equal(decoded(out), stored(w))


@pytest.mark.parametrize("scale_bytes", [[109, 127], [127, 144]])
def test_one_step_outside_is_reported_and_fits_with_an_alpha(scale_bytes):
    w = with_scales(scale_bytes)
    low, high = (b - 127 for b in scale_bytes)
    with pytest.raises(FoldError, match=rf"expert 3 gate 2\^{low}..2\^{high}"):
        mxfp4_to_nvfp4(w)
    out, report = mxfp4_to_nvfp4(w, alpha=True)
    assert report.lossless
    assert out.w13.dec[0, 0] == out.w13.dec[0, 1] != 1
    assert torch.equal(decoded(out), stored(w))


def test_ue4m3_takes_a_span_of_17_and_not_of_18():
    """Field report 30: bytes {127, 110} are lossless, {127, 109} out of range."""
    w = with_scales([127, 110])
    out, report = mxfp4_to_nvfp4(w, "ue4m3")
    assert report.lossless
    assert torch.equal(decoded(out), stored(w))
    assert out.w13.dec.tolist() == [[2.0**-8] * 2]  # kmax - 8
    with pytest.raises(FoldError, match=r"outside in 3 parts: .*expert 3 gate 2\^-18..2\^0"):
        mxfp4_to_nvfp4(with_scales([127, 109]), "ue4m3")


def test_gate_and_up_share_an_alpha_where_they_can_and_part_where_not():
    near = with_scales([127, 120], [125, 118])
    out, _ = mxfp4_to_nvfp4(near, "ue4m3")
    assert out.w13.dec[0, 0] == out.w13.dec[0, 1]
    far = with_scales([127, 120], [107, 100])
    out, report = mxfp4_to_nvfp4(far, "ue4m3")
    assert report.lossless
    assert out.w13.dec[0, 0] != out.w13.dec[0, 1]
    assert torch.equal(decoded(out), stored(far))


def test_force_rounds_and_says_so():
    w = with_scales([100, 150])
    _, report = mxfp4_to_nvfp4(w, force=True)
    blocks = 2 * w.intermediate  # of each scale, in gate
    gate = report.entries[0]
    assert (gate.blocks, gate.flushed, gate.saturated) == (2 * blocks, blocks, blocks)
    assert gate.max_rel_err == 1.0


def test_a_block_of_zeros_may_have_any_scale():
    """Signed zeros too: nothing is lost with a scale of 2^-127 or 2^127 there."""
    w = with_scales([127, 0])
    for zero in (0x00, 0x88):
        q13, q2 = w.w13.qdata.clone(), w.w2.qdata.clone()
        q13[..., 16:], q2[..., 16:] = zero, zero
        padded = dataclasses.replace(
            w,
            w13=dataclasses.replace(w.w13, qdata=q13),
            w2=dataclasses.replace(w.w2, qdata=q2),
        )
        out, report = mxfp4_to_nvfp4(padded)
        assert report.lossless
        assert torch.equal(decoded(out), stored(padded))
    with pytest.raises(FoldError, match=r"2\^-127..2\^0"):
        mxfp4_to_nvfp4(w)


def test_a_nan_scale_and_other_formats_are_refused():
    with pytest.raises(FormatError, match=r"expert 3 gate: .* no ue8m0 value"):
        mxfp4_to_nvfp4(with_scales([127, 255]))
    with pytest.raises(FoldError, match="nvfp4-ue4m3 is not mxfp4"):
        mxfp4_to_nvfp4(random_weights())
    with pytest.raises(FoldError, match="not ue8m0"):
        mxfp4_to_nvfp4(with_scales([127, 127]), "ue8m0")
