"""FC1 and FC2 for sm_107a, executed on the emulator, against the float64 oracle."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rubin_moe.formats.quantize import quantize
from rubin_moe.formats.spec import FORMATS
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.sm107.host import Sm107Kernel, make_work
from rubin_moe.kernels.sm107.plan import TILES_N, plan_gemm
from rubin_moe.layers.experts import problem_of
from tests.oracles import moe, quant, tolerance

from .layers import Case, emulator

SAMPLE = [
    Case("nvfp4-ue4m3", 7, 4, 256, 256),
    Case("nvfp4-ue5m3", 23, 4, 320, 352),
    Case("nvfp4-ue4m3", 64, 9, 352, 96, top_k=3, routing="one_expert"),
    Case("nvfp4-ue5m3", 129, 2, 256, 64),
    Case("nvfp4-ue5m3", 5, 1, 64, 32),
    Case("nvfp4-ue4m3", 16, 9, 256, 64, routing="some_missing"),
    Case("nvfp4-ue5m3", 3, 4, 256, 64, routing="none"),
    Case("mxfp4", 13, 4, 320, 160, kind="swigluoai"),
    Case("mxfp4", 130, 1, 256, 96),
    Case("nvfp4-ue4m3", 130, 1, 256, 160, kind="swigluoai"),
]


def kernel(case: Case, seed: int | None = None, deterministic: bool = True) -> Sm107Kernel:
    problem = problem_of(
        case.weights(),
        case.k,
        Activation(case.kind, limit=case.layer().limit),  # type: ignore[arg-type]
        torch.float32,
        activation_format=case.act,
        deterministic=deterministic,
    )
    return Sm107Kernel(problem, emulator(seed), num_ctas=4)


def run(case: Case, seed: int | None = None, deterministic: bool = True) -> np.ndarray:
    k = kernel(case, seed, deterministic)
    return k.run(k.prepare(case.weights()), *case.batch()).numpy()


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_whole_layer(case):
    layer, (x, ids, weights) = case.layer(), case.batch()
    batch = (x.numpy(), ids.numpy(), weights.numpy())
    expected = moe.moe(layer, *batch)
    # FC1's fp32 results and its activation, then FC2: the formats' bound, which lets a code between
    # the GEMMs fall to the other side of a boundary that it lies at
    bound = tolerance.bound(layer, *batch, "float32")
    assert (np.abs(run(case) - expected) <= bound).all()


@pytest.mark.parametrize("case", SAMPLE[:4], ids=str)
def test_codes_between_the_gemms(case):
    """At most 0.1 % of codes may differ: where two ULP of the activation span a boundary."""
    k, layer = kernel(case), case.layer()
    prepared = k.prepare(case.weights())
    x, ids, weights = case.batch()
    tile_n = TILES_N[0]
    work = make_work(k._launch, ids, weights, case.experts, tile_n)
    codes, scales = k._quantized(x, prepared.input_dec)
    got_codes, got_scales = k._fc1(plan_gemm(k.fmt, tile_n), prepared, work, codes, scales)
    w13 = layer.w13.dense(case.fmt)
    rows = int((ids >= 0).sum())
    differing = 0
    for row in range(rows):
        choice = int(work.choice[row])
        expert = int(ids.flatten()[choice])
        h = moe.activate(layer, x[choice // case.k].double().numpy() @ w13[expert].T)
        sf = quant.block_scales(h, case.fmt, layer.act_dec[1])
        value = quant.SCALES[quant.SCALE_TYPE[case.fmt]][sf] * layer.act_dec[1]
        safe = np.where(value > 0, value, 1)[:, None]
        expected = quant.pack_e2m1(quant.encode_e2m1(h.reshape(-1, 16) / safe).reshape(-1))
        n = case.intermediate
        differing += int((got_codes[row, : n // 2].numpy() != expected).sum())
        differing += int((got_scales[row, : n // 16].numpy() != sf).sum())
    assert differing <= rows * case.intermediate * 1e-3


@pytest.mark.parametrize("seed", [1, 2])
def test_delayed_asynchronous_operations_change_nothing(seed):
    case = SAMPLE[1]
    np.testing.assert_array_equal(run(case, seed), run(case))


def test_a_row_alone_equals_that_row_in_a_batch():
    case = SAMPLE[1]
    k = kernel(case)
    prepared = k.prepare(case.weights())
    x, ids, weights = case.batch()
    whole = k.run(prepared, x, ids, weights)
    for row in (0, 11, 22):
        alone = k.run(prepared, *(t[row : row + 1] for t in (x, ids, weights)))
        assert torch.equal(alone[0], whole[row])


def test_a_row_alone_equals_that_row_among_a_pairs_130():
    """Another tile, another number of CTAs; the same order of every sum."""
    case = Case("mxfp4", 130, 1, 160, 96, kind="swigluoai")
    k = kernel(case)
    prepared = k.prepare(case.weights())
    x, ids, weights = case.batch()
    whole = k.run(prepared, x, ids, weights)
    for part in (slice(0, 1), slice(127, 130), slice(50, 90)):
        alone = k.run(prepared, *(t[part] for t in (x, ids, weights)))
        assert torch.equal(alone, whole[part])


def test_atomic_finalize():
    case = SAMPLE[0]
    assert tolerance.relative_l2(run(case, deterministic=False), run(case).astype(float)) < 1e-6


def test_poisoned_outputs_and_rows_without_an_expert_never_leak():
    case = replace(SAMPLE[0], tokens=6)
    k = kernel(case)
    prepared = k.prepare(case.weights())
    x, ids, weights = case.batch()
    clean = k.run(prepared, x, ids, weights)
    ids[2], x[2] = -1, float("nan")
    out = torch.full_like(x, float("nan"))
    assert k.run(prepared, x, ids, weights, out=out) is out
    assert not out[2].any()
    keep = [0, 1, 3, 4, 5]
    assert torch.equal(out[keep], clean[keep])


def test_expert_maps_count_from_global_ids():
    case = replace(SAMPLE[0], experts=4)
    k = kernel(case)
    prepared = k.prepare(case.weights())
    x, ids, weights = case.batch()
    expert_map = torch.full((9,), -1, dtype=torch.int32)
    expert_map[torch.tensor([7, 2, 5, 0])] = torch.arange(4, dtype=torch.int32)
    moved = torch.tensor([7, 2, 5, 0])[ids]
    got = k.run(prepared, x, moved, weights, expert_map)
    assert torch.equal(got, k.run(prepared, x, ids, weights))


def test_padded_multiply_adds_follow_the_tokens():
    """Instruction N is the tile's tokens rounded to 8, whatever the tile."""
    case = Case("nvfp4-ue5m3", 23, 1, 256, 64, top_k=1)
    k = kernel(case)
    k.run(k.prepare(case.weights()), *case.batch())
    fc1 = k._launch.reports[2]
    assert fc1.mma_macs == 128 * 24 * 256


def test_activations_are_quantized_once_and_padded_with_zeros():
    case = SAMPLE[1]
    k = kernel(case)
    x, _, _ = case.batch()
    codes, scales = k._quantized(x, torch.ones(1))
    assert codes.shape == (23, 256)
    assert not codes[:, 160:].any()
    assert not scales[:, 20:].any()
    assert torch.equal(codes[:, :160], quantize(x, FORMATS[case.fmt]).qdata)
