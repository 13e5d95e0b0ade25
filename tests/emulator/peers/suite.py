"""All cases."""

from tests.emulator.peers import dense, fc1, fc2, masked, swap_ab, unscaled
from tests.emulator.peers.case import PeerCase

CASES: list[PeerCase] = [
    *dense.CASES,
    *fc1.CASES,
    *fc2.CASES,
    *masked.CASES,
    *swap_ab.CASES,
    *unscaled.CASES,
]
