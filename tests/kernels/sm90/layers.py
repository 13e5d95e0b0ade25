"""Layers of the contract on the sm_90a kernel, executed on the emulator with few small blocks."""

from __future__ import annotations

import numpy as np
import torch

from rubin_moe.emulation import EmulatorLauncher
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.sm90 import choice
from rubin_moe.kernels.sm90.host import Sm90Kernel
from rubin_moe.kernels.sm90.plan import DecodePlan, Tiles, check
from rubin_moe.layers.experts import problem_of
from tests.layers.backends import tokens, weights_of
from tests.oracles import moe, problems

NUM_BLOCKS = 3
FORMATS = ("nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4")
TILES = Tiles(warps=4, slots=2, blocks13=2, blocks2=2)


class Emulated(Sm90Kernel):
    """A layer's kernel with one choice of tiles, on the emulator.

    Attributes:
        tiles: of every launch; pairs: of one launch at most.
    """

    tiles = TILES
    pairs = 512

    def _plan(self, num_tokens: int) -> DecodePlan:
        return check(DecodePlan(choice.sizes_of(self.problem), self.tiles, self.pairs))


def kernel_of(
    layer: moe.Layer,
    top_k: int = 2,
    seed: int | None = None,
    tiles: Tiles = TILES,
    dtype: torch.dtype = torch.bfloat16,
) -> Emulated:
    problem = problem_of(
        weights_of(layer),
        top_k,
        Activation(layer.kind, layer.limit, layer.alpha, layer.beta),  # type: ignore[arg-type]
        dtype,
        router_weight_on_input=layer.weight_on_input,
    )
    kernel = Emulated(problem, EmulatorLauncher(seed, keep_reports=True), NUM_BLOCKS)
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
    kernel: Emulated,
    layer: moe.Layer,
    x: torch.Tensor,
    ids: np.ndarray,
    weights: np.ndarray,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    prepared = kernel.prepare(weights_of(layer))
    return kernel.run(prepared, x, torch.from_numpy(ids), torch.from_numpy(weights), expert_map)
