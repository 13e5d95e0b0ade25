"""What a dialect is: a table from one producer's tensor names to parts of the canonical form."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

from rubin_moe.formats.spec import BlockFormat

Part: TypeAlias = Literal["qdata", "sf", "dec", "input_dec", "bias"]
"""Attributes of `formats.experts.ProjectionWeights`."""

FLOAT_DTYPES = ("F32", "BF16", "F16")
"""Of per-tensor scales and biases; compressed-tensors exports with BF16 ``input_global_scale``
exist (Mistral-Small-4's shared experts)."""


LEAVES = (
    *("weight", "weight_packed", "blocks", "weight_scale", "scale", "scales", "weight_scale_2"),
    *("weight_global_scale", "input_scale", "input_global_scale", "weight_shape", "bias"),
)
"""Every leaf that any dialect knows."""


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
        read: leaf name -> what it is; None for a name the dialect does not have.
        needs_dec: whether every projection must bring a global scale.
        global_range: what a weight's global scale, as stored, can plausibly be.
        looks_like: what one outside that range would be.
        stacking: where the dialect itself fixes it.
    """

    name: str
    fmt: BlockFormat
    read: Callable[[str], Reading | Ignored | None]
    needs_dec: bool
    global_range: tuple[float, float] = (0.0, float("inf"))
    looks_like: str = ""
    stacking: Stacking | None = None

    def leaf(self, part: Part) -> str:
        """The producer's name of a part, for messages; the part's own if there is none."""
        return _leaves(self).get(part, part)

    def __str__(self) -> str:
        return self.name


@cache
def _leaves(dialect: Dialect) -> dict[Part, str]:
    """The first name of each part."""
    found: dict[Part, str] = {}
    for name in LEAVES:
        reading = dialect.read(name)
        if isinstance(reading, Reading):
            found.setdefault(reading.part, name)
    return found
