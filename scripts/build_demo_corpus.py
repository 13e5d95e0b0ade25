"""The demo model's text, from Debian's ``bible-kjv`` and ``bible-kjv-text`` packages.

    bible -l100000 gen1:1-rev22:21 | python scripts/build_demo_corpus.py models/kjv/corpus

Writes ``train.txt.xz`` and ``heldout.txt``. A chapter is a heading line (``Ruth 1``) and one line a
verse, without numbers; chapters are separated by a blank line. Whole books are held out, chosen
for having no near-verbatim parallel elsewhere (the synoptic gospels, Kings and Chronicles do).
"""

import lzma
import re
import sys
from pathlib import Path

HELD_OUT = ("Ruth", "Esther", "Ecclesiastes", "Jonah", "James")
CHAPTERS, VERSES = 1189, 31102  # of the whole King James Version without the Apocrypha

HEADING = re.compile(r"^(?P<book>(?:[123] )?[A-Z][A-Za-z ]*?) (?P<chapter>\d+)$")
VERSE = re.compile(r"^ +\d+ (?P<text>\S.*)$")


def parse(lines: list[str]) -> list[tuple[str, list[str]]]:
    """``(book, [heading, verse, ...])`` per chapter; any other line is an error."""
    chapters: list[tuple[str, list[str]]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if heading := HEADING.match(line):
            chapters.append((heading["book"], [line]))
        elif (verse := VERSE.match(line)) and chapters:
            chapters[-1][1].append(verse["text"].strip())
        else:
            raise ValueError(f"line {number} is neither a heading nor a verse: {line[:60]!r}")
    return chapters


def main(folder: Path) -> None:
    chapters = parse(sys.stdin.read().splitlines())
    verses = sum(len(text) - 1 for _, text in chapters)
    if (len(chapters), verses) != (CHAPTERS, VERSES):
        raise ValueError(f"{len(chapters)} chapters and {verses} verses, not {CHAPTERS}, {VERSES}")
    parts: dict[bool, list[str]] = {True: [], False: []}
    for book, text in chapters:
        parts[book in HELD_OUT].append("\n".join(text) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    train = "\n".join(parts[False]).encode()
    (folder / "train.txt.xz").write_bytes(lzma.compress(train, preset=9))
    (folder / "heldout.txt").write_text("\n".join(parts[True]))
    print(f"{len(parts[False])} chapters to train on, {len(parts[True])} held out")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
