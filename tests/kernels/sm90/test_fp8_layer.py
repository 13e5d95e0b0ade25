"""A whole layer with FP8 activations against the float64 oracle: on the emulator, and on a GPU
(--hw)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rubin_moe.emulation import EmulatorLauncher
from rubin_moe.errors import FormatError, PlanError
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.launch import launcher
from rubin_moe.kernels.sm90.choice import sizes_of
from rubin_moe.kernels.sm90.fp8_host import Fp8Kernel
from rubin_moe.kernels.sm90.fp8_plan import Fp8Plan, Fp8Tiles, check_fp8, fp8_sizes
from rubin_moe.layers.experts import problem_of
from tests.layers.backends import assert_close, weights_of
from tests.oracles import moe, problems

from .layers import GPU, MACHINES, NUM_BLOCKS, Machine, batch, run
from .test_prefill_layer import KINDS

TILES = Fp8Tiles(pass_tokens=16, groups=1, stages13=2, stages2=2, panel=2, promote=1)


class OneChoice(Fp8Kernel):
    """A layer's kernel with one choice of tiles."""

    tiles = TILES

    def _fp8_plan(self, num_tokens: int) -> Fp8Plan:
        return check_fp8(Fp8Plan(fp8_sizes(sizes_of(self.problem)), self.tiles))


def small(**fields: object) -> moe.Layer:
    """One shape for all tests: 5 blocks of K, so that the last stage is half empty, and 2."""
    return problems.layer(11, "mxfp4", 5, 288, 96, act_fmt="fp8-e4m3", **fields)


def kernel_of(
    layer: moe.Layer,
    top_k: int = 2,
    tiles: Fp8Tiles = TILES,
    machine: Machine | None = None,
    dtype: torch.dtype = torch.bfloat16,
    launch: EmulatorLauncher | None = None,
) -> OneChoice:
    problem = problem_of(
        weights_of(layer),
        top_k,
        Activation(layer.kind, layer.limit, layer.alpha, layer.beta),
        dtype,
        activation_format="fp8-e4m3",
        router_weight_on_input=layer.weight_on_input,
    )
    if machine is GPU:
        count = torch.cuda.get_device_properties(0).multi_processor_count
        kernel = OneChoice(problem, launcher("driver"), count, "cuda")
    else:
        kernel = OneChoice(problem, launch or EmulatorLauncher(), NUM_BLOCKS, "cpu")
    kernel.tiles = tiles
    return kernel


@pytest.fixture(params=MACHINES)
def machine(request) -> Machine:
    return request.param


DROPPED = 2.0**-9
"""What tensor cores, and so the emulator, lose of a sum over 128 of K, relative to the sum of
magnitudes: up to 2^-9.5 on an H200, where all have one sign (docs/notes/hopper.md)."""


def assert_right(layer: moe.Layer, args: tuple, out: torch.Tensor) -> None:
    assert_close(layer, *args, out, dropped=DROPPED)


@pytest.mark.parametrize("kind", KINDS)
def test_activations(kind, machine):
    layer = small(kind=kind, **KINDS[kind])
    args = batch(layer, 33, kind="power_law")
    out = run(kernel_of(layer, machine=machine), layer, *args)
    assert_right(layer, args, out)


def test_float16(machine):
    layer = small()
    x, ids, weights = batch(layer, 33)
    args = (x.half(), ids, weights)
    out = run(kernel_of(layer, dtype=torch.float16, machine=machine), layer, *args)
    assert_right(layer, args, out)


@pytest.mark.parametrize("kind", [*problems.ROUTINGS, "all_to_one"])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_routings(num_tokens, kind, machine):
    layer = small()
    skewed = kind == "all_to_one"
    x, ids, weights = batch(layer, num_tokens, kind="uniform" if skewed else kind)
    if skewed:
        ids[:] = [[3, -1]]
    out = run(kernel_of(layer, machine=machine), layer, x, ids, weights)
    assert_right(layer, (x, ids, weights), out)


@pytest.mark.parametrize(
    "tiles",
    [
        replace(TILES, pass_tokens=40, panel=8),
        replace(TILES, pass_tokens=8, stages13=3, stages2=4, panel=1),
        replace(TILES, groups=2, lag=1),
        replace(TILES, pass_tokens=32, narrower=3, step=8),
    ],
    ids=str,
)
def test_tiles_change_no_bit(tiles, machine):
    layer = small()
    args = (layer, *batch(layer, 33, kind="power_law"))
    base = run(kernel_of(layer, machine=machine), *args)
    assert torch.equal(run(kernel_of(layer, tiles=tiles, machine=machine), *args), base)


@pytest.mark.parametrize("promote", [0, 2])
def test_sums_that_leave_the_tensor_core_or_stay(promote):
    """Totals are float16: each promotion adds at most 2^-11 of a sum."""
    layer = small(kind="swigluoai", limit=7.0, bias=True)
    args = (layer, *batch(layer, 33))
    stay = run(kernel_of(layer, tiles=replace(TILES, promote=0)), *args)
    found = run(kernel_of(layer, tiles=replace(TILES, promote=promote)), *args)
    assert torch.equal(found, stay) is (promote == 0)
    assert_close(*args, found, dropped=2 * DROPPED)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_no_rule_is_broken_and_delays_change_nothing(seed):
    layer = small()
    args = (layer, *batch(layer, 33, kind="power_law"))
    launch = EmulatorLauncher(rules="enforce") if seed is None else EmulatorLauncher(seed)
    assert torch.equal(run(kernel_of(layer, launch=launch), *args), run(kernel_of(layer), *args))


def test_rows_are_independent_of_their_batch_and_runs_repeat(machine):
    layer = small()
    x, ids, weights = batch(layer, 33)
    kernel = kernel_of(layer, machine=machine)
    whole = run(kernel, layer, x, ids, weights)
    assert torch.equal(run(kernel, layer, x, ids, weights), whole)
    for row in (0, 32):
        alone = run(kernel, layer, *(t[row : row + 1] for t in (x, ids, weights)))
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_rows_without_an_expert_leak_nothing(garbage, machine):
    layer = small()
    x, ids, weights = batch(layer, 33)
    kernel = kernel_of(layer, machine=machine)
    clean = run(kernel, layer, x, ids, weights)
    pad = np.arange(33) % 3 == 1
    x[torch.from_numpy(pad)], weights[pad], ids[pad] = garbage, garbage, -1
    out = run(kernel, layer, x, ids, weights)
    assert out[torch.from_numpy(pad)].eq(0).all()
    assert torch.equal(out[torch.from_numpy(~pad)], clean[torch.from_numpy(~pad)])


def test_router_weight_on_the_input(machine):
    layer = small(weight_on_input=True)
    x, ids, _ = batch(layer, 33, top_k=1)
    weights = np.random.default_rng(0).uniform(0.2, 0.9, (33, 1)).astype(np.float32)
    out = run(kernel_of(layer, 1, machine=machine), layer, x, ids, weights)
    assert_right(layer, (x, ids, weights), out)


def test_weights_read_the_same_bytes_each_time_and_a_wide_row_is_named():
    layer = small(bias=True)
    kernel, weights = kernel_of(layer), weights_of(layer)
    first, second = (kernel.prepare(weights).tensors() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    weights.w2.sf[3, 70, 1] = 100  # the others are 117 to 123
    with pytest.raises(FormatError, match=r"experts\.w2 of expert 3: row 70 has block scales"):
        kernel.prepare(weights)


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (Fp8Tiles(pass_tokens=168, stages13=4, stages2=4), "8 to 160 tokens"),
        (Fp8Tiles(promote=-1), "promote -1"),
        (Fp8Tiles(stages13=9), "shared memory"),
    ],
    ids=str,
)
def test_plans_that_cannot_be_built(tiles, message):
    sizes = fp8_sizes(sizes_of(kernel_of(small()).problem))
    with pytest.raises(PlanError, match=message):
        check_fp8(Fp8Plan(sizes, tiles))


def test_no_sum_exceeds_a_half_total():
    plan = Fp8Plan(fp8_sizes(sizes_of(kernel_of(small()).problem)), Fp8Tiles())
    for chunks in (1, 23, 112):
        largest = 384 * 448 * 128 * chunks
        assert largest / 2 ** plan.half_exponent(chunks) <= 65504
        assert largest / 2 ** plan.half_exponent(chunks) > 65504 / 2
