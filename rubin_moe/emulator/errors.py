"""What the emulator raises on its own account."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rubin_moe.emulator.findings import Finding


class EmulatorError(RuntimeError):
    """Something the emulator was asked for and does not do, or cannot do here."""


class EmulationError(EmulatorError):
    """A launch that did not end in done: trap, deadlock or budget. ``outcome`` names which.

    ``rule`` is the id of the rule that was violated (`rules.RULES`), None where none is behind it;
    ``finding`` is set where a rule of a checked launch ended it.
    """

    def __init__(
        self,
        outcome: str,
        message: str,
        rule: str | None = None,
        finding: Finding | None = None,
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.rule = rule
        self.finding = finding

    def __reduce__(self) -> tuple[type[EmulationError], tuple[object, ...]]:
        return type(self), (self.outcome, str(self), self.rule, self.finding)
