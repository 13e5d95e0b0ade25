"""Global scales of UE4M3 activations: which one quantizes the input of FC1 and of FC2.

FC2's input belongs to one expert and has its scale. FC1's is a token that goes to several experts;
`MoEProblem.input_scale` says which scale it gets:

- ``layer``: the largest of all the layer's experts, other ranks' included. A token has one
  quantization, made once, wherever its experts are: ranks of expert parallelism add up to the
  whole layer. vLLM 0.32 chooses so for FlashInfer's experts.
- ``expert``: each expert's own, so that a token is quantized again for every expert.

A block's scale code is ``amax / (6 scale)`` rounded to UE4M3, so the choices differ where the
ratio of the two scales is no power of two (both round to 3 mantissa bits, at other places) or where
the larger scale brings a block among the subnormal codes, below 2^-6, or to zero: 2^-10 and less.
A block whose amax the smaller scale would clip is not clipped under the larger.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rubin_moe.errors import CheckpointError
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.kernels.base import MoEProblem


def of_experts(weights: ExpertWeights, which: Literal["w13", "w2"]) -> Tensor:
    """float32 ``[E]``: each local expert's own; gate and up read the same activations, so the
    larger of the two counts.

    Raises:
        CheckpointError: an expert without a usable scale.
    """
    proj: ProjectionWeights = getattr(weights, which)
    if proj.input_dec is None:
        raise CheckpointError(
            f"{weights.name}.{which}: no input scale in the checkpoint (W4A16), and nvfp4-ue4m3 "
            "activations need one; nvfp4-ue5m3 activations do not"
        )
    scales = proj.input_dec.amax(-1)  # NaN wins
    bad = ~(torch.isfinite(scales) & (scales > 0))
    if bad.any():
        ids = [weights.expert_ids[i] for i in bad.nonzero().flatten().tolist()]
        raise CheckpointError(
            f"{weights.name}.{which}: no usable input scale for experts {ids} (never calibrated, "
            "or not positive); nvfp4-ue5m3 activations need none"
        )
    return scales


def of_layer(weights: ExpertWeights, problem: MoEProblem) -> Tensor:
    """float32 ``[1]``: the largest of all the layer's experts, for FC1.

    Raises:
        CheckpointError: a local expert without a usable scale; or some experts are on other ranks
            and nobody looked at theirs.
    """
    own = of_experts(weights, "w13").amax().reshape(1)
    if weights.layer_input_dec is None:
        if problem.num_experts == problem.global_num_experts:
            return own
        raise CheckpointError(
            f"{weights.name}.w13: {problem.num_experts} of {problem.global_num_experts} experts, "
            "and the largest input scale of all of them is not known "
            "(ExpertWeights.layer_input_dec)"
        )
    if not float(own) <= weights.layer_input_dec < float("inf"):
        raise CheckpointError(
            f"{weights.name}.w13: {weights.layer_input_dec} as the largest input scale of the "
            f"layer, and one of its experts has {float(own)}"
        )
    return torch.full_like(own, weights.layer_input_dec)
