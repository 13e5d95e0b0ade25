"""Mutants that nothing can tell from the sound kernel, each with the argument why.

An argument is checked, on the kernel's code or by watching the sound kernel run; what is not shown
here counts as a survivor. Watching shows something for the launch at hand only: a fault in what a
launch never does is none in that launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from rubin_moe.emulator import units, worker
from rubin_moe.emulator.isa import tcgen05_data, tcgen05_mma
from rubin_moe.emulator.isa.descriptors import decode_instruction
from rubin_moe.emulator.isa.footprint import Footprint
from rubin_moe.emulator.isa.handoff import UnitSite
from rubin_moe.emulator.issue import Handler, lanes, values
from rubin_moe.emulator.lower import branch_target
from rubin_moe.emulator.machine import LaunchContext, Warp
from rubin_moe.emulator.ptx.ast import Imm
from tests.emulator.mutants.edits import Mutation, make
from tests.emulator.mutants.trial import Bench

_SEEDS = (1, 2)
Argument = Callable[[Bench, Mutation], str]
#: Families that touch nothing but the warp's own registers.
_REGISTERS = {"integer", "bits", "float", "special_function", "compare", "move", "convert_integer",
              "convert_float", "convert_small", "warp_shuffle", "warp_vote", "warp_elect",
              "warp_mask", "sleep"}  # fmt: skip
_PARAMETER = ("ld", "param")
_DESCRIPTOR_FIELDS = ("format code", "bit 3", "bit 31", "scale format", "SF id")


def proof(bench: Bench, mutation: Mutation) -> str:
    """Why the mutant is equivalent, or "" where there is no such argument."""
    for argument in ARGUMENTS:
        found = argument(bench, mutation)
        if found:
            return found
    return ""


@contextmanager
def _watching(look: Callable[[UnitSite, Warp, int], None], *sites: int) -> Iterator[None]:
    """Calls ``look`` before each execution of the sites that Python performs."""
    bind = units.bind

    def watched(site: UnitSite, context: LaunchContext) -> Handler:
        handler = bind(site, context)
        if site.index not in sites:
            return handler

        def looking(warp: Warp, mask: int) -> bool:
            look(site, warp, mask)
            return handler(warp, mask)

        return looking

    with patch.object(worker, "bind", watched):
        yield


def never_performed(bench: Bench, mutation: Mutation) -> str:
    """A trap under the same guard is never executed."""
    ins = bench.entry.instructions[mutation.index]
    if ins.guard is None:
        return ""
    edits = {mutation.index: (make("trap", ins.line, ins),)}
    probe = Mutation("probe", mutation.index, ins.line, ins.opcode, "trap", edits)
    if bench.judge(probe, _SEEDS).rule == "trap":
        return ""
    return "never performed: a trap under the same guard is not executed in this launch"


def renamed_barrier(bench: Bench, mutation: Mutation) -> str:
    """bar.sync of all threads of the CTA, with a number that no other instruction uses."""
    ins = bench.entry.instructions[mutation.index]
    if mutation.operator != "shift barrier" or ins.parts[:2] != ("bar", "sync"):
        return ""
    others = [
        other.operands[0]
        for index, other in bench.kernel.of("barrier")
        if index != mutation.index and other.operands
    ]
    first = ins.operands[0]
    if not isinstance(first, Imm) or not all(isinstance(o, Imm) for o in others):
        return ""
    if len(ins.operands) > 1 or first.value + 1 in {o.value for o in others if isinstance(o, Imm)}:
        return ""
    return (
        "a barrier of all threads that no other instruction uses: it opens when all are at this "
        "one instruction, as before"
    )


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

    with _watching(look, mutation.index):
        for seed in _SEEDS:
            bench.run(bench.load(bench.entry), seed)
    return "" if covered else "the wait covers no operation: all were waited for before"


def last_wait(bench: Bench, mutation: Mutation) -> str:
    """An mbarrier wait after which the warp only waits and exits."""
    if bench.kernel.families[mutation.index].name != "mbarrier_wait":
        return ""
    if mutation.operator not in ("drop wait", "flip phase", "shift barrier"):
        return ""
    if not _only_registers_after(bench, mutation.index + 1):
        return ""
    return (
        "after the wait the warp only waits and exits, and no operation reaches the CTA after "
        "its exit (order: exit)"
    )


def _only_registers_after(bench: Bench, start: int) -> bool:
    entry, families = bench.entry, bench.kernel.families
    seen, todo = set(), [start]
    while todo:
        at = todo.pop()
        if at in seen or at >= len(entry.instructions):
            continue
        seen.add(at)
        ins, name = entry.instructions[at], families[at].name
        if name == "leave" and ins.guard is None:
            continue
        if name == "branch":
            todo.append(branch_target(ins, entry))
            if ins.guard is None:
                continue
        elif name not in {*_REGISTERS, "mbarrier_wait", "leave"} and ins.parts[:2] != _PARAMETER:
            return False
        todo.append(at + 1)
    return True


def second_fence(bench: Bench, mutation: Mutation) -> str:
    """An equal fence stands before or after it, with nothing but registers between."""
    if mutation.operator != "drop fence":
        return ""
    ins = bench.entry.instructions[mutation.index]
    for step in (1, -1):
        at = mutation.index + step
        while 0 <= at < len(bench.entry.instructions):
            label = max(at, at - step)
            if label in bench.kernel.labelled:
                break
            other = bench.entry.instructions[at]
            if other.opcode == ins.opcode and other.guard == ins.guard:
                return f"line {other.line} is the same fence, with only registers between"
            if bench.kernel.families[at].name not in _REGISTERS:
                break
            at += step
    return ""


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
        bench.run(bench.load(bench.entry), _SEEDS[0])
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
        _watching(look, *bench.load(bench.entry).compiled.sites),
        patch.object(tcgen05_data, "decode_copy", recording(tcgen05_data.decode_copy)),
        patch.object(tcgen05_mma, "decode_mma", recording(tcgen05_mma.decode_mma)),
    ):
        bench.run(bench.load(bench.entry), _SEEDS[0])
    copies = [place for op in set(ops[mutation.index]) for place in op.writes()]
    products = [p for op in set(ops[later]) for p in (*op.reads(), *op.writes())]
    if not copies or not products or any(_meet(a, b) for a in copies for b in products):
        return ""
    return "the copy writes no column that the product reads or writes: they have no order"


def _meet(a: Footprint, b: Footprint) -> bool:
    """Whether two footprints share a cell of tensor memory."""
    if (a.space, b.space) != ("tmem", "tmem") or a.rank != b.rank:
        return False
    x, y = a.ranges[:, None], b.ranges[None]
    rows = (x[..., 0] < y[..., 1]) & (y[..., 0] < x[..., 1])
    columns = (x[..., 2] < y[..., 3]) & (y[..., 2] < x[..., 3])
    return bool(np.any(rows & columns))


ARGUMENTS: tuple[Argument, ...] = (
    renamed_barrier,
    second_fence,
    last_wait,
    covers_nothing,
    same_decoding,
    independent_copy,
    never_performed,
)
