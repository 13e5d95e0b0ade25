"""Code generation in the checked form: poison travels with registers, accesses are reported.

A register's taint is, for each of its bytes, the mask of the lanes in which the byte is not defined
(None: it is defined in all). It is exact within a segment; across segments every 32 bits have one
mask. Registers that can never be tainted (`taint_rules.clean_registers`) cost nothing.

What an instruction does to taints says `taint_rules` for those that work on registers; the
emitters in ``isa/`` say it for memory, through `loaded`, `stored` and the like. A use of poison as
an address, a guard, an operand of a barrier or unit, or a value stored to global memory is a
violation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rubin_moe.emulator import taint_rules
from rubin_moe.emulator.codegen import Emitter, SymbolPlan
from rubin_moe.emulator.forms import Family
from rubin_moe.emulator.lower import Lowered, defs_and_uses, results_by_register
from rubin_moe.emulator.native import blocks
from rubin_moe.emulator.native.ir import I1, I32, I64, V32, Val
from rubin_moe.emulator.native.order import SPACES, access_order
from rubin_moe.emulator.native.taint import GENERIC, GLOBAL
from rubin_moe.emulator.order.layout import READS_A, READS_D, WRITES
from rubin_moe.emulator.ptx.ast import (
    TYPE_BITS,
    Imm,
    Mem,
    Not,
    Operand,
    Pair,
    Reg,
    Sym,
    Vec,
)
from rubin_moe.emulator.state.registers import FIELDS, RegisterLayout

Taint = tuple[Val | None, ...]
#: ``operand`` of a violation that is the guard.
GUARD = 255


def operand_text(operand: Operand | None) -> str:
    """An operand as PTX writes it, for messages."""
    match operand:
        case Reg(name) | Sym(name, 0):
            return name.split("@")[0]
        case Sym(name, offset):
            return f"{name}+{offset}"
        case Imm(value):
            return str(value)
        case Not(reg):
            return f"!{operand_text(reg)}"
        case Vec(items):
            return "{" + ", ".join(operand_text(item) for item in items) + "}"
        case Pair(first, second):
            return f"{operand_text(first)}|{operand_text(second)}"
        case Mem(base, offset, coords):
            inner = operand_text(base) + (f"+{offset}" if offset else "")
            return f"[{inner}, {operand_text(coords)}]" if coords else f"[{inner}]"
    return str(operand)


class CheckedEmitter(Emitter):
    """Emits what the checks need around the instructions of the plain form."""

    checked = True

    def __init__(self, lowered: Lowered, symbols: SymbolPlan, deferred: bool) -> None:
        super().__init__(lowered, symbols, deferred)
        self.clean = taint_rules.clean_registers(lowered)
        self.pieces = taint_rules.piece_bytes(lowered)
        self._taints: dict[str, Taint] = {}
        self._given: dict[str, Taint] = {}
        self._wrote: list[str] = []
        self._pending: list[tuple[Val, int, int]] = []
        self._guarded: tuple[Val, Val | None] | None = None
        program = lowered.entry, lowered.families
        self._loads = results_by_register(*program, "tmem_load")
        self._products = results_by_register(*program, "wgmma")
        self._factors = results_by_register(*program, "wgmma", sources=True)
        #: segment, number of the instruction that writes or reads a register, whether it reads it
        self._completed: set[tuple[int, int, bool]] = set()

    # -- taints of operands
    def any_of(self, lanes: Iterable[Val | None]) -> Val | None:
        """Union of lane masks."""
        total: Val | None = None
        seen: set[str] = set()
        for mask in lanes:
            if mask is not None and mask.text not in seen:
                seen.add(mask.text)
                total = mask if total is None else total | mask
        return total

    def taint(self, operand: Operand | None, bits: int | None = None) -> Taint:
        """Taint of an operand, ``bits`` wide (None: its own width; a predicate has one entry)."""
        match operand:
            case Reg(name) if name in self.registers:
                taint = self._taint(name)
            case Not(reg):
                return self._taint(reg.name)
            case Vec(items):
                width = None if bits is None else bits // len(items)
                return tuple(lanes for item in items for lanes in self.taint(item, width))
            case Pair(first, second):
                return self.taint(first) + self.taint(second)
            case Mem(base, _, coords):
                return self.taint(base) + (self.taint(coords) if coords else ())
            case _:
                taint = (None,)
        if bits is None or bits == 1:
            return taint
        return taint_rules.resized(taint, bits // 8)

    def lanes(self, operand: Operand | None) -> Val | None:
        """Lanes in which any byte of an operand is not defined."""
        return self.any_of(self.taint(operand))

    def _taint(self, name: str) -> Taint:
        if name not in self._taints:
            self._taints[name] = self._load_taint(name)
        return self._taints[name]

    def _load_taint(self, name: str) -> Taint:
        bits = TYPE_BITS[self.registers[name]]
        nbytes = max(bits // 8, 1)
        if name in self.clean:
            return (None,) * nbytes
        if name not in self.layout_taints:
            return (self.b.const(-1, I32),) * nbytes
        words = [
            self.b.field(self.S, self.layout_taints[name] + 4 * word, I32)
            for word in range(max(bits // 32, 1))
        ]
        return tuple(words[byte // 4] for byte in range(nbytes))

    @property
    def layout(self) -> RegisterLayout:
        """As the plain form, with the taints of clean registers."""
        layout = self.lowered.layout
        words = [
            (layout.taints[name] - layout.taint_base) // 4 + word
            for name in layout.taints
            if name in self.clean
            for word in range(max(TYPE_BITS[self.registers[name]] // 32, 1))
        ]
        return replace(layout, defined=tuple(words))

    @property
    def layout_taints(self) -> dict[str, int]:
        """Byte offset of the taints of each register in the state."""
        return self.lowered.layout.taints

    # -- instructions
    def start(self, family: Family) -> None:
        """Before an instruction: the taints of what it writes to registers; its guard."""
        ins = self.ins
        self._given, self._wrote, self._guarded = {}, [], None
        alone = family.name in taint_rules.REGISTER_FAMILIES
        defs, _ = defs_and_uses(ins, family, self.entry)
        dirty = [name for name in defs if name not in self.clean]
        if ins.guard is not None:
            guard = self.any_of(self._taint(ins.guard.name))
            if not alone:
                self.require(guard, self.mask, blocks.POISON_BRANCH, GUARD)
            elif dirty:
                self._guarded = self.guard().bits_as(I32), guard
        if dirty and (alone or family.name in taint_rules.REDUCING):
            for name, taint in taint_rules.results(self, ins, family):
                self._given[name] = self._merged(name, taint)

    def _merged(self, name: str, taint: Taint) -> Taint:
        """The taint of a register after a guarded write."""
        if self._guarded is None:
            return taint
        old, (guard, unknown) = self._taint(name), self._guarded
        merged: dict[tuple[str, str], Val | None] = {}

        def lane_masks(new: Val | None, before: Val | None) -> Val | None:
            key = (new.text if new else "", before.text if before else "")
            if key not in merged:
                kept = before & ~guard if before is not None else None
                written = new & guard if new is not None else None
                merged[key] = self.any_of((written, kept, unknown))
            return merged[key]

        return tuple(lane_masks(a, c) for a, c in zip(taint, old, strict=True))

    def give(self, operand: Operand, taint: Taint) -> None:
        """Set the taint that the instruction leaves in a destination."""
        if isinstance(operand, Vec):
            width = len(taint) // len(operand.items)
            for position, item in enumerate(operand.items):
                self.give(item, taint[position * width : (position + 1) * width])
            return
        assert isinstance(operand, Reg)
        if operand.name in self.registers and operand.name not in self.clean:
            nbytes = max(TYPE_BITS[self.registers[operand.name]] // 8, 1)
            taint = taint_rules.resized(taint, nbytes)
            self._given[operand.name] = self._merged(operand.name, taint)

    def write(self, operand: Operand, value: Val, signed: bool = False) -> None:
        """As the plain form; the register is defined unless `give` or a rule says otherwise."""
        if isinstance(operand, Reg):
            self._require_waits_to_write(operand.name)
        super().write(operand, value, signed)
        if isinstance(operand, Reg) and operand.name in self.registers:
            self._wrote.append(operand.name)

    def finish(self) -> None:
        """After an instruction: its results' taints hold from now on."""
        self.settle()
        for name in self._wrote:
            if name not in self.clean:
                nbytes = max(TYPE_BITS[self.registers[name]] // 8, 1)
                self._taints[name] = self._given.get(name, (None,) * nbytes)

    def begin(self, number: int, segment: object) -> None:
        """As the plain form; taints are those in the state."""
        super().begin(number, segment)  # type: ignore[arg-type]
        self._taints = {}

    def flush(self, extra: list[str] | None = None) -> None:
        """As the plain form, after the checks that are due."""
        self.settle()
        super().flush(extra)

    def _store(self, name: str) -> None:
        super()._store(name)
        if name in self.clean:
            return
        taint = self._taint(name)
        for word in range(-(-len(taint) // 4)):
            slot = self.b.gep(self.S, self.layout_taints[name] + 4 * word)
            kept = self.b.load(slot, I32) & ~self.mask
            lanes = self.any_of(taint[4 * word : 4 * word + 4])
            self.b.store(kept if lanes is None else kept | (lanes & self.mask), slot)

    # -- uses that poison may not reach
    def require(self, lanes: Val | None, mask: Val, fault: int, operand: int) -> None:
        """Lanes of ``mask`` must be defined; checked at the next `trap_unless` or `settle`."""
        if lanes is not None:
            self._pending.append((lanes & mask, fault, operand))

    def require_address(self, operand: Operand, mask: Val) -> None:
        """An operand is about to be used as an address."""
        self.require(self.lanes(operand), mask, blocks.POISON_ADDRESS, self._position(operand))

    def require_operands(self, operands: Sequence[Operand], mask: Val) -> None:
        """Operands are about to be used by a barrier."""
        for operand in operands:
            lanes = self.lanes(operand)
            self.require(lanes, mask, blocks.POISON_OPERAND, self._position(operand))

    def _position(self, operand: Operand) -> int:
        """Which operand of the instruction this is, or is part of."""
        for position, whole in enumerate(self.ins.operands):
            if whole is operand or (
                isinstance(whole, Vec) and any(x is operand for x in whole.items)
            ):
                return position
        return 0

    def settle(self) -> None:
        """Check what is due."""
        if self._pending:
            self.trap_unless(self.b.const(1, I1))

    def trap_unless(self, ok: Val) -> None:
        """As the plain form, together with the checks that are due."""
        if not self._pending:
            super().trap_unless(ok)
            return
        pending, self._pending = self._pending, []
        b = self.b
        bad = self.any_of(lanes for lanes, _, _ in pending)
        assert bad is not None
        fine, look = b.fresh("defined"), b.fresh("poison")
        b.cond_br(ok & bad.eq(0), fine, look)
        b.label(look)
        for lanes, fault, operand in pending:
            numbers = (b.const(n, I32) for n in (fault, operand, self.index))
            ok = ok & b.call("emu.poison_used", I1, self.S, lanes, *numbers)
        super().trap_unless(ok)
        b.br(fine)
        b.label(fine)

    # -- memory
    def accessed(self, address: Val, mask: Val, size: int, kind: int, space: str) -> None:
        """Report an access of ``size`` bytes a lane to the race detector."""
        if space not in SPACES:
            return  # a lane's own
        kind |= access_order(self.ins.parts, kind)
        numbers = (self.b.const(n, I32) for n in (size, kind, SPACES[space], self.index))
        self.trap_unless(self.b.call("emu.order_access", I1, self.S, address, mask, *numbers))

    def ordered(self, event: str, *arguments: int) -> None:
        """Call the hook, unless a guard is false in all lanes."""
        numbers = [self.b.const(value, I32) for value in arguments]
        if self.ins.guard is None:
            self.b.call(f"emu.order_{event}", None, self.S, *numbers)
            return
        with self.b.if_(self.exec_mask().ne(0)):
            self.b.call(f"emu.order_{event}", None, self.S, *numbers)

    def first_read(self, name: str) -> None:
        """Reading a register completes the tcgen05.ld that wrote it."""
        for load in self._loads.get(name, ()):
            if (self.number, load, False) not in self._completed:
                self._completed.add((self.number, load, False))
                self.set_field("site", self.index)
                number = self.b.const(load, I32)
                self.b.call("emu.order_load_read", None, self.S, number)
        self._require_products(self._products.get(name, ()), READS_D)
        self._require_products(self._factors.get(name, ()), READS_A)

    def multiplied(self, name: str) -> None:
        """A wgmma reads a register of A, which may be A of others in flight."""
        self._require_products(self._products.get(name, ()), READS_D)

    def _require_products(self, numbers: Sequence[int], how: int) -> None:
        """Registers of wgmma are about to be touched by another instruction."""
        for product in numbers:
            key = self.number, product, how == READS_A
            if key not in self._completed:
                self._completed.add(key)
                self.set_field("site", self.index)
                arguments = (self.b.const(value, I32) for value in (product, how))
                self.b.call("emu.order_registers_used", None, self.S, *arguments)
                self.trap_if_recorded()

    def _require_waits_to_write(self, name: str) -> None:
        products = *self._factors.get(name, ()), *self._products.get(name, ())
        if not products or self.ins.guard is None:
            self._require_products(products, WRITES)
            return
        with self.b.if_(self.exec_mask().ne(0)):
            before = set(self._completed)
            self._require_products(products, WRITES)
            self._completed = before

    def _shadow(self, address: Val, space: str) -> Val:
        field = "local_poison" if space == "local" else "smem_poison"
        return address + self.field(field, I64).splat()

    def poison_at(self, address: Val, mask: Val, size: int, space: str) -> Val:
        """Lanes with a poisoned byte among ``size`` at their host address."""
        b, site = self.b, self.b.const(self.index, I32)
        if space in ("local", "shared"):
            place = self._shadow(address, space)
            return b.call(f"emu.poison{size}", I32, self.S, place, mask, site)
        generic = b.const(GENERIC if space == "generic" else GLOBAL, I32)
        return b.call(f"emu.global_poison{size}", I32, self.S, address, mask, generic, site)

    def mark(self, address: Val, mask: Val, size: int, space: str, lanes: Val | None) -> None:
        """``size`` bytes become poisoned in ``lanes`` and defined in the others of ``mask``."""
        b = self.b
        if space in ("local", "shared"):
            place = self._shadow(address, space)
            if lanes is None:
                b.call(f"emu.define{size}", None, place, mask)
            else:
                b.call(f"emu.taint{size}", None, place, lanes, mask)
            return
        generic = b.const(GENERIC if space == "generic" else GLOBAL, I32)
        lanes = lanes if lanes is not None else b.const(0, I32)
        b.call(f"emu.global_taint{size}", None, self.S, address, lanes, mask, generic)

    def loaded(
        self, items: Sequence[Operand], address: Val, mask: Val, bits: int, space: str
    ) -> None:
        """Elements of ``bits`` from consecutive memory go to ``items``."""
        pieces: list[tuple[int, int, int]] = []  # item, offset, bytes
        for position, item in enumerate(items):
            name = item.name if isinstance(item, Reg) else ""
            if name not in self.registers or name in self.clean:
                continue
            step = min(self.pieces.get(name, bits // 8), bits // 8)
            start = position * bits // 8
            pieces += [(position, start + at, step) for at in range(0, bits // 8, step)]
        if not pieces:
            return
        size = len(items) * bits // 8
        masks = self._poison_of(pieces, address, mask, size, space)
        for position, item in enumerate(items):
            taint: list[Val | None] = []
            for (at, _, step), lanes in zip(pieces, masks, strict=True):
                if at == position:
                    taint += [lanes] * step
            if taint:
                self.give(item, tuple(taint))

    def _poison_of(
        self,
        pieces: list[tuple[int, int, int]],
        address: Val,
        mask: Val,
        size: int,
        space: str,
    ) -> list[Val]:
        """Lanes in which each piece is poisoned; one look when nothing is."""
        found = self.poison_at(address, mask, size, space)
        if len(pieces) == 1:
            return [found]
        b = self.b
        slots = [b.alloca_slot(I32) for _ in pieces]
        for slot in slots:
            b.store(b.const(0, I32), slot)
        with b.if_(found.ne(0)):
            for (_, offset, step), slot in zip(pieces, slots, strict=True):
                place = address + offset if offset else address
                b.store(self.poison_at(place, mask, step, space), slot)
        return [b.load(slot, I32) for slot in slots]

    def gathered(self, item: Operand, places: Sequence[Val], mask: Val, bits: int) -> None:
        """Parts of ``bits`` from several places of shared memory go to ``item``."""
        taint: Taint = ()
        for place in places:
            taint += (self.poison_at(place, mask, bits // 8, "shared"),) * (bits // 8)
        self.give(item, taint)

    def scattered(self, item: Operand, part: int, place: Val, mask: Val, bits: int) -> None:
        """Part number ``part`` of ``item``, of ``bits``, goes to shared memory."""
        step = bits // 8
        lanes = self.any_of(self.taint(item)[part * step : (part + 1) * step])
        self.mark(place, mask, step, "shared", lanes)

    def stored(
        self, items: Sequence[Operand], address: Val, mask: Val, bits: int, space: str
    ) -> None:
        """Elements of ``bits`` go to consecutive memory.

        Poison may go to shared and local memory, not to global memory.
        """
        taints = [self.taint(item, bits) for item in items]
        size = len(items) * bits // 8
        lanes = self.any_of(tainted for taint in taints for tainted in taint)
        for item, taint in zip(items, taints, strict=True):
            self._require_outside(item, self.any_of(taint), address, mask, space)
        self.mark(address, mask, size, space, None)
        if lanes is None or space == "global":
            return
        with self.b.if_((lanes & mask).ne(0)):
            for position, taint in enumerate(taints):
                for offset, step, tainted in taint_rules.runs(taint):
                    if tainted is None:
                        continue
                    start = position * bits // 8 + offset
                    place = address + start if start else address
                    self.mark(place, mask, step, space, tainted)

    def _require_outside(
        self, item: Operand, lanes: Val | None, address: Val, mask: Val, space: str
    ) -> None:
        """A value that goes to global memory must be defined."""
        if lanes is None or space in ("shared", "local"):
            return
        if space == "generic":
            mask = self.b.call("emu.outside_arena", I32, self.S, address, mask)
        self.require(lanes, mask, blocks.POISON_STORE, self._position(item))
        self.settle()

    def combined(
        self,
        old: Operand | None,
        address: Val,
        mask: Val,
        size: int,
        space: str,
        values: Sequence[Operand],
    ) -> None:
        """An atomic operation: the old value taints the result, the new value memory.

        What is added to in global memory must be defined.
        """
        for value in values:
            self._require_outside(value, self.lanes(value), address, mask, space)
        lanes = self.any_of(self.lanes(value) for value in values)
        held = self.poison_at(address, mask, size, space)
        if "exch" not in self.ins.parts:
            where = self.ins.operands[int(self.lowered.families[self.index].name == "atomic")]
            self._require_outside(where, held, address, mask, space)
        if "exch" in self.ins.parts:
            self.mark(address, mask, size, space, lanes)
        elif lanes is not None:
            self.mark(address, mask, size, space, self.any_of((held, lanes)))
        if old is not None:
            self.give(old, (held,) * size)

    def copied(self, target: Val, source: Val, count: Val, mask: Val, size: int) -> None:
        """``cp.async``: shared memory takes over the poison of global memory."""
        place = self._shadow(target, "shared")
        nbytes = self.b.const(size, I32)
        self.b.call("emu.copy_poison", None, self.S, place, source, count, mask, nbytes)

    def defined(self, address: Val, mask: Val, size: int) -> None:
        """Bytes of shared memory become defined."""
        self.mark(address, mask, size, "shared", None)

    def permuted(self, dest: Operand, source: Val | list[int]) -> None:
        """A shuffle: each lane takes the taint of its source lane, and of its operands."""
        lanes = self.lanes(self.ins.operands[1])
        if lanes is not None:
            where = self.b.vector(source, V32) if isinstance(source, list) else source
            lanes = self.b.call("emu.permute_taint", I32, lanes, where)
        steering = self.any_of(
            mask for operand in self.ins.operands[2:] for mask in self.taint(operand)
        )
        self.give(dest, (self.any_of((lanes, steering)),) * 4)

    def argument(self, slot: int, operand: Operand, mask: Val, data: bool) -> None:
        """An operand that Python reads: it must be defined, unless it is data."""
        lanes = self.lanes(operand)
        if not data:
            self.require(lanes, mask, blocks.POISON_OPERAND, self._position(operand))
            return
        place = FIELDS["arg_taints"] + 4 * slot
        self.b.set_field(self.S, place, lanes if lanes is not None else self.b.const(0, I32))
