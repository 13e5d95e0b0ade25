"""The prefill GEMMs against the float64 oracle, executed on the emulator."""

import numpy as np
import pytest
import torch

from rubin_moe.emulation import EmulatorLauncher
from rubin_moe.errors import PlanError
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.sm90 import choice
from rubin_moe.kernels.sm90.prefill_host import gemm_kernel
from rubin_moe.kernels.sm90.prefill_plan import PrefillPlan, PrefillTiles, check_prefill
from tests.layers.backends import assert_close, weights_of
from tests.oracles import problems

from .layers import FORMATS, batch
from .layers import kernel_of as layer_kernel
from .prefill_gemms import Gemms
from .test_layer import KINDS, small

TILES = PrefillTiles(pass_tokens=16, groups=1, stages13=3, stages2=3, panel=2, lag=0)
NUM_BLOCKS = 3


def gemms_of(layer, tiles=TILES, dtype=torch.bfloat16, launch=None):
    """And the layer's prepared weights."""
    kernel = layer_kernel(layer, dtype=dtype)
    problem = kernel.problem
    plan = check_prefill(PrefillPlan(choice.sizes_of(problem), tiles))
    launch = launch or EmulatorLauncher(rules="enforce")
    gemms = Gemms(plan, problem.activation, problem.has_bias, launch, NUM_BLOCKS)
    return gemms, kernel.prepare(weights_of(layer))


def run(layer, x, ids, weights, **fields):
    gemms, prepared = gemms_of(layer, dtype=x.dtype, **fields)
    return gemms.layer(prepared, x, torch.from_numpy(ids).int(), torch.from_numpy(weights))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_formats_and_activations(fmt, kind):
    layer = small(fmt, kind=kind, **KINDS[kind])
    args = batch(layer, 33, kind="power_law")
    assert_close(layer, *args, run(layer, *args))


@pytest.mark.parametrize("fmt", FORMATS)
def test_float16(fmt):
    layer = small(fmt)
    x, ids, weights = batch(layer, 7)
    assert_close(layer, x.half(), ids, weights, run(layer, x.half(), ids, weights))


@pytest.mark.parametrize("kind", problems.ROUTINGS)
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_routings(num_tokens, kind):
    layer = small()
    args = batch(layer, num_tokens, kind=kind)
    assert_close(layer, *args, run(layer, *args))


@pytest.mark.parametrize(
    "tiles",
    [
        PrefillTiles(8, groups=2, stages13=2, stages2=3, blocks13=5, panel=1, lag=1),
        PrefillTiles(24, 2, 8, 3, stages13=4, stages2=3, blocks2=2, lag=1),
        PrefillTiles(136, 1, 72, stages13=3, stages2=3, panel=2, lag=2),
    ],
    ids=str,
)
def test_tiles_change_no_bit(tiles):
    layer = small(kind="swigluoai", bias=True)
    args = (layer, *batch(layer, 65, kind="one_expert"))
    assert torch.equal(run(*args, tiles=tiles), run(*args))


@pytest.mark.parametrize("seed", [1, 2])
def test_delayed_asynchronous_operations_change_nothing(seed):
    args = (small(), *batch(small(), 17))
    assert torch.equal(run(*args, launch=EmulatorLauncher(seed)), run(*args))


def test_rows_alone_equal_those_rows_in_a_batch():
    layer = small()
    x, ids, weights = batch(layer, 33)
    whole = run(layer, x, ids, weights)
    for row in (0, 32):
        alone = run(layer, *(t[row : row + 1] for t in (x, ids, weights)))
        assert torch.equal(alone[0], whole[row])


def test_rows_without_an_expert_leak_nothing():
    layer = small()
    x, ids, weights = batch(layer, 17)
    clean = run(layer, x, ids, weights)
    pad = np.arange(17) % 3 == 1
    x[torch.from_numpy(pad)], weights[pad], ids[pad] = float("nan"), float("nan"), -1
    out = run(layer, x, ids, weights)
    assert out[torch.from_numpy(pad)].eq(0).all()
    assert torch.equal(out[torch.from_numpy(~pad)], clean[torch.from_numpy(~pad)])


@pytest.mark.parametrize(
    "tiles",
    [
        PrefillTiles(pass_tokens=168),
        PrefillTiles(pass_tokens=12),
        PrefillTiles(pass_tokens=16, narrower=2),
        PrefillTiles(blocks2=0),
        PrefillTiles(lag=6),
        PrefillTiles(pass_tokens=88, groups=3, stages13=2, stages2=2, lag=0),
        PrefillTiles(stages13=1),
        PrefillTiles(stages2=9),
    ],
    ids=str,
)
def test_plans_that_cannot_be_built(tiles):
    sizes = choice.sizes_of(layer_kernel(small()).problem)
    with pytest.raises(PlanError):
        check_prefill(PrefillPlan(sizes, tiles))


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_registers_are_there_that_warpgroups_ask_for(groups):
    """On silicon a warpgroup that asks for more waits for ever; the emulator has no limit."""
    sizes = choice.sizes_of(layer_kernel(small()).problem)
    tiles = PrefillTiles(16, groups=groups, stages13=4, stages2=4, lag=1)
    plan = check_prefill(PrefillPlan(sizes, tiles))
    more, less = plan.registers
    for fc1 in (True, False):
        kernel = gemm_kernel(plan, fc1, Activation(), False)
        assert 128 * (groups * more + less) <= kernel.block * registers_of(kernel.cubin)


def registers_of(cubin: bytes) -> int:
    """Of a thread at launch: attribute REGCOUNT of a kernel, a function index and a number."""
    at = cubin.index(bytes([4, 0x2F, 8, 0]))
    return int.from_bytes(cubin[at + 8 : at + 12], "little")
