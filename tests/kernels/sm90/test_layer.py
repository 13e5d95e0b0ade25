"""The sm_90a kernels against the float64 oracle: executed on the emulator, and on a GPU (--hw)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rubin_moe.emulation import EmulatorLauncher
from rubin_moe.kernels.sm90 import host, plan
from rubin_moe.kernels.sm90.plan import Tiles, WideTiles
from tests.layers.backends import assert_close, weights_of
from tests.oracles import moe, problems

from .layers import FORMATS, MACHINES, TILES, WIDE, Machine, batch, kernel_of, run

KINDS = {
    "silu": {},
    "swigluoai": {"limit": 7.0, "bias": True},
    "gelu_tanh": {},
    "relu2": {"bias": True},
}


def small(fmt: str = "nvfp4-ue4m3", **fields: object) -> moe.Layer:
    """One shape for most tests, so that they share kernels: 5 and 2 blocks of K, one not full."""
    return problems.layer(11, fmt, 5, 288, 96, **fields)


@pytest.fixture(params=MACHINES)
def machine(request) -> Machine:
    return request.param


@pytest.fixture(params=[TILES, WIDE], ids=["decode", "wide"])
def tiles(request) -> Tiles | WideTiles:
    return request.param


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_formats_and_activations(fmt, kind, machine):
    layer = small(fmt, kind=kind, **KINDS[kind])
    x, ids, weights = batch(layer, 7)
    kernel = kernel_of(layer, machine=machine)
    assert_close(layer, x, ids, weights, run(kernel, layer, x, ids, weights))


@pytest.mark.parametrize(
    ("fmt", "kind", "dtype"),
    [
        ("nvfp4-ue4m3", "silu", torch.bfloat16),
        ("nvfp4-ue4m3", "silu", torch.float16),
        ("nvfp4-ue5m3", "relu2", torch.bfloat16),
        ("mxfp4", "swigluoai", torch.bfloat16),
    ],
    ids=str,
)
def test_the_wide_kernel_gives_the_same_bits(fmt, kind, dtype, machine):
    """Other instructions, other tiles: the number of tokens may choose between them."""
    layer = small(fmt, kind=kind, **KINDS[kind])
    x, ids, weights = batch(layer, 33, kind="power_law")
    args = (layer, x.to(dtype), ids, weights)
    narrow = run(kernel_of(layer, dtype=dtype, machine=machine), *args)
    assert torch.equal(
        run(kernel_of(layer, tiles=WIDE, dtype=dtype, machine=machine), *args), narrow
    )
    assert_close(*args, narrow)


@pytest.mark.parametrize("fmt", FORMATS)
def test_float16(fmt, machine):
    layer = small(fmt)
    x, ids, weights = batch(layer, 7)
    kernel = kernel_of(layer, dtype=torch.float16, machine=machine)
    assert_close(layer, x.half(), ids, weights, run(kernel, layer, x.half(), ids, weights))


@pytest.mark.parametrize("kind", problems.ROUTINGS)
@pytest.mark.parametrize(
    ("num_tokens", "tiles"),
    [(1, TILES), (16, TILES), (33, TILES), (16, WIDE), (33, WIDE)],
    ids=["1", "16", "33", "16-wide", "33-wide"],
)
def test_routings(num_tokens, kind, tiles, machine):
    """33 tokens of one expert are three passes or five."""
    layer = small()
    x, ids, weights = batch(layer, num_tokens, kind=kind)
    kernel = kernel_of(layer, tiles=tiles, machine=machine)
    assert_close(layer, x, ids, weights, run(kernel, layer, x, ids, weights))
    assert not kernel._zeroed(kernel.device)[32:].any()  # ready for the next launch


@pytest.mark.parametrize(
    "tiles",
    [
        replace(TILES, warps=10, split=True),
        replace(TILES, buffers=1, slots=3, blocks13=1, blocks2=1),
        replace(TILES, pass_tokens=16),
        replace(TILES, warps=10, split=True, pass_tokens=16),
        WideTiles(groups=2, pass_tokens=24, blocks13=1, blocks2=1, stages=2),
        WideTiles(groups=3, pass_tokens=8, blocks13=1, blocks2=1, stages=4),
    ],
    ids=str,
)
def test_tiles_change_no_bit(tiles, machine):
    layer = small()
    args = (layer, *batch(layer, 33, kind="power_law"))
    base = run(kernel_of(layer, machine=machine), *args)
    assert torch.equal(run(kernel_of(layer, tiles=tiles, machine=machine), *args), base)


@pytest.mark.parametrize("seed", [1, 2])
def test_delayed_asynchronous_operations_change_nothing(seed, tiles):
    layer = small()
    args = (layer, *batch(layer, 17))
    delayed = run(kernel_of(layer, seed=seed, tiles=tiles), *args)
    assert torch.equal(delayed, run(kernel_of(layer), *args))


def test_no_rule_of_the_hardware_is_broken(tiles):
    """Missing waits, fences and barriers among them: `rubin_moe.emulator.rules`."""
    layer = small()
    kernel = kernel_of(layer, tiles=tiles)
    kernel._launch = EmulatorLauncher(rules="enforce")
    args = (layer, *batch(layer, 33, kind="power_law"))
    assert torch.equal(run(kernel, *args), run(kernel_of(layer), *args))


def test_rows_alone_equal_those_rows_in_a_batch_and_runs_repeat(tiles, machine):
    layer = small()
    x, ids, weights = batch(layer, 33)
    kernel = kernel_of(layer, tiles=tiles, machine=machine)
    whole = run(kernel, layer, x, ids, weights)
    assert torch.equal(run(kernel, layer, x, ids, weights), whole)
    for row in (0, 16, 32):
        alone = run(kernel, layer, *(t[row : row + 1] for t in (x, ids, weights)))
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize(
    ("garbage", "tiles"),
    [(float("nan"), TILES), (float("nan"), WIDE), (float("inf"), TILES), (3e38, WIDE)],
    ids=str,
)
def test_rows_without_an_expert_leak_nothing(garbage, tiles, machine):
    layer = small()
    x, ids, weights = batch(layer, 17)
    kernel = kernel_of(layer, tiles=tiles, machine=machine)
    clean = run(kernel, layer, x, ids, weights)
    pad = np.arange(17) % 3 == 1
    x[torch.from_numpy(pad)], weights[pad], ids[pad] = garbage, garbage, -1
    out = run(kernel, layer, x, ids, weights)
    assert out[torch.from_numpy(pad)].eq(0).all()
    assert torch.equal(out[torch.from_numpy(~pad)], clean[torch.from_numpy(~pad)])


def test_expert_maps_count_from_global_ids(machine):
    layer = small()
    x, ids, weights = batch(layer, 9)
    expert_map = torch.full((9,), -1, dtype=torch.int32)
    where = np.array([7, 2, 5, 0, 8])
    expert_map[where] = torch.arange(5, dtype=torch.int32)
    kernel = kernel_of(layer, machine=machine)
    moved = run(kernel, layer, x, where[ids], weights, expert_map)
    assert torch.equal(moved, run(kernel, layer, x, ids, weights))
    elsewhere = where[ids]
    elsewhere[:, 1] = 3  # of another rank
    mine = np.where(np.arange(2) == 1, -1, ids)
    out = run(kernel, layer, x, elsewhere, weights, expert_map)
    assert_close(layer, x, mine, weights, out)


def test_more_tokens_than_a_launch_takes(monkeypatch):
    monkeypatch.setattr(host, "max_tokens", lambda problem: 8)
    layer = small()
    x, ids, weights = batch(layer, 19)
    kernel = kernel_of(layer)
    assert_close(layer, x, ids, weights, run(kernel, layer, x, ids, weights))
    assert len(kernel._launch.reports) == 3


def test_long_rows_are_summed_slab_by_slab(monkeypatch, tiles):
    monkeypatch.setattr(plan, "SLAB_K", 64)
    layer = small(bias=True)
    x, ids, weights = batch(layer, 9)
    kernel = kernel_of(layer, tiles=tiles)
    assert kernel.sizes.slabs == 2
    assert_close(layer, x, ids, weights, run(kernel, layer, x, ids, weights))


def test_gate_and_up_have_a_global_scale_each(machine):
    base = small()
    dec = base.w13.dec * np.array([[1.0, 3.0]], dtype=np.float32)
    layer = replace(base, w13=replace(base.w13, dec=dec))
    x, ids, weights = batch(layer, 4)
    kernel = kernel_of(layer, machine=machine)
    assert_close(layer, x, ids, weights, run(kernel, layer, x, ids, weights))


@pytest.mark.parametrize("fmt", FORMATS[:2])
def test_zero_scales_are_zero_whatever_the_codes(fmt, machine):
    base = small(fmt)
    sf = base.w13.sf.copy()
    sf[:, ::3] = 0
    layer = replace(base, w13=replace(base.w13, sf=sf))
    x, ids, weights = batch(layer, 4)
    kernel = kernel_of(layer, machine=machine)
    assert_close(layer, x, ids, weights, run(kernel, layer, x, ids, weights))


def test_router_weight_on_the_input(machine):
    layer = small(weight_on_input=True)
    x, ids, weights = batch(layer, 5, top_k=1)
    weights = np.random.default_rng(0).uniform(0.2, 0.9, (5, 1)).astype(np.float32)
    assert_close(
        layer, x, ids, weights, run(kernel_of(layer, 1, machine=machine), layer, x, ids, weights)
    )


def test_weights_read_the_same_bytes_each_time():
    layer = small("mxfp4", kind="swigluoai", limit=7.0, bias=True)
    kernel = kernel_of(layer)
    first, second = (kernel.prepare(weights_of(layer)).tensors() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert Tiles() != TILES


def test_a_server_loads_with_another_default_dtype():
    layer = small("mxfp4", kind="swigluoai", limit=7.0, bias=True)
    kernel = kernel_of(layer)
    expected = kernel.prepare(weights_of(layer)).tensors()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = kernel.prepare(weights_of(layer)).tensors()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
