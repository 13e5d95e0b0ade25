"""Shared memory of one block: rings of stages, and what may lie where.

Sources: first seed, sections 2.2, 3.3 and 5.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rubin_moe.arch.spec import ArchSpec
from rubin_moe.errors import PlanError

BARRIER_BYTES = 8
BARRIERS_PER_STAGE = 2  # full and empty
ALIGNMENT = 1024  # the 128-byte swizzle repeats every 8 rows of 128 bytes


@dataclass(frozen=True)
class Buffer:
    """One operand's buffer.

    Attributes:
        stage_bytes: of one stage; ring: ``weights``, ``tokens`` or ``fixed`` (one copy).
        cp_async: filled by ``cp.async.cg``, whose destination must stay below the limit.
    """

    name: str
    stage_bytes: int
    ring: str = "weights"
    cp_async: bool = False


@dataclass(frozen=True)
class Placed:
    """A buffer's bytes ``[offset, offset + nbytes)`` and its stages."""

    name: str
    offset: int
    nbytes: int
    stages: int

    def __str__(self) -> str:
        return f"{self.name} {self.stages} @ {self.offset:#x}+{self.nbytes}"


@dataclass(frozen=True)
class SmemPlan:
    """The map of a block's shared memory.

    Attributes:
        placed: in address order, after ``barrier_bytes`` and other metadata.
        stages: ring -> stages; split: whether the rings have depths of their own.
    """

    placed: tuple[Placed, ...]
    stages: dict[str, int]
    split: bool
    metadata_bytes: int
    used: int
    capacity: int

    def __str__(self) -> str:
        rings = " ".join(f"{ring}={count}" for ring, count in self.stages.items())
        parts = ", ".join(map(str, self.placed))
        return f"{rings}: {parts}; {self.used} of {self.capacity} bytes"


def stages_in(budget: int, stage_bytes: int) -> int:
    """Whole stages of ``stage_bytes`` in ``budget`` bytes."""
    return budget // stage_bytes


def plan_smem(
    arch: ArchSpec,
    buffers: Sequence[Buffer],
    *,
    metadata_bytes: int = 1024,
    token_stages: int | None = None,
    max_stages: int = 16,
) -> SmemPlan:
    """Stages and addresses for one block.

    One shared ring by default; with ``token_stages`` the tokens get that many and the weights what
    is left. ``cp.async`` targets lie lowest, TMA targets above them.

    Raises:
        PlanError: not even one stage fits; a split that gains the weights no stage; a ``cp.async``
            buffer that would reach the limit.
    """
    capacity = arch.smem_per_block
    fixed = sum(_up(b.stage_bytes) for b in buffers if b.ring == "fixed")
    weights = sum(_up(b.stage_bytes) for b in buffers if b.ring == "weights")
    tokens = sum(_up(b.stage_bytes) for b in buffers if b.ring == "tokens")
    barriers = BARRIER_BYTES * BARRIERS_PER_STAGE
    budget = capacity - _up(metadata_bytes + 2 * max_stages * barriers) - fixed
    shared = min(max_stages, stages_in(budget, weights + tokens))
    if shared < 1:
        raise PlanError(
            f"{arch.name}: one stage needs {weights + tokens} bytes ({weights} weights, {tokens} "
            f"tokens) beside {fixed} fixed, a block has {capacity}"
        )
    stages = {"weights": shared, "tokens": shared}
    if token_stages is not None:
        deep = min(max_stages, stages_in(budget - token_stages * tokens, weights))
        if deep <= shared:
            raise PlanError(
                f"a split with {token_stages} token stages gives the weights {deep} stages, the "
                f"shared ring gives {shared}: it gains nothing and costs a second wait a stage"
            )
        stages = {"weights": deep, "tokens": token_stages}
    header = _up(metadata_bytes + 2 * max_stages * barriers)
    return _place(arch, buffers, stages, token_stages is not None, header)


def _place(
    arch: ArchSpec, buffers: Sequence[Buffer], stages: dict[str, int], split: bool, at: int
) -> SmemPlan:
    header, placed = at, []
    # fixed buffers (the epilogue's staging) first, as long as they leave cp.async its room
    low = sorted(buffers, key=lambda b: (not b.cp_async, b.ring != "fixed"))
    for buffer in low:
        count = stages.get(buffer.ring, 1)
        size = _up(buffer.stage_bytes) * count
        limit = arch.cp_async_limit
        if buffer.cp_async and limit is not None and at + size > limit:
            raise PlanError(
                f"{buffer.name} ends at {at + size:#x}: cp.async.cg targets must stay below "
                f"{limit:#x} on {arch.name}"
            )
        placed.append(Placed(buffer.name, at, size, count))
        at += size
    return SmemPlan(tuple(placed), stages, split, header, at, arch.smem_per_block)


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
