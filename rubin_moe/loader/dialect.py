"""What a dialect is: a table from one producer's tensor names to parts of the canonical form."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from rubin_moe.formats.spec import BlockFormat

Part: TypeAlias = Literal["qdata", "sf", "dec", "input_dec", "bias"]
"""Attributes of `formats.experts.ProjectionWeights`."""

FLOAT_DTYPES = ("F32", "BF16", "F16")
"""Of per-tensor scales and biases; compressed-tensors exports with BF16 ``input_global_scale``
exist (Mistral-Small-4's shared experts)."""


@dataclass(frozen=True)
class Reading:
    """How one stored tensor becomes one part.

    Attributes:
        dtypes: safetensors dtypes it may have.
        reciprocal: stored as ``1 / value``.
        last_axes: axes that together hold a row's bytes (2 where blocks have an axis of their own).
    """

    part: Part
    dtypes: tuple[str, ...]
    reciprocal: bool = False
    last_axes: int = 1


@dataclass(frozen=True)
class Ignored:
    """A tensor that is known and deliberately not read."""

    reason: str


@dataclass(frozen=True)
class Stacking:
    """Orientation and row order of tensors that hold all experts. Never guessed.

    Attributes:
        transposed: ``[E, K, N]`` (packed and scaled along the middle axis), else ``[E, N, K]``.
        interleaved: rows of ``gate_up`` alternate gate, up; else the gate half comes first.
    """

    transposed: bool
    interleaved: bool

    def __str__(self) -> str:
        axes = "[E, K, N]" if self.transposed else "[E, N, K]"
        return f"{axes}, {'gate and up rows alternate' if self.interleaved else 'gate half first'}"


@dataclass(frozen=True)
class Dialect:
    """One producer's way to store one format.

    Attributes:
        name: for messages, plans and specs.
        fmt: weight format.
        leaves: the table.
        needs_dec: whether every projection must bring a global scale.
        global_range: what a weight's global scale, as stored, can plausibly be.
        looks_like: what one outside that range would be.
        stacking: where the dialect itself fixes it.
    """

    name: str
    fmt: BlockFormat
    leaves: Mapping[str, Reading | Ignored] = field(hash=False)
    needs_dec: bool
    global_range: tuple[float, float] = (0.0, float("inf"))
    looks_like: str = ""
    stacking: Stacking | None = None

    def read(self, leaf: str) -> Reading | Ignored | None:
        """What a leaf is; None for a name the dialect does not have."""
        return self.leaves.get(leaf)

    def leaf(self, part: Part) -> str:
        """The producer's name of a part, for messages; the part's own if there is none."""
        return self._names.get(part, part)

    @cached_property
    def _names(self) -> dict[Part, str]:
        return {r.part: leaf for leaf, r in self.leaves.items() if isinstance(r, Reading)}

    def __str__(self) -> str:
        return self.name
