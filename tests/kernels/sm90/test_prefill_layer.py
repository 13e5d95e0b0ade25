"""A whole layer by the prefill's four launches against the float64 oracle: on the emulator, and on
a GPU (--hw)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rubin_moe.emulation import EmulatorLauncher
from rubin_moe.kernels.sm90.prefill_plan import PrefillTiles
from tests.layers.backends import assert_close
from tests.oracles import moe, problems

from .layers import FORMATS, MACHINES, Machine, batch, kernel_of, run

KINDS = {
    "silu": {},
    "swigluoai": {"limit": 7.0, "bias": True},
    "gelu_tanh": {},
    "relu2": {"bias": True},
}
TILES = PrefillTiles(pass_tokens=16, groups=1, stages13=2, stages2=2, panel=2, lag=1)


def small(fmt: str = "nvfp4-ue4m3", **fields: object) -> moe.Layer:
    """One shape for all tests, so that they share kernels: 5 and 2 blocks of K, one not full."""
    return problems.layer(11, fmt, 5, 288, 96, **fields)


@pytest.fixture(params=MACHINES)
def machine(request) -> Machine:
    return request.param


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_formats_and_activations(fmt, kind, machine):
    layer = small(fmt, kind=kind, **KINDS[kind])
    x, ids, weights = batch(layer, 33, kind="power_law")
    kernel = kernel_of(layer, tiles=TILES, machine=machine)
    assert_close(layer, x, ids, weights, run(kernel, layer, x, ids, weights))


def test_float16(machine):
    layer = small()
    x, ids, weights = batch(layer, 33)
    kernel = kernel_of(layer, tiles=TILES, dtype=torch.float16, machine=machine)
    assert_close(layer, x.half(), ids, weights, run(kernel, layer, x.half(), ids, weights))


@pytest.mark.parametrize("kind", [*problems.ROUTINGS, "all_to_one", "nobody"])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_routings(num_tokens, kind, machine):
    layer = small()
    skewed = kind in ("all_to_one", "nobody")
    x, ids, weights = batch(layer, num_tokens, kind="uniform" if skewed else kind)
    if skewed:
        ids[:] = [[3, -1]] if kind == "all_to_one" else -1
    kernel = kernel_of(layer, tiles=TILES, machine=machine)
    assert_close(layer, x, ids, weights, run(kernel, layer, x, ids, weights))


@pytest.mark.parametrize(
    "tiles",
    [
        replace(TILES, pass_tokens=40, panel=8),
        replace(TILES, pass_tokens=8, stages13=3, stages2=4, panel=1),
        replace(TILES, groups=2),
        replace(TILES, groups=2, pass_tokens=24, narrower=2, blocks13=5, blocks2=2),
    ],
    ids=str,
)
def test_tiles_change_no_bit(tiles, machine):
    layer = small()
    args = (layer, *batch(layer, 33, kind="power_law"))
    base = run(kernel_of(layer, tiles=TILES, machine=machine), *args)
    assert torch.equal(run(kernel_of(layer, tiles=tiles, machine=machine), *args), base)


def test_no_rule_of_the_hardware_is_broken():
    layer = small()
    kernel = kernel_of(layer, tiles=TILES)
    kernel._launch = EmulatorLauncher(rules="enforce")
    args = (layer, *batch(layer, 33, kind="power_law"))
    assert torch.equal(run(kernel, *args), run(kernel_of(layer, tiles=TILES), *args))


@pytest.mark.parametrize("seed", [1, 2])
def test_delayed_asynchronous_operations_change_nothing(seed):
    layer = small()
    args = (layer, *batch(layer, 33))
    delayed = run(kernel_of(layer, seed=seed, tiles=TILES), *args)
    assert torch.equal(delayed, run(kernel_of(layer, tiles=TILES), *args))


def test_rows_are_independent_of_their_batch_and_runs_repeat(machine):
    """Within this regime: `MoEProblem.batch_invariant` is about the others."""
    layer = small()
    x, ids, weights = batch(layer, 33)
    kernel = kernel_of(layer, tiles=TILES, machine=machine)
    whole = run(kernel, layer, x, ids, weights)
    assert torch.equal(run(kernel, layer, x, ids, weights), whole)
    for row in (0, 16, 32):
        alone = run(kernel, layer, *(t[row : row + 1] for t in (x, ids, weights)))
        assert torch.equal(alone[0], whole[row])
    order = np.random.default_rng(0).permutation(33)
    moved = run(kernel, layer, x[order], ids[order], weights[order])
    assert torch.equal(moved, whole[order])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 3e38])
def test_rows_without_an_expert_leak_nothing(garbage, machine):
    layer = small()
    x, ids, weights = batch(layer, 33)
    kernel = kernel_of(layer, tiles=TILES, machine=machine)
    clean = run(kernel, layer, x, ids, weights)
    pad = np.arange(33) % 3 == 1
    x[torch.from_numpy(pad)], weights[pad], ids[pad] = garbage, garbage, -1
    out = run(kernel, layer, x, ids, weights)
    assert out[torch.from_numpy(pad)].eq(0).all()
    assert torch.equal(out[torch.from_numpy(~pad)], clean[torch.from_numpy(~pad)])


def test_expert_maps_count_from_global_ids(machine):
    layer = small()
    x, ids, weights = batch(layer, 33)
    expert_map = torch.full((9,), -1, dtype=torch.int32)
    where = np.array([7, 2, 5, 0, 8])
    expert_map[where] = torch.arange(5, dtype=torch.int32)
    kernel = kernel_of(layer, tiles=TILES, machine=machine)
    moved = run(kernel, layer, x, where[ids], weights, expert_map)
    assert torch.equal(moved, run(kernel, layer, x, ids, weights))
    elsewhere = where[ids]
    elsewhere[:, 1] = 3  # of another rank
    mine = np.where(np.arange(2) == 1, -1, ids)
    out = run(kernel, layer, x, elsewhere, weights, expert_map)
    assert_close(layer, x, mine, weights, out)


def test_more_tokens_than_a_launch_takes(monkeypatch):
    """Pieces of nearly the same size, of one plan."""
    from rubin_moe.kernels.sm90 import sort_plan

    monkeypatch.setattr(sort_plan, "MAX_PAIRS", 32)
    layer = small()
    x, ids, weights = batch(layer, 33)
    kernel = kernel_of(layer, tiles=TILES)
    out = run(kernel, layer, x, ids, weights)
    assert len(kernel._launch.reports) == 3 * 4
    monkeypatch.undo()
    assert torch.equal(run(kernel, layer, x, ids, weights), out)


def test_router_weight_on_the_input(machine):
    layer = small(weight_on_input=True)
    x, ids, _ = batch(layer, 33, top_k=1)
    weights = np.random.default_rng(0).uniform(0.2, 0.9, (33, 1)).astype(np.float32)
    kernel = kernel_of(layer, 1, tiles=TILES, machine=machine)
    assert_close(layer, x, ids, weights, run(kernel, layer, x, ids, weights))
