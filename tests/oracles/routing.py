"""Routing in float64, token by token, from the published formulas."""

from dataclasses import dataclass

import numpy as np

EPSILON = 1e-20
"""DeepSeek's published code adds it to the sum; it counts where every sigmoid is tiny."""


@dataclass(frozen=True)
class Router:
    """``scoring``: softmax, sigmoid or sqrtsoftplus; ``after``: score only the chosen logits."""

    top_k: int
    scoring: str = "softmax"
    after: bool = False
    renormalize: bool = False
    factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"


def score(logits: np.ndarray, scoring: str) -> np.ndarray:
    """Scores of one token's logits."""
    if scoring == "softmax":
        e = np.exp(logits - logits.max())
        return e / e.sum()
    if scoring == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    return np.sqrt(np.logaddexp(0, logits))


def route(
    router: Router,
    logits: np.ndarray,
    bias: np.ndarray | None = None,
    expert_scale: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """``[M, E]`` -> weights float64, ids int64, ``[M, k]``: best first, ties by lower id."""
    rows = [_one(router, row.astype(np.float64), bias, expert_scale) for row in logits]
    shape = (len(rows), router.top_k)
    weights = np.array([w for w, _ in rows], dtype=np.float64).reshape(shape)
    return weights, np.array([i for _, i in rows], dtype=np.int64).reshape(shape)


def _one(
    router: Router, logits: np.ndarray, bias: np.ndarray | None, expert_scale: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    scores = logits if router.after else score(logits, router.scoring)
    choice = scores if bias is None else scores + bias
    candidates = list(range(len(logits)))
    if router.num_groups > 1:
        size = len(logits) // router.num_groups
        best = 1 if router.group_score == "max" else 2
        groups = choice.reshape(router.num_groups, size)
        totals = [sum(sorted(group)[-best:]) for group in groups]
        kept = sorted(range(router.num_groups), key=lambda g: (-totals[g], g))[: router.top_groups]
        candidates = [e for e in candidates if e // size in kept]
    chosen = np.array(sorted(candidates, key=lambda e: (-choice[e], e))[: router.top_k])
    weights = scores[chosen]
    if router.after:
        weights = score(weights, router.scoring)
    if router.renormalize:
        weights = weights / (weights.sum() + EPSILON)
    weights = weights * router.factor
    return (weights if expert_scale is None else weights * expert_scale[chosen]), chosen
