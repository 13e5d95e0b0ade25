"""Perplexity and divergence of every way to compute a checkpoint's experts.

A row is (checkpoint, scale type, fold mode, activation format, backend). The reference is the
16-bit checkpoint computed by transformers; everything but the experts is the same in all rows.
Figures are means over the same tokens, in nats; equal inputs give equal rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from rubin_moe.errors import ConfigError
from rubin_moe.eval.heldout import log_probs, nll, windows
from rubin_moe.eval.model import SwitchableModel
from rubin_moe.eval.variants import HeldExperts, Variant, hold, variants
from rubin_moe.kernels.base import ActivationFormat, MoEProblem, Target
from rubin_moe.kernels.registry import ROWS
from rubin_moe.layers.activation import activation_from_config
from rubin_moe.layers.experts import MoEExperts, problem_of
from rubin_moe.loader.load import ModelCheckpoint

ACTIVATION_FORMATS: tuple[ActivationFormat, ...] = get_args(ActivationFormat)
MAX_REFERENCE_BYTES = 4 << 30

Row = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """Which rows are wanted; an empty tuple means all.

    Attributes:
        folds, activations: names. backends: also the only way to get an opt-in backend.
    """

    folds: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()


@dataclass
class Result:
    """Rows, and for what no backend computes: ``{weights, activations, reasons}``."""

    rows: list[Row] = field(default_factory=list)
    refused: list[Row] = field(default_factory=list)


class Evaluation:
    """One reference on one text, against which checkpoints are measured.

    Args:
        ids: int64 ``[T]``, read in disjoint windows of ``length``.

    Raises:
        ConfigError: the reference's probabilities would not fit (`MAX_REFERENCE_BYTES`).
    """

    def __init__(self, model: SwitchableModel, ids: Tensor, length: int, batch: int = 4) -> None:
        self.model = model
        self.batches = list(windows(ids, length, batch))
        self.num_tokens = sum(b[:, 1:].numel() for b in self.batches)
        needed = self.num_tokens * model.model.config.get_text_config().vocab_size * 4
        if needed > MAX_REFERENCE_BYTES:
            raise ConfigError(
                f"{self.num_tokens} tokens need {needed >> 20} MiB of reference probabilities, "
                f"at most {MAX_REFERENCE_BYTES >> 20} MiB are kept: evaluate fewer tokens"
            )
        model.use_own()
        self._reference = [log_probs(model.model, batch) for batch in self.batches]

    def reference(self) -> Row:
        """Figures of the reference itself."""
        return self._figures(self._reference)

    def measure(self, model: SwitchableModel | None = None) -> Row:
        """Figures of ``model`` (default: ours) as it is switched now."""
        chosen = model or self.model
        return self._figures(log_probs(chosen.model, batch) for batch in self.batches)

    def _figures(self, log_p: Iterable[Tensor]) -> Row:
        """Perplexity a token; KL(reference || model) in nats, with the standard error that its
        spread over windows gives; share of equal first choices."""
        loss, divergence, agree = [], [], []
        for batch, expected, got in zip(self.batches, self._reference, log_p, strict=True):
            loss.append(nll(got, batch).flatten())
            divergence.append((expected.exp() * (expected - got)).sum(-1).double().mean(-1))
            agree.append((expected.argmax(-1) == got.argmax(-1)).flatten())
        kl = torch.cat(divergence)  # [windows], all of one length
        return {
            "perplexity": round(math.exp(float(torch.cat(loss).double().mean())), 4),
            "kl": round(float(kl.mean()), 6),
            "kl_stderr": round(float(kl.std(correction=0)) / math.sqrt(max(1, kl.numel() - 1)), 6),
            "top1": round(float(torch.cat(agree).double().mean()), 4),
        }


def evaluate(
    evaluation: Evaluation,
    checkpoint: ModelCheckpoint,
    target: Target,
    choice: Choice | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Result:
    """Every row that ``choice`` leaves of one checkpoint."""
    result = Result()
    wanted = choice or Choice()
    stored = checkpoint.spec(next(iter(checkpoint.experts()))).fmt
    for variant in variants(stored):
        if wanted.folds and variant.fold not in wanted.folds:
            continue
        held = hold(checkpoint, variant)
        for activations in ACTIVATION_FORMATS:
            if wanted.activations and activations not in wanted.activations:
                continue
            problem = problem_in(evaluation.model, checkpoint, held, activations)
            backends, reasons = _backends(problem, target, wanted.backends)
            if not backends:
                refusal = {"weights": held.fmt.name, "activations": activations, "reasons": reasons}
                if refusal not in result.refused:
                    result.refused.append(refusal)
            for backend in backends:
                head = _head(checkpoint, stored.name, variant, held, activations, backend)
                progress(" ".join(str(head[k]) for k in HEAD))
                evaluation.model.use(layers_of(held, problem, target, backend))
                result.rows.append({**head, **evaluation.measure(), **held.losses()})
    return result


HEAD = ("checkpoint", "stored", "weights", "fold", "activations", "backend")


def _head(
    checkpoint: ModelCheckpoint,
    stored: str,
    variant: Variant,
    held: HeldExperts,
    activations: str,
    backend: str,
) -> Row:
    values = (
        checkpoint.folder.name, stored, held.fmt.name, variant.fold, activations, backend
    )  # fmt: skip
    return {**dict(zip(HEAD, values, strict=True)), "forced": held.forced}


def problem_in(
    model: SwitchableModel,
    checkpoint: ModelCheckpoint,
    held: HeldExperts,
    activations: ActivationFormat,
) -> MoEProblem:
    """What the experts of ``model`` compute with these weights."""
    config = model.model.config.get_text_config()
    return problem_of(
        next(iter(held.layers.values())),
        top_k=config.num_experts_per_tok,
        activation=activation_from_config(checkpoint.config),
        dtype=model.model.dtype,
        activation_format=activations,
    )


def _backends(
    problem: MoEProblem, target: Target, named: tuple[str, ...]
) -> tuple[list[str], dict[str, str]]:
    """Backends that compute ``problem``, and the reasons of those that do not."""
    able: list[str] = []
    reasons: dict[str, str] = {}
    for row in ROWS:
        if named and row.name not in named:
            continue
        if row.opt_in and row.name not in named:
            reasons[row.name] = f"opt-in: {row.opt_in}"
        elif (reason := row.rules().why_not(problem, target)) is not None:
            reasons[row.name] = reason
        else:
            able.append(row.name)
    return able, reasons


def layers_of(
    held: HeldExperts, problem: MoEProblem, target: Target, backend: str | None = None
) -> dict[str, MoEExperts]:
    """All layers of one variant on one backend, for `SwitchableModel.use`."""
    return {name: MoEExperts(w, problem, target, backend) for name, w in held.layers.items()}
