"""The faults: each operator finds its sites in an entry and says what it makes of them.

Every fault is one that a person porting or tuning such a kernel can make: something missing, a
phase, count, index, offset or code off by a step, two asynchronous operations in the wrong order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from rubin_moe.emulator.forms import Family
from rubin_moe.emulator.lower import branch_target, check_forms, defs_and_uses
from rubin_moe.emulator.ptx.ast import Entry, Imm, Instruction, Mem, Reg, Vec
from tests.emulator.mutants.edits import Mutation, combined, make, text_of, with_operand

Sites = Iterator[Mutation]
Operator = Callable[["Kernel"], Sites]

_WAIT_GROUPS = ("cp_async_group", "bulk_group", "wgmma_group", "tmem_wait")
_PIPES = (
    {"tmem_copy", "tcgen05_mma", "tmem_commit"},
    {"cp_async", "cp_async_group", "cp_async_arrive"},
    {"bulk_tensor", "bulk_copy", "bulk_group"},
    {"wgmma", "wgmma_group"},
)
_ASYNCHRONOUS = set.union(*_PIPES)
_COMMITS = ("tmem_commit", "cp_async_group", "cp_async_arrive", "bulk_group", "wgmma_group")


class Kernel:
    """An entry with the families of its instructions; ``pairs``: its CTAs work in pairs."""

    def __init__(self, entry: Entry, cluster_size: int) -> None:
        self.entry = entry
        self.cluster_size = cluster_size
        self.families: list[Family] = check_forms(entry)
        self.labelled = set(entry.labels.values())

    def of(self, *families: str) -> Iterator[tuple[int, Instruction]]:
        """Instructions of some families."""
        for index, (ins, family) in enumerate(
            zip(self.entry.instructions, self.families, strict=True)
        ):
            if family.name in families:
                yield index, ins


def _dropped(operator: str, index: int, ins: Instruction, what: str = "dropped") -> Mutation:
    return Mutation(operator, index, ins.line, ins.opcode, what, {index: ()})


def _changed(
    kernel: Kernel, operator: str, index: int, position: int, value: int, how: str, what: str
) -> Sites:
    ins = kernel.entry.instructions[index]
    made = combined(kernel.entry, ins, position, value, how)
    if made is not None:
        yield Mutation(operator, index, ins.line, ins.opcode, what, {index: made[0]}, made[1])


# ---- something is missing


def drop_wait(kernel: Kernel) -> Sites:
    """An mbarrier wait that goes on at once, a group or tensor-memory wait, a barrier."""
    for index, ins in kernel.of("mbarrier_wait"):
        predicate = ins.operands[0]
        go_on = make("setp.eq.u32 %p, 0, 0", ins.line, ins)
        edits = {index: (with_operand(go_on, 0, predicate),)}
        yield Mutation("drop wait", index, ins.line, ins.opcode, "true at once", edits)
    for index, ins in kernel.of(*_WAIT_GROUPS):
        if "wait" in ins.opcode:
            yield _dropped("drop wait", index, ins)
    for index, ins in kernel.of("warp_barrier", "cluster_wait"):
        yield _dropped("drop wait", index, ins)
    for index, ins in kernel.of("barrier"):
        if "sync" in ins.parts:
            yield _dropped("drop wait", index, ins)
            if len(ins.operands) == 2:
                arrive = make("bar.arrive 0, 0", ins.line, ins)
                arrive = with_operand(with_operand(arrive, 0, ins.operands[0]), 1, ins.operands[1])
                yield Mutation(
                    "drop wait", index, ins.line, ins.opcode, "arrives only", {index: (arrive,)}
                )


def drop_fence(kernel: Kernel) -> Sites:
    """A fence of memory, of a proxy, of wgmma's registers."""
    for index, ins in kernel.of("hint"):
        if ins.parts[0] in ("fence", "membar") or "fence" in ins.opcode:
            yield _dropped("drop fence", index, ins)


def drop_commit(kernel: Kernel) -> Sites:
    """A commit of tcgen05 operations, or of a group of copies."""
    for index, ins in kernel.of("tmem_commit", "cp_async_arrive"):
        yield _dropped("drop commit", index, ins)
    for index, ins in kernel.of("cp_async_group", "bulk_group", "wgmma_group"):
        if "commit_group" in ins.opcode:
            yield _dropped("drop commit", index, ins)


def drop_arrive(kernel: Kernel) -> Sites:
    """An arrival at an mbarrier, at a named or at the cluster's barrier."""
    for index, ins in kernel.of("mbarrier_arrive", "mbarrier_tx", "cluster_arrive"):
        yield _dropped("drop arrive", index, ins)
    for index, ins in kernel.of("barrier"):
        if "arrive" in ins.parts:
            yield _dropped("drop arrive", index, ins)


# ---- something is off by a step


def flip_phase(kernel: Kernel) -> Sites:
    """A wait for the other parity."""
    for index, ins in kernel.of("mbarrier_wait"):
        if "parity" in ins.parts:
            yield from _changed(kernel, "flip phase", index, 2, 1, "xor", "other parity")


def change_expect_tx(kernel: Kernel) -> Sites:
    """16 bytes more or fewer than the copies bring."""
    for index, ins in kernel.of("mbarrier_arrive", "mbarrier_tx"):
        if "expect_tx" in ins.opcode:
            for delta in (16, -16):
                last = len(ins.operands) - 1
                yield from _changed(
                    kernel, "expect_tx", index, last, delta, "add", f"{delta:+} bytes"
                )


def shift_barrier(kernel: Kernel) -> Sites:
    """The neighbouring mbarrier or named barrier."""
    users = ("mbarrier_init", "mbarrier_arrive", "mbarrier_tx", "mbarrier_wait", "tmem_commit",
             "cp_async_arrive")  # fmt: skip
    for index, ins in kernel.of(*users, "bulk_tensor", "bulk_copy"):
        addresses = [i for i, o in enumerate(ins.operands) if isinstance(o, Mem)]
        copies = ins.parts[0] == "cp" and "bulk" in ins.parts
        if copies and "mbarrier::complete_tx::bytes" not in ins.parts:
            continue
        position = addresses[2] if copies else addresses[0]
        for delta in (8, -8):
            yield from _changed(
                kernel, "shift barrier", index, position, delta, "add", f"mbarrier {delta:+} bytes"
            )
    for index, ins in kernel.of("barrier"):
        if isinstance(ins.operands[0], Imm):
            yield from _changed(kernel, "shift barrier", index, 0, 1, "add", "the next barrier")


def shift_smem(kernel: Kernel) -> Sites:
    """Shared memory a step further: of threads, of copies, of operands."""
    for index, ins in kernel.of("load", "store", "matrix_load", "matrix_store", "cp_async"):
        if not any(part.startswith("shared") for part in ins.parts):
            continue
        position = next(i for i, o in enumerate(ins.operands) if isinstance(o, Mem))
        for delta in (16, 1024):
            yield from _changed(
                kernel, "shift smem", index, position, delta, "add", f"{delta:+} bytes"
            )
    for index, ins in kernel.of("bulk_tensor"):
        position = 0 if "mbarrier::complete_tx::bytes" in ins.parts else 1
        for delta in (128, 1024):
            yield from _changed(
                kernel, "shift smem", index, position, delta, "add", f"{delta:+} bytes"
            )
    for index, position, which in _descriptors(kernel):
        for delta in (16, 1024):
            what = f"descriptor of {which} {delta:+} bytes"
            yield from _changed(kernel, "shift smem", index, position, delta >> 4, "add", what)


def _descriptors(kernel: Kernel) -> Iterator[tuple[int, int, str]]:
    for index, _ in kernel.of("tmem_copy"):
        yield index, 1, "the scales"
    for index, ins in kernel.of("tcgen05_mma"):
        if not isinstance(ins.operands[1], Mem):
            yield index, 1, "A"
        yield index, 2, "B"
    for index, ins in kernel.of("wgmma"):
        if isinstance(ins.operands[1], Reg):
            yield index, 1, "A"
        yield index, 2, "B"


def shift_tmem(kernel: Kernel) -> Sites:
    """Tensor memory some columns further."""
    places = [(i, 1, "") for i, _ in kernel.of("tmem_load")]
    places += [(i, 0, "") for i, _ in kernel.of("tmem_store", "tmem_copy")]
    for index, ins in kernel.of("tcgen05_mma"):
        places.append((index, 0, "D "))
        if "block_scale" in ins.parts:
            places += [(index, 4, "SFA "), (index, 5, "SFB ")]
    for index, position, which in places:
        for delta in (4, 32):
            yield from _changed(
                kernel, "shift tmem", index, position, delta, "add", f"{which}{delta:+} columns"
            )


def _descriptor_bits(operator: str, bits: dict[int, str]) -> Operator:
    def sites(kernel: Kernel) -> Sites:
        for index, _ in kernel.of("tcgen05_mma"):
            for bit, name in bits.items():
                yield from _changed(
                    kernel, operator, index, 3, 1 << bit, "xor", f"{name}: bit {bit} flipped"
                )

    return sites


change_format = _descriptor_bits("format code", {7: "A", 8: "A", 9: "A", 10: "B", 11: "B", 12: "B"})
flip_bit3 = _descriptor_bits("bit 3", {3: "K size, upper"})
flip_bit31 = _descriptor_bits("bit 31", {31: "K size"})
change_scale_format = _descriptor_bits("scale format", {23: "scale format", 24: "scale format"})


def change_sf_id(kernel: Kernel) -> Sites:
    """Another scale-factor id: in the descriptor, in an address, or in both."""
    ids = {4: "SFB", 5: "SFB", 29: "SFA", 30: "SFA"}
    yield from _descriptor_bits("SF id", ids)(kernel)
    for index, ins in kernel.of("tcgen05_mma"):
        if "block_scale" not in ins.parts:
            continue
        for position, which in ((4, "SFA"), (5, "SFB")):
            bit = 31
            yield from _changed(
                kernel, "SF id", index, position, 1 << bit, "xor", f"address of {which}: bit {bit}"
            )


def shift_second_cta(kernel: Kernel) -> Sites:
    """The second CTA of a pair loads its tile some rows further."""
    if kernel.cluster_size == 1:
        return
    for index, ins in kernel.of("bulk_tensor"):
        source = ins.operands[1]
        if "mbarrier::complete_tx::bytes" not in ins.parts or not isinstance(source, Mem):
            continue
        assert source.coords is not None
        for axis in range(1, min(len(source.coords.items), 3)):
            old = source.coords.items[axis]
            items = list(source.coords.items)
            items[axis] = Reg("%mutant1")
            moved = Mem(source.base, source.offset, Vec(tuple(items)))
            lines = (
                make("mov.u32 %mutant0, %cluster_ctarank", ins.line),
                make("and.b32 %mutant0, %mutant0, 1", ins.line),
                make("shl.b32 %mutant0, %mutant0, 3", ins.line),
                with_operand(make("add.s32 %mutant1, %mutant0, 0", ins.line), 2, old),
                with_operand(ins, 1, moved),
            )
            yield Mutation(
                "second CTA", index, ins.line, ins.opcode, f"coordinate {axis} +8 in odd CTAs",
                {index: lines}, {"%mutant0": "b32", "%mutant1": "b32"},
            )  # fmt: skip


# ---- something comes in the wrong order


def swap_asynchronous(kernel: Kernel) -> Sites:
    """An asynchronous operation comes after the next one of its pipe or group.

    Two TMA loads, or two tcgen05.cp, have no order, so pairs of one kind are left out. So are
    commits that come later: they cover more, which is no fault.
    """
    issued = [
        index
        for index, family in enumerate(kernel.families)
        if family.name in _ASYNCHRONOUS and "wait" not in kernel.entry.instructions[index].opcode
    ]
    for first, second in pairwise(issued):
        commits = kernel.families[first].name in _COMMITS
        if (
            not commits
            and _together(kernel, first, second)
            and _exchangeable(kernel, first, second)
        ):
            ins, other = kernel.entry.instructions[first], kernel.entry.instructions[second]
            what = f"after line {other.line}: {other.opcode}"
            edits = {first: (), second: (other, ins)}
            yield Mutation("swap", first, ins.line, ins.opcode, what, edits)


def _together(kernel: Kernel, first: int, second: int) -> bool:
    """Whether straight code leads from one to the other, but for short forward branches (the
    elect.sync blocks around single instructions)."""
    entry = kernel.entry
    between = range(first + 1, second)
    for index in between:
        ins = entry.instructions[index]
        name = kernel.families[index].name
        leaves = name == "branch" and not first < branch_target(ins, entry) <= second + 1
        if name == "leave" or leaves:
            return False
    inside = {at for at in kernel.labelled if first < at <= second}
    return all(
        index in range(first - 8, second)
        for index, ins in enumerate(entry.instructions)
        if kernel.families[index].name == "branch" and branch_target(ins, entry) in inside
    )


def _exchangeable(kernel: Kernel, first: int, second: int) -> bool:
    """Whether the order of the two means anything, and the registers of the first still hold."""
    names = {kernel.families[first].name, kernel.families[second].name}
    if len(names) != 2 or not any(names <= pipe for pipe in _PIPES):
        return False
    entry, families = kernel.entry, kernel.families
    used = set(defs_and_uses(entry.instructions[first], families[first], entry)[1])
    return not any(
        used & set(defs_and_uses(entry.instructions[i], families[i], entry)[0])
        for i in range(first + 1, second + 1)
    )


OPERATORS: dict[str, Operator] = {
    "drop wait": drop_wait,
    "drop fence": drop_fence,
    "drop commit": drop_commit,
    "drop arrive": drop_arrive,
    "flip phase": flip_phase,
    "expect_tx": change_expect_tx,
    "shift barrier": shift_barrier,
    "shift smem": shift_smem,
    "shift tmem": shift_tmem,
    "format code": change_format,
    "bit 3": flip_bit3,
    "bit 31": flip_bit31,
    "SF id": change_sf_id,
    "scale format": change_scale_format,
    "second CTA": shift_second_cta,
    "swap": swap_asynchronous,
}


def describe(ins: Instruction) -> str:
    """An instruction as PTX text."""
    guard = f"@{'!' if ins.guard_negated else ''}{ins.guard.name} " if ins.guard else ""
    return f"{guard}{ins.opcode} " + ", ".join(text_of(operand) for operand in ins.operands)
