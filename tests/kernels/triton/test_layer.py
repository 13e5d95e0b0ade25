"""Whole layers on the Triton kernels: exact sums, groups, launches, scales of float16.

The contract of every backend (`tests/layers`) runs on these kernels too.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rubin_moe.kernels.triton import plan as plans
from tests.kernels.triton.layers import ALL, QUICK, batch, kernel_of, run
from tests.layers.backends import assert_close
from tests.oracles import moe, problems


def exact_layer() -> moe.Layer:
    """With tokens of -1, 0 and 1 every sum is exact in float32: four weights a row of w13, at most
    12 each; so FC2 adds 96 products of at most 48^2 x 6, all multiples of 1/8."""
    base = problems.layer(14, "nvfp4-ue4m3", 5, 160, 96, kind="relu2")
    alternating = 0x38 + 8 * (np.arange(base.w13.sf.size).reshape(base.w13.sf.shape) % 2)
    few = base.w13.qdata.copy()
    few[..., 1:39] = 0
    few[..., 40:] = 0  # elements 0, 1, 78 and 79: both halves of a byte, two blocks
    ones = np.ones_like(base.w13.dec)
    return replace(
        base,
        w13=moe.Projection(few, alternating.astype(np.uint8), ones),
        w2=moe.Projection(base.w2.qdata, np.full_like(base.w2.sf, 0x38), ones),
    )


def exact_result(layer: moe.Layer, x: torch.Tensor, ids: np.ndarray) -> torch.Tensor:
    """Router weights of 1/2; FC1's result and the output rounded to bfloat16, nothing else."""
    w13, w2 = (torch.from_numpy(p.dense(layer.fmt)) for p in (layer.w13, layer.w2))
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, expert in zip(*np.nonzero(ids >= 0), strict=True):
        e = ids[token, expert]
        between = (w13[e] @ x[token].double()).relu().square()
        out[token] += 0.5 * (w2[e] @ between.bfloat16().double())
    return out.bfloat16()


@pytest.mark.parametrize("machine", ALL)
def test_exact_sums_agree_bit_for_bit(machine, monkeypatch):
    """So the interpreter, the emulator with what was compiled for sm_90a, and a GPU are equal."""
    layer = exact_layer()
    x = torch.randint(-1, 2, (7, 160), generator=torch.Generator().manual_seed(0)).bfloat16()
    ids, _ = problems.routing(15, "some_missing", 7, 5, 2)
    machine.start(monkeypatch)
    out = run(kernel_of(layer, machine), layer, x, ids, np.full(ids.shape, 0.5, np.float32))
    assert torch.equal(out, exact_result(layer, x, ids))
    assert out.count_nonzero() > 100


@pytest.mark.parametrize("machine", ALL)
def test_gpt_oss_in_float16(machine, monkeypatch):
    layer = problems.layer(11, "mxfp4", 5, 288, 96, kind="swigluoai", bias=True, limit=7.0)
    x, ids, weights = batch(layer, 7, dtype=torch.float16)
    machine.start(monkeypatch)
    out = run(kernel_of(layer, machine, dtype=torch.float16), layer, x, ids, weights)
    assert_close(layer, x, ids, weights, out)


@pytest.mark.parametrize("byte", [0, 1, 2, 3, 64, 127, 250, 252, 253, 254])
@pytest.mark.parametrize("machine", QUICK)
def test_every_e8m0_exponent_in_bfloat16(machine, byte):
    """Products with weights of 2^-128 (bfloat16's subnormals) and of 6 x 2^127."""
    base = problems.layer(3, "mxfp4", 2, 64, 64, kind="relu2")
    w13 = replace(base.w13, sf=np.full_like(base.w13.sf, byte))
    layer = replace(base, w13=w13)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[:, ::9] = 2.0 ** float(np.clip(127 - byte, -110, 110))
    ids, weights = np.array([[0], [1]]), np.ones((2, 1), dtype=np.float32)
    out = run(kernel_of(layer, machine, 1), layer, x, ids, weights)
    assert_close(layer, x, ids, weights, out)
    assert out.abs().max() > 0


@pytest.mark.parametrize("spread", [(100, 110), (104, 140), (141, 170)])
@pytest.mark.parametrize("machine", QUICK)
def test_float16_moves_e8m0_scales_of_each_half(machine, spread):
    """The gate's alone: they reach 2^43, the clamp brings its result back to float16's range."""
    base = problems.layer(5, "mxfp4", 2, 64, 64, limit=4.0)
    sf = base.w13.sf.copy()
    sf[:, :64] = np.random.default_rng(0).integers(*spread, sf[:, :64].shape, endpoint=True)
    layer = replace(base, w13=replace(base.w13, sf=sf))
    x = torch.full((3, 64), 64.0, dtype=torch.float16)
    ids, weights = np.array([[0], [1], [1]]), np.ones((3, 1), dtype=np.float32)
    out = run(kernel_of(layer, machine, 1, torch.float16), layer, x, ids, weights)
    expected = moe.moe(layer, x.double().numpy(), ids, weights)
    most = np.abs(expected).max()
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=0, atol=2e-3 * most)
    assert most > 1e-4


@pytest.mark.parametrize("machine", QUICK)
def test_the_size_of_a_group_changes_no_bit(machine, monkeypatch):
    layer = problems.layer(6, "nvfp4-ue5m3", 3, 288, 96)
    args = (layer, *batch(layer, 33, kind="power_law"))
    results = []
    for group in plans.GROUPS:
        monkeypatch.setattr(plans, "GROUPS", (group,))
        kernel = kernel_of(layer, machine)
        results.append(run(kernel, *args))
        assert kernel._plan(33).group == group
    assert all(torch.equal(result, results[0]) for result in results)
    assert_close(*args, results[0])


@pytest.mark.parametrize("machine", QUICK)
def test_more_tokens_than_a_launch_takes(machine, monkeypatch):
    layer = problems.layer(7, "nvfp4-ue4m3", 3)
    args = (layer, *batch(layer, 19, kind="some_missing"))
    whole = run(kernel_of(layer, machine), *args)
    monkeypatch.setattr(plans, "MAX_PAIRS", 15)
    kernel = kernel_of(layer, machine)
    assert torch.equal(run(kernel, *args), whole)
    assert sorted(kernel._plans) == [5, 7]  # 7, 7 and 5 tokens


@pytest.mark.parametrize("machine", QUICK)
def test_hidden_beyond_the_fast_path_and_no_multiple_of_a_tile(machine):
    layer = problems.layer(8, "nvfp4-ue4m3", 2, 8208, 48)
    args = (layer, *batch(layer, 1, 1))
    assert_close(*args, run(kernel_of(layer, machine, 1), *args))
