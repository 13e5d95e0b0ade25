"""A thin expression layer over llvmlite: values with operators, counted loops, branches.

Code is emitted in SSA form as it is written, so no IR optimizer is needed: the target's code
generator alone gives the object code. Floating point is strict: nothing is reassociated or
contracted, and a fused multiply-add happens only where `Function.fma` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
PTR = I8.as_pointer()
VOID = ir.VoidType()


def vec(element: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def _scalar(t: ir.Type) -> ir.Type:
    return t.element if isinstance(t, ir.VectorType) else t


def _is_float(t: ir.Type) -> bool:
    return isinstance(_scalar(t), (ir.FloatType, ir.HalfType))


def constant(t: ir.Type, value: float | Sequence[float]) -> ir.Constant:
    """A scalar, a splat, or a vector given lane by lane."""
    if isinstance(t, ir.VectorType):
        lanes = value if isinstance(value, Sequence) else [value] * t.count
        return ir.Constant(t, [ir.Constant(t.element, v) for v in lanes])
    return ir.Constant(t, value)


class Value:
    """An SSA value. Python numbers are lifted to its type; integers are signed in comparisons."""

    __slots__ = ("b", "ir")

    def __init__(self, builder: ir.IRBuilder, value: Any) -> None:
        self.b, self.ir = builder, value

    @property
    def type(self) -> ir.Type:
        return self.ir.type

    def _lift(self, other: Value | float) -> Any:
        return other.ir if isinstance(other, Value) else constant(self.type, other)

    def _binary(self, integer: str, floating: str, other: Value | float) -> Value:
        op = getattr(self.b, floating if _is_float(self.type) else integer)
        return Value(self.b, op(self.ir, self._lift(other)))

    def __add__(self, other: Value | float) -> Value:
        return self._binary("add", "fadd", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._binary("sub", "fsub", other)

    def __mul__(self, other: Value | float) -> Value:
        return self._binary("mul", "fmul", other)

    def __floordiv__(self, other: Value | int) -> Value:
        return Value(self.b, self.b.udiv(self.ir, self._lift(other)))

    def __mod__(self, other: Value | int) -> Value:
        return Value(self.b, self.b.urem(self.ir, self._lift(other)))

    def __truediv__(self, other: Value | float) -> Value:
        return Value(self.b, self.b.fdiv(self.ir, self._lift(other)))

    def __rtruediv__(self, other: float) -> Value:
        return Value(self.b, self.b.fdiv(constant(self.type, other), self.ir))

    def __and__(self, other: Value | int) -> Value:
        return Value(self.b, self.b.and_(self.ir, self._lift(other)))

    def __or__(self, other: Value | int) -> Value:
        return Value(self.b, self.b.or_(self.ir, self._lift(other)))

    def __xor__(self, other: Value | int) -> Value:
        return Value(self.b, self.b.xor(self.ir, self._lift(other)))

    def __lshift__(self, other: Value | int) -> Value:
        return Value(self.b, self.b.shl(self.ir, self._lift(other)))

    def __rshift__(self, other: Value | int) -> Value:
        """Logical."""
        return Value(self.b, self.b.lshr(self.ir, self._lift(other)))

    def __rrshift__(self, other: int) -> Value:
        return Value(self.b, self.b.lshr(constant(self.type, other), self.ir))

    def _compare(self, op: str, other: Value | float) -> Value:
        compare = self.b.fcmp_ordered if _is_float(self.type) else self.b.icmp_signed
        return Value(self.b, compare(op, self.ir, self._lift(other)))

    def __lt__(self, other: Value | float) -> Value:
        return self._compare("<", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Value | float) -> Value:
        return self._compare("==", other)

    def is_nan(self) -> Value:
        return Value(self.b, self.b.fcmp_unordered("uno", self.ir, self.ir))

    def at(self, index: int) -> Value:
        """One lane."""
        return Value(self.b, self.b.extract_element(self.ir, ir.Constant(I32, index)))


@dataclass
class Loop:
    """``i`` counts; ``carried`` are the values at the top (and, after the loop, the final ones)."""

    i: Value
    carried: list[Value]
    following: list[Value] = field(default_factory=list)


class Function:
    """A function being written; ``args`` in order."""

    def __init__(self, module: ir.Module, name: str, args: Sequence[ir.Type], ret: Any = VOID):
        self.module = module
        self.fn = ir.Function(module, ir.FunctionType(ret, list(args)), name)
        self.b = ir.IRBuilder(self.fn.append_basic_block("entry"))
        self.args = [Value(self.b, a) for a in self.fn.args]

    def const(self, t: ir.Type, value: float | Sequence[float]) -> Value:
        return Value(self.b, constant(t, value))

    def i64(self, value: Value | int) -> Value:
        return value if isinstance(value, Value) else self.const(I64, value)

    def ret(self, value: Value | None = None) -> None:
        self.b.ret_void() if value is None else self.b.ret(value.ir)

    def offset(self, ptr: Value, nbytes: Value | int) -> Value:
        return Value(self.b, self.b.gep(ptr.ir, [self.i64(nbytes).ir]))

    def load(self, ptr: Value, t: ir.Type, nbytes: Value | int = 0) -> Value:
        """The ``t`` at ``ptr + nbytes``, of no more alignment than its element's."""
        at = self.b.bitcast(self.offset(ptr, nbytes).ir, t.as_pointer())
        return Value(self.b, self.b.load(at, align=_bytes(_scalar(t))))

    def store(self, value: Value, ptr: Value, nbytes: Value | int = 0) -> None:
        at = self.b.bitcast(self.offset(ptr, nbytes).ir, value.type.as_pointer())
        self.b.store(value.ir, at, align=_bytes(_scalar(value.type)))

    def pointer(self, address: Value) -> Value:
        return Value(self.b, self.b.inttoptr(address.ir, PTR))

    def fetch_add(self, ptr: Value, nbytes: int, amount: int) -> Value:
        at = self.b.bitcast(self.offset(ptr, nbytes).ir, I64.as_pointer())
        step = ir.Constant(I64, amount)
        return Value(self.b, self.b.atomic_rmw("add", at, step, "monotonic"))

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(self.b, self.b.select(condition.ir, yes.ir, no.ir))

    def cast(self, op: str, value: Value, t: ir.Type) -> Value:
        """``op``: bitcast, zext, sext, trunc, fpext, fptrunc, uitofp, sitofp."""
        return Value(self.b, getattr(self.b, op)(value.ir, t))

    def arithmetic_shift(self, value: Value, bits: int) -> Value:
        return Value(self.b, self.b.ashr(value.ir, constant(value.type, bits)))

    def shuffle(self, a: Value, mask: Sequence[int], other: Value | None = None) -> Value:
        second = a if other is None else other
        lanes = ir.Constant(vec(I32, len(mask)), [ir.Constant(I32, m) for m in mask])
        return Value(self.b, self.b.shuffle_vector(a.ir, second.ir, lanes))

    def concat(self, low: Value, high: Value) -> Value:
        return self.shuffle(low, range(2 * low.type.count), high)

    def splat(self, value: Value, lanes: int) -> Value:
        undef = ir.Constant(vec(value.type, lanes), ir.Undefined)
        one = self.b.insert_element(undef, value.ir, ir.Constant(I32, 0))
        return self.shuffle(Value(self.b, one), [0] * lanes)

    def vector(self, values: Sequence[Value]) -> Value:
        made = ir.Constant(vec(values[0].type, len(values)), ir.Undefined)
        for lane, value in enumerate(values):
            made = self.b.insert_element(made, value.ir, ir.Constant(I32, lane))
        return Value(self.b, made)

    def fold(self, value: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """All lanes (a power of two of them) combined in a tree."""
        count = value.type.count
        while count > 1:
            count //= 2
            low, high = range(count), range(count, 2 * count)
            value = combine(self.shuffle(value, low), self.shuffle(value, high))
        return value.at(0)

    def intrinsic(self, name: str, ret: ir.Type, *args: Value) -> Value:
        fn = self.module.globals.get(name)
        if fn is None:
            fn = ir.Function(self.module, ir.FunctionType(ret, [a.type for a in args]), name)
        return Value(self.b, self.b.call(fn, [a.ir for a in args]))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        t = a.type
        suffix = f"v{t.count}f32" if isinstance(t, ir.VectorType) else "f32"
        return self.intrinsic(f"llvm.fma.{suffix}", t, a, b, c)

    def prefetch(self, ptr: Value, nbytes: int) -> None:
        """Into the second-level cache."""
        read, level, data = (self.const(I32, v) for v in (0, 2, 1))
        self.intrinsic("llvm.prefetch.p0i8", VOID, self.offset(ptr, nbytes), read, level, data)

    def call_address(self, address: Value, *args: Value) -> None:
        """A call of a void function at an address."""
        t = ir.FunctionType(VOID, [a.type for a in args])
        self.b.call(self.b.inttoptr(address.ir, t.as_pointer()), [a.ir for a in args])

    def stack(self, nbytes: int) -> Value:
        """Scratch on the stack, 64-byte aligned."""
        with self.b.goto_entry_block():
            area = self.b.alloca(ir.ArrayType(I8, nbytes))
        area.align = 64
        return Value(self.b, self.b.bitcast(area, PTR))

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.b.if_then(condition.ir):
            yield

    @contextmanager
    def either(self, condition: Value) -> Iterator[tuple[Any, Any]]:
        with self.b.if_else(condition.ir) as branches:
            yield branches

    @contextmanager
    def loop(
        self, stop: Value | int, start: Value | int = 0, carry: Sequence[Value] = ()
    ) -> Iterator[Loop]:
        """``for i in range(start, stop)``; the body appends to ``following`` what it carries."""
        b, before = self.b, self.b.block
        head, body, done = (b.append_basic_block(n) for n in ("head", "body", "done"))
        first, last = self.i64(start), self.i64(stop)
        b.branch(head)
        b.position_at_end(head)
        count = b.phi(I64)
        count.add_incoming(first.ir, before)
        phis = [b.phi(c.type) for c in carry]
        for phi, initial in zip(phis, carry, strict=True):
            phi.add_incoming(initial.ir, before)
        b.cbranch(b.icmp_signed("<", count, last.ir), body, done)
        b.position_at_end(body)
        loop = Loop(Value(b, count), [Value(b, p) for p in phis])
        yield loop
        count.add_incoming(b.add(count, ir.Constant(I64, 1)), b.block)
        for phi, value in zip(phis, loop.following, strict=True):
            phi.add_incoming(value.ir, b.block)
        b.branch(head)
        b.position_at_end(done)

    @contextmanager
    def work(self, ptr: Value, nbytes: int, items: Value) -> Iterator[Value]:
        """Takes items ``0 .. items - 1`` one by one from the shared counter at ``ptr + nbytes``."""
        b = self.b
        head, body, done = (b.append_basic_block(n) for n in ("take", "item", "empty"))
        b.branch(head)
        b.position_at_end(head)
        item = self.fetch_add(ptr, nbytes, 1)
        b.cbranch((item < items).ir, body, done)
        b.position_at_end(body)
        yield item
        b.branch(head)
        b.position_at_end(done)


def _bytes(t: ir.Type) -> int:
    if isinstance(t, ir.IntType):
        return max(1, int(t.width) // 8)
    return 2 if isinstance(t, ir.HalfType) else 4
