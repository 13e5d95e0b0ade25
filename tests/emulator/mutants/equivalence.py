"""Mutants that nothing can tell from the sound kernel, each with the argument why."""

from __future__ import annotations

from tests.emulator.mutants.edits import Mutation
from tests.emulator.mutants.trial import Bench


def proof(bench: Bench, mutation: Mutation) -> str:
    """Why the mutant is equivalent, or "" where there is no such argument."""
    return ""
