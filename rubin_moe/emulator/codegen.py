"""One LLVM function for a kernel: ``i32 kernel(state*)`` runs one warp until it must stop.

Lanes are vectors of 32, predicates ``<32 x i1>``. The function enters at the segment in the state's
``resume`` field, or chooses one when the warp is diverged. A warp whose live lanes all execute
together jumps between segments directly; otherwise each lane's segment is in the state and
``emu.pick`` chooses who goes on.

:class:`Emitter` is what the instruction families in ``isa/`` write with.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rubin_moe.emulator.forms import Family, UnsupportedInstructionError
from rubin_moe.emulator.lower import Lowered, Segment, branch_target
from rubin_moe.emulator.native.ir import (
    I1,
    I32,
    I64,
    LANES,
    PTR,
    V1,
    V32,
    V64,
    Builder,
    Type,
    Val,
)
from rubin_moe.emulator.ptx.ast import TYPE_BITS, Imm, Instruction, Mem, Not, Operand, Reg, Sym, Vec
from rubin_moe.emulator.state.registers import FIELDS, SPECIALS, Outcome, RegisterLayout

#: Compiled code starts with this name; the runtime's scheduler calls it.
KERNEL_SYMBOL = "emu.kernel"
_LANE_MASKS = {
    "%lanemask_eq": [1 << i for i in range(LANES)],
    "%lanemask_lt": [(1 << i) - 1 for i in range(LANES)],
    "%lanemask_le": [(2 << i) - 1 for i in range(LANES)],
    "%lanemask_gt": [0xFFFFFFFF & -(2 << i) for i in range(LANES)],
    "%lanemask_ge": [0xFFFFFFFF & -(1 << i) for i in range(LANES)],
}


@dataclass(frozen=True, slots=True)
class SymbolPlan:
    """Where variables live: shared offsets, local offsets, slots of global addresses."""

    shared: dict[str, int]
    local: dict[str, int]
    pointers: dict[str, int]  # byte offset in the parameter block of a variable's host address
    local_bytes: int  # local memory of one lane


class Emitter:
    """State of code generation for one kernel."""

    #: Whether the code carries poison and reports its accesses (`taint.CheckedEmitter`).
    checked = False

    def __init__(self, lowered: Lowered, symbols: SymbolPlan, deferred: bool) -> None:
        self.lowered, self.symbols, self.deferred = lowered, symbols, deferred
        self.entry = lowered.entry
        self.registers = lowered.entry.registers
        self.offsets = lowered.layout.offsets
        self.declarations: set[str] = set()
        self.b = Builder(self.declarations)
        self.S = Val(self.b, "%S", PTR)
        self._params = {p.name: p.offset for p in self.entry.params}
        self._faults: list[int] = []
        self.number = 0  # of the segment being emitted
        self.ins: Instruction = self.entry.instructions[0]
        self.index = 0
        self._values: dict[str, Val] = {}
        self._previous: dict[str, Val] = {}
        self._written: list[str] = []
        self._exec: Val | None = None

    @property
    def layout(self) -> RegisterLayout:
        """Where registers live, for launches."""
        return self.lowered.layout

    # -- state fields
    def field(self, name: str, ty: Type) -> Val:
        """Load a header field of the warp."""
        return self.b.field(self.S, FIELDS[name], ty)

    def set_field(self, name: str, value: Val | int, ty: Type = I32) -> None:
        """Store a header field of the warp."""
        value = value if isinstance(value, Val) else self.b.const(value, ty)
        self.b.set_field(self.S, FIELDS[name], value)

    # -- refusals and faults
    def refuse(self, reason: str) -> UnsupportedInstructionError:
        """The error for the current instruction."""
        return UnsupportedInstructionError(self.ins.opcode, self.ins.line, reason)

    def trap_unless(self, ok: Val) -> None:
        """Stop the warp with the fault in its state unless the scalar i1 holds."""
        go_on = self.b.fresh("ok")
        self.b.cond_br(ok, go_on, f"fault.{self.index}")
        if self.index not in self._faults:
            self._faults.append(self.index)
        self.b.label(go_on)

    def trap_if_recorded(self) -> None:
        """Stop if a runtime function has recorded a fault."""
        self.trap_unless(self.field("trap_code", I32).eq(0))

    # -- what the checked form adds; the plain form has nothing of it
    def start(self, family: Family) -> None:
        """Before an instruction."""

    def finish(self) -> None:
        """After an instruction that does not leave."""

    def accessed(self, address: Val, mask: Val, size: int, kind: int, space: str) -> None:
        """``size`` bytes a lane are about to be accessed at host addresses."""

    def ordered(self, event: str, *arguments: int) -> None:
        """Tell the race detector of an event (a hook of ``order/hooks.py``)."""

    def first_read(self, name: str) -> None:
        """A segment reads a register that is in the state block."""

    def multiplied(self, name: str) -> None:
        """A wgmma reads a register of A."""

    def loaded(
        self, items: Sequence[Operand], address: Val, mask: Val, bits: int, space: str
    ) -> None:
        """Consecutive elements of ``bits`` go to ``items``."""

    def gathered(self, item: Operand, places: Sequence[Val], mask: Val, bits: int) -> None:
        """Parts of ``bits`` from several places of shared memory go to ``item``."""

    def scattered(self, item: Operand, part: int, place: Val, mask: Val, bits: int) -> None:
        """Part number ``part`` of ``item``, of ``bits``, goes to shared memory."""

    def stored(
        self, items: Sequence[Operand], address: Val, mask: Val, bits: int, space: str
    ) -> None:
        """``items`` go to consecutive elements of ``bits``."""

    def combined(
        self,
        old: Operand | None,
        address: Val,
        mask: Val,
        size: int,
        space: str,
        values: Sequence[Operand],
    ) -> None:
        """An atomic operation of ``size`` bytes a lane leaves the old value in ``old``."""

    def copied(self, target: Val, source: Val, count: Val, mask: Val, size: int) -> None:
        """``count`` bytes from global memory, then zeros up to ``size``, go to shared memory."""

    def permuted(self, dest: Operand, source: Val | list[int]) -> None:
        """A shuffle: each lane takes the value of a source lane."""

    def defined(self, address: Val, mask: Val, size: int) -> None:
        """``size`` bytes a lane of shared memory become defined."""

    def require_address(self, operand: Operand, mask: Val) -> None:
        """An operand is about to be used as an address."""

    def require_operands(self, operands: Sequence[Operand], mask: Val) -> None:
        """Operands are about to be used by a barrier."""

    def argument(self, slot: int, operand: Operand, mask: Val, data: bool) -> None:
        """An operand goes to an argument row, as data or to steer the instruction."""

    # -- operands
    def read(self, operand: Operand, bits: int) -> Val:
        """Integer lanes of an operand, truncated or zero-extended to ``bits``."""
        match operand:
            case Reg(name) if name in self.registers:
                return self._register(name).resize(bits)
            case Reg(name):
                return self._special(name).resize(bits)
            case Imm(value):
                return self.b.const(self._literal(value, bits), Type("i", bits, LANES))
            case Sym(name, offset):
                return self._symbol(name, offset).resize(bits)
            case Vec(items):
                return self._packed([self.read(item, bits // len(items)) for item in items], bits)
        raise self.refuse(f"operand {operand} has no value")

    def read_float(self, operand: Operand, bits: int) -> Val:
        """Floating lanes of an operand."""
        return self.read(operand, bits).as_float()

    def is_predicate(self, operand: Operand) -> bool:
        """Whether an operand is a predicate register or its complement."""
        register = operand.reg if isinstance(operand, Not) else operand
        return isinstance(register, Reg) and self.registers.get(register.name) == "pred"

    def predicate(self, operand: Operand) -> Val:
        """A predicate operand as ``<32 x i1>``."""
        if isinstance(operand, Not):
            return ~self._register(operand.reg.name)
        if isinstance(operand, Imm):
            return self.b.const(1 if operand.value else 0, V1)
        if isinstance(operand, Reg) and self.registers.get(operand.name) == "pred":
            return self._register(operand.name)
        raise self.refuse(f"{operand} is not a predicate")

    def _literal(self, value: int | float, bits: int) -> int:
        if isinstance(value, float):
            code = {16: "<e", 32: "<f", 64: "<d"}[bits]
            return int.from_bytes(struct.pack(code, value), "little")
        return value

    def _packed(self, parts: list[Val], bits: int) -> Val:
        ty = Type("i", bits, LANES)
        out = parts[0].resize(bits)
        for position, part in enumerate(parts[1:], 1):
            out = out | part.resize(bits) << position * (bits // len(parts))
        return out.bits_as(ty)

    def _register(self, name: str) -> Val:
        if name not in self._values:
            self._values[name] = self._previous[name] = self._load(name)
        return self._values[name]

    def _load(self, name: str) -> Val:
        if name not in self.offsets:  # never written before it is read: undefined
            bits = TYPE_BITS[self.registers[name]]
            return self.b.const(0, Type("i", bits, LANES))
        self.first_read(name)
        slot = self.b.gep(self.S, self.offsets[name])
        bits = TYPE_BITS[self.registers[name]]
        if bits == 1:
            return self.b.load(slot, I32).bits_as(V1)
        return self.b.load(slot, Type("i", bits, LANES), 64)

    def _special(self, name: str) -> Val:
        if name in SPECIALS:
            offset = FIELDS["specials"] + 4 * SPECIALS.index(name)
            return self.b.field(self.S, offset, I32).splat()
        if name in ("%tid.x", "%tid.y", "%tid.z"):
            field = FIELDS[f"tid_{name[-1]}"]
            return self.b.load(self.b.gep(self.S, field), V32, 64)
        if name == "%laneid":
            return self.b.lane_numbers()
        if name in _LANE_MASKS:
            return self.b.vector(_LANE_MASKS[name], V32)
        if name in ("%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo"):
            return self.b.call("llvm.readcyclecounter", I64).splat()
        raise self.refuse(f"special register {name} is not modelled")

    def _symbol(self, name: str, offset: int) -> Val:
        if name in self.symbols.shared:
            rank = self._special("%cluster_ctarank")
            return (rank << 24) + (self.symbols.shared[name] + offset)
        if name in self.symbols.local:
            return self.b.const(self.symbols.local[name] + offset, V64)
        params = self.field("params", I64)
        if name in self._params:
            return (params + (self._params[name] + offset)).splat()
        if name in self.symbols.pointers:
            slot = self.b.gep(self.field("params", PTR), self.symbols.pointers[name])
            return (self.b.load(slot, I64) + offset).splat()
        raise self.refuse(f"symbol {name} is not declared")

    def param_offset(self, operand: Mem) -> int | None:
        """Constant byte offset of a ``ld.param`` address, or None."""
        base = operand.base
        if isinstance(base, Sym) and base.name in self._params:
            return self._params[base.name] + base.offset + operand.offset
        return None

    def address(self, operand: Operand, bits: int) -> Val:
        """The address of a memory operand (without coordinates), ``bits`` wide."""
        if not isinstance(operand, Mem):
            return self.read(operand, bits)
        base = self.read(operand.base, bits)
        return base + operand.offset if operand.offset else base

    # -- results
    def write(self, operand: Operand, value: Val, signed: bool = False) -> None:
        """Write lanes to a register (guard applied); ``_`` is a sink; ``{..}`` unpacks."""
        if isinstance(operand, Vec):
            part = value.ty.bits // len(operand.items)
            for position, item in enumerate(operand.items):
                self.write(item, (value >> position * part).resize(part))
            return
        assert isinstance(operand, Reg)
        if operand.name == "_":
            return
        if operand.name not in self.registers:
            raise self.refuse(f"register {operand.name} is not declared")
        bits = TYPE_BITS[self.registers[operand.name]]
        value = value.as_int() if value.ty.kind == "f" else value
        value = value.resize(bits, signed)
        if self.ins.guard is not None:
            value = self.guard().select(value, self._register(operand.name))
        self._values[operand.name] = value
        if operand.name not in self._written:
            self._written.append(operand.name)

    # -- execution masks
    def guard(self) -> Val:
        """Lanes whose guard predicate holds."""
        assert self.ins.guard is not None
        value = self._register(self.ins.guard.name)
        return ~value if self.ins.guard_negated else value

    def exec_mask(self) -> Val:
        """Lanes for which the current instruction executes, an i32."""
        if self.ins.guard is None:
            return self.mask
        return self.guard().bits_as(I32) & self.mask

    def first_lane(self, mask: Val) -> Val:
        """Lowest lane of a mask (0 when empty)."""
        return self.b.call("llvm.cttz.i32", I32, mask, self.b.const(0, I1)) & 31

    def uniform(self, operand: Operand, bits: int, mask: Val) -> Val:
        """The value of an operand in the lowest lane of ``mask``, a scalar."""
        return self.read(operand, bits).lane(self.first_lane(mask))

    # -- segments
    def flush(self, extra: list[str] | None = None) -> None:
        """Store the registers that outlive the segment (and ``extra``)."""
        live = self.segment.live_out
        for name in self._written:
            if name in live or (extra is not None and name in extra):
                self._store(name)
        self._written = []

    def _store(self, name: str) -> None:
        value = self._values[name]
        old = self._previous.get(name) or self._load(name)
        merged = self.mask_vector.select(value, old)
        slot = self.b.gep(self.S, self.offsets[name])
        if value.ty.bits == 1:
            self.b.store(merged.bits_as(I32), slot)
        else:
            self.b.store(merged, slot, 64)

    def whole(self) -> Val:
        """Whether all live lanes execute together."""
        return self.field("live", I32).eq(self.mask)

    def goto(self, target: int) -> None:
        """Leave the segment for ``target``."""
        if target not in self.lowered.joins:
            self.b.br(f"s{target}")
            return
        apart = self.b.fresh("apart")
        self.b.cond_br(self.whole(), f"s{target}", apart)
        self.b.label(apart)
        self._diverge(self.mask, target, None, 0)

    def _diverge(self, taken: Val, target: int, rest: Val | None, other: int) -> None:
        zero = self.b.const(0, I32)
        self.b.call(
            "emu.diverge",
            None,
            self.S,
            taken,
            self.b.const(target, I32),
            rest if rest is not None else zero,
            self.b.const(other, I32),
        )
        self.b.br("dispatch")

    def branch(self, condition: Val, target: int, other: int) -> None:
        """Lanes of ``condition`` (i32) go to ``target``, the rest of the mask to ``other``."""
        rest = condition ^ self.mask
        uniform = condition.eq(0) | rest.eq(0)
        together, apart = self.b.fresh("together"), self.b.fresh("apart")
        self.b.cond_br(uniform & self.whole(), together, apart)
        self.b.label(together)
        self.b.cond_br(condition.eq(0), f"s{other}", f"s{target}")
        self.b.label(apart)
        self._diverge(condition, target, rest, other)

    def leave(self, outcome: int, following: int) -> None:
        """Return to the scheduler; the warp resumes at segment ``following``."""
        self.set_field("site", self.index)
        together, apart = self.b.fresh("leave"), self.b.fresh("leave.apart")
        self.b.cond_br(self.whole(), together, apart)
        self.b.label(together)
        self.set_field("resume", following)
        self.b.ret(outcome)
        self.b.label(apart)
        self.b.call(
            "emu.diverge", None, self.S, self.mask, self.b.const(following, I32),
            self.b.const(0, I32), self.b.const(0, I32),
        )  # fmt: skip
        self.set_field("resume", -1)
        self.b.ret(outcome)

    def skip_unless_executed(self, mask: Val, following: int) -> str | None:
        """With no lane in ``mask`` the segment goes on to ``following``; see :meth:`end_skip`."""
        if self.ins.guard is None:
            return None
        skip, run = self.b.fresh("skip"), self.b.fresh("run")
        self.b.cond_br(mask.eq(0), skip, run)
        self.b.label(run)
        return skip

    def end_skip(self, skip: str | None, following: int) -> None:
        """Close what :meth:`skip_unless_executed` opened, after the segment's own end."""
        if skip is not None:
            self.b.label(skip)
            self.goto(following)

    def begin(self, number: int, segment: Segment) -> None:
        """Start a segment: label, slice budget, mask, counter."""
        self.number, self.segment = number, segment
        self._values, self._previous, self._written = {}, {}, []
        b = self.b
        b.label(f"s{number}")
        if number in self.lowered.loop_heads:
            budget = self.field("budget", I32) - 1
            self.set_field("budget", budget)
            b.cond_br(budget.cmp("slt", 0), f"slice.{number}", f"body.{number}")
            b.label(f"slice.{number}")
            b.call("emu.slice", None, self.S, b.const(number, I32))
            b.ret(Outcome.SLICE)
            b.label(f"body.{number}")
        self.mask = self.field("mask", I32)
        self.mask_vector = self.mask.bits_as(V1)
        if number in self.lowered.awaits:
            self._await_loads(number)
        counts = self.field("counts", PTR)
        b.set_field(counts, 8 * number, b.field(counts, 8 * number, I64) + 1)

    def _await_loads(self, number: int) -> None:
        """Let Python perform what the warp has loaded from tensor memory, then start again."""
        b = self.b
        ready, wait = b.fresh("loaded"), b.fresh("await")
        b.cond_br(self.field("pending_loads", I32).eq(0), ready, wait)
        b.label(wait)
        self.set_field("exec", self.mask)
        self.index = len(self.entry.instructions)  # the site that stands for it
        self.leave(Outcome.UNIT, number)
        b.label(ready)

    def rendezvous(self, members: Val | None) -> None:
        """Before a collective: wait until the live lanes of ``members`` (None: all) are here."""
        b = self.b
        here, check, alone = b.fresh("here"), b.fresh("check"), b.fresh("alone")
        b.cond_br(self.whole(), here, check)
        b.label(check)
        live = self.field("live", I32)
        needed = live if members is None else live & members
        b.cond_br((needed & ~self.mask).eq(0), here, alone)
        b.label(alone)
        b.call("emu.suspend", None, self.S, self.mask, b.const(self.number, I32))
        b.br("dispatch")
        b.label(here)
        self.ordered("converge")


EmitFunction = Callable[[Emitter, Instruction], None]


def _prologue(em: Emitter) -> None:
    b = em.b
    b.label("entry")
    resume = em.field("resume", I32)
    b.cond_br(resume.eq(-1), "dispatch", "resume")
    b.label("dispatch")
    picked = b.call("emu.pick", I32, em.S)
    b.cond_br(picked.eq(-1), "stall", "picked")
    b.label("stall")
    em.set_field("resume", -1)
    b.ret(Outcome.STALL)
    b.label("picked")
    b.br("enter")
    b.label("resume")
    b.br("enter")
    b.label("enter")
    number = b.emit(f"phi i32 [{picked.text}, %picked], [{resume.text}, %resume]", I32)
    count = len(em.lowered.segments)
    cases = " ".join(f'i32 {j}, label %"s{j}"' for j in range(count))
    b.lines.append(f'  switch {number}, label %"s{count}" [{cases}]')


def _emit_segment(em: Emitter, number: int, emitters: dict[str, EmitFunction]) -> None:
    segment = em.lowered.segments[number]
    em.begin(number, segment)
    for index in range(segment.start, segment.stop):
        em.ins, em.index = em.entry.instructions[index], index
        family = em.lowered.families[index]
        em.start(family)
        if family.name == "branch":
            em.flush()
            target = em.lowered.segment_at[branch_target(em.ins, em.entry)]
            if em.ins.guard is None:
                em.goto(target)
            else:
                em.branch(em.exec_mask(), target, number + 1)
            return
        if family.name == "leave":
            _emit_exit(em)
            return
        emitters[family.name](em, em.ins)
        if family.leaves or family.name == "trap":
            return
        em.finish()
    em.flush()
    em.goto(number + 1)


def _emit_exit(em: Emitter) -> None:
    em.flush()
    b = em.b
    leaving = em.exec_mask()
    live = em.field("live", I32) & ~leaving
    em.set_field("live", live)
    gone, stay = b.fresh("gone"), b.fresh("stay")
    b.cond_br(live.eq(0), gone, stay)
    b.label(gone)
    em.set_field("site", em.index)
    b.ret(Outcome.EXITED)
    b.label(stay)
    em._diverge(em.mask & ~leaving, em.number + 1, None, 0)


def generate(em: Emitter, emitters: dict[str, EmitFunction]) -> str:
    """LLVM IR of the kernel function.

    An emitter that is ``deferred`` makes every asynchronous operation and its waits return to the
    scheduler, for policies that delay completion; otherwise ``cp.async`` and waits are native.
    """
    lowered = em.lowered
    _prologue(em)
    for number in range(len(lowered.segments)):
        _emit_segment(em, number, emitters)
    b = em.b
    b.label(f"s{len(lowered.segments)}")  # falling off the end is an exit
    em.set_field("live", 0)
    b.ret(Outcome.EXITED)
    for index in em._faults:
        b.label(f"fault.{index}")
        em.set_field("site", index)
        b.ret(Outcome.TRAP)
    body = b.function(KERNEL_SYMBOL, I32, [("S", PTR)])
    return "\n".join([*sorted(em.declarations), body])
