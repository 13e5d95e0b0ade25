"""Layers of the contract on the sm_90a kernel, executed on the emulator with few small blocks."""

from __future__ import annotations

import numpy as np
import torch

from rubin_moe.emulation import EmulatorLauncher
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.sm90.host import Sm90Kernel
from rubin_moe.layers.experts import problem_of
from tests.layers.backends import weights_of
from tests.oracles import moe

NUM_BLOCKS = 3
FORMATS = ("nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4")


def kernel_of(layer: moe.Layer, top_k: int, seed: int | None = None) -> Sm90Kernel:
    problem = problem_of(
        weights_of(layer),
        top_k,
        Activation(layer.kind, layer.limit, layer.alpha, layer.beta),  # type: ignore[arg-type]
        torch.bfloat16,
        router_weight_on_input=layer.weight_on_input,
    )
    return Sm90Kernel(problem, EmulatorLauncher(seed, keep_reports=True), NUM_BLOCKS)


def run(
    layer: moe.Layer,
    x: torch.Tensor,
    ids: np.ndarray,
    weights: np.ndarray,
    kernel: Sm90Kernel | None = None,
) -> torch.Tensor:
    kernel = kernel or kernel_of(layer, ids.shape[1])
    prepared = kernel.prepare(weights_of(layer))
    return kernel.run(prepared, x, torch.from_numpy(ids), torch.from_numpy(weights))
