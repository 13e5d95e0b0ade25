"""``setmaxnreg``: warpgroups hand registers to one another, out of what the CTA got at launch.

PTX ISA, setmaxnreg: ``dec`` releases registers, ``inc`` waits until the CTA's pool has enough. The
pool holds what ptxas gave each thread, times the threads: asking for more waits for ever.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from rubin_moe.emulator.errors import EmulationError
from rubin_moe.emulator.ptx.ast import Entry

if TYPE_CHECKING:
    from rubin_moe.emulator.isa.handoff import UnitSite
    from rubin_moe.emulator.issue import Handler
    from rubin_moe.emulator.machine import Cta, LaunchContext, Warp

#: 32-bit registers of an SM, and of a thread; ptxas gives each thread a multiple of eight.
SM_REGISTERS, MOST, STEP, LEAST = 65536, 256, 8, 24
_WARPGROUP = 4


def most_registers(entry: Entry) -> int:
    """The most registers that ptxas can give a thread of the entry, by its directives."""
    threads = prod(entry.directives.get("reqntid") or entry.directives.get("maxntid") or (1,))
    blocks = prod(entry.directives.get("minnctapersm", (1,)))
    limit = prod(entry.directives.get("maxnreg", (MOST,)))
    return min(limit, MOST, SM_REGISTERS // (threads * blocks) // STEP * STEP)


class RegisterPool:
    """Registers of one CTA: ``free`` of them, and a thread's share by warp."""

    def __init__(self, warps: int, at_launch: int) -> None:
        self.at_launch = min(at_launch, SM_REGISTERS // (32 * warps) // STEP * STEP)
        self.total = 32 * warps * self.at_launch
        self.free = 0
        self.shares: dict[int, int] = {}

    def change(self, warp: int, count: int, more: bool) -> bool:
        """Give a warp ``count`` registers a thread; False: it has to wait."""
        needed = 32 * (count - self.shares.get(warp, self.at_launch))
        if needed > 0 and not more:
            return True  # it has fewer already
        if needed > self.free:
            return False
        self.free -= needed
        self.shares[warp] = count
        return True

    def check(self, warps: int) -> None:
        """Raise unless the warps of each warpgroup ended with the same share."""
        for first in range(0, warps, _WARPGROUP):
            group = range(first, min(first + _WARPGROUP, warps))
            shares = {self.shares.get(warp) for warp in group}
            if len(shares) > 1:
                raise EmulationError(
                    "trap",
                    f"warps {group.start}..{group.stop - 1} of a warpgroup executed different "
                    f"setmaxnreg: {sorted(x or self.at_launch for x in shares)} registers a thread",
                    "setmaxnreg: warpgroup",
                )


def waits_for(cta: Cta, count: int) -> str:
    """What a warp waits for that asks for ``count`` registers a thread."""
    pool = cta.registers
    return (
        f"{32 * count} registers ({count} a thread); {pool.free} of the CTA's {pool.total} are "
        f"free ({pool.at_launch} a thread at launch)"
    )


def bind_setmaxnreg(site: UnitSite, context: LaunchContext) -> Handler:
    """The handler of one instruction."""
    more = "inc" in site.parts

    def handler(warp: Warp, mask: int) -> bool:
        count = int(warp.state.args[0, 0])
        if not LEAST <= count <= MOST or count % STEP:
            raise EmulationError(
                "trap",
                f"line {site.line}: {site.opcode} {count}: a multiple of {STEP} from {LEAST} to "
                f"{MOST}",
                "setmaxnreg: count",
            )
        return warp.cta.registers.change(warp.index, count, more)

    return handler
