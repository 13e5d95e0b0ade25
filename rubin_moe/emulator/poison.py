"""Findings about poison: what native code noticed, as sentences.

In "enforce" the first use of poison traps; in "report" native code keeps each instruction's first
use in the cluster's log and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rubin_moe.emulator.isa.handoff import UnitSite
from rubin_moe.emulator.isa.shadow_ops import NOWHERE, REDUCED
from rubin_moe.emulator.issue import taints
from rubin_moe.emulator.machine import Cluster, Warp
from rubin_moe.emulator.native.blocks import (
    FAULT_RULES,
    POISON_ADDRESS,
    POISON_BRANCH,
    POISON_LOG,
    POISON_OPERAND,
    POISON_STORE,
)
from rubin_moe.emulator.state.memory import RANK_SHIFT
from rubin_moe.emulator.state.registers import FULL_MASK
from rubin_moe.emulator.taint import GUARD

#: An operation on shadow memory: the offset of poison that it would store, NOWHERE or REDUCED.
Move = Callable[[Any, Any, Any], int]
_USES = {
    POISON_ADDRESS: "is an address",
    POISON_BRANCH: "guards the instruction",
    POISON_STORE: "goes to global memory",
}


def trap(warp: Warp, fault: int) -> None:
    """The finding of a warp that stopped. Raises EmulationError."""
    state = warp.state
    _found(
        warp, state.get("site"), fault, state.get_wide("trap_address"), state.get("trap_lane"),
        state.get("poison_site"), state.get_wide("poison_address"), 1,
    )  # fmt: skip


def drain(cluster: Cluster) -> None:
    """Turn the cluster's log into findings."""
    if cluster.shadow is None:
        return
    log = cluster.poison_log
    count = int(log[:4].view(np.uint32)[0])
    if not count:
        return
    log[:4] = 0
    size = POISON_LOG["bytes"]
    for index in range(1, count + 1):
        entry = log[index * size : (index + 1) * size]
        words = entry.view(np.uint32)
        site, rule, operand, lane, times, warp, rank, origin = words[:8].tolist()
        address = int(entry.view(np.uint64)[POISON_LOG["address"] // 8])
        where = cluster.ctas[rank].warps[warp]
        _found(where, site, rule, operand, lane, origin, address, times)


def _found(
    warp: Warp,
    site: int,
    fault: int,
    operand: int,
    lane: int,
    origin: int,
    address: int,
    times: int,
) -> None:
    instructions = warp.cta.cluster.kernel.compiled.instructions
    info = instructions[site]
    name = info.guard if operand == GUARD else info.operands[operand]
    use = _USES.get(fault, "is an operand")
    if fault == POISON_STORE and name.startswith("["):
        use = "is what an atomic operation changes"
    sentence = f"{name} {use} and is not defined: "
    if origin == FULL_MASK:
        sentence += "it comes from a register that nothing wrote"
    else:
        source = instructions[origin]
        sentence += (
            f"the warp last read bytes that nothing wrote at line {source.line}, "
            f"{source.opcode}{_place(warp, address)}"
        )
    for _ in range(min(times, 1000)):
        warp.found(FAULT_RULES[fault], sentence, info.line, info.opcode, lane)


def require_defined(warp: Warp, site: UnitSite, position: int, lane: int) -> None:
    """A register vector steers an operation: it must be defined."""
    if (taints(site, warp, position) >> np.uint32(lane) & 1).any():
        origin, address = warp.state.get("poison_site"), warp.state.get_wide("poison_address")
        _found(warp, site.index, POISON_OPERAND, position, lane, origin, address, 1)


def store(move: Move, op: Any, warp: Warp, site: UnitSite) -> None:
    """Before an asynchronous copy: move its poison; what goes to global memory is a violation."""
    cluster = warp.cta.cluster
    assert cluster.shadow is not None
    where = move(op, cluster.shadow, cluster.context.memory)
    if where != NOWHERE:
        sentence = f"it stores shared byte {where:#x}, which nothing wrote or poison did"
        if where == REDUCED:
            sentence = "it reduces into global memory that nothing wrote"
        warp.found(FAULT_RULES[POISON_STORE], sentence, site.line, site.opcode)


def _place(warp: Warp, shadow_address: int) -> str:
    """Where poison was read, of its shadow address (0: not known)."""
    cluster = warp.cta.cluster
    assert cluster.shadow is not None
    if not shadow_address:
        return ""
    offset = shadow_address - cluster.shadow.arena.address
    if 0 <= offset < cluster.arena.bytes.size:
        rank, offset = offset >> RANK_SHIFT, offset & ((1 << RANK_SHIFT) - 1)
        return f" at shared byte {offset:#x} of CTA rank {rank}"
    for (low, size), data in cluster.context.memory.shadows.items():
        offset = shadow_address - int(data.ctypes.data)
        if 0 <= offset < size:
            return f" at global address {low + offset:#x}"
    return " in local memory"
