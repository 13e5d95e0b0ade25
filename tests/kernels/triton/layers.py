"""Layers of the contract on the Triton kernels: in the interpreter, on the emulator, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.triton.host import TritonKernel
from rubin_moe.layers.experts import problem_of
from tests.layers.backends import INTERPRETED, tokens, weights_of
from tests.oracles import moe, problems


@dataclass(frozen=True)
class Machine:
    """Where kernels run: ``interpreter`` (only there in a process that set TRITON_INTERPRET before
    it imported Triton), ``emulator`` (what Triton compiles for sm_90a), or ``gpu``."""

    name: str

    @property
    def device(self) -> str:
        return "cuda" if self.name == "gpu" else "cpu"

    def start(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Must be called before the first launch; the launches, where they are recorded."""
        if self.name != "emulator":
            return None
        from tests.kernels.triton.ahead import Launches

        return Launches(monkeypatch)


EMULATOR = pytest.param(Machine("emulator"), id="emulator")
QUICK = (
    (pytest.param(Machine("interpreter"), id="interpreter"),)
    if INTERPRETED
    else (pytest.param(Machine("gpu"), id="gpu", marks=pytest.mark.hw),)
)
ALL = QUICK if INTERPRETED else (EMULATOR, *QUICK)


def kernel_of(
    layer: moe.Layer, machine: Machine, top_k: int = 2, dtype: torch.dtype = torch.bfloat16
) -> TritonKernel:
    problem = problem_of(
        weights_of(layer),
        top_k,
        Activation(layer.kind, layer.limit, layer.alpha, layer.beta),  # type: ignore[arg-type]
        dtype,
        router_weight_on_input=layer.weight_on_input,
    )
    return TritonKernel(problem, machine.device)


def batch(
    layer: moe.Layer,
    num_tokens: int,
    top_k: int = 2,
    kind: str = "uniform",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Hidden states, ids and weights."""
    num_experts, hidden, _ = layer.w2.qdata.shape
    x = tokens(1, num_tokens, hidden, dtype)
    return x, *problems.routing(2, kind, num_tokens, num_experts, top_k)


def run(
    kernel: TritonKernel,
    layer: moe.Layer,
    x: torch.Tensor,
    ids: np.ndarray,
    weights: np.ndarray,
) -> torch.Tensor:
    """The layer's result on the CPU; its weights come from there."""
    prepared = kernel.prepare(weights_of(layer))
    args = (x, torch.from_numpy(ids), torch.from_numpy(weights))
    return kernel.run(prepared, *(t.to(kernel.device) for t in args)).cpu()
