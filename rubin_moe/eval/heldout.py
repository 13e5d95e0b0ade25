"""Held-out text as token windows, and what a causal language model says about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rubin_moe.errors import ConfigError


def encode_chapters(tokenizer: Any, text: str) -> Tensor:
    """int64 ``[T]``: chapters (separated by a blank line) each preceded by the end-of-text token.

    The same stream that the demo model was trained on.
    """
    stream: list[int] = []
    for chapter in text.split("\n\n"):
        stream.append(tokenizer.eos_token_id)
        # a chapter may be longer than the context: it is cut into windows later
        stream.extend(tokenizer.encode(chapter.strip("\n") + "\n", verbose=False))
    return torch.tensor(stream, dtype=torch.int64)


def read_chapters(tokenizer: Any, path: Path, num_tokens: int | None = None) -> Tensor:
    """`encode_chapters` of a file, or its first ``num_tokens``."""
    if not path.is_file():
        raise ConfigError(f"held-out text {path}: no such file")
    ids = encode_chapters(tokenizer, path.read_text(encoding="utf-8"))
    if num_tokens is not None and num_tokens > ids.numel():
        raise ConfigError(f"{path} has {ids.numel()} tokens, {num_tokens} were asked for")
    return ids if num_tokens is None else ids[:num_tokens]


def windows(ids: Tensor, length: int, batch: int = 8) -> Iterator[Tensor]:
    """Batches ``[<= batch, length]`` of disjoint windows; a rest shorter than a window is dropped.

    Each window is read from its own start, so its first token is context only.
    """
    count = ids.numel() // length
    if count == 0:
        raise ConfigError(f"{ids.numel()} tokens are less than one window of {length}")
    rows = ids[: count * length].view(count, length)
    for start in range(0, count, batch):
        yield rows[start : start + batch]


@torch.inference_mode()
def log_probs(model: Any, batch: Tensor) -> Tensor:
    """float32 ``[B, L - 1, V]``: natural log probabilities of every next token."""
    logits = model(input_ids=batch.to(model.device)).logits[:, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


def nll(logp: Tensor, batch: Tensor) -> Tensor:
    """float32 ``[B, L - 1]``: minus log probability, in nats, of the token that came next."""
    return -logp.gather(-1, batch[:, 1:, None].to(logp.device)).squeeze(-1)


def mean_nll(model: Any, ids: Tensor, length: int) -> float:
    """Nats a token over all windows; its exponential is the perplexity."""
    losses = [
        nll(log_probs(model, batch), batch).double().flatten() for batch in windows(ids, length)
    ]
    return float(torch.cat(losses).mean())
