"""From router logits to expert ids and weights; float32 throughout.

Ties go to the lower id, so the same logits give the same experts on every machine.
"""

import torch
from torch import Tensor

from rubin_moe.errors import ConfigError
from rubin_moe.layers.router_config import Routing, Scoring


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
