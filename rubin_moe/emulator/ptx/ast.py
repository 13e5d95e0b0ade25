"""The tree that the parser makes of PTX text.

Names are already unique: registers and labels of a scoped ``{ }`` block carry a suffix ``@n``
that PTX identifiers cannot contain. Everything is immutable and picklable.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Bits of a register or memory element of each PTX type (``pred`` is a lane mask bit).
TYPE_BITS = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "u16x2": 32,
    "s16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "f32x2": 64, "b128": 128,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reg:
    """A register, or a special register when ``name`` is not declared (``%tid.x``)."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """A literal. ``0f``/``0d`` literals are bit patterns (``value`` an int); ``1.5`` is a float."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Sym:
    """A variable or label used as a value: ``name + offset``."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Vec:
    """``{a, b, ...}``: a vector operand or the coordinates of a tensor access."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Mem:
    """``[base + offset]``, with ``coords`` for ``[tensor_map, {c0, c1}]``."""

    base: Operand
    offset: int = 0
    coords: Vec | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """``d|p``: two destinations of one instruction."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Not:
    """``!p``: the complement of a predicate operand."""

    reg: Reg


Operand = Reg | Imm | Sym | Vec | Mem | Pair | Not


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; ``opcode`` is the full dotted string, ``parts`` the same split at dots."""

    opcode: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Reg | None
    guard_negated: bool
    line: int


@dataclass(frozen=True, slots=True)
class Param:
    """A kernel parameter at byte ``offset`` of the parameter block."""

    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A declared variable. ``size`` 0 with ``extern`` is dynamic shared memory."""

    name: str
    space: str
    size: int
    align: int
    extern: bool = False
    data: bytes = b""


@dataclass(slots=True)
class Entry:
    """One ``.entry``: parameters, registers (name to PTX type), variables, code and labels."""

    name: str
    params: list[Param] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    line: int = 0

    @property
    def param_bytes(self) -> int:
        """Size of the parameter block in bytes."""
        return max((p.offset + p.size for p in self.params), default=0)


@dataclass(slots=True)
class PtxModule:
    """A PTX file: version, target, module variables and entries in file order."""

    version: str
    target: str
    variables: list[Variable]
    entries: list[Entry]
