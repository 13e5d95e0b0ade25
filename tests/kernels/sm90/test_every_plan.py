"""Any layer and any call: the plan can be built, and memory and tables hold the worst routing."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubin_moe.arch import SM90A
from rubin_moe.formats.spec import MXFP4, NVFP4_UE4M3, NVFP4_UE5M3
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.sm90 import choice, plan, prefill_host, route, rules, sort, sort_plan
from rubin_moe.kernels.sm90.calls import choices, plan_of
from rubin_moe.kernels.sm90.fp8_host import fp8_workspace_bytes
from rubin_moe.kernels.sm90.fp8_plan import Fp8Plan, check_fp8
from rubin_moe.kernels.sm90.host import MAX_COUNTERS, _Launch
from rubin_moe.kernels.sm90.prefill_plan import PrefillPlan, check_prefill
from rubin_moe.kernels.sm90.sort_host import sum_blocks

REGISTERS = 65536  # of a multiprocessor
INT32 = 2**31
GRANULES = {NVFP4_UE4M3: 16, NVFP4_UE5M3: 16, MXFP4: 32}
MULTIPROCESSORS = (132, 114, 16, 1)  # H200 and H100, H100 PCIe, a part of one, one


@st.composite
def problems(draw: st.DrawFn) -> MoEProblem:
    fmt = draw(st.sampled_from(list(GRANULES)))
    granule = GRANULES[fmt] * draw(st.sampled_from((1, 2, 4)))
    experts = draw(st.integers(1, 1024) | st.sampled_from((1, 8, 128, 256, 512, 1024)))
    fp8 = fmt == MXFP4 and draw(st.booleans())
    return MoEProblem(
        num_experts=experts,
        global_num_experts=draw(st.integers(experts, 1024) | st.just(experts)),
        top_k=draw(st.integers(1, plan.MAX_TOP_K)),
        hidden=granule * draw(st.integers(1, 16384 // granule)),
        intermediate=granule * draw(st.integers(1, 16384 // granule)),
        weight_format=fmt,
        activation=Activation(draw(st.sampled_from(("silu", "relu2")))),
        activation_format="fp8-e4m3" if fp8 else "16bit",
        dtype=draw(st.sampled_from(("bfloat16", "float16"))),
        batch_invariant=draw(st.booleans()),
    )


calls = st.integers(0, 65536) | st.integers(0, 600)


def worst_passes(num_pairs: int, experts: int, size: int) -> int:
    """Of all ways to give pairs to experts: one alone to as many as possible, and what is left so
    that each pass of ``size`` but an expert's last is full."""
    touched = min(experts, num_pairs)
    return touched + (num_pairs - touched) // size


def check_decode(problem: MoEProblem, num_tokens: int) -> None:
    """A launch of as many."""
    made = plan_of(problem, num_tokens)
    assert isinstance(made, plan.Plan)
    plan.check(made)
    pairs, size = num_tokens * problem.top_k, made.tiles.pass_tokens
    assert pairs <= made.max_pairs
    assert made.smem_bytes <= SM90A.smem_per_block
    assert made.threads <= 1024
    assert made.counters <= MAX_COUNTERS
    assert worst_passes(pairs, problem.num_experts, size) <= made.passes_of(pairs)
    assert worst_passes(made.max_pairs, problem.num_experts, size) <= made.max_passes
    # a pass's word: 13 bits of expert, 11 of its first pair, 8 of their number
    assert problem.num_experts <= 1 << min(13, route.EXPERT_BITS)
    assert made.max_pairs <= 1 << 11
    assert size < 1 << 8
    launch = _Launch.of(made, None, num_tokens)  # type: ignore[arg-type]
    ends = (*launch.areas[1:], launch.scratch_bytes)
    wanted = (*made.scratch_bytes(pairs), 4 * pairs * made.sizes.slabs * made.sizes.hidden)
    for start, end, nbytes in zip(launch.areas, ends, wanted, strict=True):
        assert end - start >= nbytes


def check_prefill_round(made: PrefillPlan, num_tokens: int, num_blocks: int) -> None:
    sizes, size = made.sizes, made.tiles.pass_tokens
    sorting = sort_plan.check(prefill_host.sort_plan_of(made))
    pairs = num_tokens * sizes.top_k
    assert pairs <= min(sort_plan.MAX_PAIRS, num_blocks * sort_plan.ROUNDS * sorting.threads)
    assert pairs < 1 << 31 - sort.EXPERT_BITS  # an expert's total and its number in a word
    passes = worst_passes(pairs, sizes.num_experts, size)
    assert passes <= made.passes_of(pairs) == sorting.max_passes(pairs)
    assert passes * max(made.units13, made.units2) < INT32
    assert num_tokens * sorting.k_blocks * 8 < INT32  # what permutes and what sums count
    area = prefill_host.workspace_bytes(made, num_tokens, num_blocks)
    assert area["passes"] >= sort_plan.RECORD * (1 + passes)
    assert area["counts"] >= 4 * num_blocks * sizes.num_experts
    assert area["h"] >= passes * size * 2 * sizes.padded_intermediate
    assert area["y"] == 2 * pairs * sizes.hidden
    assert area["tokens"] >= 2 * num_tokens * sizes.hidden
    assert 1 <= sum_blocks(num_tokens, sizes.hidden, num_blocks) < INT32
    if isinstance(made, Fp8Plan):
        more = fp8_workspace_bytes(made, num_tokens, num_blocks)
        assert more["x8"] >= num_tokens * sizes.hidden
        assert more["h8"] >= passes * size * sizes.padded_intermediate


def check_many(made: PrefillPlan, num_tokens: int, num_blocks: int) -> None:
    (check_fp8 if isinstance(made, Fp8Plan) else check_prefill)(made)  # type: ignore[operator]
    assert max(made.smem13, made.smem2) <= SM90A.smem_per_block
    assert made.threads <= 1024
    mine, loads = made.registers
    assert 128 * (made.tiles.groups * mine + loads) <= min(REGISTERS, 168 * made.threads)
    none: Any = None
    at_once = prefill_host.Prefill(made, none, none_launcher, num_blocks, none).max_tokens
    assert at_once >= 1
    rounds = max(1, -(-num_tokens // at_once))
    assert -(-num_tokens // rounds) <= at_once
    check_prefill_round(made, min(num_tokens, -(-num_tokens // rounds)), num_blocks)


class _NoLauncher:
    def launch(self, *_: Any) -> None:
        raise AssertionError

    load = launch


none_launcher: Any = _NoLauncher()


@settings(max_examples=400, derandomize=True, deadline=None)
@given(problems(), calls, st.sampled_from(MULTIPROCESSORS))
def test_every_call_has_a_plan_that_can_be_built(
    problem: MoEProblem, num_tokens: int, num_blocks: int
) -> None:
    assert rules.why_not_problem(problem) is None
    least = choice.prefill_from(problem)
    made = plan_of(problem, num_tokens)
    if isinstance(made, PrefillPlan):
        check_many(made, num_tokens, num_blocks)
        return
    assert least is None or num_tokens < least
    step = choice.max_tokens(problem)
    assert step >= 1
    assert least is None or least <= step + 1  # one launch before it, whatever the routing
    for piece in {min(num_tokens, step), num_tokens % step}:
        check_decode(problem, piece)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(problems(), st.sampled_from(MULTIPROCESSORS))
def test_around_the_switch_too(problem: MoEProblem, num_blocks: int) -> None:
    problem = replace(problem, batch_invariant=False, activation_format="16bit")
    least = choice.prefill_from(problem)
    assert least is not None
    assert least >= 1
    for num_tokens in (least, least + 1):
        made = plan_of(problem, num_tokens)
        assert isinstance(made, PrefillPlan)
        check_many(made, num_tokens, num_blocks)
    check_decode(problem, least - 1)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(problems(), calls)
def test_a_call_takes_a_plan_that_was_compiled_ahead(problem: MoEProblem, most: int) -> None:
    most = 1 + most % 3000
    ahead = set(choices(problem, most))
    for num_tokens in {1, 2, most // 3, most // 2, most - 1, most} - {0}:
        made = plan_of(problem, num_tokens)
        if isinstance(made, PrefillPlan):
            assert made in ahead
        else:
            step = choice.max_tokens(problem)
            pieces = {min(step, num_tokens), num_tokens % step} - {0}
            assert {plan_of(problem, m) for m in pieces} <= ahead


@pytest.mark.parametrize("num_pairs", [1, 5, 64, 2048])
@pytest.mark.parametrize("size", [8, 24, 144])
def test_the_worst_routing_is_the_worst(num_pairs: int, size: int) -> None:
    """Against a search over how many pairs each of three experts gets."""
    third = [
        -(-a // size) + -(-b // size) + -(-(num_pairs - a - b) // size)
        for a in range(0, num_pairs + 1, 1 + num_pairs // 97)
        for b in range(0, num_pairs + 1 - a, 1 + num_pairs // 97)
    ]
    assert max(third) <= worst_passes(num_pairs, 3, size)
