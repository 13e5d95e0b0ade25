"""Memory after a launch against the expected one: how much differs, and where first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rubin_moe.replay.file import Bytes, Named, ReplayFile


@dataclass(frozen=True)
class Outcome:
    """One launch's verdict.

    Attributes:
        nbytes: of all buffers; changed: by the kernel, as expected; differing: from what was
            expected; first: where, in words ("" if nowhere); tiles: tiles that differ.
    """

    name: str
    nbytes: int
    changed: int
    differing: int
    tiles: int
    first: str

    @property
    def equal(self) -> bool:
        return self.differing == 0

    def __str__(self) -> str:
        if self.equal:
            return f"{self.name}: equal, {self.changed:,} of {self.nbytes:,} bytes written"
        return (
            f"{self.name}: {self.differing:,} of {self.nbytes:,} bytes differ, in {self.tiles} "
            f"tiles; first: {self.first}"
        )


def compare(file: ReplayFile, got: Sequence[Bytes]) -> Outcome:
    """``got``: the buffers after the launch."""
    differ = [want != have for want, have in zip(file.after, got, strict=True)]
    changed = sum(int((a != b).sum()) for a, b in zip(file.before, file.after, strict=True))
    tiles, first = 0, ""
    covered = [np.zeros(d.size, bool) for d in differ]
    for tensor in file.tensors:
        part = slice(tensor.offset, tensor.offset + _size(tensor))
        covered[tensor.buffer][part] = True
        wrong = _tiles(tensor, differ[tensor.buffer][part])
        tiles += len(wrong)
        if len(wrong) and not first:
            first = _describe(file, tensor, wrong[0], got)
    if not first:
        for index, (d, seen) in enumerate(zip(differ, covered, strict=True)):
            outside = np.flatnonzero(d & ~seen)
            if outside.size:
                first = f"buffer {index}, byte {outside[0]}, which no tensor covers"
                break
    return Outcome(
        file.name,
        sum(a.size for a in file.after),
        changed,
        sum(int(d.sum()) for d in differ),
        tiles,
        first,
    )


def _size(tensor: Named) -> int:
    return tensor.rows * tensor.columns * tensor.element_bytes


def _tiles(tensor: Named, differ: Bytes | np.ndarray) -> np.ndarray:
    """(tile row, tile column) of every tile that differs, in order."""
    elements = differ.reshape(tensor.rows, tensor.columns, tensor.element_bytes).any(-1)
    row, column = np.nonzero(elements)
    return np.unique(np.stack([row // tensor.tile[0], column // tensor.tile[1]], 1), axis=0)


def _describe(file: ReplayFile, tensor: Named, tile: np.ndarray, got: Sequence[Bytes]) -> str:
    """The tile, and the first element in it with both values."""
    (height, width), (r, c) = tensor.tile, (int(tile[0]), int(tile[1]))
    rows = slice(r * height, min((r + 1) * height, tensor.rows))
    columns = slice(c * width, min((c + 1) * width, tensor.columns))

    def cells(buffers: Sequence[Bytes]) -> np.ndarray:
        raw = buffers[tensor.buffer][tensor.offset : tensor.offset + _size(tensor)]
        return raw.reshape(tensor.rows, tensor.columns, tensor.element_bytes)[rows, columns]

    want, have = cells(file.after), cells(got)
    at = np.argwhere((want != have).any(-1))[0]
    row, column = rows.start + int(at[0]), columns.start + int(at[1])
    values = (bytes(x[tuple(at)][::-1]).hex() for x in (have, want))
    place = f"rows {rows.start}-{rows.stop - 1}, columns {columns.start}-{columns.stop - 1}"
    mine, theirs = values
    return (
        f"{tensor.name}, tile of {place}: [{row}, {column}] is 0x{mine}, expected 0x{theirs}"
        f"{_expert(file, tensor, row)}"
    )


def _expert(file: ReplayFile, tensor: Named, row: int) -> str:
    """Whose row it is, where the launch has a work list and the tensor is in sorted rows."""
    work = next((t for t in file.tensors if t.name == "work"), None)
    if work is None or not tensor.name.startswith("sorted "):
        return ""
    raw = file.after[work.buffer][work.offset : work.offset + _size(work)]
    for expert, first, count, _ in raw.view(np.int32).reshape(-1, 4).tolist():
        if first <= row < first + count:
            return f" (expert {expert}, token {row - first} of {count})"
    return ""
