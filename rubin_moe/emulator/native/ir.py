"""A small typed writer of LLVM IR text in which a value is a Python object with operators.

Vectors have 32 lanes (one per thread of a warp) unless a type says otherwise. Python integers mixed
into an expression become constants of the other operand's type. ``>>`` is the logical shift.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Type:
    """``kind`` is ``i`` (integer), ``f`` (float) or ``p`` (pointer); ``lanes`` 1 is a scalar."""

    kind: str
    bits: int
    lanes: int = 1

    def __str__(self) -> str:
        return _type_text(self.kind, self.bits, self.lanes)

    def with_bits(self, bits: int) -> Type:
        """The integer type of the same lanes."""
        return Type("i", bits, self.lanes)

    @property
    def as_int(self) -> Type:
        """The integer type of the same shape."""
        return Type("i", self.bits, self.lanes)

    @property
    def as_float(self) -> Type:
        """The floating type of the same shape."""
        return Type("f", self.bits, self.lanes)


@cache
def _type_text(kind: str, bits: int, lanes: int) -> str:
    if kind == "p":
        scalar = "ptr"
    elif kind == "f":
        scalar = {16: "half", 32: "float", 64: "double"}[bits]
    else:
        scalar = f"i{bits}"
    return scalar if lanes == 1 else f"<{lanes} x {scalar}>"


LANES = 32
PTR = Type("p", 64)
I1, I8, I16, I32, I64 = (Type("i", bits) for bits in (1, 8, 16, 32, 64))
V1, V8, V16, V32, V64 = (Type("i", bits, LANES) for bits in (1, 8, 16, 32, 64))
F16V, F32V, F64V = (Type("f", bits, LANES) for bits in (16, 32, 64))


def constant(value: int | float, ty: Type) -> str:
    """Text of a constant of ``ty`` (splat over lanes); integers wrap to the width."""
    scalar = Type(ty.kind, ty.bits)
    if ty.kind == "f":
        text = _float_text(float(value), ty.bits)
    elif ty.bits == 1:
        text = "true" if value else "false"
    else:
        wrapped = int(value) & ((1 << ty.bits) - 1)
        text = str(wrapped - (1 << ty.bits) if wrapped >> (ty.bits - 1) else wrapped)
    return text if ty.lanes == 1 else f"splat ({scalar} {text})"


def _float_text(value: float, bits: int) -> str:
    if bits == 16:
        return f"0xH{struct.unpack('<H', struct.pack('<e', value))[0]:04X}"
    if bits == 32:
        value = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


class Val:
    """A value of a function under construction."""

    __slots__ = ("b", "text", "ty")

    def __init__(self, b: Builder, text: str, ty: Type) -> None:
        self.b, self.text, self.ty = b, text, ty

    def __str__(self) -> str:
        return f"{self.ty} {self.text}"

    def _binary(self, op: str, other: Val | int | float) -> Val:
        return self.b.emit(f"{op} {self.ty} {self.text}, {self.b.operand(other, self.ty)}", self.ty)

    def __add__(self, other: Val | int | float) -> Val:
        return self._binary("fadd" if self.ty.kind == "f" else "add", other)

    def __sub__(self, other: Val | int | float) -> Val:
        return self._binary("fsub" if self.ty.kind == "f" else "sub", other)

    def __mul__(self, other: Val | int | float) -> Val:
        return self._binary("fmul" if self.ty.kind == "f" else "mul", other)

    def __truediv__(self, other: Val | int | float) -> Val:
        return self._binary("fdiv", other)

    def __and__(self, other: Val | int) -> Val:
        return self._binary("and", other)

    def __or__(self, other: Val | int) -> Val:
        return self._binary("or", other)

    def __xor__(self, other: Val | int) -> Val:
        return self._binary("xor", other)

    def __lshift__(self, other: Val | int) -> Val:
        return self._binary("shl", other)

    def __rshift__(self, other: Val | int) -> Val:
        return self._binary("lshr", other)

    def ashr(self, other: Val | int) -> Val:
        """Arithmetic shift right."""
        return self._binary("ashr", other)

    def op(self, name: str, other: Val | int) -> Val:
        """Any other binary instruction (``udiv``, ``srem``, ...)."""
        return self._binary(name, other)

    def __invert__(self) -> Val:
        return self ^ -1

    def __neg__(self) -> Val:
        zero = constant(0, self.ty)
        return self.b.emit(f"sub {self.ty} {zero}, {self.text}", self.ty)

    def cmp(self, predicate: str, other: Val | int | float) -> Val:
        """``icmp``/``fcmp`` with the predicate; one bit a lane."""
        kind = "fcmp" if self.ty.kind == "f" else "icmp"
        text = f"{kind} {predicate} {self.ty} {self.text}, {self.b.operand(other, self.ty)}"
        return self.b.emit(text, Type("i", 1, self.ty.lanes))

    def eq(self, other: Val | int) -> Val:
        """Equal."""
        return self.cmp("eq", other)

    def ne(self, other: Val | int) -> Val:
        """Not equal."""
        return self.cmp("ne", other)

    def select(self, yes: Val | int, no: Val | int) -> Val:
        """``self ? yes : no``; one of them must be a Val."""
        ty = yes.ty if isinstance(yes, Val) else no.ty  # type: ignore[union-attr]
        a, b = self.b.operand(yes, ty), self.b.operand(no, ty)
        return self.b.emit(f"select {self}, {ty} {a}, {ty} {b}", ty)

    def cast(self, op: str, ty: Type) -> Val:
        """A conversion instruction, unless the type is already ``ty``."""
        return self if ty == self.ty else self.b.emit(f"{op} {self} to {ty}", ty)

    def bits_as(self, ty: Type) -> Val:
        """The same bits seen as ``ty``."""
        return self.cast("bitcast", ty)

    def as_float(self) -> Val:
        """The same bits as floating point of the same width."""
        return self.bits_as(self.ty.as_float)

    def as_int(self) -> Val:
        """The same bits as integers of the same width."""
        return self.bits_as(self.ty.as_int)

    def resize(self, bits: int, signed: bool = False) -> Val:
        """Truncate or extend integers to ``bits``."""
        if bits < self.ty.bits:
            return self.cast("trunc", self.ty.with_bits(bits))
        return self.cast("sext" if signed else "zext", self.ty.with_bits(bits))

    def splat(self, lanes: int = LANES) -> Val:
        """A scalar in every lane."""
        ty = Type(self.ty.kind, self.ty.bits, lanes)
        one = self.b.emit(f"insertelement {ty} poison, {self}, i32 0", ty)
        return self.b.emit(f"shufflevector {one}, {ty} poison, <{lanes} x i32> zeroinitializer", ty)

    def lane(self, index: Val | int) -> Val:
        """One lane as a scalar."""
        i = self.b.operand(index, I32)
        return self.b.emit(f"extractelement {self}, i32 {i}", Type(self.ty.kind, self.ty.bits))

    def shuffle(self, other: Val | None, indices: list[int]) -> Val:
        """``shufflevector`` with constant indices (into self, then other)."""
        ty = Type(self.ty.kind, self.ty.bits, len(indices))
        second = f"{other}" if other is not None else f"{self.ty} poison"
        mask = ", ".join(f"i32 {i}" for i in indices)
        return self.b.emit(f"shufflevector {self}, {second}, <{len(indices)} x i32> <{mask}>", ty)


class Builder:
    """Emits one function; ``lines`` is its body."""

    def __init__(self, declarations: set[str]) -> None:
        self.lines: list[str] = []
        self.declarations = declarations
        self._count = 0

    # -- values
    def emit(self, text: str, ty: Type) -> Val:
        """Append an instruction and name its result."""
        self._count += 1
        name = f"%t{self._count}"
        self.lines.append(f"  {name} = {text}")
        return Val(self, name, ty)

    def operand(self, value: Val | int | float, ty: Type) -> str:
        """Text of a value or a constant of ``ty``."""
        return value.text if isinstance(value, Val) else constant(value, ty)

    def const(self, value: int | float, ty: Type) -> Val:
        """A constant."""
        return Val(self, constant(value, ty), ty)

    def lane_numbers(self) -> Val:
        """``<0, 1, ..., 31>``."""
        return self.vector(list(range(LANES)), V32)

    def vector(self, values: list[int], ty: Type) -> Val:
        """A constant vector."""
        scalar = Type(ty.kind, ty.bits)
        return Val(
            self, "<" + ", ".join(f"{scalar} {constant(v, scalar)}" for v in values) + ">", ty
        )

    def call(self, name: str, result: Type | None, *args: Val) -> Val:
        """Call a runtime function or intrinsic, declaring it on first use."""
        types = ", ".join(str(a.ty) for a in args)
        returns = str(result) if result is not None else "void"
        self.declarations.add(f'declare {returns} @"{name}"({types})')
        text = f'call {returns} @"{name}"({", ".join(map(str, args))})'
        if result is None:
            self.lines.append(f"  {text}")
            return Val(self, "void", I1)
        return self.emit(text, result)

    def math(self, name: str, *args: Val) -> Val:
        """An overloaded LLVM intrinsic on the type of its first argument."""
        ty = args[0].ty
        scalar = f"{'f' if ty.kind == 'f' else 'i'}{ty.bits}"
        suffix = f"v{ty.lanes}{scalar}" if ty.lanes > 1 else scalar
        return self.call(f"llvm.{name}.{suffix}", ty, *args)

    # -- memory
    def gep(self, base: Val, offset: Val | int) -> Val:
        """``base + offset`` bytes; the offset is an i64 or a constant."""
        text = self.operand(offset, I64)
        return self.emit(f"getelementptr i8, {base}, i64 {text}", PTR)

    def load(self, pointer: Val, ty: Type, align: int = 0) -> Val:
        """Load; ``align`` defaults to the element size."""
        align = align or max(ty.bits // 8, 1)
        return self.emit(f"load {ty}, {pointer}, align {align}", ty)

    def store(self, value: Val, pointer: Val, align: int = 0) -> None:
        """Store."""
        align = align or max(value.ty.bits // 8, 1)
        self.lines.append(f"  store {value}, {pointer}, align {align}")

    def compare_exchange(self, pointer: Val, old: Val, new: Val) -> tuple[Val, Val]:
        """``cmpxchg``: the scalar found there, and (i1) whether it was ``old`` and replaced."""
        text = f"cmpxchg {pointer}, {old}, {new} seq_cst seq_cst, align {old.ty.bits // 8}"
        pair = f"{{ {old.ty}, i1 }} {self.emit(text, old.ty).text}"
        found = self.emit(f"extractvalue {pair}, 0", old.ty)
        return found, self.emit(f"extractvalue {pair}, 1", I1)

    def fence(self, ordering: str) -> None:
        """``acquire``, ``release`` or ``seq_cst``, towards other threads."""
        self.lines.append(f"  fence {ordering}")

    def field(self, base: Val, offset: int, ty: Type) -> Val:
        """Load the field at a constant byte offset."""
        return self.load(self.gep(base, offset), ty)

    def set_field(self, base: Val, offset: int, value: Val) -> None:
        """Store the field at a constant byte offset."""
        self.store(value, self.gep(base, offset))

    def alloca(self, ty: Type, count: int = 1) -> Val:
        """Stack space for ``count`` values, aligned for vectors."""
        return self.emit(f"alloca {ty}, i32 {count}, align 64", PTR)

    # -- control
    def label(self, name: str) -> None:
        """Start a block."""
        self.lines.append(f'"{name}":')

    def fresh(self, stem: str) -> str:
        """A block name used nowhere else."""
        self._count += 1
        return f"{stem}.{self._count}"

    def br(self, target: str) -> None:
        """Jump."""
        self.lines.append(f'  br label %"{target}"')

    def cond_br(self, condition: Val, yes: str, no: str) -> None:
        """Jump on a scalar i1."""
        self.lines.append(f'  br {condition}, label %"{yes}", label %"{no}"')

    def ret(self, value: Val | int | None = None, ty: Type = I32) -> None:
        """Return (``None``: void)."""
        text = "void" if value is None else f"{ty} {self.operand(value, ty)}"
        self.lines.append(f"  ret {text}")

    @contextmanager
    def if_(self, condition: Val) -> Iterator[None]:
        """A block run when the scalar i1 is true; falls through to what follows."""
        yes, after = self.fresh("then"), self.fresh("after")
        self.cond_br(condition, yes, after)
        self.label(yes)
        yield
        if not self.lines[-1].lstrip().startswith(("ret ", "br ", "unreachable")):
            self.br(after)
        self.label(after)

    @contextmanager
    def for_lanes(self, mask: Val) -> Iterator[Val]:
        """Run the block once for each set bit of the i32 mask, with the lane number."""
        slot = self.alloca_slot(I32)
        self.store(mask, slot)
        head, body, done = self.fresh("lanes"), self.fresh("lane"), self.fresh("lanes.done")
        self.br(head)
        self.label(head)
        left = self.load(slot, I32)
        self.cond_br(left.eq(0), done, body)
        self.label(body)
        false = self.const(0, I1)
        lane = self.call("llvm.cttz.i32", I32, left, false)
        self.store(left & (left - 1), slot)
        yield lane
        self.br(head)
        self.label(done)

    def alloca_slot(self, ty: Type) -> Val:
        """A stack slot made in the entry block, so that loops do not grow the stack."""
        self._count += 1
        name = f"%t{self._count}"
        self.lines.insert(1, f"  {name} = alloca {ty}, align 64")
        return Val(self, name, PTR)

    def function(self, name: str, result: Type | None, params: list[tuple[str, Type]]) -> str:
        """Text of the function whose body has been emitted (its first line must be a label)."""
        head = ", ".join(f"{ty} %{label}" for label, ty in params)
        returns = str(result) if result is not None else "void"
        body = "\n".join(self.lines)
        return f'define {returns} @"{name}"({head}) {{\n{body}\n}}'
