"""Named bit fields of a hardware word."""

from collections.abc import Mapping
from dataclasses import dataclass

from rubin_moe.errors import PlanError


@dataclass(frozen=True)
class Field:
    """Bits ``[start, start + width)`` of a word."""

    name: str
    start: int
    width: int

    @property
    def mask(self) -> int:
        return ((1 << self.width) - 1) << self.start


@dataclass(frozen=True)
class Word:
    """A word made of fields; bits that no field covers must be zero."""

    name: str
    bits: int
    fields: tuple[Field, ...]

    def encode(self, values: Mapping[str, int]) -> int:
        """The word. Raises PlanError for an unknown field or a value that does not fit."""
        word = 0
        by_name = {f.name: f for f in self.fields}
        for name, value in values.items():
            if name not in by_name:
                raise PlanError(f"{self.name} has no field {name!r}")
            field = by_name[name]
            if not 0 <= value < 1 << field.width:
                raise PlanError(f"{self.name}.{name} = {value} does not fit {field.width} bits")
            word |= value << field.start
        return word

    def decode(self, word: int) -> dict[str, int]:
        """Every field's value. Raises PlanError for bits that the architecture leaves undefined."""
        stray = self.undefined(word)
        if stray:
            raise PlanError(f"{self.name} {word:#x}: undefined bits {stray:#x} are set")
        return {f.name: (word & f.mask) >> f.start for f in self.fields}

    def undefined(self, word: int) -> int:
        """The set bits that no field covers."""
        covered = 0
        for field in self.fields:
            covered |= field.mask
        return word & ((1 << self.bits) - 1) & ~covered
