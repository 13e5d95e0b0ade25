"""What the slow CPU mode answers; standard library only."""

import pytest

from rubin_moe.formats.spec import FORMATS, WEIGHT_FORMATS
from rubin_moe.kernels.base import MoEProblem, Target
from rubin_moe.kernels.cpu_tcgen05 import rules
from rubin_moe.kernels.registry import select

CPU = Target("cpu")


def problem(weights: str, activations: str, **fields) -> MoEProblem:
    return MoEProblem(
        8, 8, 2, 64, 64, FORMATS[weights], activation_format=activations, **fields
    )  # fmt: skip


@pytest.mark.parametrize("weights", [f.name for f in WEIGHT_FORMATS])
@pytest.mark.parametrize("activations", ["16bit", "nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp8", "int8"])
def test_one_activation_format_goes_with_each_weight_format(weights, activations):
    reason = rules.why_not(problem(weights, activations), CPU)
    if rules.PAIRS[weights] == activations:
        assert reason is None
        chosen = select(problem(weights, activations), CPU)
        assert chosen.backend == "cpu-tcgen05"
    elif activations in ("16bit", "int8"):
        assert reason.startswith(f"{activations} activations; computes nvfp4-ue4m3")
    else:
        assert f"{weights} weights with {activations} activations" in reason


def test_other_machines_and_dtypes():
    mx = problem("mxfp4", "mxfp8")
    assert rules.why_not(mx, Target("cuda", (10, 7))) == (
        "computes on the CPU, and the layer's tensors are on sm_107"
    )
    odd = problem("mxfp4", "mxfp8", dtype="float8_e4m3fn")
    assert rules.why_not(odd, CPU).startswith("hidden states of float8_e4m3fn")
    assert str(rules.plan(mx, 3)) == "cpu-tcgen05: num_tokens=3 rows_per_tile=16"
