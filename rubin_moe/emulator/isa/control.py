"""Instructions without data: hints, fences, sleep, traps (PTX ISA 9.7.12, 9.7.13).

One thread runs all warps of a cluster and asynchronous work completes when the policy says so:
a fence orders accesses towards clusters on other threads alone, and those of proxies and barriers,
which end at the cluster, order nothing; but the race detector asks for all of them. Prefetches
and cache policies have no functional effect.
"""

from __future__ import annotations

from rubin_moe.emulator.codegen import Emitter
from rubin_moe.emulator.native.blocks import TRAP_INSTRUCTION
from rubin_moe.emulator.native.ir import V64
from rubin_moe.emulator.order.layout import (
    FENCE_AFTER,
    FENCE_BEFORE,
    FENCE_INIT,
    FENCE_MEMORY,
    FENCE_PROXY,
)
from rubin_moe.emulator.ptx.ast import Instruction
from rubin_moe.emulator.state.registers import Outcome

_ORDERS = ("sc", "acq_rel", "acquire", "release")


def emit_hint(em: Emitter, ins: Instruction) -> None:
    """Nothing, except for fences of memory and a zero cache policy in a register."""
    if ins.parts[0] == "membar" or (ins.parts[0] == "fence" and ins.parts[1] in _ORDERS):
        em.b.fence("seq_cst")
        em.ordered("fence", FENCE_MEMORY)
    elif ins.parts[:3] == ("fence", "proxy", "async"):
        em.ordered("fence", FENCE_PROXY)
    elif ins.parts == ("tcgen05", "fence::after_thread_sync"):
        em.ordered("fence", FENCE_AFTER)
    elif ins.parts == ("tcgen05", "fence::before_thread_sync"):
        em.ordered("fence", FENCE_BEFORE)
    elif ins.parts[:2] == ("fence", "mbarrier_init"):
        em.ordered("fence", FENCE_INIT)
    if ins.parts[0] == "createpolicy":
        em.write(ins.operands[0], em.b.const(0, V64))


def emit_sleep(em: Emitter, ins: Instruction) -> None:
    """nanosleep: give way at the next backward branch."""
    em.set_field("budget", 0)


def emit_trap(em: Emitter, ins: Instruction) -> None:
    """trap, brkpt: stop the launch."""
    em.flush()
    run = em.b.fresh("trap")
    skip = em.b.fresh("no.trap")
    mask = em.exec_mask()
    em.b.cond_br(mask.eq(0), skip, run)
    em.b.label(run)
    em.set_field("trap_code", TRAP_INSTRUCTION)
    em.set_field("trap_lane", em.first_lane(mask))
    em.set_field("site", em.index)
    em.b.ret(Outcome.TRAP)
    em.b.label(skip)
    em.goto(em.number + 1)


EMITTERS = {"hint": emit_hint, "sleep": emit_sleep, "trap": emit_trap}
