"""`select` answers with a winner and every other one's reason."""

import pytest

from rubin_moe.errors import ConfigError, UnsupportedError
from rubin_moe.formats.spec import MXFP4, MXFP8, NVFP4_UE4M3
from rubin_moe.kernels import registry
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import MoEProblem, Target

CPU = Target("cpu")


def problem(**fields):
    base = {"num_experts": 8, "global_num_experts": 8, "top_k": 2, "hidden": 64}
    return MoEProblem(**{**base, "intermediate": 32, "weight_format": NVFP4_UE4M3, **fields})


def test_cpu_wins_on_a_cpu_and_every_other_has_a_reason():
    chosen = registry.select(problem(), CPU)
    assert chosen.backend == "cpu"
    assert set(chosen.reasons) == set(registry.backend_names()) - {"cpu"}
    assert all(chosen.reasons.values())


def test_a_refusal_carries_each_candidates_reason():
    with pytest.raises(UnsupportedError, match="no decoder for mxfp8") as caught:
        registry.select(problem(weight_format=MXFP8), CPU)
    assert set(caught.value.reasons) == set(registry.backend_names())


def test_a_named_backend_that_cannot_is_refused_and_not_replaced(monkeypatch):
    monkeypatch.setenv("RUBIN_MOE_BACKEND", "cpu")
    with pytest.raises(UnsupportedError, match="tensors are on sm_90"):
        registry.select(problem(weight_format=MXFP4), Target("cuda", (9, 0)))


def test_unknown_and_forbidden_names(monkeypatch):
    with pytest.raises(ConfigError, match="unknown backend 'gpu'"):
        registry.select(problem(), CPU, backend="gpu")
    monkeypatch.setenv("RUBIN_MOE_FORBID", "cpu")
    with pytest.raises(UnsupportedError, match="forbidden by RUBIN_MOE_FORBID"):
        registry.select(problem(), CPU)


def test_a_cpu_without_the_packages_names_the_line_that_mends_it():
    bare = Target("cpu", None, {"triton": "3.6.0"})
    with pytest.raises(UnsupportedError, match=r"needs torch and llvmlite: pip install 'rubin-moe"):
        registry.select(problem(), bare, backend="cpu")


def gpu(major, minor):
    return Target("cuda", (major, minor), {"triton": "3.6.0", "nvidia-cutlass-dsl": "4.8.1"})


@pytest.mark.parametrize(
    ("capability", "backend", "fields", "reason"),
    [
        ((10, 7), "sm107", {}, "tcgen05 has no 16-bit x FP4 instruction"),
        (
            (10, 7), "sm107", {"activation_format": "mxfp8"},
            "no instruction multiplies nvfp4-ue4m3 weights with mxfp8 activations",
        ),
        (
            (10, 7), "sm107",
            {"activation_format": "nvfp4-ue4m3", "activation": Activation("relu2")},
            "activation relu2; computes silu, swigluoai",
        ),
        ((9, 0), "sm90", {"activation_format": "nvfp4-ue4m3"}, "multiplies 16-bit and fp8-e4m3"),
        ((9, 0), "sm90", {"dtype": "float32"}, "the model's are float32"),
    ],
)  # fmt: skip
def test_a_refusal_for_a_scheme_or_an_activation_says_so(capability, backend, fields, reason):
    """Field report 107: "this GPU has no FP4" was said of GPUs that have it, whatever the cause."""
    target = gpu(*capability)
    with pytest.raises(UnsupportedError) as refused:
        registry.select(problem(**fields), target, backend=backend)
    said = refused.value.reasons[backend]
    assert reason in said
    assert str(target) not in said  # it is not the GPU's fault
    others = {name for name in registry.backend_names() if name != backend}
    assert {refused.value.reasons[name] for name in others} == {f"{backend} was asked for by name"}


ODD = {"hidden": 72}  # no multiple of the 16 rows that a tile has


def test_a_slower_backend_for_a_size_is_named_with_the_size():
    """Field report 108: 176, no multiple of 32, took a slow path elsewhere, and nothing said so."""
    assert registry.select(problem(intermediate=176), gpu(9, 0)).backend == "sm90"
    odd = registry.select(problem(**ODD), gpu(9, 0))
    assert odd.backend == "triton"
    assert "not sm90: hidden 72: a multiple of 16" in str(odd)


@pytest.mark.parametrize(
    ("variable", "value"), [("RUBIN_MOE_BACKEND", "sm90"), ("RUBIN_MOE_FORBID", "triton")]
)
def test_who_wants_the_fast_one_alone_gets_it_or_an_error(monkeypatch, variable, value):
    """Field report 108, its strict mode."""
    monkeypatch.setenv(variable, value)
    assert registry.select(problem(), gpu(9, 0)).backend == "sm90"
    with pytest.raises(UnsupportedError, match="hidden 72: a multiple of 16"):
        registry.select(problem(**ODD), gpu(9, 0))


@pytest.mark.parametrize("name", ["num_experts", "top_k", "hidden", "intermediate"])
def test_a_problem_of_nothing_is_refused_by_its_size(name):
    with pytest.raises(ConfigError, match=f"{name} 0: expected 1 or more"):
        problem(**{name: 0})
