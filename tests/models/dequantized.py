"""The shipped model as transformers computes it on weights that the float64 oracle decoded."""

from pathlib import Path

import torch

from rubin_moe.eval.model import SwitchableModel
from rubin_moe.loader.load import ModelCheckpoint, load_experts
from tests.oracles import quant

KJV = Path(__file__).parents[2] / "models" / "kjv"


def dequantized(form: str) -> SwitchableModel:
    """Nothing of ours computes: ``form`` is a folder of ``models/kjv``."""
    model = SwitchableModel(KJV / "bf16", torch.float32)
    checkpoint = ModelCheckpoint(str(KJV / form))
    for layer, block in enumerate(model.model.model.layers):
        weights = load_experts(checkpoint, layer)
        for ours, theirs in (
            (weights.w13, block.mlp.experts.gate_up_proj),
            (weights.w2, block.mlp.experts.down_proj),
        ):
            dense = torch.from_numpy(quant.dequantize(ours.qdata.numpy(), ours.sf.numpy(), form))
            halves = dense.reshape(*ours.dec.shape, -1, dense.shape[-1])
            dense = (halves * ours.dec[:, :, None, None]).reshape(theirs.shape)
            theirs.data.copy_(dense)
    return model
