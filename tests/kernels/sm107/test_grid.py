"""A sample of the grid; `scripts/sm107_grid.py` runs all of it."""

import pytest

from .grid import GridCase, GridProblem, cases
from .layers import emulator

SAMPLE = [
    GridCase("nvfp4-ue4m3", 23, 9, "some_empty", 352, 352),
    GridCase("nvfp4-ue4m3", 129, 1, "all", 352, 352, "swigluoai", 2),
    GridCase("nvfp4-ue5m3", 16, 4, "random", 2880, 96),
    GridCase("nvfp4-ue5m3", 23, 9, "some_empty", 352, 352, "swigluoai", 1),
    GridCase("mxfp8", 64, 1, "all", 256, 256),
    GridCase("mxfp8", 23, 9, "some_empty", 352, 352, "swigluoai", 1),
    GridCase("mxfp8", 7, 4, "random", 2880, 96, "silu", 2),
]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_accumulators_are_exact_and_codes_follow(case):
    problem = GridProblem(case)
    out = problem.run(emulator())
    equal, accumulators = problem.accumulators_equal(out)
    assert equal == accumulators
    codes = problem.compare_codes(out)
    assert codes.passed, codes
    assert codes.elements - codes.bit_equal <= 1e-3 * codes.elements


SCHEDULED = [(GridCase("nvfp4-ue4m3", 23, 4, "random", 256, 96), seed) for seed in range(8)] + [
    (GridCase("mxfp8", 23, 1, "all", 256, 64, "swigluoai", cta_group), seed)
    for cta_group in (1, 2)
    for seed in range(2)
]


@pytest.mark.parametrize(("case", "seed"), SCHEDULED, ids=str)
def test_every_schedule_gives_the_same_bytes(case, seed):
    problem = GridProblem(case)
    assert problem.run(emulator(seed)).equal(problem.run(emulator()))


def test_the_sample_is_of_the_grid():
    assert set(SAMPLE) <= set(cases())


def test_a_changed_weight_is_seen():
    """The comparisons can fail: one code of the first expert's gate changes its sign."""
    problem = GridProblem(GridCase("nvfp4-ue4m3", 64, 1, "all", 256, 256))
    problem.w13[0].qdata[3, 5] ^= 8
    out = problem.run(emulator())
    equal, accumulators = problem.accumulators_equal(out)
    assert 0 < accumulators - equal <= 64
    assert not problem.compare_codes(out).passed
