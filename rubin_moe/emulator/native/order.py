"""Runtime functions of the race detector, called by checked code before each access."""

from __future__ import annotations

from rubin_moe.emulator.native.ir import I1, I32, PTR, V64, Builder, Val
from rubin_moe.emulator.native.library import runtime_function

#: What an access does, and the space that its instruction names.
READ, WRITE, ATOMIC = range(3)
SPACES = {"global": 0, "shared": 1, "generic": 2}


@runtime_function(
    "emu.order_access", I1, S=PTR, a=V64, mask=I32, size=I32, kind=I32, space=I32, site=I32
)
def _order_access(
    b: Builder, S: Val, a: Val, mask: Val, size: Val, kind: Val, space: Val, site: Val
) -> None:
    """``size`` bytes at each lane's host address; false when a violation is in the state."""
    b.ret(1, I1)
