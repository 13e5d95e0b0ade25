"""The oracle against a third party's tables and against arithmetic by hand."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from . import moe, problems, quant, routing, tolerance


@pytest.mark.parametrize(
    ("table", "dtype"),
    [
        (quant.SCALES["ue4m3"][:128], ml_dtypes.float8_e4m3fn),
        (quant.SCALES["ue8m0"], ml_dtypes.float8_e8m0fnu),
        (quant.E4M3, ml_dtypes.float8_e4m3fn),
        (quant.E2M1, ml_dtypes.float4_e2m1fn),
    ],
)
def test_tables_equal_ml_dtypes(table, dtype):
    theirs = np.arange(table.size, dtype=np.uint8).view(dtype).astype(np.float64)
    np.testing.assert_array_equal(table, theirs)


def test_ue5m3_corners():
    table = quant.SCALES["ue5m3"]
    assert table[0] == 0
    assert table[1] == 2.0**-17
    assert table[0x78] == 1
    assert table[0x80] == 2
    assert table[0xFE] == 114688
    assert np.isnan(table[0xFF])


def test_e2m1_ties_go_to_even():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7])
    for sign in (1, -1):
        got = quant.E2M1[quant.encode_e2m1(sign * ties)]
        np.testing.assert_array_equal(got, sign * np.array([0, 1, 1, 2, 2, 4, 4, 6]))


def test_elements_are_divided_by_the_rounded_scale():
    x = np.zeros(16)
    x[0], x[1] = 7.0, 1.0
    scale = quant.SCALES["ue5m3"][quant.block_scales(x, "nvfp4-ue5m3")[0]]
    assert scale == 1.25  # 7/6 rounded up
    np.testing.assert_array_equal(quant.quantize_dequantize(x, "nvfp4-ue5m3")[:2], [7.5, 1.25])


@pytest.mark.parametrize(
    ("gate", "up", "silu", "oai"),
    [(1, 1, 0.7310586, 1.6915), (10, 9, 89.99591, 56.0), (2, -1, -1.761594, 0.0)],
)
def test_activations_by_hand(gate, up, silu, oai):
    h = np.array([float(gate), float(up)])
    base = problems.layer(0, "mxfp4")
    plain = moe.Layer("mxfp4", base.w13, base.w2, kind="silu")
    gpt = moe.Layer("mxfp4", base.w13, base.w2, kind="swigluoai", limit=7.0)
    assert moe.activate(plain, h)[0] == pytest.approx(silu, rel=1e-4)
    assert moe.activate(gpt, h)[0] == pytest.approx(oai, rel=1e-4, abs=1e-4)


def test_the_bound_holds_a_right_result_and_refuses_swapped_halves():
    layer = problems.layer(1, "nvfp4-ue4m3")
    rng = np.random.default_rng(2)
    x = rng.normal(size=(5, 64)).astype(np.float32)
    ids, weights = problems.routing(3, "uniform", 5, 4, 2)
    expected = moe.moe(layer, x, ids, weights)
    bound = tolerance.bound(layer, x, ids, weights, "bfloat16")
    noisy = expected * (1 + 2.0**-9)
    assert (np.abs(noisy - expected) <= bound).all()
    swapped = moe.Projection(
        np.roll(layer.w13.qdata, 32, axis=1), np.roll(layer.w13.sf, 32, axis=1), layer.w13.dec
    )
    wrong = moe.moe(moe.Layer(layer.fmt, swapped, layer.w2), x, ids, weights)
    assert (np.abs(wrong - expected) > bound).mean() > 0.5


@pytest.mark.parametrize(
    ("fmt", "act", "dec"),
    [
        ("nvfp4-ue4m3", "nvfp4-ue4m3", 2.0**-6),
        ("nvfp4-ue5m3", "nvfp4-ue5m3", 1.0),
        ("mxfp4", "mxfp8", 1.0),
    ],
)
def test_the_bound_of_quantized_activations_refuses_a_skipped_quantization(fmt, act, dec):
    layer = replace(problems.layer(1, fmt), act_fmt=act, act_dec=(dec, dec))
    x = np.random.default_rng(2).normal(size=(5, 64)).astype(np.float32)
    ids, weights = problems.routing(3, "uniform", 5, 4, 2)
    expected = moe.moe(layer, x, ids, weights)
    bound = tolerance.bound(layer, x, ids, weights, "float32")
    assert (np.abs(expected * (1 + 2.0**-24) - expected) <= bound).all()
    skipped = moe.moe(replace(layer, act_fmt=None), x, ids, weights)
    assert (np.abs(skipped - expected) > bound).mean() > 0.9


def test_the_envelope_covers_a_flipped_element_and_a_flipped_scale():
    x = np.zeros(16)
    x[0], x[1] = 6.0, 2.5  # 2.5 is a tie: up to 3 with the least nudge
    moved = quant.rounding_envelope(x, np.full(16, 1e-9), "nvfp4-ue5m3")
    assert moved[1] >= 1.0
    assert moved[0] == pytest.approx(0.75)  # 6 (1 + tiny) needs the next scale: 6 * 1.125
    assert quant.rounding_envelope(x, np.zeros(16), "nvfp4-ue5m3").max() == 0


def test_an_activation_scale_an_expert():
    layer = replace(problems.layer(4, "nvfp4-ue4m3"), act_fmt="nvfp4-ue4m3")
    x = np.random.default_rng(5).normal(size=(4, 64))
    ids, weights = np.arange(4)[:, None], np.ones((4, 1), dtype=np.float32)
    each = np.array([0.01, 0.02, 0.03, 0.05])
    own = replace(layer, act_dec=(each, each), input_scale="expert")
    together = moe.moe(own, x, ids, weights)
    largest = moe.moe(replace(own, input_scale="layer"), x, ids, weights)
    for e in range(4):
        alone = replace(layer, act_dec=(each[e], each[e]))
        part = slice(e, e + 1)
        np.testing.assert_array_equal(
            moe.moe(alone, x[part], ids[part], weights[part])[0], together[e]
        )
        alone = replace(layer, act_dec=(each[3], each[e]))
        np.testing.assert_array_equal(
            moe.moe(alone, x[part], ids[part], weights[part])[0], largest[e]
        )


def test_routing_by_hand():
    logits = np.array([[0.0, np.log(3.0), np.log(2.0), -50.0]])
    weights, ids = routing.route(routing.Router(2), logits)
    assert ids.tolist() == [[1, 2]]
    np.testing.assert_allclose(weights, [[3 / 6, 2 / 6]])
    weights, _ = routing.route(routing.Router(2, renormalize=True, factor=2.5), logits)
    np.testing.assert_allclose(weights, [[1.5, 1.0]])
    weights, _ = routing.route(routing.Router(2, after=True), logits)
    np.testing.assert_allclose(weights, [[0.6, 0.4]])
    grouped = routing.Router(2, "sigmoid", num_groups=2, top_groups=1)
    _, ids = routing.route(grouped, logits, bias=np.array([0.0, 0.0, 0.0, 9.0]))
    assert ids.tolist() == [[3, 2]]
