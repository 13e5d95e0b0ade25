"""Arguments for the equivalence of mutants that come from watching the sound kernel run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from rubin_moe.emulator import EmulationError
from rubin_moe.emulator.isa import tcgen05_data, tcgen05_mma
from rubin_moe.emulator.isa.descriptors import decode_instruction
from rubin_moe.emulator.isa.handoff import UnitSite
from rubin_moe.emulator.issue import lanes, values
from rubin_moe.emulator.machine import Warp
from rubin_moe.emulator.ptx.ast import Entry, Imm, Instruction, Mem, Operand, Reg
from tests.emulator.mutants.edits import Mutation, apply, make
from tests.emulator.mutants.trial import Bench
from tests.emulator.mutants.watching import (
    REGISTERS,
    SEEDS,
    log,
    log_waits,
    meet,
    traps,
    watching,
)

_PARAMETER = ("ld", "param")
_DESCRIPTOR_FIELDS = ("format code", "bit 3", "bit 31", "scale format", "SF id")


def never_performed(bench: Bench, mutation: Mutation) -> str:
    """A trap under the same guard is never executed."""
    ins = bench.entry.instructions[mutation.index]
    if ins.guard is None:
        return ""
    edits = {mutation.index: (make("trap", ins.line, ins),)}
    probe = Mutation("probe", mutation.index, ins.line, ins.opcode, "trap", edits)
    if bench.judge(probe, SEEDS).kind:
        return ""
    return "never performed: a trap under the same guard is not executed in this launch"


def covers_nothing(bench: Bench, mutation: Mutation) -> str:
    """A wait for a group, or for tensor-memory accesses, when nothing of that kind is open."""
    kinds = {"cp_async_group": "cp.async", "bulk_group": "bulk", "wgmma_group": "wgmma"}
    family = bench.kernel.families[mutation.index].name
    ins = bench.entry.instructions[mutation.index]
    if mutation.operator != "drop wait" or family not in (*kinds, "tmem_wait"):
        return ""
    kind = kinds.get(family, ins.parts[1])
    covered = 0

    def look(site: UnitSite, warp: Warp, mask: int) -> None:
        nonlocal covered
        allowed = values(site, warp, lanes(mask)[0])[0] if site.slots else 0
        groups = warp.groups[kind]
        covered += sum(len(group) for group in groups[: max(len(groups) - allowed, 0)])
        if family == "tmem_wait" or "wait_all" in site.parts:
            covered += len(warp.open_group[kind])

    with watching(look, mutation.index):
        for seed in SEEDS:
            bench.run(bench.load(bench.entry), seed)
    return "" if covered else "the wait covers no operation: all were waited for before"


def last_wait(bench: Bench, mutation: Mutation) -> str:
    """An mbarrier wait after which the warp only waits and exits.

    Shown by a trap before every instruction that does more, armed by the wait.
    """
    families, instructions = bench.kernel.families, bench.entry.instructions
    if families[mutation.index].name != "mbarrier_wait":
        return ""
    if mutation.operator not in ("drop wait", "flip phase", "shift barrier"):
        return ""
    edits: dict[int, tuple[Instruction, ...]] = {}
    for index, ins in enumerate(instructions):
        lines = [ins]
        harmless = {*REGISTERS, "mbarrier_wait", "branch", "leave", "hint"}
        if families[index].name not in harmless and ins.parts[:2] != _PARAMETER:
            trap = replace(make("trap", ins.line), guard=Reg("%armed"))
            lines.insert(0, trap)
        if index == mutation.index:
            lines.append(make("setp.eq.u32 %armed, 0, 0", ins.line, ins))
        if index == 0:
            lines.insert(0, make("setp.ne.u32 %armed, 0, 0", ins.line))
        edits[index] = tuple(lines)
    if traps(bench, replace(mutation, edits=edits, registers={"%armed": "pred"})):
        return ""
    return (
        "after the wait the warp only waits and exits, and no operation reaches the CTA after "
        "its exit (order: exit)"
    )


def first_phase(bench: Bench, mutation: Mutation) -> str:
    """A wait for the phase before an mbarrier's first, which passes at once by definition.

    Shown by a log of all mbarrier waits: here every thread waits for parity 1 of mbarriers for
    which it has not waited before.
    """
    if mutation.operator != "drop wait":
        return ""
    if bench.kernel.families[mutation.index].name != "mbarrier_wait":
        return ""
    for seed in SEEDS:
        seen: set[tuple[int, ...]] = set()
        for site, who, where, address, parity in log_waits(bench, seed):
            key = (who, where, address)
            if site == mutation.index and (parity != 1 or key in seen):
                return ""
            seen.add(key)
    return (
        "every thread waits here once for an mbarrier, for parity 1: the phase before the first, "
        "which is complete by definition"
    )


def never_awaited(bench: Bench, mutation: Mutation) -> str:
    """An arrival at mbarriers of which nobody waits for a phase that can be incomplete.

    Shown by logs of the arrivals and of all waits: those of the same mbarriers (of any CTA) are for
    parity 1 alone, the phase before the first, and each thread's only one.
    """
    arrivals = ("tmem_commit", "mbarrier_arrive", "cp_async_arrive")
    if mutation.operator not in ("drop commit", "drop arrive"):
        return ""
    if bench.kernel.families[mutation.index].name not in arrivals:
        return ""
    ins = bench.entry.instructions[mutation.index]
    address = next(o for o in ins.operands if isinstance(o, Mem))
    if bench.entry.registers.get(getattr(address.base, "name", ""), "b32").endswith("64"):
        return ""
    for seed in SEEDS:
        logged = log(bench, seed, {mutation.index: (address, Imm(0))})
        arrived = {row[3] & _OFFSET for row in logged}
        seen: set[tuple[int, ...]] = set()
        for _, who, where, waited, parity in log_waits(bench, seed):
            if waited & _OFFSET in arrived:
                if parity != 1 or (who, where, waited) in seen:
                    return ""
                seen.add((who, where, waited))
    return (
        "nobody waits for the phases that it completes: in this launch the ring of stages does "
        "not come around"
    )


def one_thread(bench: Bench, mutation: Mutation) -> str:
    """bar.sync of all threads around which, up to the next ones, one thread alone does anything.

    Shown by a log of who executes the instructions between the barriers before and after it.
    """
    ins = bench.entry.instructions[mutation.index]
    if mutation.operator != "drop wait" or ins.parts[:2] != ("bar", "sync"):
        return ""
    if len(ins.operands) != 1:
        return ""
    between: dict[int, tuple[Operand, Operand]] = {}
    for step in (1, -1):
        at = mutation.index + step
        while bench.entry.instructions[at].opcode != ins.opcode:
            leaves = bench.kernel.families[at].name in ("branch", "leave")
            if leaves or max(at, at - step) in bench.kernel.labelled:
                return ""
            if bench.kernel.families[at].name not in {*REGISTERS, "hint"}:
                between[at] = Imm(0), Imm(0)
            at += step
        if bench.entry.instructions[at].operands != ins.operands:
            return ""
    if len({row[1] for row in log(bench, SEEDS[0], between)}) > 1:
        return ""
    return (
        "between the barriers before and after it one thread alone accesses memory: its own order"
    )


_OFFSET = (1 << 24) - 1


def same_groups(bench: Bench, mutation: Mutation) -> str:
    """Every wait for a group leaves as many operations open as before."""
    kinds = {"cp_async": "cp.async", "cp_async_group": "cp.async", "bulk_tensor": "bulk",
             "bulk_copy": "bulk", "bulk_group": "bulk", "wgmma": "wgmma",
             "wgmma_group": "wgmma"}  # fmt: skip
    family = bench.kernel.families[mutation.index].name
    if mutation.operator not in ("swap", "drop commit", "drop wait") or family not in kinds:
        return ""
    kind = kinds[family]
    waits = {f"{name}_group" for name in ("cp_async", "bulk", "wgmma")}

    def open_after(entry: Entry) -> list[dict[tuple[object, ...], list[int]]]:
        kernel = bench.load(entry)
        sites = [s.index for s in kernel.compiled.sites.values() if s.family in waits]
        results = []
        for seed in SEEDS:
            rows: dict[tuple[object, ...], list[int]] = {}

            def look(site: UnitSite, warp: Warp, mask: int, rows: Any = rows) -> None:
                if "wait" not in site.opcode or not site.opcode.startswith(_PREFIX[kind]):
                    return
                allowed = values(site, warp, lanes(mask)[0])[0] if site.slots else 0
                groups = warp.groups[kind]
                kept = [len(g) for g in groups[max(len(groups) - allowed, 0) :]]
                left = sum(kept) + len(warp.open_group[kind]) * ("wait_all" not in site.parts)
                key = (*warp.cta.coordinates, warp.index)
                if not rows.get(key) or rows[key][-2:] != [site.line, left]:
                    rows.setdefault(key, []).extend([site.line, left])

            with watching(look, *sites):
                bench.run(kernel, seed)
            results.append(rows)
        return results

    try:
        if open_after(bench.entry) != open_after(apply(bench.entry, mutation)):
            return ""
    except EmulationError:
        return ""
    return "every wait for a group leaves as many operations open as before"


_PREFIX = {"cp.async": "cp.async.wait", "bulk": "cp.async.bulk.wait", "wgmma": "wgmma.wait"}


def same_decoding(bench: Bench, mutation: Mutation) -> str:
    """The changed bit of the instruction descriptor means nothing."""
    if mutation.operator not in _DESCRIPTOR_FIELDS or "bit" not in mutation.what:
        return ""
    if mutation.what.startswith("address"):
        return ""
    flipped = 1 << int(mutation.what.split("bit ")[1].split()[0])
    pairs: set[tuple[Any, ...]] = set()
    original = decode_instruction

    def record(word: int, kind: str, arch: str, group: int, vec: int = 0) -> Any:
        pairs.add((word, kind, arch, group, vec))
        return original(word, kind, arch, group, vec)

    from rubin_moe.emulator.isa import tcgen05_mma_decode

    tcgen05_mma_decode._decode_mma.cache_clear()
    with patch.object(tcgen05_mma_decode, "decode_instruction", record):
        bench.run(bench.load(bench.entry), SEEDS[0])
    for word, *rest in pairs:
        try:
            changed = original(word ^ flipped, *rest)
        except RuntimeError:
            return ""
        if changed != original(word, *rest):
            return ""
    return "the bit means nothing: every descriptor decodes to the same instruction"


def independent_copy(bench: Bench, mutation: Mutation) -> str:
    """tcgen05.cp that comes after a product that reads none of its columns."""
    if mutation.operator != "swap" or bench.kernel.families[mutation.index].name != "tmem_copy":
        return ""
    later = max(mutation.edits)
    if bench.kernel.families[later].name != "tcgen05_mma":
        return ""
    ops: dict[int, list[Any]] = {mutation.index: [], later: []}
    at = -1

    def look(site: UnitSite, warp: Warp, mask: int) -> None:
        nonlocal at
        at = site.index

    def recording(decode: Callable[..., Any]) -> Callable[..., Any]:
        def decoded(*args: Any, **kwargs: Any) -> Any:
            op = decode(*args, **kwargs)
            if at in ops:
                ops[at].append(op)
            return op

        return decoded

    with (
        watching(look, *bench.load(bench.entry).compiled.sites),
        patch.object(tcgen05_data, "decode_copy", recording(tcgen05_data.decode_copy)),
        patch.object(tcgen05_mma, "decode_mma", recording(tcgen05_mma.decode_mma)),
    ):
        bench.run(bench.load(bench.entry), SEEDS[0])

    def unique(site: int) -> list[Any]:
        return list({id(op): op for op in ops[site]}.values())

    copies = [place for op in unique(mutation.index) for place in op.writes()]
    products = [p for op in unique(later) for p in (*op.reads(), *op.writes())]
    if not copies or not products or any(meet(a, b) for a in copies for b in products):
        return ""
    return "the copy writes no column that the product reads or writes: they have no order"
