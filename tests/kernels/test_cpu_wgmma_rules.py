"""The slow CPU mode of FP8 activations: what it answers, and that nobody gets it unasked."""

import pytest

from rubin_moe.errors import UnsupportedError
from rubin_moe.formats.spec import FORMATS, WEIGHT_FORMATS
from rubin_moe.kernels.base import MoEProblem, Target
from rubin_moe.kernels.cpu_wgmma import rules
from rubin_moe.kernels.registry import select
from rubin_moe.loader.for_activations import default_activations

CPU = Target("cpu")


def problem(weights: str = "mxfp4", activations: str = "fp8-e4m3", **fields) -> MoEProblem:
    return MoEProblem(8, 8, 2, 64, 64, FORMATS[weights], activation_format=activations, **fields)


def test_mxfp4_only():
    assert rules.why_not(problem(), CPU) is None
    assert select(problem(), CPU).backend == "cpu-wgmma"
    for weights in ("nvfp4-ue4m3", "nvfp4-ue5m3"):
        assert rules.why_not(problem(weights), CPU).startswith(f"{weights} weights; fp8-e4m3")
        with pytest.raises(UnsupportedError, match="fp8-e4m3 activations on cpu"):
            select(problem(weights), CPU)


@pytest.mark.parametrize("activations", ["16bit", "mxfp8", "int8"])
def test_other_activations_never_get_it(activations):
    assert rules.why_not(problem(activations=activations), CPU) == (
        f"{activations} activations; computes fp8-e4m3 only"
    )
    assert select(problem(activations=activations), CPU).backend != "cpu-wgmma"


@pytest.mark.parametrize("capability", [None, (9, 0), (10, 0), (10, 7), (12, 0)])
@pytest.mark.parametrize("stored", WEIGHT_FORMATS, ids=str)
def test_no_checkpoint_gets_fp8_activations_unasked(stored, capability):
    for scheme in ("w4a4", "w4a4-dynamic", "w4a16"):
        assert default_activations(stored, scheme, capability) != "fp8-e4m3"


def test_other_machines_and_dtypes():
    assert "tensors are on sm_90" in rules.why_not(problem(), Target("cuda", (9, 0)))
    odd = problem(dtype="float8_e4m3fn")
    assert rules.why_not(odd, CPU).startswith("hidden states of float8_e4m3fn")
    assert str(rules.plan(problem(), 3)) == "cpu-wgmma: num_tokens=3 rows_per_tile=16"
