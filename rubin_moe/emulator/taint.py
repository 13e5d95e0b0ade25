"""Code generation in the checked form: accesses are reported before they happen."""

from __future__ import annotations

from rubin_moe.emulator.codegen import Emitter
from rubin_moe.emulator.native.ir import I1, I32, Val
from rubin_moe.emulator.native.order import SPACES


class CheckedEmitter(Emitter):
    """Emits what the checks need around the instructions of the plain form."""

    checked = True

    def accessed(self, address: Val, mask: Val, size: int, kind: int, space: str) -> None:
        """Report an access of ``size`` bytes a lane to the race detector."""
        if space not in SPACES:
            return  # a lane's own
        numbers = (self.b.const(n, I32) for n in (size, kind, SPACES[space], self.index))
        self.trap_unless(self.b.call("emu.order_access", I1, self.S, address, mask, *numbers))
