"""One row per backend; ``select`` names the winner and every other one's reason.

Standard library only: a row's rules are light, its host file is imported when it has won.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from rubin_moe import envs
from rubin_moe.errors import ConfigError, UnsupportedError
from rubin_moe.kernels.base import ExpertsKernel, MoEProblem, Rules, Target


@dataclass(frozen=True)
class Row:
    """One backend.

    Attributes:
        name: what users type; package: under `rubin_moe.kernels`, holds ``rules`` and ``host``.
        opt_in: never chosen unless named; the sentence says what choosing it means.
        unproven: compute capabilities that it compiles for and was never run on.
    """

    name: str
    package: str
    opt_in: str = ""
    unproven: tuple[tuple[int, int], ...] = ()

    def rules(self) -> Rules:
        return cast(Rules, importlib.import_module(f"rubin_moe.kernels.{self.package}.rules"))


ROWS: tuple[Row, ...] = (
    Row("sm107", "sm107"),
    Row("sm90", "sm90"),
    Row("cpu", "cpu"),
    Row("cpu-tcgen05", "cpu_tcgen05"),
    Row("cpu-wgmma", "cpu_wgmma"),
    Row("triton", "triton", unproven=((8, 0), (8, 6), (8, 9))),
    Row(
        "sm107-emulated",
        "sm107_emulated",
        opt_in="runs the sm_107a kernels instruction by instruction on a CPU, seconds a token",
    ),
)
"""In order of preference: the first that can, wins."""


@dataclass(frozen=True)
class Selection:
    """The answer to one ``select``: the winner, why it, and why none of the others."""

    backend: str
    why: str
    reasons: Mapping[str, str]
    problem: MoEProblem
    target: Target

    def kernel(self) -> ExpertsKernel:
        """The winner's host object. Imports what it needs."""
        row = next(r for r in ROWS if r.name == self.backend)
        host = importlib.import_module(f"rubin_moe.kernels.{row.package}.host")
        return cast(ExpertsKernel, host.build(self.problem))

    def __str__(self) -> str:
        lines = [f"{self.backend} on {self.target}: {self.why}"]
        return "\n".join([*lines, *(f"  not {n}: {r}" for n, r in self.reasons.items())])


def backend_names() -> tuple[str, ...]:
    return tuple(row.name for row in ROWS)


def select(problem: MoEProblem, target: Target, backend: str | None = None) -> Selection:
    """The backend that computes ``problem`` on ``target``.

    Args:
        backend: the only one wanted; default ``RUBIN_MOE_BACKEND``, else the best that can.

    Raises:
        UnsupportedError: none can, or the one named cannot; carries each candidate's reason.
        ConfigError: an unknown name.
    """
    wanted = backend or envs.text("RUBIN_MOE_BACKEND") or None
    forbidden = envs.names("RUBIN_MOE_FORBID")
    for name in (*((wanted,) if wanted else ()), *forbidden):
        if name not in backend_names():
            raise ConfigError(f"unknown backend {name!r}; known: {', '.join(backend_names())}")
    winner: Row | None = None
    reasons: dict[str, str] = {}
    for row in ROWS:
        reason = _why_not(row, problem, target, wanted, forbidden)
        if reason is not None:
            reasons[row.name] = reason
        elif winner is None:
            winner = row
        else:
            reasons[row.name] = f"{winner.name} comes first"
    if winner is None:
        raise UnsupportedError(
            f"no backend computes {problem.weight_format} experts with "
            f"{problem.activation_format} activations on {target}:",
            reasons,
        )
    why = "asked for by name" if wanted else "first in preference among those that can"
    if target.capability in winner.unproven:
        why += f"; compiled for {target}, never run on such a GPU"
    return Selection(winner.name, why, reasons, problem, target)


def _why_not(
    row: Row, problem: MoEProblem, target: Target, wanted: str | None, forbidden: tuple[str, ...]
) -> str | None:
    if row.name in forbidden:
        return "forbidden by RUBIN_MOE_FORBID"
    if wanted and row.name != wanted:
        return f"{wanted} was asked for by name"
    if row.opt_in and row.name != wanted:
        return f"opt-in: {row.opt_in}"
    return row.rules().why_not(problem, target)
