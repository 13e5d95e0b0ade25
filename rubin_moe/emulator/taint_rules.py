"""What instructions on registers do to poison.

By default every byte of a result is undefined in the lanes in which any source is. Bytes that are
moved, masked, shifted, permuted, converted or computed apart from one another keep their own
taint; a selection takes that of what it selects; zero masks poison, and so does a predicate that
decides alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rubin_moe.emulator.forms import Family
from rubin_moe.emulator.lower import Lowered, defs_and_uses, registers_in
from rubin_moe.emulator.native.ir import I32, Val
from rubin_moe.emulator.ptx.ast import TYPE_BITS, Imm, Instruction, Operand, Pair, Reg, Vec

if TYPE_CHECKING:
    from rubin_moe.emulator.taint import CheckedEmitter

Taint = tuple[Val | None, ...]
Rule = Callable[["CheckedEmitter", Instruction], Taint]

#: Families that only write registers; their guard merges.
REGISTER_FAMILIES = frozenset(
    ("integer", "bits", "float", "special_function", "compare", "move", "convert_integer",
     "convert_float", "convert_small")
)  # fmt: skip
#: Collectives whose result depends on every lane's source.
REDUCING = frozenset(("warp_vote", "warp_reduce", "warp_match", "transpose"))
#: Families whose result is never poison, whatever they read.
_DEFINING = frozenset(
    ("warp_elect", "warp_mask", "mbarrier_arrive", "mbarrier_wait", "hint", "sleep")
)


def resized(taint: Taint, nbytes: int) -> Taint:
    """The low ``nbytes``; bytes that are added are defined."""
    return (taint + (None,) * nbytes)[:nbytes] if len(taint) != nbytes else taint


def runs(taint: Taint) -> Iterator[tuple[int, int, Val | None]]:
    """Parts of equal taint: offset, bytes (a power of two), lanes."""
    texts = {lanes.text if lanes is not None else "" for lanes in taint}
    if len(texts) == 1:
        yield 0, len(taint), taint[0]
        return
    half = len(taint) // 2
    for start, part in ((0, taint[:half]), (half, taint[half:])):
        for offset, nbytes, lanes in runs(part):
            yield start + offset, nbytes, lanes


# ---- registers that are never tainted, and those whose bytes matter


def clean_registers(lowered: Lowered) -> frozenset[str]:
    """Registers that are written before they are read, and never from memory, a unit or a
    register that is not clean."""
    dirty = set(lowered.unwritten)
    steps: list[tuple[list[str], set[str]]] = []
    for ins, family in zip(lowered.entry.instructions, lowered.families, strict=True):
        defs, uses = defs_and_uses(ins, family, lowered.entry)
        if not defs or family.name in _DEFINING:
            continue
        if family.name == "load" and ins.parts[1] in ("param", "const"):
            continue
        if family.name in REGISTER_FAMILIES | REDUCING | {"warp_shuffle"}:
            steps.append((defs, set(uses)))
        else:
            dirty.update(defs)
    grew = True
    while grew:
        before = len(dirty)
        for defs, sources in steps:
            if not dirty.isdisjoint(sources):
                dirty.update(defs)
        grew = len(dirty) != before
    return frozenset(lowered.entry.registers) - dirty


def piece_bytes(lowered: Lowered) -> dict[str, int]:
    """Bytes of a loaded register that are looked at apart, where some instruction needs it."""
    pieces: dict[str, int] = {}
    registers = lowered.entry.registers
    for ins, family in zip(lowered.entry.instructions, lowered.families, strict=True):
        if family.name not in REGISTER_FAMILIES and family.name != "store":
            continue
        for operand in ins.operands[family.dests :]:
            for name in registers_in(operand, lowered.entry):
                step = _piece(ins, family, TYPE_BITS[registers[name]])
                if step:
                    pieces[name] = min(pieces.get(name, step), step)
    return pieces


def _piece(ins: Instruction, family: Family, bits: int) -> int:
    if bits < 16:
        return 0
    kind = ins.parts[-1]
    if family.name == "bits" or kind.endswith("x4"):
        return 4 if bits == 64 else 1
    if family.name == "convert_integer" and int(ins.parts[-2][1:]) < bits:
        return 4 if bits == 64 else 1
    if family.name == "move" and isinstance(ins.operands[0], Vec):
        return bits // 8 // len(ins.operands[0].items)
    if family.name == "store" and TYPE_BITS[kind] < bits:
        return TYPE_BITS[kind] // 8
    if kind.endswith("x2"):
        return max(bits // 16, 1)
    return 0


# ---- results


def results(em: CheckedEmitter, ins: Instruction, family: Family) -> list[tuple[str, Taint]]:
    """The taint of every register that the instruction writes, as wide as the register."""
    dest = ins.operands[0]
    rule = _reduced if family.name in REDUCING else _RULES.get(ins.parts[0], _default)
    taint = rule(em, ins)
    if isinstance(dest, Pair):
        return [*_spread(em, dest.first, taint), *_spread(em, dest.second, taint)]
    return _spread(em, dest, taint)


def _spread(em: CheckedEmitter, dest: Operand, taint: Taint) -> list[tuple[str, Taint]]:
    if isinstance(dest, Vec):
        width = len(taint) // len(dest.items)
        parts = [taint[i * width : (i + 1) * width] for i in range(len(dest.items))]
        pairs = zip(dest.items, parts, strict=True)
        return [given for item, part in pairs for given in _spread(em, item, part)]
    if not isinstance(dest, Reg) or dest.name not in em.registers:
        return []
    return [(dest.name, resized(taint, _width(em, dest)))]


def _width(em: CheckedEmitter, operand: Operand) -> int:
    """Bytes of a destination (1 for a predicate)."""
    if isinstance(operand, Pair):
        return _width(em, operand.first)
    if isinstance(operand, Vec):
        return sum(_width(em, item) for item in operand.items)
    if isinstance(operand, Reg) and operand.name in em.registers:
        return max(TYPE_BITS[em.registers[operand.name]] // 8, 1)
    return 4


def _mixed(em: CheckedEmitter, ins: Instruction) -> Val | None:
    return em.any_of(lanes for operand in ins.operands[1:] for lanes in em.taint(operand))


def _default(em: CheckedEmitter, ins: Instruction) -> Taint:
    return (_mixed(em, ins),) * _width(em, ins.operands[0])


def _reduced(em: CheckedEmitter, ins: Instruction) -> Taint:
    """A collective: a source of any lane taints the result of every lane."""
    lanes = _mixed(em, ins)
    if lanes is not None:
        lanes = (lanes & em.mask).ne(0).cast("sext", I32)
    return (lanes,) * _width(em, ins.operands[0])


def _bytes(ins: Instruction) -> int:
    return TYPE_BITS[ins.parts[-1]] // 8


def _is(operand: Operand, value: int) -> bool:
    return isinstance(operand, Imm) and operand.value == value


def _join(em: CheckedEmitter, *taints: Taint) -> Taint:
    """Byte by byte."""
    return tuple(em.any_of(lanes) for lanes in zip(*taints, strict=True))


def _grouped(em: CheckedEmitter, taint: Taint, group: int) -> Taint:
    """Every ``group`` bytes together."""
    out: list[Val | None] = []
    for start in range(0, len(taint), group):
        out += [em.any_of(taint[start : start + group])] * group
    return tuple(out)


def _multiply(em: CheckedEmitter, ins: Instruction) -> Taint:
    """A factor zero (written so) gives zero, whatever the other is."""
    if ins.parts[-1][0] in "us":
        a, c, *rest = ins.operands[1:]
        if _is(a, 0) or _is(c, 0):
            lanes = em.any_of(mask for operand in rest for mask in em.taint(operand))
            return (lanes,) * _width(em, ins.operands[0])
    return _packed(em, ins)


def _difference(em: CheckedEmitter, ins: Instruction) -> Taint:
    """x - x and x ^ x are zero."""
    a, c = ins.operands[1:3]
    if a == c and ins.parts[-1][0] not in "f" and "f16" not in ins.parts[-1]:
        return (None,) * _width(em, ins.operands[0])
    return _logic(em, ins) if ins.parts[0] == "xor" else _packed(em, ins)


def _packed(em: CheckedEmitter, ins: Instruction) -> Taint:
    """Elements of packed types keep apart."""
    kind = ins.parts[-1]
    if kind not in ("f32x2", "f16x2", "bf16x2"):
        return _default(em, ins)
    nbytes = TYPE_BITS[kind] // 8
    taints = [em.taint(operand, 8 * nbytes) for operand in ins.operands[1:]]
    return _grouped(em, _join(em, *taints), nbytes // 2)


# -- logic


def _logic(em: CheckedEmitter, ins: Instruction) -> Taint:
    op, kind = ins.parts[0], ins.parts[-1]
    if kind == "pred":
        return (_predicate_logic(em, ins, op),)
    nbytes = _bytes(ins)
    taints = [em.taint(operand, 8 * nbytes) for operand in ins.operands[1:]]
    for operand, position in ((ins.operands[-1], 0), (ins.operands[1], -1)):
        if op in ("and", "or") and isinstance(operand, Imm):
            kept = tuple(
                None if int(operand.value) >> 8 * i & 255 == (0 if op == "and" else 255) else lanes
                for i, lanes in enumerate(taints[position])
            )
            return kept
    joined = _join(em, *taints)
    if op != "and" or len(taints) < 2 or not any(joined):
        return joined
    # a defined zero masks
    masks = [em.any_of(taint) for taint in taints]
    known: list[Val] = []
    for operand, lanes in zip(ins.operands[1:], masks, strict=True):
        if isinstance(operand, Reg):
            zero = em.read(operand, 8 * nbytes).eq(0).bits_as(I32)
            known.append(zero & ~lanes if lanes is not None else zero)
    visible = ~_union(known)
    cache: dict[str, Val] = {}
    out: list[Val | None] = []
    for lanes in joined:
        if lanes is not None and lanes.text not in cache:
            cache[lanes.text] = lanes & visible
        out.append(cache[lanes.text] if lanes is not None else None)
    return tuple(out)


def _union(masks: list[Val]) -> Val:
    total = masks[0]
    for mask in masks[1:]:
        total = total | mask
    return total


def _predicate_logic(em: CheckedEmitter, ins: Instruction, op: str) -> Val | None:
    """A defined false decides ``and``, a defined true ``or``."""
    sources = ins.operands[1:]
    unknown = [em.lanes(operand) for operand in sources]
    both = em.any_of(unknown)
    if both is None or op not in ("and", "or"):
        return both
    deciding: list[Val] = []
    for operand, lanes in zip(sources, unknown, strict=True):
        value = em.predicate(operand).bits_as(I32)
        decides = ~value if op == "and" else value
        deciding.append(decides & ~lanes if lanes is not None else decides)
    return both & ~_union(deciding)


def _setp(em: CheckedEmitter, ins: Instruction) -> Taint:
    """With a combined predicate that decides alone, the comparison does not matter."""
    combine = next((p for p in ins.parts[2:] if p in ("and", "or", "xor")), None)
    compared = em.any_of(mask for operand in ins.operands[1:3] for mask in em.taint(operand))
    if ins.operands[1] == ins.operands[2] and ins.parts[-1][0] in "bus":
        compared = None
    if combine is None:
        return (compared,)
    other = em.lanes(ins.operands[3])
    if compared is not None and combine in ("and", "or"):
        value = em.predicate(ins.operands[3]).bits_as(I32)
        compared = compared & (value if combine == "and" else ~value)
    return (em.any_of((compared, other)),)


def _select(em: CheckedEmitter, ins: Instruction) -> Taint:
    """selp, slct: the taint of what is selected, and of what selects."""
    kind = ins.parts[1] if ins.parts[0] == "slct" else ins.parts[-1]
    nbytes = TYPE_BITS[kind] // 8
    yes, no = (em.taint(operand, 8 * nbytes) for operand in ins.operands[1:3])
    condition = em.lanes(ins.operands[3])
    if not any(yes) and not any(no):
        return (condition,) * nbytes
    if ins.parts[0] == "slct":
        chosen = em.read(ins.operands[3], 32).cmp("sge", 0).bits_as(I32)
    else:
        chosen = em.predicate(ins.operands[3]).bits_as(I32)
    cache: dict[tuple[str, str], Val | None] = {}
    out = []
    for a, c in zip(yes, no, strict=True):
        key = (a.text if a else "", c.text if c else "")
        if key not in cache:
            parts = (a & chosen if a else None, c & ~chosen if c else None, condition)
            cache[key] = em.any_of(parts)
        out.append(cache[key])
    return tuple(out)


# -- moved bytes


def _move(em: CheckedEmitter, ins: Instruction) -> Taint:
    if ins.parts[-1] == "pred":
        return (em.lanes(ins.operands[1]),)
    return em.taint(ins.operands[1], 8 * _bytes(ins))


def _shifted(em: CheckedEmitter, taint: Taint, bits: int) -> Taint:
    """Bytes of a value shifted left by ``bits`` (right: negative); zeros come in."""
    out: list[Val | None] = []
    for i in range(len(taint)):
        low = (8 * i - bits) // 8
        places = {low, low + 1 if bits % 8 else low}
        out.append(em.any_of(taint[p] for p in sorted(places) if 0 <= p < len(taint)))
    return tuple(out)


def _shift(em: CheckedEmitter, ins: Instruction) -> Taint:
    amount, nbytes = ins.operands[2], _bytes(ins)
    taint = em.taint(ins.operands[1], 8 * nbytes)
    if not isinstance(amount, Imm):
        return _default(em, ins)
    count = min(int(amount.value) & 0xFFFFFFFF, 8 * nbytes)
    if ins.parts[0] == "shl":
        return _shifted(em, taint, count)
    if ins.parts[-1][0] == "s":
        taint = taint + (taint[-1],) * nbytes
    return _shifted(em, taint, -count)[:nbytes]


def _funnel(em: CheckedEmitter, ins: Instruction) -> Taint:
    amount = ins.operands[3]
    if not isinstance(amount, Imm):
        return _default(em, ins)
    count = int(amount.value) & 31 if "wrap" in ins.parts else min(int(amount.value), 32)
    wide = em.taint(ins.operands[1], 32) + em.taint(ins.operands[2], 32)
    if ins.parts[1] == "l":
        return _shifted(em, wide, count)[4:]
    return _shifted(em, wide, -count)[:4]


def _permute(em: CheckedEmitter, ins: Instruction) -> Taint:
    selector = ins.operands[3]
    if not isinstance(selector, Imm) or len(ins.parts) > 2:
        return _default(em, ins)
    wide = em.taint(ins.operands[1], 32) + em.taint(ins.operands[2], 32)
    return tuple(wide[int(selector.value) >> 4 * byte & 7] for byte in range(4))


def _lop3(em: CheckedEmitter, ins: Instruction) -> Taint:
    """Byte by byte, of the operands on which a bit of the byte depends."""
    table = ins.operands[4]
    assert isinstance(table, Imm)
    sources = ins.operands[1:4]
    taints = [em.taint(operand, 32) for operand in sources]
    out = []
    for byte in range(4):
        needed: set[int] = set()
        for bit in range(8 * byte, 8 * byte + 8):
            needed |= _lop3_needs(int(table.value), sources, bit)
        out.append(em.any_of(taints[position][byte] for position in sorted(needed)))
    return tuple(out)


def _lop3_needs(table: int, sources: Sequence[Operand], bit: int) -> set[int]:
    """Sources (0, 1, 2) on which a bit of the result depends, given the literals among them."""
    strides = (4, 2, 1)
    rows = [
        row
        for row in range(8)
        if all(
            not isinstance(source, Imm) or bool(row & stride) == bool(int(source.value) >> bit & 1)
            for source, stride in zip(sources, strides, strict=True)
        )
    ]
    return {
        position
        for position, stride in enumerate(strides)
        for row in rows
        if row + stride in rows and not row & stride and (table >> row ^ table >> row + stride) & 1
    }


def _extract(em: CheckedEmitter, ins: Instruction) -> Taint:
    start, length = ins.operands[2:4]
    if not (isinstance(start, Imm) and isinstance(length, Imm)):
        return _default(em, ins)
    nbytes = _bytes(ins)
    first, count = int(start.value) & 255, int(length.value) & 255
    taint = _shifted(em, em.taint(ins.operands[1], 8 * nbytes), -min(first, 8 * nbytes))
    used = min(-(-count // 8), nbytes)
    sign = taint[used - 1] if used and ins.parts[-1][0] == "s" else None
    return taint[:used] + (sign,) * (nbytes - used)


def _insert(em: CheckedEmitter, ins: Instruction) -> Taint:
    start, length = ins.operands[3:5]
    if not (isinstance(start, Imm) and isinstance(length, Imm)):
        return _default(em, ins)
    nbytes = _bytes(ins)
    first, count = int(start.value) & 255, int(length.value) & 255
    field = _shifted(em, em.taint(ins.operands[1], 8 * nbytes), min(first, 8 * nbytes))
    base = em.taint(ins.operands[2], 8 * nbytes)
    out: list[Val | None] = []
    for i in range(nbytes):
        inside = 8 * i < first + count and 8 * i + 8 > first
        whole = first <= 8 * i and 8 * i + 8 <= first + count
        out.append(field[i] if whole else em.any_of((field[i], base[i])) if inside else base[i])
    return tuple(out)


# -- conversions


def _convert(em: CheckedEmitter, ins: Instruction) -> Taint:
    to, source = ins.parts[-2], ins.parts[-1]
    if ins.parts[1] == "pack" or "sat" in ins.parts:
        return _default(em, ins)
    if to[0] in "us" and source[0] in "us":
        into, out_of = TYPE_BITS[to] // 8, TYPE_BITS[source] // 8
        taint = em.taint(ins.operands[1], 8 * out_of)
        top = taint[-1] if source[0] == "s" else None
        taint = (taint + (top,) * into)[:into]
        extra = taint[-1] if to[0] == "s" else None
        return taint + (extra,) * (_width(em, ins.operands[0]) - into)
    if to.endswith("x2") and to != "e2m1x2" and len(ins.operands) >= 3 and source == "f32":
        half = 2 if to in ("f16x2", "bf16x2") else 1
        upper, lower = (em.lanes(operand) for operand in ins.operands[1:3])
        common = em.any_of(mask for operand in ins.operands[3:] for mask in em.taint(operand))
        parts = [em.any_of((lanes, common)) for lanes in (lower, upper)]
        return (parts[0],) * half + (parts[1],) * half
    if to.endswith("x2") and source.endswith("x2") and len(ins.operands) == 2:
        return _convert_pairs(em, ins, to, source)
    return _default(em, ins)


def _convert_pairs(em: CheckedEmitter, ins: Instruction, to: str, source: str) -> Taint:
    width = {"e2m1x2": 1, "f16x2": 4, "bf16x2": 4}
    into, out_of = width.get(to, 2), width.get(source, 2)
    if into == 1 or out_of == 1:
        return _default(em, ins)
    taint = em.taint(ins.operands[1], 8 * out_of)
    half = out_of // 2
    parts = [em.any_of(taint[:half]), em.any_of(taint[half:])]
    return (parts[0],) * (into // 2) + (parts[1],) * (into // 2)


_RULES: dict[str, Rule] = {
    "add": _packed, "sub": _difference, "fma": _packed, "min": _packed, "max": _packed,
    "neg": _packed, "abs": _packed, "mul": _multiply, "mad": _multiply,
    "and": _logic, "or": _logic, "xor": _difference, "not": _logic, "setp": _setp,
    "selp": _select, "slct": _select, "mov": _move, "shl": _shift, "shr": _shift, "shf": _funnel,
    "prmt": _permute, "lop3": _lop3, "bfe": _extract, "bfi": _insert, "cvt": _convert,
}  # fmt: skip
