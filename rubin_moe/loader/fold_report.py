"""What a fold did to each expert, as data that prints in one line."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class FoldEntry:
    """One expert and part of a layer.

    Attributes:
        expert: global id; part: ``gate``, ``up`` or ``down``.
        k, r: ``g = 2^k r`` with ``1 <= r < 2``.
        shift: power of two that moved into the block scales; alpha: what remains of g.
        blocks: block scales; rerounded: of them, those whose value changed; flushed: became zero;
            saturated: above the target's maximum.
        max_rel_err, mean_rel_err: of the non-zero decoded block scales, which is the error of
            every weight under them; after ``full+requantize`` of the non-zero decoded weights.
    """

    expert: int
    part: str
    k: int
    r: float
    shift: int
    alpha: float
    blocks: int
    rerounded: int = 0
    flushed: int = 0
    saturated: int = 0
    max_rel_err: float = 0.0
    mean_rel_err: float = 0.0


@dataclass(frozen=True)
class FoldReport:
    """One layer.

    Attributes:
        name: module name; mode: of the fold; source, target: format names.
        entries: one per expert and part, in order; none where there was nothing to fold.
    """

    name: str
    mode: str
    source: str
    target: str
    entries: tuple[FoldEntry, ...]

    def total(self, field: str) -> int:
        """Sum over the entries of ``blocks``, ``rerounded``, ``flushed`` or ``saturated``."""
        return sum(getattr(e, field) for e in self.entries)

    @property
    def lossless(self) -> bool:
        return self.max_rel_err == 0

    @property
    def max_rel_err(self) -> float:
        return max((e.max_rel_err for e in self.entries), default=0.0)

    @property
    def mean_rel_err(self) -> float:
        """Mean over all blocks of the layer."""
        blocks = self.total("blocks")
        return sum(e.mean_rel_err * e.blocks for e in self.entries) / blocks if blocks else 0.0

    def to_dict(self) -> Mapping[str, object]:
        """Plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        head = f"{self.name}: {self.source} -> {self.target}, fold {self.mode}: "
        if self.lossless:
            return f"{head}lossless, {self.total('blocks')} blocks"
        return (
            f"{head}{self.total('rerounded')} of {self.total('blocks')} blocks re-rounded, "
            f"{self.total('flushed')} flushed, {self.total('saturated')} saturated, "
            f"relative error max {self.max_rel_err:.3g} mean {self.mean_rel_err:.3g}"
        )
