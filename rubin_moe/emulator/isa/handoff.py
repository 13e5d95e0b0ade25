"""Instructions that Python performs: native code leaves their operands in the state and returns.

Scalars, addresses and coordinates go to argument rows (one 64-bit value a lane each); vectors of
32-bit registers stay in their rows of the state block, where Python reads and writes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rubin_moe.emulator.codegen import Emitter
from rubin_moe.emulator.forms import Family
from rubin_moe.emulator.isa.memory import order_group
from rubin_moe.emulator.isa.register_fence import missing_fences
from rubin_moe.emulator.lower import Lowered
from rubin_moe.emulator.native.ir import V64, Val
from rubin_moe.emulator.ptx.ast import (
    TYPE_BITS,
    Imm,
    Instruction,
    Mem,
    Operand,
    Reg,
    Vec,
)
from rubin_moe.emulator.state.registers import (
    FIELDS,
    HEADER_ROWS,
    LANES,
    MAX_ARGS,
    ROW_BYTES,
    Outcome,
)

#: Families whose register vectors stay in the state block.
VECTOR_FAMILIES = ("tmem_load", "tmem_store", "tcgen05_mma", "wgmma", "mma_sync")
#: Families whose effect is complete when issued, unless operations are deferred.
WAIT_FAMILIES = ("bulk_group", "tmem_wait", "wgmma_group", "grid_wait")


@dataclass(frozen=True, slots=True)
class Slots:
    """An operand in argument rows ``first .. first + count`` (an address and its coordinates);
    ``memory`` for operands in brackets."""

    first: int
    count: int = 1
    memory: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """A register vector: rows of the state block, and of their taints; ``view``: as slices, since
    the rows follow one another."""

    rows: tuple[int, ...]
    view: bool = field(init=False)
    index: slice | list[int] = field(init=False)
    taints: slice | list[int] = field(init=False)

    def __post_init__(self) -> None:
        first, count = self.rows[0], len(self.rows)
        view = self.rows == tuple(range(first, first + count))
        start = first - HEADER_ROWS
        places = [row - HEADER_ROWS for row in self.rows]
        object.__setattr__(self, "view", view)
        object.__setattr__(self, "index", slice(first, first + count) if view else [*self.rows])
        object.__setattr__(self, "taints", slice(start, start + count) if view else places)


@dataclass(frozen=True, slots=True)
class UnitSite:
    """One instruction that Python performs."""

    index: int
    opcode: str
    parts: tuple[str, ...]
    line: int
    family: str
    operands: tuple[Slots | Rows, ...]
    slots: int
    #: rule and reason of what is wrong with the instruction where it stands
    faults: tuple[tuple[str, str], ...] = ()


def _is_vector(operand: Operand, position: int, family: Family, lowered: Lowered) -> bool:
    if family.name not in VECTOR_FAMILIES:
        return False
    if isinstance(operand, Reg):  # a single destination register
        return position < family.dests
    return isinstance(operand, Vec) and all(
        isinstance(item, Reg) and item.name in lowered.layout.offsets for item in operand.items
    )


def plan_site(index: int, lowered: Lowered) -> UnitSite:
    """Where each operand of the instruction goes."""
    ins, family = lowered.entry.instructions[index], lowered.families[index]
    plans: list[Slots | Rows] = []
    slot = 0
    for position, operand in enumerate(ins.operands):
        if _is_vector(operand, position, family, lowered):
            items = operand.items if isinstance(operand, Vec) else (operand,)
            offsets = [lowered.layout.offsets[item.name] for item in items]  # type: ignore[union-attr]
            plans.append(Rows(tuple(offset // ROW_BYTES for offset in offsets)))
            continue
        count = len(_scalars(operand))
        plans.append(Slots(slot, count, isinstance(operand, Mem)))
        slot += count
    if slot > MAX_ARGS:
        raise ValueError(f"line {ins.line}: {ins.opcode} has {slot} scalar operands")
    faults = missing_fences(index, lowered) if family.name == "wgmma" else ()
    return UnitSite(index, ins.opcode, ins.parts, ins.line, family.name, tuple(plans), slot, faults)


def results_site(index: int) -> UnitSite:
    """Stands for the first touch of registers that deferred tcgen05.ld write."""
    return UnitSite(index, "tcgen05.ld", ("tcgen05", "ld"), 0, "tmem_results", (), 0)


def _scalars(operand: Operand) -> tuple[Operand, ...]:
    """The values that stand for an operand in argument rows."""
    if isinstance(operand, Vec):
        return operand.items
    if isinstance(operand, Mem) and operand.coords is not None:
        return (Mem(operand.base, operand.offset), *operand.coords.items)
    return (operand,)


def _value(em: Emitter, operand: Operand) -> Val:
    """64-bit lanes of a scalar operand."""
    if isinstance(operand, Mem):
        return em.address(operand, _width(em, operand.base)).resize(64)
    if em.is_predicate(operand):
        return em.predicate(operand).cast("zext", V64)
    if isinstance(operand, Imm):
        return em.read(operand, 64)
    return em.read(operand, _width(em, operand)).resize(64)


def _width(em: Emitter, operand: Operand) -> int:
    if isinstance(operand, Reg) and operand.name in em.registers:
        return TYPE_BITS[em.registers[operand.name]]
    return 64


def emit_unit(em: Emitter, ins: Instruction) -> None:
    """Leave operands behind and return to the scheduler; resume at the next segment."""
    family = em.lowered.families[em.index]
    if family.sync:
        em.rendezvous(None)
    if family.name in WAIT_FAMILIES and not em.deferred:
        if family.name == "tmem_wait":
            em.ordered("tensor_wait", int(ins.parts[1] == "wait::st"))
        elif family.name != "grid_wait":
            order_group(em, ins)
        em.flush()
        em.goto(em.number + 1)
        return
    site = plan_site(em.index, em.lowered)
    mask = em.exec_mask()
    vectors: list[str] = []
    for place, (operand, plan) in enumerate(zip(ins.operands, site.operands, strict=True)):
        if isinstance(plan, Rows):
            items = operand.items if isinstance(operand, Vec) else (operand,)
            names = [item.name for item in items if isinstance(item, Reg)]
            vectors += names
            if place >= family.dests:
                for name in names:
                    if family.name == "wgmma":
                        em.multiplied(name)
                    else:
                        em.first_read(name)
            continue
        for position, scalar in enumerate(_scalars(operand)):
            offset = FIELDS["args"] + 8 * LANES * (plan.first + position)
            value = _value(em, scalar)
            data = family.name == "async_store" and isinstance(plan, Slots) and plan.first == 1
            em.argument(plan.first + position, scalar, mask, data)
            if family.name == "cp_async" and em.is_predicate(scalar):
                value = value.ne(0).select(em.b.const(0, V64), 16)  # ignore the source: size 0
            em.b.store(value, em.b.gep(em.S, offset), 64)
    em.flush(vectors)
    following = em.number + 1
    skip = em.skip_unless_executed(mask, following)
    em.set_field("exec", mask)
    em.leave(Outcome.UNIT, following)
    em.end_skip(skip, following)
