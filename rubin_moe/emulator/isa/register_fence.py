"""Where ``wgmma`` lacks its fence, found from the code alone, whatever the timing is.

PTX ISA, wgmma.fence: it must stand before the first ``wgmma.mma_async`` of a kernel, and between an
access to a register and a ``wgmma.mma_async`` that accesses the same register; accumulators that
pass from one product to the next of the same shape need none. CuTe DSL clears accumulators after
the fence and leaves the rest to ptxas: the second half is the letter, which Hopper kernels depart
from.
"""

from __future__ import annotations

from collections.abc import Iterator

from rubin_moe.emulator.lower import Lowered, branch_target, defs_and_uses, registers_in
from rubin_moe.emulator.ptx.ast import Vec


def missing_fences(index: int, lowered: Lowered) -> tuple[tuple[str, str], ...]:
    """Rule and reason for each fence that the ``wgmma`` at ``index`` lacks."""
    return tuple(_faults(index, lowered))


def _faults(index: int, lowered: Lowered) -> Iterator[tuple[str, str]]:
    before = predecessors(lowered)
    if _reaches_start(index, lowered, before):
        yield "wgmma: first fence", "no wgmma.fence stands before the first product"
    touched = _touched_after_fence(index, lowered, before)
    if touched:
        yield "wgmma: register fence", touched


def _reaches_start(index: int, lowered: Lowered, before: list[list[int]]) -> bool:
    """Whether a path from the entry has neither a fence nor another product."""
    seen, todo = {index}, [index]
    while todo:
        at = todo.pop()
        if at == 0:
            return True
        for place in before[at]:
            stops = lowered.entry.instructions[place].opcode.startswith("wgmma.fence")
            if place not in seen and not stops and lowered.families[place].name != "wgmma":
                seen.add(place)
                todo.append(place)
    return False


def _touched_after_fence(index: int, lowered: Lowered, before: list[list[int]]) -> str:
    """The access to one of its registers that no fence separates from the product, or ""."""
    entry, families = lowered.entry, lowered.families
    ins = entry.instructions[index]
    accumulators = frozenset(registers_in(ins.operands[0], entry))
    left = ins.operands[1]
    fragments = frozenset(registers_in(left, entry)) if isinstance(left, Vec) else frozenset()
    seen: set[tuple[int, frozenset[str]]] = set()
    todo = [(at, accumulators | fragments) for at in before[index]]
    while todo:
        at, open_ = todo.pop()
        other = entry.instructions[at]
        if (at, open_) in seen or other.opcode.startswith("wgmma.fence"):
            continue
        seen.add((at, open_))
        if families[at].name == "wgmma":
            if other.opcode == ins.opcode and set(registers_in(other.operands[0], entry)) & open_:
                open_ -= accumulators  # they pass from product to product
        else:
            touched = set().union(*defs_and_uses(other, families[at], entry)) & open_
            if touched:
                name = min(touched).split("@")[0]
                return f"line {other.line} ({other.opcode}) accesses {name} after the last fence"
        if open_:
            todo += [(place, open_) for place in before[at]]
    return ""


def predecessors(lowered: Lowered) -> list[list[int]]:
    """Instructions that control may come from, for each instruction."""
    entry, families = lowered.entry, lowered.families
    before: list[list[int]] = [[] for _ in entry.instructions]
    for index, ins in enumerate(entry.instructions):
        name = families[index].name
        ends = name in ("branch", "leave", "trap") and ins.guard is None
        if not ends and index + 1 < len(before):
            before[index + 1].append(index)
        if name == "branch" and branch_target(ins, entry) < len(before):
            before[branch_target(ins, entry)].append(index)
    return before
