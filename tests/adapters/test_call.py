"""A layer's call through vLLM's modular kernel, and past it where that would only copy."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.target import detect
from rubin_moe.layers import ops
from rubin_moe.layers.experts import MoEExperts, problem_of
from tests.layers.backends import tokens, weights_of
from tests.oracles import problems

NAME = "call.experts"


@pytest.fixture
def method(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A layer's method as it is after loading; one expert a token."""
    pytest.importorskip("vllm")
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.prepare_finalize import (
        MoEPrepareAndFinalizeNoDPEPModular,
    )

    from rubin_moe.adapters.vllm import compat
    from rubin_moe.adapters.vllm.experts import RubinExperts
    from rubin_moe.adapters.vllm.method import RubinMoeMethod

    weights = weights_of(problems.layer(3, "nvfp4-ue4m3", 4))
    problem = problem_of(weights, 1, Activation(), torch.float32)
    experts = MoEExperts(weights, problem, detect("cpu"), "cpu")
    ops.unbind(NAME)
    ops.bind(NAME, experts)
    compat.prepare_workspaces()
    config = FusedMoEQuantConfig.make(quant_dtype=None)
    parallel = SimpleNamespace(dp_size=1, pcp_size=1, sp_size=1, use_ep=False)
    moe = MagicMock(moe_parallel_config=parallel)
    step = RubinExperts(moe, config, NAME, problem)
    made = object.__new__(RubinMoeMethod)
    made._experts, made._handle = experts, NAME
    made.moe_kernel = mk.FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), step)
    yield made
    ops.unbind(NAME)


def layer(weight_on_input: bool) -> Any:
    return SimpleNamespace(
        apply_router_weight_on_input=weight_on_input, expert_map=None, activation=None,
        global_num_experts=4,
    )  # fmt: skip


def batch(hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tokens(1, 5, hidden), torch.rand(5, 1) + 0.5, torch.tensor([[0], [3], [1], [2], [0]])


@pytest.mark.parametrize("copied", [False, True])
def test_both_ways_give_the_layer(method: Any, copied: bool, monkeypatch: Any) -> None:
    from rubin_moe.adapters.vllm import compat

    x, weights, ids = batch(method._experts.problem.hidden)
    calls = []
    inner = method.moe_kernel.apply
    method.moe_kernel.apply = lambda *args, **kw: calls.append(1) or inner(*args, **kw)
    if copied:
        monkeypatch.setattr(compat, "tokens_stay", lambda kernel: False)
    assert torch.equal(
        method.apply(layer(False), x, weights, ids), method._experts(x, ids, weights)
    )
    assert len(calls) == copied


def test_a_router_weight_on_the_input_counts_once(method: Any) -> None:
    """vLLM multiplies the tokens before it hands them over."""
    x, weights, ids = batch(method._experts.problem.hidden)
    out = method.apply(layer(True), x, weights, ids)
    assert torch.equal(out, method._experts(x * weights, ids, torch.ones_like(weights)))
