"""`select` answers with a winner and every other one's reason."""

import pytest

from rubin_moe.errors import ConfigError, UnsupportedError
from rubin_moe.formats.spec import MXFP4, MXFP8, NVFP4_UE4M3
from rubin_moe.kernels import registry
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
