"""The sm_90a backend on an H100 or H200: what only a GPU can show. ``pytest --hw``."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.target import detect
from rubin_moe.layers import ops
from rubin_moe.layers.experts import MoEExperts, problem_of
from tests.layers.backends import assert_close, tokens, weights_of
from tests.oracles import moe, problems

from .layers import FORMATS

pytestmark = pytest.mark.hw
EXPERTS, TOP_K = 8, 2
SIZES = (576, 352)  # hidden and intermediate, neither a multiple of a tile
LONG_ROWS = (12288, 64)


def layer_of(fmt: str = "nvfp4-ue4m3", sizes: tuple[int, int] = SIZES) -> moe.Layer:
    return problems.layer(3, fmt, EXPERTS, *sizes)


def served(layer: moe.Layer, batch_invariant: bool = False) -> MoEExperts:
    """As a server has it: the backend's own choice of kernel for every number of tokens."""
    weights = weights_of(layer)
    problem = problem_of(weights, TOP_K, Activation(), batch_invariant=batch_invariant)
    return MoEExperts(weights, problem, detect("cuda"), "sm90")


def batch(
    num_tokens: int, seed: int = 2, hidden: int = SIZES[0], kind: str = "uniform"
) -> tuple[torch.Tensor, ...]:
    """x, ids and weights, on the GPU."""
    x = tokens(seed, num_tokens, hidden, torch.bfloat16)
    routed = problems.routing(seed, kind, num_tokens, EXPERTS, TOP_K)
    return (x.cuda(), *(torch.from_numpy(t).cuda() for t in routed))


def check(layer: moe.Layer, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    x, ids, weights = (t.cpu() for t in args)
    assert_close(layer, x, ids.numpy(), weights.numpy(), out.cpu())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("num_tokens", "batch_invariant"),
    [*((m, False) for m in (0, 1, 7, 20, 33, 200, 1100)), (150, True)],
)
def test_any_number_of_tokens(fmt, num_tokens, batch_invariant):
    """Decode, prefill, and the wide kernel, which is left to batch-invariant layers."""
    layer = layer_of(fmt)
    args = batch(num_tokens)
    args[1][torch.rand(args[1].shape, device="cuda") < 0.1] = -1
    check(layer, args, served(layer, batch_invariant)(*args))


@pytest.mark.parametrize("kind", [*problems.ROUTINGS, "all_to_one"])
def test_skewed_routings_of_many_tokens(kind):
    """Some rows are compared: the oracle computes them one by one."""
    layer, num_tokens = layer_of(), 16384
    x, ids, weights = batch(num_tokens, kind="uniform" if kind == "all_to_one" else kind)
    if kind == "all_to_one":
        ids[:, 0], ids[:, 1] = 5, -1
    out = served(layer)(x, ids, weights)
    some = slice(0, num_tokens, 331)
    check(layer, (x[some], ids[some], weights[some]), out[some])


@pytest.mark.parametrize("num_tokens", [20, 200, 4096])
def test_twenty_runs_are_bit_equal(num_tokens):
    experts, args = served(layer_of()), batch(num_tokens)
    first = experts(*args)
    assert all(torch.equal(experts(*args), first) for _ in range(20))


@pytest.mark.parametrize(
    ("num_tokens", "batch_invariant"), [(20, False), (33, True), (200, True), (1100, True)]
)
def test_a_row_alone_is_that_row_of_a_batch(num_tokens, batch_invariant):
    experts, args = served(layer_of(), batch_invariant), batch(num_tokens)
    whole = experts(*args)
    alone = [experts(*(t[row : row + 1] for t in args)) for row in range(num_tokens)]
    assert torch.equal(torch.cat(alone), whole)


def test_rows_of_a_prefill_do_not_depend_on_the_others():
    """Of its own regime: not on their number, nor on their order."""
    experts, args = served(layer_of()), batch(3000)
    whole = experts(*args)
    for rows in (slice(0, 700), slice(700, 3000), torch.randperm(3000)[:2000]):
        assert torch.equal(experts(*(t[rows] for t in args)), whole[rows])


@pytest.mark.parametrize("num_tokens", [20, 200, 1100])
def test_a_graph_is_replayed_with_other_routings(num_tokens):
    experts, args = served(layer_of()), batch(num_tokens)
    experts(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(*args)
    for seed in range(20):
        fresh = batch(num_tokens, seed)
        for old, new in zip(args, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        assert torch.equal(out, experts(*fresh))


@pytest.mark.parametrize("num_tokens", [20, 1100])
def test_torch_compile_sees_one_operator(num_tokens):
    experts, args = served(layer_of()), batch(num_tokens)
    ops.bind(f"hw.compiled.{num_tokens}", experts)
    call = partial(ops.moe_experts, expert_map=None, name=f"hw.compiled.{num_tokens}")
    compiled = torch.compile(lambda *a: call(*a) * 2, fullgraph=True)
    assert torch.equal(compiled(*args), experts(*args) * 2)


@pytest.mark.parametrize("num_tokens", [20, 1100])
def test_a_call_waits_for_nothing(num_tokens):
    experts, args = served(layer_of()), batch(num_tokens)
    expected = experts(*args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = experts(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)


def test_rows_longer_than_a_block_can_hold():
    layer = layer_of(sizes=LONG_ROWS)
    experts = served(layer)
    for num_tokens in (1, 33, 300):
        args = batch(num_tokens, hidden=LONG_ROWS[0])
        check(layer, args, experts(*args))


def test_more_elements_than_an_int32_counts():
    """M x top-k x hidden is beyond 2^31; rows here and there are those of small batches."""
    num_tokens = 2**31 // (TOP_K * SIZES[0]) + 5000
    experts = served(layer_of())
    some = batch(5000)
    args = [t.repeat(-(-num_tokens // 5000), 1)[:num_tokens] for t in some]
    assert args[0].numel() * TOP_K > 2**31
    out = experts(*args)
    expected = experts(*some)
    for start in (0, num_tokens // 2 // 5000 * 5000, num_tokens // 5000 * 5000 - 5000):
        assert torch.equal(out[start : start + 5000], expected)


HERE = Path(__file__).parent
ONE_LAUNCH = {
    "decode": f"{HERE / 'test_hw.py'}::test_any_number_of_tokens[20-False-nvfp4-ue4m3]",
    "wide": f"{HERE / 'test_hw.py'}::test_any_number_of_tokens[150-True-nvfp4-ue4m3]",
    "prefill": f"{HERE / 'test_hw.py'}::test_any_number_of_tokens[1100-False-nvfp4-ue4m3]",
    "top_k": f"{HERE / 'test_route.py'}::test_the_best_of_softmax[True-128-8-dtype0-gpu]",
    "triton": f"{HERE.parent / 'triton' / 'test_layer.py'}::test_gpt_oss_in_float16[gpu]",
}
"""A test that launches the kernel."""


@pytest.mark.parametrize("kernel", ONE_LAUNCH)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool, kernel):
    """In a process of its own."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    found = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "pytest",
         "--hw", "-p", "no:cacheprovider", "-v", ONE_LAUNCH[kernel]],
        capture_output=True, text=True, timeout=300, cwd=HERE.parents[2],
        env=dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-3000:]
    assert "1 passed" in found.stdout
    assert any(f"{kind} SUMMARY: 0" in found.stdout for kind in ("ERROR", "RACECHECK"))
