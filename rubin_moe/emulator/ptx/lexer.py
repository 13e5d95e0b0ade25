"""Cuts PTX text into statements.

A statement is a scope brace, a label, or the text up to its ``;`` (braces inside belong to vector
operands and initialisers). Debug directives that end at the line (``.loc``, ``.file``,
``.section``) are dropped here.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from rubin_moe.emulator.errors import EmulatorError


class PtxSyntaxError(EmulatorError, ValueError):
    """Text that is not PTX as this reader knows it; the message names the line."""


@dataclass(frozen=True, slots=True)
class Statement:
    """``kind`` is ``open``, ``close``, ``label`` or ``text``; ``line`` counts from 1."""

    kind: str
    text: str
    line: int


_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_SPACE = re.compile(r"\s*")
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_LINE_DIRECTIVE = re.compile(r"\.(?:loc|file)\b[^\n]*|\.section\b[^{]*\{[^}]*\}")


def strip_comments(text: str) -> str:
    """Replace comments by spaces; line numbers stay."""
    return _COMMENT.sub(lambda m: "\n" * m.group().count("\n") or " ", text)


class LineIndex:
    """Line numbers (from 1) of positions in ``text``."""

    def __init__(self, text: str) -> None:
        self._starts = [m.end() for m in re.finditer("\n", text)]

    def __call__(self, position: int) -> int:
        return bisect_right(self._starts, position) + 1


def statements(text: str, start: int, line_of: LineIndex) -> Iterator[Statement]:
    """Statements of a function body; ``start`` is just after its opening brace.

    Ends after the brace that closes the body. ``text`` has no comments.
    """
    position, depth = start, 1
    while True:
        position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
        if position >= len(text):
            raise PtxSyntaxError(f"line {line_of(start)}: the body that opens here never closes")
        char = text[position]
        if char == "{":
            depth += 1
            yield Statement("open", "{", line_of(position))
            position += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return
            yield Statement("close", "}", line_of(position))
            position += 1
        elif char == ";":
            position += 1
        elif match := _LINE_DIRECTIVE.match(text, position):
            position = match.end()
        elif match := _LABEL.match(text, position):
            yield Statement("label", match.group(1), line_of(position))
            position = match.end()
        else:
            end = text.find(";", position)
            if end < 0:
                raise PtxSyntaxError(f"line {line_of(position)}: statement without ';'")
            yield Statement("text", text[position:end].strip(), line_of(position))
            position = end + 1


def split_commas(text: str) -> list[str]:
    """Split at commas outside brackets; empty text gives no items."""
    if "{" not in text and "[" not in text and "(" not in text:
        return [item.strip() for item in text.split(",")] if text.strip() else []
    items, depth, begin = [], 0, 0
    for position, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and depth == 0:
            items.append(text[begin:position].strip())
            begin = position + 1
    if text[begin:].strip():
        items.append(text[begin:].strip())
    return items
