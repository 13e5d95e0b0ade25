"""Random MoE layers of published sizes on a GPU: weights, float32 reference, routings, timing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import Pool

import torch
from torch import Tensor

from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.spec import FORMATS, BlockFormat
from rubin_moe.formats.ue4m3 import UE4M3
from rubin_moe.formats.ue5m3 import UE5M3
from rubin_moe.formats.ue8m0 import UE8M0
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import ActivationFormat, MoEProblem
from rubin_moe.kernels.epilogue import activate
from rubin_moe.kernels.sm90.choice import AnyPlan
from rubin_moe.kernels.sm90.host import kernels_of

SILU, OAI = Activation(), Activation("swigluoai", 7.0)
ELEMENTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODECS = {"ue4m3": UE4M3, "ue5m3": UE5M3, "ue8m0": UE8M0}
SCALES = {"nvfp4-ue4m3": (0x30, 0x40), "nvfp4-ue5m3": (0x58, 0x68), "mxfp4": (120, 124)}
LONG_US = 4000  # of a replay
BANDWIDTH, FLOPS = 4.3e12, 790e12  # both measured on an H200


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer; ``fmt`` is its checkpoint's."""

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    fmt: str
    activation: Activation = SILU
    bias: bool = False
    dtype: str = "bfloat16"

    def problem(self, activation_format: ActivationFormat = "16bit") -> MoEProblem:
        return MoEProblem(
            self.num_experts, self.num_experts, self.top_k, self.hidden, self.intermediate,
            FORMATS[self.fmt], self.activation, activation_format, self.dtype, self.bias,
        )  # fmt: skip

    def floor_us(self, num_tokens: int, experts: float) -> float:
        """Time of reading the touched experts, or of the multiply-adds, whichever is longer."""
        elements = 3 * self.hidden * self.intermediate
        nbytes = experts * elements * (0.5 + 1 / FORMATS[self.fmt].sf_vec_size)
        nbytes += 4 * num_tokens * self.hidden
        flops = 2 * num_tokens * self.top_k * elements
        return max(nbytes / BANDWIDTH, flops / FLOPS) * 1e6


SHAPES = {
    "gptoss": Shape(128, 4, 2880, 2880, "mxfp4", OAI),
    "qwen3": Shape(128, 8, 2048, 768, "nvfp4-ue4m3"),
    "dsv3tp8": Shape(256, 8, 7168, 256, "nvfp4-ue4m3"),
    "mixtral": Shape(8, 2, 4096, 14336, "nvfp4-ue4m3"),
}


Job = tuple[AnyPlan, Activation, bool]


def compile_one(job: Job) -> str:
    return f"{' '.join(k.key for k in kernels_of(*job))}: {job[0]}"


def compile_all(jobs: Iterable[Job]) -> None:
    """Fills the kernel cache; needs no GPU."""
    with Pool(2) as pool:
        for line in pool.imap_unordered(compile_one, sorted(set(jobs), key=str)):
            print(line, flush=True)


def random_weights(shape: Shape, seed: int = 0, device: str = "cuda") -> ExpertWeights:
    """Codes of every value, scales over four octaves or so."""
    generator = torch.Generator(device).manual_seed(seed)
    fmt = FORMATS[shape.fmt]
    low, high = SCALES[shape.fmt]
    e, halves = shape.num_experts, 2 if shape.activation.gated else 1

    def integers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, dtype=torch.uint8, device=device, generator=generator)

    def projection(n: int, k: int, parts: int) -> ProjectionWeights:
        dec = torch.ones(e, parts, device=device)
        if fmt.has_global:
            dec = (1 + torch.arange(e * parts, device=device) % 3).view(e, parts) / 32.0
        bias = torch.randn(e, n, device=device, generator=generator) if shape.bias else None
        return ProjectionWeights(
            integers(0, 256, e, n, fmt.packed_k(k)),
            integers(low, high, e, n, fmt.scales_k(k)),
            dec,
            bias,
        )

    return ExpertWeights(
        fmt, shape.hidden, shape.intermediate, shape.activation.gated,
        projection(halves * shape.intermediate, shape.hidden, halves),
        projection(shape.hidden, shape.intermediate, 1), tuple(range(e)),
    )  # fmt: skip


def dense(proj: ProjectionWeights, expert: int, fmt: BlockFormat) -> Tensor:
    """float32 ``[N, K]`` of one expert."""
    values = torch.tensor([*ELEMENTS, *(-v for v in ELEMENTS)], device=proj.qdata.device)
    q = proj.qdata[expert].int()
    w = torch.stack([values[q & 15], values[q >> 4]], dim=-1).flatten(-2)
    scale = CODECS[fmt.scale].decode(proj.sf[expert])
    w = w * scale.repeat_interleave(fmt.sf_vec_size, -1)
    dec = proj.dec[expert].repeat_interleave(w.shape[0] // proj.dec.shape[1])
    return w * dec[:, None]


def reference(
    weights: ExpertWeights, activation: Activation, x: Tensor, ids: Tensor, router: Tensor
) -> Tensor:
    """float32 ``[M, hidden]``; rounded to x's dtype between the GEMMs as the kernels do."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        token, choice = (ids == expert).nonzero(as_tuple=True)
        h = x[token].float() @ dense(weights.w13, expert, weights.fmt).T
        if weights.w13.bias is not None:
            h = h + weights.w13.bias[expert]
        h = activate(activation, h).to(x.dtype).float()
        y = h @ dense(weights.w2, expert, weights.fmt).T
        if weights.w2.bias is not None:
            y = y + weights.w2.bias[expert]
        out.index_add_(0, token, y * router[token, choice][:, None])
    return out


def relative(actual: Tensor, expected: Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return float((actual.float() - expected).norm() / expected.norm())


def routing(shape: Shape, num_tokens: int) -> tuple[Tensor, Tensor]:
    """int32 ids and float32 weights ``[M, top_k]``, distinct ids in a row."""
    scores = torch.rand(num_tokens, shape.num_experts, device="cuda")
    ids = scores.topk(shape.top_k, dim=-1).indices.int().contiguous()
    weights = torch.rand(num_tokens, shape.top_k, device="cuda") + 0.2
    return ids, weights / weights.sum(-1, keepdim=True)


def logits_of(shape: Shape, ids: Tensor, router: Tensor) -> Tensor:
    """bfloat16 router logits whose softmax over the best ``top_k`` gives these ids and weights."""
    logits = torch.full((len(ids), shape.num_experts), -20.0, device=ids.device)
    return logits.scatter_(1, ids.long(), router.log()).bfloat16()


def routings(shape: Shape, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Independent ones, so that the L2 cache does not hold the next call's experts; for one token
    the experts of consecutive ones are disjoint as long as there are any left."""
    number = {1: 16, 4: 16, 16: 8}.get(num_tokens, 4 if num_tokens < 4096 else 2)
    out = [routing(shape, num_tokens) for _ in range(number)]
    if num_tokens == 1:
        each = shape.num_experts // shape.top_k
        for start in range(0, number, each):
            order = torch.randperm(shape.num_experts, device="cuda").int()
            for i in range(start, min(number, start + each)):
                place = (i - start) * shape.top_k
                out[i][0].copy_(order[place : place + shape.top_k][None])
    return out


def experts_touched(routed: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Distinct experts of a routing, on average."""
    return statistics.mean(len(set(ids.flatten().tolist())) for ids, _ in routed)


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """One CUDA graph of all calls, after a warm-up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (*calls, *calls):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def median_us(calls: Sequence[Callable[[], object]], budget_ms: float = 60) -> float:
    """Median time of one call in microseconds: replays of one graph of all calls, at least eight,
    three where they take long."""
    graph = graph_of(calls)

    def replays(number: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
        events[0].record()
        for i in range(number):
            graph.replay()
            events[i + 1].record()
        torch.cuda.synchronize()
        return [events[i].elapsed_time(events[i + 1]) * 1e3 / len(calls) for i in range(number)]

    warm = min(replays(2)) * len(calls)
    least = 8 if warm < LONG_US else 3
    return statistics.median(replays(max(least, min(100, int(budget_ms * 1e3 / warm)))))
