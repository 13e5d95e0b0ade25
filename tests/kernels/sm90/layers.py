"""Layers of the contract on the sm_90a kernels: executed on the emulator with few small blocks, or
on a GPU as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rubin_moe.emulation import EmulatorLauncher
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.launch import launcher
from rubin_moe.kernels.sm90 import choice
from rubin_moe.kernels.sm90.host import Sm90Kernel
from rubin_moe.kernels.sm90.plan import Tiles, WideTiles, check
from rubin_moe.kernels.sm90.prefill_plan import PrefillPlan, PrefillTiles, check_prefill
from rubin_moe.layers.experts import problem_of
from tests.layers.backends import tokens, weights_of
from tests.oracles import moe, problems

NUM_BLOCKS = 3
FORMATS = ("nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4")
TILES = Tiles(warps=4, slots=2, blocks13=2, blocks2=2)
WIDE = WideTiles(groups=1, pass_tokens=16, blocks13=1, blocks2=1, stages=3)


class OneChoice(Sm90Kernel):
    """A layer's kernel with one choice of tiles.

    Attributes:
        tiles: of every launch; pairs: of one launch at most.
    """

    tiles: choice.AnyTiles = TILES
    pairs = 512

    def _plan(self, num_tokens: int) -> choice.AnyPlan:
        sizes = choice.sizes_of(self.problem)
        if isinstance(self.tiles, PrefillTiles):
            return check_prefill(PrefillPlan(sizes, self.tiles))
        return check(choice.plan_of(sizes, self.tiles, self.pairs))


@dataclass(frozen=True)
class Machine:
    """Where the kernels run: ``emulator`` or ``gpu``."""

    name: str

    @property
    def device(self) -> str:
        return "cuda" if self.name == "gpu" else "cpu"

    def kernel(self, problem: MoEProblem, seed: int | None = None) -> OneChoice:
        if self.name == "gpu":
            count = torch.cuda.get_device_properties(0).multi_processor_count
            return OneChoice(problem, launcher("driver"), count, "cuda")
        return OneChoice(problem, EmulatorLauncher(seed, keep_reports=True), NUM_BLOCKS, "cpu")


EMULATOR, GPU = Machine("emulator"), Machine("gpu")
MACHINES = (
    pytest.param(EMULATOR, id="emulator"),
    pytest.param(GPU, id="gpu", marks=pytest.mark.hw),
)


def kernel_of(
    layer: moe.Layer,
    top_k: int = 2,
    seed: int | None = None,
    tiles: choice.AnyTiles = TILES,
    dtype: torch.dtype = torch.bfloat16,
    machine: Machine = EMULATOR,
) -> OneChoice:
    problem = problem_of(
        weights_of(layer),
        top_k,
        Activation(layer.kind, layer.limit, layer.alpha, layer.beta),  # type: ignore[arg-type]
        dtype,
        router_weight_on_input=layer.weight_on_input,
    )
    kernel = machine.kernel(problem, seed)
    kernel.tiles = tiles
    return kernel


def batch(
    layer: moe.Layer, num_tokens: int, top_k: int = 2, kind: str = "uniform"
) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """bfloat16 hidden states, ids and weights."""
    num_experts, hidden, _ = layer.w2.qdata.shape
    x = tokens(1, num_tokens, hidden, torch.bfloat16)
    return x, *problems.routing(2, kind, num_tokens, num_experts, top_k)


def run(
    kernel: OneChoice,
    layer: moe.Layer,
    x: torch.Tensor,
    ids: np.ndarray,
    weights: np.ndarray,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Prepares, runs where the kernel runs, and brings the result home."""
    prepared = kernel.prepare(weights_of(layer))
    args = (x, torch.from_numpy(ids), torch.from_numpy(weights), expert_map)
    there = [None if t is None else t.to(kernel.device) for t in args]
    return kernel.run(prepared, *there).cpu()  # type: ignore[arg-type]
