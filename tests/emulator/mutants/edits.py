"""Changes to a kernel's tree: instructions replaced by others, labels and registers kept right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rubin_moe.emulator.ptx.ast import Entry, Imm, Instruction, Mem, Operand, Pair, Reg, Sym, Vec
from rubin_moe.emulator.ptx.parser import parse_operand


@dataclass(frozen=True)
class Mutation:
    """One fault: the instruction at ``index`` (its PTX line) and what replaces instructions.

    ``edits`` maps instruction indices to their replacements (none: dropped); ``registers`` are new
    ones, name to PTX type.
    """

    operator: str
    index: int
    line: int
    opcode: str
    what: str
    edits: Mapping[int, tuple[Instruction, ...]]
    registers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.operator}: line {self.line}: {self.opcode}: {self.what}"


def apply(entry: Entry, mutation: Mutation) -> Entry:
    """The entry with the fault in it; the original is unchanged."""
    instructions: list[Instruction] = []
    moved: dict[int, int] = {}
    for index, instruction in enumerate(entry.instructions):
        moved[index] = len(instructions)
        instructions += mutation.edits.get(index, (instruction,))
    moved[len(entry.instructions)] = len(instructions)
    return replace(
        entry,
        instructions=instructions,
        labels={name: moved[at] for name, at in entry.labels.items()},
        registers={**entry.registers, **mutation.registers},
    )


def make(text: str, line: int, guard_of: Instruction | None = None) -> Instruction:
    """An instruction from text, under the guard of another one."""
    opcode, _, rest = text.partition(" ")
    operands: list[str] = []
    depth, item = 0, ""
    for char in rest:
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            operands.append(item.strip())
            item = ""
        else:
            item += char
    if item.strip():
        operands.append(item.strip())
    guard = guard_of.guard if guard_of else None
    negated = guard_of.guard_negated if guard_of else False
    parsed = tuple(parse_operand(o) for o in operands)
    return Instruction(opcode, tuple(opcode.split(".")), parsed, guard, negated, line)


def with_operand(ins: Instruction, position: int, operand: Operand) -> Instruction:
    """The instruction with another operand."""
    operands = list(ins.operands)
    operands[position] = operand
    return replace(ins, operands=tuple(operands))


#: What is added to a register, or XORed into it.
_NEW = "%mutant"


def combined(
    entry: Entry, ins: Instruction, position: int, value: int, how: str
) -> tuple[tuple[Instruction, ...], dict[str, str]] | None:
    """``ins`` with ``value`` added to (``how`` "add") or XORed into ("xor") one operand.

    For an address the base is changed. None where the operand is neither register nor literal.
    """
    operand = ins.operands[position]
    if isinstance(operand, Mem):
        if how == "add":
            changed = Mem(operand.base, operand.offset + value, operand.coords)
            return (with_operand(ins, position, changed),), {}
        inner = operand.base
    else:
        inner = operand
    if isinstance(inner, Imm) and isinstance(inner.value, int):
        number = inner.value + value if how == "add" else inner.value ^ value
        new: Operand = Imm(number)
        before: tuple[Instruction, ...] = ()
        registers: dict[str, str] = {}
    elif isinstance(inner, Reg) and inner.name in entry.registers:
        bits = {"b16": 16, "u16": 16, "s16": 16, "b64": 64, "u64": 64, "s64": 64}.get(
            entry.registers[inner.name], 32
        )
        opcode = f"add.s{bits}" if how == "add" else f"xor.b{bits}"
        new = Reg(_NEW)
        registers = {_NEW: f"b{bits}"}
        line = Instruction(
            opcode, tuple(opcode.split(".")), (new, inner, Imm(value)), None, False, ins.line
        )
        before = (line,)
    else:
        return None
    if isinstance(operand, Mem):
        new = Mem(new, operand.offset, operand.coords)
    return (*before, with_operand(ins, position, new)), registers


def text_of(operand: Operand) -> str:
    """An operand as PTX text."""
    match operand:
        case Reg(name):
            return name
        case Imm(value):
            return str(value)
        case Sym(name, offset):
            return f"{name}+{offset}" if offset else name
        case Mem(base, offset, coords):
            inner = text_of(base) + (f"+{offset}" if offset else "")
            return f"[{inner}]" if coords is None else f"[{inner}, {text_of(coords)}]"
        case Vec(items):
            return "{" + ", ".join(text_of(item) for item in items) + "}"
        case Pair(first, second):
            return f"{text_of(first)}|{text_of(second)}"
    return str(operand)
