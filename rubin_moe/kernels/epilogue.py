"""The activation between FC1 and FC2 in torch, for every backend that computes it there."""

import torch
from torch import Tensor

from rubin_moe.kernels.activation import Activation


def activate(activation: Activation, h: Tensor) -> Tensor:
    """FC1 result in real units, float32 ``[..., N]`` -> ``[..., I]``; gate rows come first."""
    if not activation.gated:
        return torch.relu(h).square()
    gate, up = h.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.kind == "swigluoai":
        return (up + activation.beta) * gate * torch.sigmoid(activation.alpha * gate)
    if activation.kind == "gelu_tanh":
        return up * torch.nn.functional.gelu(gate, approximate="tanh")
    return up * torch.nn.functional.silu(gate)
