"""Random layers and activations for the sm_107a kernels, on the format grid; where they run."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rubin_moe.emulation import EmulatorLauncher
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.spec import FORMATS
from tests.oracles import moe, problems, quant

ACT = {"nvfp4-ue4m3": "nvfp4-ue4m3", "nvfp4-ue5m3": "nvfp4-ue5m3", "mxfp4": "mxfp8"}
"""Weight format -> activation format."""
INPUT_DEC = {"nvfp4-ue4m3": (0.02, 0.05), "nvfp4-ue5m3": (1.0, 1.0), "mxfp8": (1.0, 1.0)}


def emulator(seed: int | None = None) -> EmulatorLauncher:
    """Every launch of these tests ends where it breaks a rule of the hardware."""
    return EmulatorLauncher(seed, keep_reports=True, rules="enforce")


@dataclass(frozen=True)
class Case:
    """One layer and one batch; sizes as in `tests.oracles.problems.layer`. ``swigluoai`` layers
    have gpt-oss's limit, and biases."""

    fmt: str
    tokens: int
    experts: int
    hidden: int
    intermediate: int
    top_k: int = 2
    routing: str = "uniform"
    kind: str = "silu"

    @property
    def act(self) -> str:
        return ACT[self.fmt]

    @property
    def k(self) -> int:
        return min(self.top_k, self.experts)

    def layer(self) -> moe.Layer:
        sizes = (self.experts, self.hidden, self.intermediate)
        gpt_oss = self.kind == "swigluoai"
        base = problems.layer(1, self.fmt, *sizes, self.kind, bias=gpt_oss)
        limit = 7.0 if gpt_oss else None
        return replace(base, act_fmt=self.act, act_dec=INPUT_DEC[self.act], limit=limit)

    def weights(self) -> ExpertWeights:
        layer = self.layer()
        return ExpertWeights(
            FORMATS[self.fmt],
            self.hidden,
            self.intermediate,
            True,
            _projection(layer.w13, layer.act_dec[0]),
            _projection(layer.w2, layer.act_dec[1]),
            tuple(range(self.experts)),
        )

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """float32 ``[M, hidden]`` whose quantization is exact, ids and weights ``[M, k]``."""
        rng = np.random.default_rng(5)
        x = rng.normal(size=(self.tokens, self.hidden))
        x = quant.quantize_dequantize(x, self.act, INPUT_DEC[self.act][0])
        ids, weights = problems.routing(3, self.routing, self.tokens, self.experts, self.k)
        return torch.from_numpy(x).float(), torch.from_numpy(ids), torch.from_numpy(weights)


def _projection(p: moe.Projection, input_dec: float) -> ProjectionWeights:
    return ProjectionWeights(
        qdata=torch.from_numpy(p.qdata),
        sf=torch.from_numpy(p.sf),
        dec=torch.from_numpy(p.dec),
        bias=None if p.bias is None else torch.from_numpy(p.bias),
        input_dec=torch.full(p.dec.shape, input_dec, dtype=torch.float32),
    )
