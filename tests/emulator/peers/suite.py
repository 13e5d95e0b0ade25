"""All cases."""

from tests.emulator.peers import dense, moe, unscaled
from tests.emulator.peers.case import PeerCase

CASES: list[PeerCase] = [*dense.CASES, *moe.CASES, *unscaled.CASES]
