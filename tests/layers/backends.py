"""The backends that the layer contract is run on, and the oracle's layers as the package's.

A new backend is one more row of `BACKENDS`; every test of the contract then runs on it.
"""

import os
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from rubin_moe import emulation
from rubin_moe.errors import UnsupportedError
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.spec import FORMATS
from rubin_moe.kernels.activation import KINDS, Activation
from rubin_moe.kernels.base import MoEProblem, Target
from rubin_moe.kernels.target import installed_versions
from rubin_moe.layers.experts import MoEExperts, problem_of
from tests.oracles import moe, tolerance


@dataclass(frozen=True)
class Backend:
    """One row.

    Attributes:
        name: registry name; pairs: (weight format, activation format) it computes.
        target, device: where; marks: of pytest, such as ``hw``.
        kinds: activations it computes; it has to refuse the others by name.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    target: Target = field(default_factory=lambda: Target("cpu"))
    device: str = "cpu"
    marks: tuple[pytest.MarkDecorator, ...] = ()
    kinds: tuple[str, ...] = KINDS


BACKENDS = (
    Backend("cpu", (("nvfp4-ue4m3", "16bit"), ("nvfp4-ue5m3", "16bit"), ("mxfp4", "16bit"))),
    Backend(
        "cpu-tcgen05",
        (("nvfp4-ue4m3", "nvfp4-ue4m3"), ("nvfp4-ue5m3", "nvfp4-ue5m3"), ("mxfp4", "mxfp8")),
    ),
    Backend("cpu-wgmma", (("mxfp4", "fp8-e4m3"),)),
    Backend(
        "sm107-emulated",
        (("nvfp4-ue4m3", "nvfp4-ue4m3"), ("nvfp4-ue5m3", "nvfp4-ue5m3"), ("mxfp4", "mxfp8")),
        Target("cpu", None, installed_versions()),
        kinds=("silu", "swigluoai"),
    ),
)
emulation.install()

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton reads it when it is imported: `tests/kernels/triton/test_interpreted.py` sets it for a
process of its own."""

BACKENDS += (
    Backend("triton", BACKENDS[0].pairs, Target("cpu", None, installed_versions()))
    if INTERPRETED
    else Backend(
        "triton",
        BACKENDS[0].pairs,
        Target("cuda", (9, 0), installed_versions()),
        device="cuda",
        marks=(pytest.mark.hw,),
    ),
)


@dataclass(frozen=True)
class Case:
    """A backend, a weight format and an activation format."""

    backend: Backend
    fmt: str
    act: str

    @property
    def act_fmt(self) -> str | None:
        """The oracle's name of the activation format."""
        return None if self.act == "16bit" else self.act


def cases(fmt: str | None = None, name: str | None = None) -> list:
    """pytest parameters: all cases, or those of one weight format or backend."""
    return [
        pytest.param(Case(b, f, a), id=f"{b.name}-{f}", marks=b.marks)
        for b in BACKENDS
        for f, a in b.pairs
        if fmt in (None, f) and name in (None, b.name)
    ]


def one_a_backend() -> list:
    """pytest parameters for what has nothing to do with the format: NVFP4 with UE4M3 scales."""
    return cases(fmt="nvfp4-ue4m3")


def with_case(layer: moe.Layer, case: Case, act_dec: float = 2.0**-6) -> moe.Layer:
    """The oracle's layer with the case's activation format, one input scale an expert."""
    num_experts = len(layer.w2.qdata)
    per_expert = (act_dec * (1 + np.arange(num_experts) / 8)).astype(np.float32)
    dec = (per_expert, per_expert * np.float32(2)) if case.act == "nvfp4-ue4m3" else (1.0, 1.0)
    return replace(layer, act_fmt=case.act_fmt, act_dec=dec)


def weights_of(layer: moe.Layer, expert_ids: tuple[int, ...] | None = None) -> ExpertWeights:
    """The oracle's layer as the package's container, some of its experts or all."""
    num_experts, hidden, packed = layer.w2.qdata.shape
    ids = tuple(range(num_experts)) if expert_ids is None else expert_ids
    keep = list(ids)

    def projection(p: moe.Projection, gemm: int) -> ProjectionWeights:
        dec = np.asarray(layer.act_dec[gemm], dtype=np.float32)
        per_expert = np.broadcast_to(dec, (num_experts,))[:, None]
        inputs = np.repeat(per_expert, p.dec.shape[1], axis=1)[keep]
        scales = torch.from_numpy(inputs.copy()) if layer.act_fmt == "nvfp4-ue4m3" else None
        bias = None if p.bias is None else torch.from_numpy(p.bias[keep])
        qdata, sf, w_dec = (torch.from_numpy(t[keep]) for t in (p.qdata, p.sf, p.dec))
        return ProjectionWeights(qdata, sf, w_dec, bias, scales)

    return ExpertWeights(
        fmt=FORMATS[layer.fmt],
        hidden=hidden,
        intermediate=2 * packed,
        gated=layer.kind != "relu2",
        w13=projection(layer.w13, 0),
        w2=projection(layer.w2, 1),
        expert_ids=ids,
        name="layers.0.experts",
        layer_input_dec=float(np.max(layer.act_dec[0])) if layer.act_fmt == "nvfp4-ue4m3" else None,
    )


def experts_of(
    layer: moe.Layer,
    case: Case,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
    expert_ids: tuple[int, ...] | None = None,
) -> MoEExperts:
    """The layer prepared on the case's backend. Skips the test where that refuses, as it has to,
    an activation that it does not compute."""
    weights = weights_of(layer, expert_ids)
    problem = problem_of(
        weights,
        top_k,
        Activation(layer.kind, layer.limit, layer.alpha, layer.beta),  # type: ignore[arg-type]
        dtype,
        activation_format=case.act,  # type: ignore[arg-type]
        global_num_experts=len(layer.w2.qdata),
        router_weight_on_input=layer.weight_on_input,
    )
    problem = replace(problem, input_scale=layer.input_scale)
    return made(weights, problem, case)


def made(weights: ExpertWeights, problem: MoEProblem, case: Case) -> MoEExperts:
    """The layer on the case's backend; see `experts_of`."""
    where, kind = (case.backend.target, case.backend.name), problem.activation.kind
    if kind not in case.backend.kinds:
        with pytest.raises(UnsupportedError, match=f"activation {kind}"):
            MoEExperts(weights, problem, *where)
        pytest.skip(f"{case.backend.name} refuses {kind}")
    return MoEExperts(weights, problem, *where)


def call(
    experts: MoEExperts,
    case: Case,
    x: torch.Tensor,
    ids: np.ndarray,
    weights: np.ndarray,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs on the case's device and brings the result home."""
    device = case.backend.device
    where = None if expert_map is None else expert_map.to(device)
    args = (x, torch.from_numpy(ids), torch.from_numpy(weights))
    return experts(*(t.to(device) for t in args), where).cpu()


def assert_close(
    layer: moe.Layer,
    x: torch.Tensor,
    ids: np.ndarray,
    weights: np.ndarray,
    out: torch.Tensor,
    dropped: float = 0.0,
) -> None:
    """``out`` within the bound of `tolerance` of the oracle; ids are local to ``layer``."""
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    wide = np.nan_to_num(x.double().numpy())
    expected = moe.moe(layer, wide, ids, weights)
    dtype = str(x.dtype).removeprefix("torch.")
    bound = tolerance.bound(layer, wide, ids, weights, dtype, dropped)
    error = np.abs(out.double().numpy() - expected)
    inside = error <= bound  # a NaN is not
    assert inside.all(), (
        f"{(~inside).sum()} of {inside.size} outside, worst {np.nanmax(error / bound):.3g} bounds "
        f"at {np.unravel_index(np.nanargmax(error / bound), error.shape)}"
    )


def tokens(seed: int, num_tokens: int, hidden: int = 64, dtype=torch.float32) -> torch.Tensor:
    """Normal hidden states ``[num_tokens, hidden]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, hidden, generator=generator).to(dtype)
