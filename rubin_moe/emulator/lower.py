"""From instructions to segments: where code is cut, which registers survive a cut, where they live.

A segment is straight code that native code enters at its first instruction. Cuts are made at branch
targets, after control flow, around instructions that may return to the scheduler, and before
collectives (a lane may have to wait there for the rest of its warp). Within a segment registers are
values of the compiled function; a register that is live across a cut has a place in the warp's
state block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from rubin_moe.emulator.forms import Family, UnsupportedInstructionError, family_of
from rubin_moe.emulator.ptx.ast import (
    TYPE_BITS,
    Entry,
    Instruction,
    Mem,
    Not,
    Operand,
    Pair,
    Reg,
    Sym,
    Vec,
)
from rubin_moe.emulator.state.registers import RegisterLayout

CONTROL_FAMILIES = ("branch", "leave", "trap")
#: Native when they complete at issue; performed by Python when operations are deferred.
DEFERRED_FAMILIES = ("cp_async", "cp_async_group", "cp_async_arrive")
#: Families whose results come to registers later; they are numbered in program order.
RESULT_FAMILIES = ("tmem_load", "wgmma")
#: Families whose register vectors Python reads or writes in the state block.
UNIT_FAMILIES = (
    "grid_wait", "bulk_copy", "bulk_tensor", "bulk_group", "async_store", "tmem_alloc",
    "tmem_wait", "tmem_load", "tmem_store", "tmem_copy", "tmem_commit", "tcgen05_mma", "wgmma",
    "wgmma_group", "mma_sync", "register_budget",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Segment:
    """Instructions ``start <= i < stop``; registers that must be in the state when it ends."""

    start: int
    stop: int
    live_out: frozenset[str]


@dataclass(slots=True)
class Lowered:
    """An entry ready for code generation."""

    entry: Entry
    families: list[Family]
    segments: list[Segment]
    segment_at: dict[int, int]  # first instruction -> segment number
    joins: set[int]  # segments that a branch targets
    loop_heads: set[int]  # segments that a backward branch targets
    layout: RegisterLayout
    unwritten: frozenset[str]  # registers that may be read before they are written
    awaits: set[int]  # segments that start with a touch of what a deferred tcgen05.ld writes


def registers_in(operand: Operand | None, entry: Entry) -> list[str]:
    """Names of the registers that an operand mentions."""
    match operand:
        case Reg(name):
            return [name] if name in entry.registers else []
        case Not(reg):
            return [reg.name]
        case Vec(items):
            return [name for item in items for name in registers_in(item, entry)]
        case Pair(first, second):
            return registers_in(first, entry) + registers_in(second, entry)
        case Mem(base, _, coords):
            return registers_in(base, entry) + registers_in(coords, entry)
        case _:
            return []


def defs_and_uses(ins: Instruction, family: Family, entry: Entry) -> tuple[list[str], list[str]]:
    """Registers written and read by an instruction."""
    dests, sources = ins.operands[: family.dests], ins.operands[family.dests :]
    defs = [name for operand in dests for name in registers_in(operand, entry)]
    uses = [name for operand in sources for name in registers_in(operand, entry)]
    if family.reads_dest:
        uses += defs
    if ins.guard is not None:
        uses.append(ins.guard.name)
    return defs, uses


def results_by_register(
    entry: Entry, families: list[Family], kind: str, sources: bool = False
) -> dict[str, list[int]]:
    """Numbers of the instructions of a kind of RESULT_FAMILIES that write each register, or that
    read it from a vector."""
    found: dict[str, list[int]] = {}
    number = 0
    for ins, family in zip(entry.instructions, families, strict=True):
        if family.name == kind:
            operands = ins.operands[family.dests :] if sources else ins.operands[: family.dests]
            for operand in operands:
                if not sources or isinstance(operand, Vec):
                    for name in registers_in(operand, entry):
                        found.setdefault(name, []).append(number)
        number += family.name in RESULT_FAMILIES
    return found


def check_forms(entry: Entry) -> list[Family]:
    """The family of every instruction; raises UnsupportedInstructionError for the first outside."""
    families = []
    for ins in entry.instructions:
        family = family_of(ins.opcode)
        if family is None:
            raise UnsupportedInstructionError(ins.opcode, ins.line)
        families.append(family)
    return families


def branch_target(ins: Instruction, entry: Entry) -> int:
    """Instruction index that a ``bra`` goes to."""
    target = ins.operands[0]
    if not isinstance(target, Sym) or target.name not in entry.labels:
        raise UnsupportedInstructionError(
            ins.opcode, ins.line, f"label {target} is not in the kernel"
        )
    return entry.labels[target.name]


def _cut(entry: Entry, families: list[Family]) -> tuple[list[tuple[int, int]], set[int]]:
    count = len(entry.instructions)
    cuts, targets = {0, count}, set()
    for index, (ins, family) in enumerate(zip(entry.instructions, families, strict=True)):
        if family.name == "branch":
            targets.add(branch_target(ins, entry))
        if family.name in CONTROL_FAMILIES or family.leaves:
            cuts.add(index + 1)
        if family.sync or family.retry:
            cuts.add(index)
    ordered = sorted(cuts | targets)
    return list(pairwise(ordered)), targets


def _cut_before_results(
    entry: Entry, families: list[Family], spans: list[tuple[int, int]]
) -> tuple[list[tuple[int, int]], set[int]]:
    """Cut before the first instruction of a span that touches what a tcgen05.ld writes: the load
    may not have happened yet. Also the numbers of the spans that start with such an one."""
    loaded = set(results_by_register(entry, families, "tmem_load"))
    out: list[tuple[int, int]] = []
    awaits: set[int] = set()
    for start, stop in spans:
        for index in range(start, stop):
            writes, reads = defs_and_uses(entry.instructions[index], families[index], entry)
            touched = reads if families[index].name == "tmem_load" else writes + reads
            if not loaded.isdisjoint(touched):
                if index > start:
                    out.append((start, index))
                    start = index
                awaits.add(len(out))
                break
        out.append((start, stop))
    return out, awaits


class _Liveness:
    """Backward dataflow over segments with sets as integer bit masks."""

    def __init__(self, entry: Entry, families: list[Family], spans: list[tuple[int, int]]) -> None:
        self.names = list(entry.registers)
        number = {name: 1 << i for i, name in enumerate(self.names)}
        self.uses, self.defs, self.next = [], [], []
        at = {start: i for i, (start, _) in enumerate(spans)}
        for start, stop in spans:
            used = defined = 0
            for index in range(start, stop):
                ins = entry.instructions[index]
                writes, reads = defs_and_uses(ins, families[index], entry)
                for name in reads:
                    used |= number[name] & ~defined
                for name in writes:
                    if ins.guard is not None:
                        used |= number[name] & ~defined  # a partial write keeps the old value
                    defined |= number[name]
            self.uses.append(used)
            self.defs.append(defined)
            self.next.append(self._successors(entry, families, stop, at))

    @staticmethod
    def _successors(
        entry: Entry, families: list[Family], stop: int, at: dict[int, int]
    ) -> list[int]:
        last, ins = families[stop - 1], entry.instructions[stop - 1]
        after = [at[stop]] if stop in at else []
        if last.name == "branch":
            target = branch_target(ins, entry)
            targets = [at[target]] if target in at else []
            return targets if ins.guard is None else targets + after
        if last.name in ("leave", "trap") and ins.guard is None:
            return []
        return after

    def solve(self) -> tuple[list[int], int]:
        """Live-out mask of each segment, live-in mask of the first."""
        live_in = [0] * len(self.uses)
        live_out = [0] * len(self.uses)
        changed = True
        while changed:
            changed = False
            for i in range(len(self.uses) - 1, -1, -1):
                out = 0
                for successor in self.next[i]:
                    out |= live_in[successor]
                live_out[i] = out
                into = self.uses[i] | (out & ~self.defs[i])
                if into != live_in[i]:
                    live_in[i], changed = into, True
        return live_out, live_in[0] if live_in else 0

    def expand(self, mask: int) -> frozenset[str]:
        """Names of a mask."""
        names = []
        while mask:
            low = mask & -mask
            names.append(self.names[low.bit_length() - 1])
            mask ^= low
        return frozenset(names)


def _unit_registers(entry: Entry, families: list[Family]) -> set[str]:
    """Registers that Python touches: vectors read, and everything written, by units."""
    names: set[str] = set()
    for ins, family in zip(entry.instructions, families, strict=True):
        if family.name in UNIT_FAMILIES:
            names.update(defs_and_uses(ins, family, entry)[0])
            for operand in ins.operands:
                if isinstance(operand, Vec):
                    names.update(registers_in(operand, entry))
    return names


def lower(entry: Entry, deferred: bool = False, checked: bool = False) -> Lowered:
    """Check, cut and lay out an entry. Raises UnsupportedInstructionError by name and line."""
    families = check_forms(entry)
    if deferred:
        families = [
            replace(family, leaves=True) if family.name in DEFERRED_FAMILIES else family
            for family in families
        ]
    spans, targets = _cut(entry, families)
    awaits: set[int] = set()
    if deferred:
        spans, awaits = _cut_before_results(entry, families, spans)
    liveness = _Liveness(entry, families, spans)
    after, at_entry = liveness.solve()
    live_out = [liveness.expand(mask) for mask in after]
    resident = set().union(*live_out, _unit_registers(entry, families)) if live_out else set()
    vectors = {
        name: TYPE_BITS[kind]
        for name, kind in entry.registers.items()
        if kind != "pred" and name in resident
    }
    predicates = [n for n, kind in entry.registers.items() if kind == "pred" and n in resident]
    segments = [Segment(a, b, out) for (a, b), out in zip(spans, live_out, strict=True)]
    segment_at = {segment.start: number for number, segment in enumerate(segments)}
    segment_at[len(entry.instructions)] = len(segments)
    loop_heads = {
        segment_at[branch_target(ins, entry)]
        for index, (ins, family) in enumerate(zip(entry.instructions, families, strict=True))
        if family.name == "branch" and branch_target(ins, entry) <= index
    }
    joins = {segment_at[target] for target in targets}
    layout = RegisterLayout.of(vectors, predicates, checked)
    unwritten = liveness.expand(at_entry)
    return Lowered(
        entry, families, segments, segment_at, joins, loop_heads, layout, unwritten, awaits
    )
