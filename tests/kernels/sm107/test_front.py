"""Routing to work in one launch, executed on the emulator, against torch, bit for bit."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rubin_moe.kernels.sm107.compiled import route_kernel
from rubin_moe.kernels.sm107.host import make_work
from rubin_moe.kernels.sm107.rules import MAX_EXPERTS, MAX_TOP_K
from rubin_moe.kernels.sm107.work import Work
from tests.oracles import problems

from .layers import emulator
from .routing import reference_work

LAUNCHER = emulator()


def assert_equal(got: Work, want: Work) -> None:
    number, rows = int(want.num_items), len(want.token)
    assert torch.equal(got.num_items, want.num_items)
    assert len(got.items) >= number
    assert torch.equal(got.items[:number], want.items)
    for name in ("token", "choice", "weight"):
        assert torch.equal(getattr(got, name)[:rows], getattr(want, name)), name


def weights_for(ids: torch.Tensor) -> torch.Tensor:
    return torch.rand(ids.shape, generator=torch.Generator().manual_seed(3))


@st.composite
def routings(draw):
    """(ids, experts, tile): a few experts get most, some pairs none, some ids are no expert's."""
    experts = draw(st.integers(1, MAX_EXPERTS))
    top_k = draw(st.integers(1, MAX_TOP_K))
    tokens = draw(st.integers(0, 90))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    among = draw(st.integers(1, experts))  # 1: all tokens to one
    shape = (tokens, top_k)
    ids = torch.randint(experts - among, experts, shape, generator=generator)
    lost = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.2, 1.0]))
    ids[lost] = draw(st.sampled_from([-1, -7, experts, 1 << 30]))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return ids.to(dtype), experts, draw(st.sampled_from([8, 32, 64, 100, 128]))


@settings(max_examples=60, deadline=None)
@given(routings())
def test_equals_torch_bit_for_bit(routing):
    ids, experts, tile_n = routing
    weights = weights_for(ids)
    got = make_work(LAUNCHER, ids, weights, experts, tile_n)
    assert_equal(got, reference_work(ids, weights, experts, tile_n))


@pytest.mark.parametrize("routing", problems.ROUTINGS)
def test_the_oracles_routings(routing):
    ids, weights = (torch.from_numpy(t) for t in problems.routing(2, routing, 200, 9, 3))
    assert_equal(make_work(LAUNCHER, ids, weights, 9, 32), reference_work(ids, weights, 9, 32))


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(5000, 8, 128), (1200, 16, 1024)])
def test_many_rounds_of_a_warp(tokens, top_k, experts):
    """A segment of more than one round of loads, and one that ends inside a round."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(-1, experts, (tokens, top_k), generator=generator)
    weights = weights_for(ids)
    got = make_work(LAUNCHER, ids, weights, experts, 128)
    assert_equal(got, reference_work(ids, weights, experts, 128))


def test_an_expert_map_and_no_weights():
    """Global ids to a rank's experts; ones where the router weight went into the input."""
    ids = torch.randint(-1, 12, (40, 2), generator=torch.Generator().manual_seed(1))
    expert_map = torch.full((12,), -1, dtype=torch.int32)
    expert_map[torch.tensor([7, 2, 5, 0, 11])] = torch.arange(5, dtype=torch.int32)
    got = make_work(LAUNCHER, ids, None, 5, 32, expert_map)
    assert_equal(got, reference_work(ids, None, 5, 32, expert_map))
    assert got.weight[: len(reference_work(ids, None, 5, 32, expert_map).token)].eq(1).all()


def test_a_captured_launch_is_right_for_the_next_routing():
    """The same addresses and numbers again, other ids: what a graph replay does."""
    ids, weights = torch.zeros(33, 4, dtype=torch.int64), torch.empty(33, 4)
    work = Work.empty(ids.numel(), 16, 32, ids.device)
    outputs = [getattr(work, field.name) for field in fields(Work)]
    captured = [ids, None, weights, *outputs, ids.numel(), 4, 8, 16, 32]
    for number, high in enumerate((16, 1, 16, 0, 5)):
        generator = torch.Generator().manual_seed(number)
        ids.copy_(torch.randint(-1, max(high, 0), ids.shape, generator=generator))
        weights.copy_(torch.rand(ids.shape, generator=generator))
        LAUNCHER.launch(route_kernel(), 1, captured)
        assert_equal(work, reference_work(ids, weights, 16, 32))


def test_nothing_past_the_work_is_written():
    ids = torch.tensor([[-1, 3], [3, -1], [0, 3]])
    work = Work.empty(ids.numel(), 4, 32, ids.device)
    poison = -0x01234567
    for tensor in (work.items, work.token, work.choice, work.weight.view(torch.int32)):
        tensor.fill_(poison)
    outputs = [getattr(work, field.name) for field in fields(Work)]
    weights = weights_for(ids)
    LAUNCHER.launch(route_kernel(), 1, [ids, None, weights, *outputs, 6, 2, 8, 4, 32])
    assert_equal(work, reference_work(ids, weights, 4, 32))
    assert work.items[2:].eq(poison).all()
    for tensor in (work.token, work.choice, work.weight.view(torch.int32)):
        assert tensor[4:].eq(poison).all()


@pytest.mark.parametrize("seed", range(8))
def test_every_schedule_gives_the_same_work(seed):
    ids = torch.randint(-1, 60, (150, 5), generator=torch.Generator().manual_seed(seed))
    weights = weights_for(ids)
    got = make_work(emulator(seed), ids, weights, 60, 32)
    assert_equal(got, reference_work(ids, weights, 60, 32))
