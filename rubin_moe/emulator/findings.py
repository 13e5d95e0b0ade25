"""What a checked launch finds: violations of rules, each once for the instructions involved."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

from rubin_moe.emulator.errors import EmulationError
from rubin_moe.emulator.rules import RULES

#: ``launch(..., rules=...)``: end at the first violation of an enforced rule, or report all.
Mode = Literal["enforce", "report"]

#: Different findings that a launch keeps; it goes on counting the others.
MAX_FINDINGS = 256


@dataclass(frozen=True, slots=True)
class Access:
    """The earlier one of two accesses that nothing orders.

    ``what`` is a phrase ("TMA load", "generic write"); ``cta`` is (x, y, z); ``lane`` is -1 where
    the whole warp acted.
    """

    what: str
    cta: tuple[int, int, int]
    warp: int
    lane: int
    line: int
    opcode: str

    def __str__(self) -> str:
        lane = f", lane {self.lane}" if self.lane >= 0 else ""
        return (
            f"{self.what} of CTA {self.cta}, warp {self.warp}{lane}, line {self.line}: "
            f"{self.opcode}"
        )


@dataclass(slots=True)
class Finding:
    """One violation of a rule, the first of ``count`` by the same instructions.

    ``rule`` is an id of `rules.RULES`; ``severity`` is "error", "isa" or "warning"; ``cta`` is
    (x, y, z); ``lane`` is -1 where the whole warp acted; ``line`` is of the PTX text; ``sentence``
    says what happened, with the values; ``other`` is the access that it collides with.
    """

    rule: str
    severity: str
    kernel: str
    cta: tuple[int, int, int]
    warp: int
    lane: int
    line: int
    opcode: str
    sentence: str
    other: Access | None = None
    count: int = 1

    def __str__(self) -> str:
        lane = f", lane {self.lane}" if self.lane >= 0 else ""
        text = (
            f"kernel {self.kernel}, CTA {self.cta}, warp {self.warp}{lane}, line {self.line}: "
            f"{self.opcode}: {self.rule}: {self.sentence}"
        )
        return text if self.other is None else f"{text}; the other access: {self.other}"


class Findings:
    """Collects the findings of one launch; may be shared by its threads."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.dropped = 0
        self._found: dict[tuple[str, int, int], Finding] = {}
        self._lock = threading.Lock()

    @property
    def all(self) -> list[Finding]:
        """Different findings, in the order in which they were made."""
        return list(self._found.values())

    def add(
        self,
        rule: str,
        sentence: str,
        *,
        kernel: str,
        cta: tuple[int, int, int],
        warp: int,
        line: int,
        opcode: str,
        lane: int = -1,
        other: Access | None = None,
    ) -> None:
        """Record a violation. Raises EmulationError (trap) where its rule is enforced."""
        severity = RULES[rule].severity
        finding = Finding(
            rule, severity, kernel, cta, warp, lane, line, opcode, sentence, other
        )  # fmt: skip
        if severity == "error" and self.mode == "enforce":
            raise EmulationError("trap", str(finding), rule, finding)
        key = rule, line, -1 if other is None else other.line
        with self._lock:
            if key in self._found:
                self._found[key].count += 1
            elif len(self._found) < MAX_FINDINGS:
                self._found[key] = finding
            else:
                self.dropped += 1
