"""Hardware rules as data and pure functions. A leaf: standard library only."""

from rubin_moe.arch.sm90 import SM90A
from rubin_moe.arch.sm100 import SM100A, SM103A
from rubin_moe.arch.sm107 import SM107A
from rubin_moe.arch.spec import ArchSpec
from rubin_moe.errors import PlanError

__all__ = ["ARCHS", "SM90A", "SM100A", "SM103A", "SM107A", "ArchSpec", "arch"]

ARCHS: dict[str, ArchSpec] = {a.name: a for a in (SM90A, SM100A, SM103A, SM107A)}


def arch(name: str) -> ArchSpec:
    """The architecture of that name, ``sm_107a``. Raises PlanError for any other."""
    if name not in ARCHS:
        raise PlanError(f"unknown architecture {name!r}; known: {', '.join(ARCHS)}")
    return ARCHS[name]
