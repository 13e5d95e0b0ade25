"""The 64-bit mbarrier object, kept in shared memory itself.

Our encoding of the opaque word (the hardware's is not documented): bits 0-19 pending count, 20-39
expected count, 40-60 transaction count (signed), 61 phase parity, 62-63 the marker 0b10. A word
without the marker is not an mbarrier: using it is a fault.
"""

from __future__ import annotations

from dataclasses import dataclass

COUNT_BITS = 20
TX_BITS = 21
EXPECTED_SHIFT = 20
TX_SHIFT = 40
PHASE_SHIFT = 61
MARKER_SHIFT = 62
MARKER = 0b10
COUNT_MASK = (1 << COUNT_BITS) - 1
MAX_COUNT = COUNT_MASK


@dataclass(frozen=True, slots=True)
class MbarrierWord:
    """A decoded mbarrier."""

    pending: int
    expected: int
    tx: int
    phase: int

    def __str__(self) -> str:
        return f"phase {self.phase}, pending {self.pending} of {self.expected}, tx {self.tx} bytes"


def pack(word: MbarrierWord) -> int:
    """The 64-bit word."""
    tx = word.tx & ((1 << TX_BITS) - 1)
    return (
        word.pending
        | word.expected << EXPECTED_SHIFT
        | tx << TX_SHIFT
        | word.phase << PHASE_SHIFT
        | MARKER << MARKER_SHIFT
    )


def unpack(value: int) -> MbarrierWord | None:
    """Decode, or None when the word is not an initialised mbarrier."""
    if value >> MARKER_SHIFT != MARKER:
        return None
    tx = value >> TX_SHIFT & ((1 << TX_BITS) - 1)
    tx -= (tx >> (TX_BITS - 1)) << TX_BITS
    return MbarrierWord(
        value & COUNT_MASK, value >> EXPECTED_SHIFT & COUNT_MASK, tx, value >> PHASE_SHIFT & 1
    )
