"""The only reader of ``configs/tuning``: measured tile choices. Standard library only.

A file is one layer shape on one architecture, written by ``scripts/tune.py``: its sizes, where and
when it was measured, the best tiles of each number of tokens, and from which number on a kernel for
many tokens takes over (``prefill_from``), if it was measured.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rubin_moe.shapes import configs_dir

logger = logging.getLogger(__name__)


def folder() -> Path:
    """Where the files are, by architecture."""
    return configs_dir() / "tuning"


def file_name(shape: Mapping[str, int]) -> str:
    """Name of a shape's file."""
    return "_".join(f"{key}-{value}" for key, value in shape.items()) + ".json"


def nearest(
    arch: str,
    shape: Mapping[str, int],
    num_tokens: int,
    accept: Callable[[Mapping[str, Any]], bool] = lambda tiles: True,
) -> dict[str, Any] | None:
    """The tiles, among those that ``accept`` takes, of the measured number of tokens that is
    nearest in log space, or None (said once a shape) where this shape was not measured."""
    rows = [r for r in _facts(arch, file_name(shape)).get("rows", []) if accept(r["tiles"])]
    if not rows:
        return None
    best = min(rows, key=lambda row: abs(math.log(row["num_tokens"] / max(1, num_tokens))))
    return dict(best["tiles"])


def prefill_from(arch: str, shape: Mapping[str, int]) -> int | None:
    """The number of tokens where the kernel for many tokens takes over, or None: not measured."""
    found: int | None = _facts(arch, file_name(shape)).get("prefill_from")
    return found


@cache
def _facts(arch: str, name: str) -> dict[str, Any]:
    path = folder() / arch / name
    if not path.is_file():
        logger.info("%s: no measured tiles for %s, using the default", arch, name)
        return {}
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts
