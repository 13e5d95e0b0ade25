"""Experts to fold: random ones, and rows of chosen scale codes."""

import numpy as np
import torch

from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.quantize import dequantize
from rubin_moe.formats.spec import MXFP4, NVFP4_UE4M3, NVFP4_UE5M3
from tests.oracles import problems

WS2 = float(np.float32(3.72e-5))  # amax 0.1


def from_oracle(layer, num_experts=4, hidden=64, intermediate=32) -> ExpertWeights:
    fmt = {f.name: f for f in (NVFP4_UE4M3, NVFP4_UE5M3, MXFP4)}[layer.fmt]

    def convert(p):
        return ProjectionWeights(*(torch.from_numpy(t) for t in (p.qdata, p.sf, p.dec)))

    w13, w2 = convert(layer.w13), convert(layer.w2)
    ids = tuple(range(10, 10 + num_experts))
    return ExpertWeights(fmt, hidden, intermediate, True, w13, w2, ids, "layers.0.experts")


def one_row(codes: list[int], g: float, up_g: float | None = None) -> ExpertWeights:
    """One expert whose every row has these block scale codes, weight nibbles 1.0."""
    k = 16 * len(codes)
    sf = torch.tensor(codes, dtype=torch.uint8)

    def proj(n, decs):
        qdata = torch.full((1, n, k // 2), 0x22, dtype=torch.uint8)
        return ProjectionWeights(qdata, sf.expand(1, n, -1).clone(), torch.tensor([decs]))

    w13, w2 = proj(2 * k, [g, up_g or g]), proj(k, [g])
    return ExpertWeights(NVFP4_UE4M3, k, k, True, w13, w2, (0,), "layers.0.experts")


def decoded(w: ExpertWeights, which: str = "w13") -> torch.Tensor:
    """float64 ``[E, N, K]``."""
    p: ProjectionWeights = getattr(w, which)
    halves = p.dec.shape[1]
    dec = p.dec.double().repeat_interleave(p.sf.shape[1] // halves, dim=1)
    return dequantize(p.qdata, p.sf, w.fmt, dec, torch.float64)


def random_weights(seed=0, fmt="nvfp4-ue4m3") -> ExpertWeights:
    return from_oracle(problems.layer(seed, fmt))


def codes_of(values, codec):
    return codec.encode(torch.tensor(values, dtype=torch.float64)).tolist()
