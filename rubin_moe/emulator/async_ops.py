"""Asynchronous operations: objects with an issue and a completion, performed by a policy.

An instruction that the hardware performs asynchronously becomes an :class:`AsyncOperation` when it
issues. A policy decides when its effects on memory happen (``perform``) and when they are
announced (``complete``: arrivals on mbarriers, the end of a bulk group). :class:`ImmediatePolicy`
does both at issue, which is a legal execution of a correctly synchronised kernel and hides missing
waits. :class:`DelayPolicy` holds operations back and reorders them within what the pipes keep in
order: the effects of an operation may be there long before it is announced, never after.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True, eq=False)
class AsyncOperation:
    """One asynchronous operation.

    ``pipe`` names the queue whose operations are performed in order (``tcgen05`` of a CTA pair is
    one; every TMA copy is its own). ``done`` becomes true on completion; waits look at it.
    """

    kind: str
    pipe: tuple[object, ...]
    perform: Callable[[], None]
    complete: Callable[[], None]
    cta: int = 0
    warp: int = 0
    line: int = 0
    done: bool = False
    performed: bool = False

    def start(self) -> None:
        """Perform, unless that happened."""
        if not self.performed:
            self.performed = True
            self.perform()

    def finish(self) -> None:
        """Perform and complete, unless that happened."""
        self.start()
        if not self.done:
            self.done = True
            self.complete()


class Policy(Protocol):
    """When asynchronous operations happen."""

    #: Kernels must be compiled so that waits return to the scheduler.
    deferred: bool

    def submit(self, operation: AsyncOperation) -> None:
        """An operation issues."""

    def advance(self) -> bool:
        """Let time pass: finish something. False when nothing is outstanding."""

    def drain(self, pipe: tuple[object, ...]) -> None:
        """Finish all of a pipe."""

    def outstanding(self) -> list[AsyncOperation]:
        """Operations that have issued and not completed."""


class ImmediatePolicy:
    """Everything happens when it issues."""

    deferred = False

    def submit(self, operation: AsyncOperation) -> None:
        """Perform and complete."""
        operation.finish()

    def advance(self) -> bool:
        """Nothing is ever outstanding."""
        return False

    def drain(self, pipe: tuple[object, ...]) -> None:
        """Nothing is ever outstanding."""

    def outstanding(self) -> list[AsyncOperation]:
        """None."""
        return []


@dataclass
class DelayPolicy:
    """Operations wait in their pipes; a seeded generator chooses which pipe moves, and when.

    A move performs the next operation of the pipe or completes its first one. ``eagerness`` is the
    chance that an issue also moves something. Two runs with one seed are the same.
    """

    seed: int
    eagerness: float = 0.25
    deferred: bool = True
    _pipes: dict[tuple[object, ...], deque[AsyncOperation]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def submit(self, operation: AsyncOperation) -> None:
        """Queue the operation behind those of its pipe."""
        self._pipes.setdefault(operation.pipe, deque()).append(operation)
        if self._random.random() < self.eagerness:
            self.advance()

    def advance(self) -> bool:
        """Move a pipe chosen at random by one step."""
        if not self._pipes:
            return False
        pipe = self._random.choice(list(self._pipes))
        queue = self._pipes[pipe]
        waiting = next((operation for operation in queue if not operation.performed), None)
        if waiting is not None and (waiting is queue[0] or self._random.random() < 0.5):
            waiting.start()
            return True
        operation = queue.popleft()
        if not queue:
            del self._pipes[pipe]
        operation.finish()
        return True

    def drain(self, pipe: tuple[object, ...]) -> None:
        """Finish all of a pipe, in order."""
        for operation in self._pipes.pop(pipe, ()):
            operation.finish()

    def outstanding(self) -> list[AsyncOperation]:
        """Everything queued, pipe by pipe."""
        return [operation for queue in self._pipes.values() for operation in queue]
