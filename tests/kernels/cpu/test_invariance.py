"""Bit-equal runs: for any number of threads, any batch, any chunking, any leftover memory."""

import pytest
import torch

from rubin_moe.kernels.cpu import host, memory, rules, threads
from tests.oracles import problems

from .cases import Case, same_bits


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def case(request):
    return Case(problems.layer(7, "nvfp4-ue4m3", 6, 96, 80), request.param, top_k=3)


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_row_alone_equals_the_row_in_any_batch(case):
    ids, weights = problems.routing(2, "power_law", 33, 6, 3)
    x = case.inputs(33)
    together = case.run(x, ids, weights)
    for row in range(33):
        one = slice(row, row + 1)
        assert same_bits(case.run(x[one], ids[one], weights[one]), together[one])


def test_twenty_runs_are_equal(case):
    ids, weights = problems.routing(2, "uniform", 9, 6, 3)
    x = case.inputs(9)
    first = case.run(x, ids, weights)
    for _ in range(19):
        assert same_bits(case.run(x, ids, weights), first)


def test_the_number_of_threads_changes_nothing(case, restore_threads, monkeypatch):
    monkeypatch.setattr(host, "SERIAL_REDUCE", 0)
    ids, weights = problems.routing(2, "uniform", 33, 6, 3)
    x = case.inputs(33)
    torch.set_num_threads(1)
    one = case.run(x, ids, weights)
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        assert same_bits(case.run(x, ids, weights), one)


def test_python_threads_do_the_same(case, monkeypatch):
    ids, weights = problems.routing(2, "uniform", 33, 6, 3)
    x = case.inputs(33)
    expected = case.run(x, ids, weights)
    monkeypatch.setattr(threads, "launcher", lambda: threads._python_threads)
    monkeypatch.setenv("RUBIN_MOE_NUM_THREADS", "3")
    assert same_bits(case.run(x, ids, weights), expected)


def test_openmp_runs_the_function_on_every_thread():
    seen = []
    note = threads.ctypes.CFUNCTYPE(None, threads.ctypes.c_void_p)(seen.append)
    threads.launcher()(threads.ctypes.cast(note, threads.ctypes.c_void_p).value, 7, 2)
    assert seen == [7, 7]


def test_chunks_change_nothing(case, monkeypatch):
    """Field report 88: more tokens than a workspace holds."""
    ids, weights = problems.routing(2, "some_missing", 33, 6, 3)
    x = case.inputs(33)
    expected = case.run(x, ids, weights)
    monkeypatch.setattr(rules, "WORKSPACE_BYTES", 10_000)
    assert rules.chunk_tokens(case.kernel.problem) < 5
    assert same_bits(case.run(x, ids, weights), expected)


def test_the_workspace_outlives_the_inference_mode_it_was_made_in():
    vars(memory.OF_THREAD).pop("block", None)
    with torch.inference_mode():
        memory.workspace({"all": 64})
    memory.OF_THREAD.block.fill_(0)


def test_leftover_memory_is_never_read(case):
    ids, weights = problems.routing(2, "some_missing", 9, 6, 3)
    x = case.inputs(9)
    expected = case.run(x, ids, weights)
    memory.workspace({"all": 1 << 20})
    memory.OF_THREAD.block.fill_(0xFF)  # NaN in every float format
    out = torch.full_like(x, float("nan"))
    assert same_bits(case.run(x, ids, weights, out=out), expected)
