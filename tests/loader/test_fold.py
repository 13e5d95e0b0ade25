"""`fold`: four modes, their reports, refusals, and that nothing in place ever happens."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rubin_moe.errors import FoldError, FormatError
from rubin_moe.formats.ue4m3 import UE4M3
from rubin_moe.formats.ue5m3 import UE5M3
from rubin_moe.loader import fold as fold_module
from rubin_moe.loader.fold import FOLD_MODES, fold, share_alpha
from tests.loader.fold_cases import WS2, codes_of, decoded, one_row, random_weights

# -- none and exact: no error --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "exact"])
@pytest.mark.parametrize("target", ["ue4m3", "ue5m3"])
def test_none_and_exact_keep_every_decoded_value(mode, target):
    w = random_weights()
    out, report = fold(w, mode, target)
    assert out.fmt.scale == target
    for which in ("w13", "w2"):
        assert torch.equal(decoded(out, which), decoded(w, which))
        assert getattr(out, which).qdata is getattr(w, which).qdata
    assert report.lossless
    assert [e.expert for e in report.entries] == [i for i in (10, 11, 12, 13) for _ in range(3)]


@pytest.mark.parametrize("target", ["ue4m3", "ue5m3"])
@pytest.mark.parametrize("k", [-18, -9, -1, 0, 4, 9])
def test_a_fold_without_counting_is_the_one_with_it(monkeypatch, target, k):
    """Spans of codes with and without subnormals, and ends that a shift by ``k`` pushes out."""
    cases = [one_row(range(a, b), 1.5 * 2.0**k) for a, b in ((0x40, 0x7F), (0, 0x7F), (1, 9))]
    quick = [fold(w, "exact", target) for w in cases]
    monkeypatch.setattr(fold_module, "_all_exact", lambda *_: False)
    for w, (out, report) in zip(cases, quick, strict=True):
        counted, told = fold(w, "exact", target)
        assert torch.equal(out.w13.sf, counted.w13.sf)
        assert torch.equal(out.w13.dec, counted.w13.dec)
        assert report == told


def test_none_recodes_every_e4m3_scale_and_leaves_the_global_scale():
    finite = [*range(1, 0x7F), 0, 0]  # 128 codes
    w = one_row(finite, WS2)
    out, _ = fold(w, "none", "ue5m3")
    assert torch.equal(UE5M3.table[out.w13.sf.int()], UE4M3.table[w.w13.sf.int()])
    assert out.w13.dec.tolist() == [[WS2, WS2]]
    assert int(out.w13.sf[0, 0, 0x37]) == 0x78  # 1.0: 0x38 -> 0x78
    assert w.w13.sf[0, 0, 0x37] == 0x38


def test_exact_moves_the_power_of_two_and_leaves_r():
    """Codes 448..0.5 at g = 2^-15 r into UE5M3: all of 2^k moves."""
    w = one_row(codes_of([448, 56, 7, 1], UE4M3), WS2)
    out, report = fold(w, "exact", "ue5m3")
    k, r = math.floor(math.log2(WS2)), WS2 / 2.0 ** math.floor(math.log2(WS2))
    entry = report.entries[0]
    assert (entry.k, entry.r, entry.shift) == (k, r, k) == (-15, r, -15)
    assert out.w13.dec.tolist() == [[r, r]]
    values = UE5M3.table[out.w13.sf[0, 0].int()].tolist()
    assert values == [448 * 2.0**k, 56 * 2.0**k, 7 * 2.0**k, 2.0**k]


@pytest.mark.parametrize(
    ("values", "target", "shift"),
    [
        ([448, 2.0**-9], "ue5m3", -8),  # 2^-17 is the smallest UE5M3 value
        ([448, 1.125], "ue4m3", -6),  # 2^-3 is the lowest bit; 2^-9 the smallest UE4M3 value
        ([448, 2.0**-9], "ue4m3", 0),  # no room: as in the checkpoint
        ([0.0, 0.0], "ue4m3", -15),  # zero blocks constrain nothing
    ],
)
def test_exact_stops_at_the_exponent_that_keeps_every_block(values, target, shift):
    w = one_row(codes_of(values, UE4M3), WS2)
    out, report = fold(w, "exact", target)
    assert {e.shift for e in report.entries} == {shift}
    assert torch.equal(decoded(out), decoded(w))


def test_exact_moves_up_when_g_is_large():
    w = one_row(codes_of([2.0, 2.0**-9], UE4M3), 2.0**12 * 1.5)
    out, report = fold(w, "exact", "ue4m3")
    assert report.entries[0].shift == 7  # 2 -> 256; 512 would be above 448
    assert torch.equal(decoded(out), decoded(w))


# -- full: field report 3 ------------------------------------------------------------------------


def test_full_into_ue4m3_underflows_as_reported():
    """448, 56, 7, 1 become 0.0176, 0.00195, 0, 0 (codes 9, 1, 0, 0) at g = 3.72e-5."""
    w = one_row(codes_of([448, 56, 7, 1, 0.5, 2.0**-9], UE4M3), WS2)
    with pytest.raises(FoldError, match="384 of 576 blocks flushed to zero"):
        fold(w, "full", "ue4m3")
    out, report = fold(w, "full", "ue4m3", force=True)
    assert out.w13.sf[0, 0].tolist() == [9, 1, 0, 0, 0, 0]
    entry = report.entries[0]
    rows = w.intermediate
    assert (entry.blocks, entry.flushed, entry.rerounded) == (6 * rows, 4 * rows, 6 * rows)
    assert entry.max_rel_err == 1.0
    assert out.w13.dec.eq(1).all()


def test_full_into_ue5m3_loses_at_most_one_rounding_of_three_bits():
    """Where sf g >= 2^-14; below, UE5M3 is subnormal: 29 of the 127 codes flush at 3.72e-5."""
    codes = [*range(1, 0x7F), 0, 0]
    w = one_row(codes, WS2)
    out, report = fold(w, "full", "ue5m3", force=True)
    got = UE5M3.table[out.w13.sf[0, 0].int()]
    wanted = UE4M3.table[w.w13.sf[0, 0].int()] * WS2
    normal = wanted >= 2.0**-14
    error = ((got - wanted).abs() / wanted)[normal]
    assert error.max() <= 1 / 17  # 5.9 %
    assert int(((got == 0) & (wanted > 0)).sum()) == 29
    entry = report.entries[0]
    assert entry.flushed == 29 * w.intermediate
    expected = ((got - wanted).abs() / wanted)[wanted > 0]
    assert entry.max_rel_err == expected.max() == 1.0
    assert entry.mean_rel_err == pytest.approx(float(expected.mean()))


def test_full_folds_a_power_of_two_without_loss_down_to_2_to_the_minus_8():
    """g = 2^-8 is lossless in UE5M3; 2^-9 loses exactly the code 2^-9."""
    values = [448, 56, 7, 1, 0.5, 2.0**-9]
    w = one_row(codes_of(values, UE4M3), 2.0**-8)
    out, report = fold(w, "full", "ue5m3")
    assert report.lossless
    assert torch.equal(decoded(out), decoded(w))
    w = one_row(codes_of(values, UE4M3), 2.0**-9)
    out, report = fold(w, "full", "ue5m3", force=True)
    rows = w.intermediate
    assert [(e.rerounded, e.flushed) for e in report.entries] == [(rows, rows)] * 3
    assert UE5M3.table[out.w13.sf[0, 0].int()].tolist() == [v * 2.0**-9 for v in values[:5]] + [0]


def test_full_on_a_usual_checkpoint_is_allowed_into_ue5m3_and_refused_into_ue4m3():
    torch.manual_seed(0)
    codes = UE4M3.encode(torch.rand(64).double() * 300 + 60).tolist()
    w = one_row(codes, WS2)
    _, report = fold(w, "full", "ue5m3")
    assert 0 < report.mean_rel_err < 0.04
    assert report.max_rel_err <= 1 / 17
    with pytest.raises(FoldError, match=r"mean relative error 0\.\d+ \(allowed 0\.04\)"):
        fold(w, "full", "ue4m3")


def test_saturation_is_refused_and_counted():
    w = one_row(codes_of([448, 1], UE4M3), 300.0)
    with pytest.raises(FoldError, match="saturated"):
        fold(w, "full", "ue5m3")
    out, report = fold(w, "full", "ue5m3", force=True)
    assert report.entries[0].saturated == w.intermediate
    assert out.w13.sf[0, 0].tolist()[0] == 0xFE


def test_requantize_is_never_worse_than_full_and_reports_its_error():
    torch.manual_seed(1)
    w = random_weights(3)
    w = dataclasses.replace(w, w13=dataclasses.replace(w.w13, dec=w.w13.dec * 0.9))
    stored = decoded(w)
    for target in ("ue4m3", "ue5m3"):
        full, _ = fold(w, "full", target, force=True)
        again, report = fold(w, "full+requantize", target)
        assert again.w13.dec.eq(1).all()

        def block_errors(out):
            e = (decoded(out) - stored).square()
            return e.reshape(*e.shape[:2], -1, 16).sum(-1)

        assert (block_errors(again) <= block_errors(full) * (1 + 1e-5) + 1e-30).all()
        error = ((decoded(again) - stored).abs() / stored.abs())[stored != 0]
        assert report.max_rel_err >= float(error.max()) - 1e-6
        assert 0 < report.mean_rel_err < 0.2
    assert w.w13.qdata.equal(random_weights(3).w13.qdata)


# -- purity and refusals -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", FOLD_MODES)
def test_folding_twice_gives_the_same_bytes_and_leaves_the_source_alone(mode):
    w = random_weights(2)
    before = {p: {n: t.clone() for n, t in getattr(w, p).tensors().items()} for p in ("w13", "w2")}
    first, report = fold(w, mode, "ue5m3", force=True)
    second, again = fold(w, mode, "ue5m3", force=True)
    assert report == again
    for p in ("w13", "w2"):
        for name, tensor in getattr(first, p).tensors().items():
            assert torch.equal(tensor, getattr(second, p).tensors()[name])
            assert torch.equal(getattr(w, p).tensors()[name], before[p][name])


def test_a_folded_layer_folds_again_to_itself():
    once, _ = fold(random_weights(2), "exact", "ue5m3")
    twice, report = fold(once, "exact")
    assert report.lossless
    assert torch.equal(once.w13.sf, twice.w13.sf)
    assert torch.equal(once.w13.dec, twice.w13.dec)


@pytest.mark.parametrize("mode", FOLD_MODES)
def test_nvfp4_never_becomes_mxfp4(mode):
    with pytest.raises(FoldError, match=r"layers.0.experts: NVFP4 experts stay NVFP4 \(group 16"):
        fold(random_weights(), mode, "ue8m0")


def test_mxfp4_has_nothing_to_fold():
    w = random_weights(0, "mxfp4")
    for mode in FOLD_MODES:
        out, report = fold(w, mode)
        assert out is w
        assert report.entries == ()
    with pytest.raises(FoldError, match="mxfp4 has no global scale to fold"):
        fold(w, "exact", "ue5m3")


def test_ue5m3_scales_that_do_not_fit_ue4m3_are_refused_by_name():
    w, _ = fold(one_row(codes_of([448, 1], UE4M3), 1.0), "none", "ue5m3")
    wide = w.w13.sf.clone()
    wide[..., 1] = 1  # 2^-17
    w = dataclasses.replace(w, w13=dataclasses.replace(w.w13, sf=wide))
    with pytest.raises(FoldError, match="experts expert 0 gate: no power of two brings"):
        fold(w, "exact", "ue4m3")
    with pytest.raises(FoldError, match="expert 0 gate: 32 block scales have no exact ue4m3"):
        fold(w, "none", "ue4m3")


@pytest.mark.parametrize("g", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_global_scale_is_named(g):
    w = one_row(codes_of([1.0], UE4M3) * 2, WS2)
    bad = w.w2.dec.clone()
    bad[0, 0] = g
    w = dataclasses.replace(w, w2=dataclasses.replace(w.w2, dec=bad))
    with pytest.raises(FormatError, match=r"experts expert 0 down: global scale .*positive"):
        fold(w)


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xB8])
def test_a_scale_that_is_no_number_is_named(byte):
    w = random_weights()
    sf = w.w13.sf.clone()
    sf[2, 40, 1] = byte
    w = dataclasses.replace(w, w13=dataclasses.replace(w.w13, sf=sf))
    with pytest.raises(FormatError, match="expert 12 up: 1 of 128 block scales are no ue4m3"):
        fold(w)


def test_an_unknown_mode_is_refused():
    with pytest.raises(FoldError, match="known: none, exact, full"):
        fold(random_weights(), "half")


# -- one alpha for both halves: field reports 1, 2 and 25 ----------------------------------------


@pytest.mark.parametrize(("gate", "up"), [(3.85e-5, 4.83e-5), (4.83e-5, 3.85e-5)])
def test_sharing_an_alpha_rescales_the_other_half(gate, up):
    w = one_row(codes_of([448, 56, 7, 1], UE4M3), float(np.float32(gate)), float(np.float32(up)))
    out, report = share_alpha(w)
    assert out.w13.dec.tolist() == [[float(np.float32(4.83e-5))] * 2]
    error = (decoded(out) - decoded(w)).abs() / decoded(w)
    assert 0.01 < error.max() <= 1 / 15  # bounded by rounding an E4M3 mantissa
    smaller = error[:, :64] if gate < up else error[:, 64:]
    larger = error[:, 64:] if gate < up else error[:, :64]
    assert larger.max() == 0
    assert smaller.max() == error.max()
    assert report.total("rerounded") > 0
    # the mistake of the reports: gate's scale for both halves
    wrong = dataclasses.replace(
        w, w13=dataclasses.replace(w.w13, dec=w.w13.dec[:, :1].expand(1, 2))
    )
    ratio = decoded(wrong)[:, 64:] / decoded(w)[:, 64:]
    assert ratio.max() == pytest.approx(gate / up, rel=1e-6)


@pytest.mark.parametrize("ratio", [2.0, 0.5, 8.0])
def test_a_ratio_that_is_a_power_of_two_is_bit_exact(ratio):
    w = one_row(codes_of([448, 56, 7, 1], UE4M3), WS2, WS2 * ratio)
    out, report = share_alpha(w)
    assert report.lossless
    assert torch.equal(decoded(out), decoded(w))
    assert out.w13.dec[0, 0] == out.w13.dec[0, 1]


def test_the_smaller_scale_is_kept_where_only_that_is_exact():
    """2^-9 cannot shrink, and 2 can grow."""
    w = one_row(codes_of([2, 2.0**-9], UE4M3), WS2, WS2 * 2)
    out, report = share_alpha(w)
    assert report.lossless
    assert torch.equal(decoded(out), decoded(w))
    assert out.w13.dec.tolist() == [[WS2, WS2]]


def test_equal_scales_stay_and_mxfp4_is_refused():
    w = one_row(codes_of([448, 1], UE4M3), WS2)
    out, report = share_alpha(w)
    assert report.lossless
    assert torch.equal(out.w13.sf, w.w13.sf)
    with pytest.raises(FoldError, match="no global scales"):
        share_alpha(random_weights(0, "mxfp4"))
