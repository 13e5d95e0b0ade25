"""Which files of an unfinished conversion are complete: one JSON line a file, written after it.

A line is written once its file's bytes are on disk (fsync), so that a kill at any moment repeats at
most the file it interrupted. Lines themselves are left to the kernel: a machine that loses its
power repeats the files of the last half minute. A last line that was cut short is no line.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rubin_moe.convert.tally import Tally
from rubin_moe.errors import ConvertError

NAME = "journal.jsonl"
FILES = "files"
"""Folder beside the journal that becomes the output."""


@dataclass(frozen=True)
class Finished:
    """A complete file.

    Attributes:
        size: in bytes; pieces: (start, stop, CRC-32) of every range that was written, in order;
            tally: of its groups.
    """

    name: str
    size: int
    pieces: tuple[tuple[int, int, int], ...]
    tally: Tally


class Journal:
    """The journal of one work folder. What another conversion began and did not finish is removed.

    Raises:
        ConvertError: another conversion finished files there.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.path = folder / NAME
        self.finished: dict[str, Finished] = {}
        lines = self._lines()
        if lines and lines[0].get("fingerprint") != fingerprint:
            if len(lines) > 1:
                raise ConvertError(
                    f"{folder.name}: holds finished files of another conversion (other options, "
                    "version or source); finish that one or remove the folder"
                )
            for begun in (folder / FILES).iterdir():
                begun.unlink()
        for line in lines[1:]:
            pieces = tuple((int(a), int(b), int(c)) for a, b, c in line["pieces"])
            done = Finished(line["name"], line["size"], pieces, Tally.read(line["tally"]))
            file = folder / FILES / done.name
            if file.is_file() and file.stat().st_size == done.size:
                self.finished[done.name] = done
        self._rewrite(fingerprint)

    def _lines(self) -> list[dict[str, Any]]:
        try:
            raw = self.path.read_text()
        except FileNotFoundError:
            return []
        lines = []
        for text in raw.splitlines(keepends=True):
            if not text.endswith("\n"):
                break
            lines.append(json.loads(text))
        return lines

    def _rewrite(self, fingerprint: str) -> None:
        """Drops a torn line and lines of files that are gone, atomically."""
        fresh = self.path.with_suffix(".new")
        with fresh.open("w") as f:
            f.write(json.dumps({"fingerprint": fingerprint}) + "\n")
            for done in self.finished.values():
                f.write(_line(done))
        fresh.replace(self.path)

    def add(self, done: Finished) -> None:
        """Notes a file whose bytes are on disk."""
        with self.path.open("a") as f:
            f.write(_line(done))
        self.finished[done.name] = done


def _line(done: Finished) -> str:
    told = {
        "name": done.name,
        "size": done.size,
        "pieces": [list(p) for p in done.pieces],
        "tally": done.tally.record(),
    }
    return json.dumps(told) + "\n"
