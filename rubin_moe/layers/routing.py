"""From router logits to expert ids and weights; float32 throughout.

Ties go to the lower id, so the same logits give the same experts on every machine.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rubin_moe.errors import ConfigError

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclass(frozen=True)
class Routing:
    """How a model routes.

    Attributes:
        top_k: experts a token.
        scoring: of the logits. ``sqrtsoftplus``: ``sqrt(log(1 + e^x))`` (DeepSeek-V4).
        score_after_topk: choose on the logits and score only the chosen ones (gpt-oss: softmax
            over the k; Llama-4: sigmoid of the one).
        renormalize: divide the chosen scores by their sum (plus ``epsilon``).
        scaling_factor: multiplies the weights, once, after renormalizing.
        num_groups, top_groups: experts are chosen from the best ``top_groups`` of ``num_groups``
            equal groups; the others count as -inf.
        group_score: ``top2``: sum of a group's two best (DeepSeek-V3); ``max``: its best (V2).
    """

    top_k: int
    scoring: Scoring = "softmax"
    score_after_topk: bool = False
    renormalize: bool = False
    scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    epsilon: float = 1e-20

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise ConfigError(f"scoring {self.scoring!r} is unknown; known: {', '.join(SCORINGS)}")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ConfigError(f"top {self.top_groups} of {self.num_groups} expert groups")
        if self.top_k < 1:
            raise ConfigError(f"top-{self.top_k} routing chooses no expert")


def route(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights and experts of each token.

    Args:
        logits: any float dtype ``[M, E]``.
        bias: ``[E]``, added to the scores to choose by; the weights come from the scores alone.
        expert_scale: ``[E]``, multiplies the weights last (Gemma-4's ``per_expert_scale``).

    Returns:
        float32 ``[M, top_k]`` weights, best first, and int32 ``[M, top_k]`` ids.

    Raises:
        ConfigError: shapes that do not fit, or fewer experts than ``top_k`` in the chosen groups.
    """
    _check(logits, routing, bias, expert_scale)
    logits = logits.float()
    scores = logits if routing.score_after_topk else _score(logits, routing.scoring)
    choice = scores if bias is None else scores + bias.float()
    choice = _mask_groups(choice, routing)
    ids = _top(choice, routing.top_k)
    weights = scores.gather(-1, ids)
    if routing.score_after_topk:
        weights = _score(weights, routing.scoring)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    weights = weights * routing.scaling_factor
    if expert_scale is not None:
        weights = weights * expert_scale.float()[ids]
    return weights, ids.int()


def _score(logits: Tensor, scoring: Scoring) -> Tensor:
    if scoring == "softmax":
        return logits.softmax(-1)
    if scoring == "sigmoid":
        return logits.sigmoid()
    return torch.nn.functional.softplus(logits).sqrt()


def _top(values: Tensor, k: int) -> Tensor:
    """int64 ``[M, k]``, best first, ties by lower index."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _mask_groups(choice: Tensor, routing: Routing) -> Tensor:
    if routing.num_groups == 1:
        return choice
    grouped = choice.reshape(choice.shape[0], routing.num_groups, -1)
    best = 1 if routing.group_score == "max" else min(2, grouped.shape[-1])
    group_scores = grouped.topk(best, dim=-1).values.sum(-1)
    kept = torch.zeros_like(group_scores, dtype=torch.bool)
    kept.scatter_(-1, _top(group_scores, routing.top_groups), True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).reshape(choice.shape)


def _check(
    logits: Tensor, routing: Routing, bias: Tensor | None, expert_scale: Tensor | None
) -> None:
    if logits.dim() != 2:
        raise ConfigError(f"router logits are {list(logits.shape)}, expected [M, E]")
    num_experts = logits.shape[1]
    if num_experts % routing.num_groups:
        raise ConfigError(f"{num_experts} experts in {routing.num_groups} equal groups")
    reachable = num_experts // routing.num_groups * routing.top_groups
    if reachable < routing.top_k:
        raise ConfigError(f"top-{routing.top_k} of {reachable} experts in the chosen groups")
    for name, tensor in (("bias", bias), ("expert_scale", expert_scale)):
        if tensor is not None and tuple(tensor.shape) != (num_experts,):
            raise ConfigError(f"router {name} is {list(tensor.shape)}, expected [{num_experts}]")
