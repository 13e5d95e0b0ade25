"""The one error of the functional units: an operation that the architecture does not define."""

from __future__ import annotations

from typing import NoReturn

from ..errors import EmulatorError
from ..rules import RULES


class IllegalOperationError(EmulatorError):
    """An operation, descriptor or operand that is illegal or not modelled.

    ``rule`` is an id of `rules.RULES` (``"instruction descriptor: N"``); the message says what was
    found and what is legal.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = RULES[rule].id


def refuse(rule: str, message: str) -> NoReturn:
    """Raise :class:`IllegalOperationError`."""
    raise IllegalOperationError(rule, message)


def require(condition: bool, rule: str, message: str) -> None:
    """Raise :class:`IllegalOperationError` unless ``condition`` holds."""
    if not condition:
        raise IllegalOperationError(rule, message)
