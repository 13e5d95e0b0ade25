"""Every backend against the float64 oracle: formats, activations, scales and biases."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rubin_moe.errors import CheckpointError
from rubin_moe.layers.experts import MoEExperts
from tests.layers import backends
from tests.oracles import moe, problems, quant

KINDS = {
    "silu": {},
    "swigluoai": {"limit": 7.0, "bias": True},
    "gelu_tanh": {},
    "relu2": {"bias": True},
}


def ones_layer(fmt: str, codes: np.ndarray, nibble: int = 2) -> moe.Layer:
    """No gate (relu2), one expert: row n of w13 has scale ``codes[n]`` and weights of one nibble;
    w2 is the identity times 1."""
    intermediate = len(codes)
    hidden = quant.BLOCK[fmt]
    one = {"nvfp4-ue4m3": 0x38, "nvfp4-ue5m3": 0x78, "mxfp4": 127}[fmt]
    q13 = np.full((1, intermediate, hidden // 2), 0, dtype=np.uint8)
    q13[:, :, 0] = nibble  # the first element alone
    sf13 = np.broadcast_to(codes.astype(np.uint8)[None, :, None], (1, intermediate, 1)).copy()
    q2 = np.full((1, hidden, intermediate // 2), 0, dtype=np.uint8)
    sf2 = np.full((1, hidden, intermediate // quant.BLOCK[fmt]), one, dtype=np.uint8)
    for n in range(min(hidden, intermediate)):
        q2[0, n, n // 2] = 0x02 if n % 2 == 0 else 0x20
    dec = np.ones((1, 1), dtype=np.float32)
    return moe.Layer(
        fmt, moe.Projection(q13, sf13, dec), moe.Projection(q2, sf2, dec), kind="relu2"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", backends.cases())
def test_formats_activations_and_dtypes(case, kind, dtype):
    layer = backends.with_case(problems.layer(11, case.fmt, kind=kind, **KINDS[kind]), case)
    x = backends.tokens(1, 7, dtype=dtype)
    ids, weights = problems.routing(2, "uniform", 7, 4, 2)
    out = backends.call(backends.experts_of(layer, case, dtype=dtype), case, x, ids, weights)
    backends.assert_close(layer, x, ids, weights, out)
    assert out.abs().max() > 0


@pytest.mark.parametrize("routing", problems.ROUTINGS)
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 33])
@pytest.mark.parametrize("case", backends.one_a_backend())
def test_routings_and_numbers_of_tokens(case, num_tokens, routing):
    layer = backends.with_case(problems.layer(5, case.fmt, 8), case)
    x = backends.tokens(3, num_tokens)
    ids, weights = problems.routing(4, routing, num_tokens, 8, 3)
    out = backends.call(backends.experts_of(layer, case, top_k=3), case, x, ids, weights)
    backends.assert_close(layer, x, ids, weights, out)


@pytest.mark.parametrize(("hidden", "intermediate"), [(32, 32), (160, 96), (96, 352), (576, 64)])
@pytest.mark.parametrize("case", backends.cases())
def test_sizes_that_fill_no_tile(case, hidden, intermediate):
    layer = backends.with_case(problems.layer(6, case.fmt, 2, hidden, intermediate), case)
    x = backends.tokens(5, 3, hidden)
    ids, weights = problems.routing(7, "uniform", 3, 2, 2)
    out = backends.call(backends.experts_of(layer, case), case, x, ids, weights)
    backends.assert_close(layer, x, ids, weights, out)


@pytest.mark.parametrize(
    ("gate", "up"), [(3.85e-5, 4.83e-5), (4.83e-5, 3.85e-5), (2.0**-15, 2.0**-14)]
)
@pytest.mark.parametrize("case", backends.cases(fmt="nvfp4-ue4m3"))
def test_gate_and_up_have_a_global_scale_each(case, gate, up):
    """Field reports 1 and 2: a build that uses gate's for both is far outside the bound."""
    base = problems.layer(8, case.fmt)
    dec = base.w13.dec.copy()
    dec[0] = gate, up
    layer = backends.with_case(replace(base, w13=replace(base.w13, dec=dec)), case)
    x = backends.tokens(6, 4)
    ids, weights = np.zeros((4, 1), dtype=np.int64), np.ones((4, 1), dtype=np.float32)
    out = backends.call(backends.experts_of(layer, case, top_k=1), case, x, ids, weights)
    backends.assert_close(layer, x, ids, weights, out)
    dec_wrong = dec.copy()
    dec_wrong[0] = gate, gate
    wrong = replace(layer, w13=replace(layer.w13, dec=dec_wrong))
    with pytest.raises(AssertionError, match="outside"):
        backends.assert_close(wrong, x, ids, weights, out)


@pytest.mark.parametrize("case", backends.cases())
def test_gate_is_the_first_half(case):
    """Field reports 33 and 34: gate = -3, up = 2: up silu(gate) is -0.285 and not -5.285."""
    layer = problems.layer(9, case.fmt, 1, 32, 32)
    sf_one = {"nvfp4-ue4m3": 0x38, "nvfp4-ue5m3": 0x78, "mxfp4": 127}[case.fmt]
    q13 = np.zeros((1, 64, 16), dtype=np.uint8)
    q13[0, :32, 0], q13[0, 32:, 0] = 0xD, 0x4  # -3 in gate rows, 2 in up rows, first element
    q2 = np.zeros((1, 32, 16), dtype=np.uint8)
    q2[0, :, 0] = 0x2  # the first channel, times 1

    def projection(q, halves):
        sf = np.full((1, *q.shape[1:2], 32 // quant.BLOCK[case.fmt]), sf_one, dtype=np.uint8)
        return moe.Projection(q, sf, np.ones((1, halves), dtype=np.float32))

    layer = backends.with_case(
        replace(layer, w13=projection(q13, 2), w2=projection(q2, 1)), case, 2.0**-9
    )
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    ids, weights = np.zeros((1, 1), dtype=np.int64), np.ones((1, 1), dtype=np.float32)
    out = backends.call(backends.experts_of(layer, case, top_k=1), case, x, ids, weights)
    backends.assert_close(layer, x, ids, weights, out)
    assert out[0, 0].item() == pytest.approx(2 * -3 / (1 + np.exp(3)), rel=0.1)


@pytest.mark.parametrize(
    "case", backends.cases(fmt="nvfp4-ue4m3") + backends.cases(fmt="nvfp4-ue5m3")
)
def test_every_block_scale_code_is_decoded(case):
    """Field reports 7 and 8: subnormal codes too, with a global scale of 1."""
    last = 0x7E if case.fmt == "nvfp4-ue4m3" else 0xFE
    codes = np.arange(1, last + 1)
    for start in range(0, len(codes) - 15, 16):
        layer = replace(ones_layer(case.fmt, codes[start : start + 16]), act_fmt=case.act_fmt)
        value = quant.SCALES[quant.SCALE_TYPE[case.fmt]][codes[start : start + 16]]
        x = torch.zeros(1, 16)
        x[0, 0] = 6.0  # a value that every activation format holds
        layer = backends.with_case(layer, case, 1.0)
        if case.act == "nvfp4-ue4m3":
            second = np.float32(max(36 * value.max() ** 2, 1e-9) / 2688)
            layer = replace(layer, act_dec=(1.0, second))
        ids, weights = np.zeros((1, 1), dtype=np.int64), np.ones((1, 1), dtype=np.float32)
        out = backends.call(backends.experts_of(layer, case, top_k=1), case, x, ids, weights)
        backends.assert_close(layer, x, ids, weights, out)
        if case.act == "16bit":
            np.testing.assert_allclose(out[0].numpy(), (6 * value) ** 2, rtol=1e-6)


@pytest.mark.parametrize("case", backends.cases(fmt="mxfp4"))
@pytest.mark.parametrize("byte", [0, 1, 64, 103, 112, 127, 160])
def test_e8m0_bytes_at_the_small_end(case, byte):
    """Field report 9: byte 0 is 2^-127 and not 0; no byte is flushed."""
    layer = replace(ones_layer("mxfp4", np.full(32, byte)), act_fmt=case.act_fmt)
    x = torch.zeros(1, 32)
    x[0, 0] = 2.0 ** min(100, 127 - byte + 20)
    ids, weights = np.zeros((1, 1), dtype=np.int64), np.ones((1, 1), dtype=np.float32)
    out = backends.call(backends.experts_of(layer, case, top_k=1), case, x, ids, weights)
    backends.assert_close(layer, x, ids, weights, out)
    expected = (x[0, 0].item() * 2.0 ** (byte - 127)) ** 2
    assert out[0, 0].item() == expected > 0


@pytest.mark.parametrize("case", backends.cases())
def test_clamp_and_bias_are_in_real_units(case):
    """Field report 22: limit 7 and a bias of 0.5 whatever the scales; gate 10 gives 7."""
    base = problems.layer(10, case.fmt, 1, 32, 32, kind="swigluoai", bias=True, limit=7.0)
    dec = base.w13.dec.copy()
    if case.fmt == "nvfp4-ue4m3":
        dec[:] = 0.01
    bias = np.where(np.arange(64) < 32, 10.0, 9.5).astype(np.float32)[None]
    w13 = replace(base.w13, dec=dec, bias=bias)
    layer = backends.with_case(replace(base, w13=w13), case)
    x = torch.zeros(2, 32)  # the bias alone: gate 10, up 9.5
    ids, weights = np.zeros((2, 1), dtype=np.int64), np.ones((2, 1), dtype=np.float32)
    out = backends.call(backends.experts_of(layer, case, top_k=1), case, x, ids, weights)
    backends.assert_close(layer, x, ids, weights, out)
    assert moe.activate(layer, bias[0].astype(np.float64))[0] == pytest.approx(56.0, rel=1e-4)


@pytest.mark.parametrize("limit", [None, 4.0, 10.0])
@pytest.mark.parametrize("case", backends.cases())
def test_plain_silu_with_a_clamp(case, limit):
    """Field reports 66 and 68 (DeepSeek-V4): the clamp comes before any quantization."""
    layer = backends.with_case(problems.layer(12, case.fmt, bias=True, limit=limit), case, 2.0**-4)
    layer = replace(layer, w13=replace(layer.w13, bias=layer.w13.bias * 40))
    x = backends.tokens(8, 6)
    ids, weights = problems.routing(9, "uniform", 6, 4, 2)
    out = backends.call(backends.experts_of(layer, case), case, x, ids, weights)
    backends.assert_close(layer, x, ids, weights, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", backends.cases())
def test_router_weight_on_the_input(case, dtype):
    """Llama-4: top-1, before quantization, and not a second time on the output."""
    layer = backends.with_case(problems.layer(13, case.fmt, weight_on_input=True), case)
    x = backends.tokens(10, 5, dtype=dtype)
    ids, _ = problems.routing(11, "uniform", 5, 4, 1)
    weights = np.random.default_rng(0).uniform(0.2, 0.9, (5, 1)).astype(np.float32)
    out = backends.call(
        backends.experts_of(layer, case, top_k=1, dtype=dtype), case, x, ids, weights
    )
    backends.assert_close(layer, x, ids, weights, out)


def test_quantized_activations_are_the_oracles_bit_for_bit():
    """relu2 on small integers: every float32 sum is exact, so the outputs must be equal."""
    case = next(p.values[0] for p in backends.cases(fmt="nvfp4-ue5m3", name="cpu-tcgen05"))
    base = problems.layer(14, case.fmt, kind="relu2")
    flat = np.full_like(base.w13.sf, 0x78)  # scale 1: products of small multiples of 1/4
    layer = replace(base, w13=replace(base.w13, sf=flat, dec=np.ones_like(base.w13.dec)))
    layer = backends.with_case(
        replace(layer, w2=replace(layer.w2, dec=np.ones_like(layer.w2.dec))), case
    )
    layer = replace(layer, w2=replace(layer.w2, sf=np.full_like(layer.w2.sf, 0x78)))
    x = torch.randint(-8, 9, (16, 64), generator=torch.Generator().manual_seed(0)).float()
    ids, _ = problems.routing(15, "uniform", 16, 4, 2)
    weights = np.full(ids.shape, 0.5, dtype=np.float32)
    out = backends.call(backends.experts_of(layer, case), case, x, ids, weights)
    np.testing.assert_array_equal(out.double().numpy(), moe.moe(layer, x.numpy(), ids, weights))


def test_missing_or_broken_input_scales_are_named():
    """Field reports 14 to 16: expert 2 never calibrated; a W4A16 checkpoint run as W4A4."""
    case = next(p.values[0] for p in backends.cases(fmt="nvfp4-ue4m3", name="cpu-tcgen05"))
    plain = next(p.values[0] for p in backends.cases(fmt="nvfp4-ue4m3", name="cpu"))
    layer = backends.with_case(problems.layer(16, case.fmt), case)
    for bad in (np.nan, 0.0, -1.0, np.inf):
        dec = layer.act_dec[0].copy()
        dec[2] = bad
        broken = replace(layer, act_dec=(dec, layer.act_dec[1]))
        with pytest.raises(CheckpointError, match=r"w13: no usable input scale for experts \[2\]"):
            backends.experts_of(broken, case)
        backends.experts_of(broken, plain)  # W4A16 never reads it
    with pytest.raises(CheckpointError, match=r"no input scale in the checkpoint \(W4A16\)"):
        backends.experts_of(replace(layer, act_fmt=None), case)
    tiny = replace(layer, act_dec=(np.full(4, 1e-40, dtype=np.float32), layer.act_dec[1]))
    ids, weights = problems.routing(1, "uniform", 3, 4, 2)
    out = backends.call(backends.experts_of(tiny, case), case, backends.tokens(1, 3), ids, weights)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("input_scale", ["layer", "expert"])
def test_which_input_scale_quantizes_a_token(input_scale):
    """Unequal ones, up to twice the smallest: the layer's largest, or each expert's own."""
    case = next(p.values[0] for p in backends.cases(fmt="nvfp4-ue4m3", name="cpu-tcgen05"))
    layer = backends.with_case(problems.layer(20, case.fmt, 8), case)
    layer = replace(layer, input_scale=input_scale)
    x = backends.tokens(21, 12)
    ids, weights = problems.routing(22, "uniform", 12, 8, 2)
    out = backends.call(backends.experts_of(layer, case), case, x, ids, weights)
    backends.assert_close(layer, x, ids, weights, out)
    other = replace(layer, input_scale={"layer": "expert", "expert": "layer"}[input_scale])
    assert not torch.equal(
        out, backends.call(backends.experts_of(other, case), case, x, ids, weights)
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_quantize_a_token_as_the_whole_layer_does(ranks):
    """Expert parallelism with unequal input scales: every rank takes the layer's largest."""
    case = next(p.values[0] for p in backends.cases(fmt="nvfp4-ue4m3", name="cpu-tcgen05"))
    layer = backends.with_case(problems.layer(23, case.fmt, 8), case)
    x = backends.tokens(24, 9)
    ids, weights = problems.routing(25, "uniform", 9, 8, 1)
    whole = backends.call(backends.experts_of(layer, case, top_k=1), case, x, ids, weights)
    parts = [tuple(range(r, 8, ranks)) for r in range(ranks)]
    ranked = [backends.experts_of(layer, case, top_k=1, expert_ids=part) for part in parts]
    outs = [backends.call(rank, case, x, ids, weights) for rank in ranked]
    assert torch.equal(torch.stack(outs).sum(0), whole)  # one expert a token: sums with zeros
    for largest, message in (
        (None, "largest input scale of all of them is not known"),
        (1e-9, "as the largest input scale of the layer"),
    ):
        wrong = replace(backends.weights_of(layer, parts[0]), layer_input_dec=largest)
        with pytest.raises(CheckpointError, match=message):
            MoEExperts(wrong, ranked[0].problem, case.backend.target, case.backend.name)


def test_a_calibrated_input_scale_changes_the_rounding_and_not_the_size():
    """Field report 18: an ignored or twice applied scale is off by its value, here 2000."""
    case = next(p.values[0] for p in backends.cases(fmt="nvfp4-ue4m3", name="cpu-tcgen05"))
    base = problems.layer(17, case.fmt)
    x = backends.tokens(18, 8)
    ids, weights = problems.routing(19, "uniform", 8, 4, 2)
    outs = []
    for dec in (float(x.abs().max()) / 2688, 1.0):
        layer = replace(base, act_fmt=case.act_fmt, act_dec=(np.float32(dec), 2.0**-4))
        outs.append(backends.call(backends.experts_of(layer, case), case, x, ids, weights))
        backends.assert_close(layer, x, ids, weights, outs[-1])
    assert 0 < (outs[0] - outs[1]).norm() / outs[0].norm() < 0.3


@pytest.mark.long
@pytest.mark.parametrize("case", backends.cases(fmt="mxfp4", name="cpu"))
def test_more_than_two_to_the_31_elements(case):
    """Field report 87: M x top_k x H = 2.29e9; the last rows are right."""
    layer = backends.with_case(problems.layer(44, case.fmt, 8, 7168, 32), case)
    num_tokens = 40_000
    x = torch.zeros(num_tokens, 7168, dtype=torch.bfloat16)
    x[-3:] = backends.tokens(45, 3, 7168, torch.bfloat16)
    ids = np.tile(np.arange(8), (num_tokens, 1))
    weights = np.full((num_tokens, 8), 0.125, dtype=np.float32)
    experts = backends.experts_of(layer, case, top_k=8, dtype=torch.bfloat16)
    out = backends.call(experts, case, x, ids, weights)
    assert out[:-3].eq(0).all()
    backends.assert_close(layer, x[-3:], ids[-3:], weights[-3:], out[-3:])


@pytest.mark.long
@pytest.mark.parametrize("case", backends.cases(fmt="nvfp4-ue4m3", name="cpu"))
def test_weights_of_more_than_two_to_the_31_bytes(case):
    """Field report 87: 513 experts of 2 x 1024 x 4096: the last one starts beyond 2^31."""
    few = problems.layer(46, case.fmt, 2, 4096, 1024)

    def spread(t: np.ndarray) -> np.ndarray:
        wide = np.zeros((513, *t.shape[1:]), dtype=t.dtype)
        wide[0], wide[512] = t[0], t[1]
        return wide

    def projection(p: moe.Projection) -> moe.Projection:
        return moe.Projection(spread(p.qdata), spread(p.sf), spread(p.dec))

    many = replace(few, w13=projection(few.w13), w2=projection(few.w2))
    experts = backends.experts_of(backends.with_case(many, case), case)
    x = backends.tokens(47, 2, 4096)
    ids, weights = np.array([[512, 0], [512, 0]]), np.full((2, 2), 0.5, dtype=np.float32)
    out = backends.call(experts, case, x, ids, weights)
    small = backends.with_case(few, case)
    if case.act_fmt:
        first, second = (np.asarray(d) for d in backends.with_case(many, case).act_dec)
        small = replace(small, act_dec=(first.max(), second[[0, 512]]))
    backends.assert_close(small, x, np.where(ids == 512, 1, 0), weights, out)
