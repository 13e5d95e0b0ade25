"""From folders to a result file, and from a result file to a table."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rubin_moe.errors import ConfigError
from rubin_moe.eval.heldout import read_chapters
from rubin_moe.eval.model import SwitchableModel
from rubin_moe.eval.quality import ACTIVATION_FORMATS, Choice, Evaluation, Row, evaluate
from rubin_moe.kernels.registry import backend_names
from rubin_moe.kernels.target import DISTRIBUTIONS, detect
from rubin_moe.loader.fold import FOLD_MODES
from rubin_moe.loader.load import ModelCheckpoint
from rubin_moe.provenance import provenance

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEVICES = ("cpu", "cuda")
TITLES = ("on disk", "computed as", "fold", "activations", "backend", "perplexity", "KL", "top-1")


@dataclass(frozen=True)
class Settings:
    """How a result is measured.

    Attributes:
        tokens: of the text, from its start; None: all. window: tokens the model sees at once.
        dtype: of hidden states, ``float32`` or ``bfloat16``. device: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: a value that is none of these.
    """

    tokens: int | None = None
    window: int = 512
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        _one_of("dtype", (self.dtype,), tuple(DTYPES))
        _one_of("device", (self.device,), DEVICES)
        if self.tokens is not None and self.tokens < 2:
            raise ConfigError(f"tokens {self.tokens}: at least 2, the first is only context")
        if self.window < 2:
            raise ConfigError(f"window {self.window}: at least 2, the first token is only context")


@dataclass(frozen=True)
class QualityResult:
    """What ``docs/results/quality.json`` holds: `head` has device, date, versions, settings,
    ``tokens_scored``, ``text`` and ``refused``; the first row is the reference."""

    head: dict[str, Any]
    rows: list[Row]


def measure(
    checkpoints: Sequence[Path],
    reference: Path,
    text: Path,
    settings: Settings,
    choice: Choice,
    progress: Callable[[str], None] = lambda line: None,
) -> QualityResult:
    """Every row of every checkpoint against one reference.

    Raises:
        ConfigError: an unknown name in ``choice``, a file that is not there, a reference of other
            layers than a checkpoint. CheckpointError: a checkpoint that cannot be read.
    """
    _one_of("fold", choice.folds, FOLD_MODES)
    _one_of("activations", choice.activations, ACTIVATION_FORMATS)
    _one_of("backend", choice.backends, backend_names())
    target = detect(settings.device)
    opened = [ModelCheckpoint(str(path)) for path in checkpoints]
    model = SwitchableModel(reference, DTYPES[settings.dtype], settings.device)
    ids = read_chapters(model.tokenizer, text, settings.tokens)
    evaluation = Evaluation(model, ids, settings.window)
    own: Row = {"checkpoint": reference.name, "stored": "16bit", "weights": "16bit", "fold": "-"}
    own |= {"activations": "16bit", "backend": "transformers", "forced": False}
    rows: list[Row] = [own | evaluation.reference()]
    refused: list[Row] = []
    for checkpoint in opened:
        result = evaluate(evaluation, checkpoint, target, choice, progress)
        rows += result.rows
        refused += [r for r in result.refused if r not in refused]
    head = {
        **provenance([*DISTRIBUTIONS, "transformers"], settings.device),
        "window": settings.window,
        "dtype": settings.dtype,
        "tokens_scored": evaluation.num_tokens,
        "text": {"name": text.name, "sha256": hashlib.sha256(text.read_bytes()).hexdigest()},
        "refused": refused,
    }
    return QualityResult(head, rows)


def table_cells(rows: Sequence[Row]) -> list[list[str]]:
    """A line of `TITLES` for each row; rows that differ in nothing but the fold share one."""
    folds: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        divergence = f"{row['kl']:.5f} ± {row['kl_stderr']:.5f}"
        figures = (f"{row['perplexity']:.3f}", divergence, f"{row['top1']:.2%}")
        key = (*(row[name] for name in ("stored", "weights", "activations", "backend")), *figures)
        folds.setdefault(key, []).append(row["fold"] + (" (forced)" if row["forced"] else ""))
    return [[*key[:2], ", ".join(merged), *key[2:]] for key, merged in folds.items()]


def _one_of(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for value in given:
        if value not in known:
            raise ConfigError(f"{what} {value!r}: expected one of {', '.join(known)}")
