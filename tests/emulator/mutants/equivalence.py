"""Mutants that nothing can tell from the sound kernel, each with the argument why.

An argument is checked, here on the kernel's code, in `observed.py` by watching the sound kernel
run; what is not shown counts as a survivor. Watching shows something for the launch at hand only: a
fault in what a launch never does is none in that launch.
"""

from __future__ import annotations

from collections.abc import Callable

from rubin_moe.emulator.errors import EmulatorError
from rubin_moe.emulator.isa.register_fence import predecessors
from rubin_moe.emulator.lower import branch_target, lower
from rubin_moe.emulator.ptx.ast import Imm
from tests.emulator.mutants import needless, observed
from tests.emulator.mutants.edits import Mutation
from tests.emulator.mutants.trial import Bench
from tests.emulator.mutants.watching import REGISTERS

Argument = Callable[[Bench, Mutation], str]


def proof(bench: Bench, mutation: Mutation) -> str:
    """Why the mutant is equivalent, or "" where there is no such argument."""
    for argument in ARGUMENTS:
        try:
            found = argument(bench, mutation)
        except EmulatorError:  # the kernel does not run with the probe in it
            continue
        if found:
            return found
    return ""


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


def bracketed_barrier(bench: Bench, mutation: Mutation) -> str:
    """bar.sync of all threads with another number, where the next barriers on every way to and
    from it are of all threads too: nobody is at another barrier meanwhile."""
    ins = bench.entry.instructions[mutation.index]
    if mutation.operator != "shift barrier" or ins.parts[:2] != ("bar", "sync"):
        return ""
    if len(ins.operands) > 1 or not isinstance(ins.operands[0], Imm):
        return ""
    before = predecessors(lower(bench.entry, deferred=True, checked=True))
    after: list[list[int]] = [[] for _ in before]
    for at, places in enumerate(before):
        for place in places:
            after[place].append(at)
    for ways in (before, after):
        seen, todo = {mutation.index}, list(ways[mutation.index])
        while todo:
            at = todo.pop()
            other = bench.entry.instructions[at]
            if at in seen:
                continue
            seen.add(at)
            if bench.kernel.families[at].name != "barrier":
                todo += ways[at]
            elif len(other.operands) > 1 or other.operands != ins.operands:
                return ""
    return "the barriers before and after it are of all threads, none is used between them"


def empty_window(bench: Bench, mutation: Mutation) -> str:
    """bar.warp.sync before which, since the last collective on every way, lanes have at most
    arrived at mbarriers and started copies."""
    ins = bench.entry.instructions[mutation.index]
    if mutation.operator != "drop wait" or ins.parts[:3] != ("bar", "warp", "sync"):
        return ""
    lowered = lower(bench.entry, deferred=True, checked=True)
    before = predecessors(lowered)
    allowed = {*REGISTERS, "branch", "hint", "mbarrier_wait", "mbarrier_arrive", "mbarrier_tx",
               "bulk_copy", "bulk_tensor"}  # fmt: skip
    meeting = ("barrier", "mma_sync", "wgmma")
    seen, todo = {mutation.index}, list(before[mutation.index])
    while todo:
        at = todo.pop()
        name, other = lowered.families[at].name, bench.entry.instructions[at]
        same = name == "warp_barrier" and other.operands == ins.operands
        if at in seen or same or name in meeting:
            continue
        seen.add(at)
        todo += before[at]
        if name not in allowed and other.parts[:2] != ("ld", "param"):
            return ""
    return (
        "since the last collective no lane has done more than arrive at mbarriers and start "
        "copies, which it does not order"
    )


def second_barrier(bench: Bench, mutation: Mutation) -> str:
    """bar.sync of all threads beside another one, with nothing but registers and fences between."""
    ins = bench.entry.instructions[mutation.index]
    if mutation.operator != "drop wait" or ins.parts[:2] != ("bar", "sync"):
        return ""
    allowed = {*REGISTERS, "hint", "grid_wait"}
    for step in (1, -1):
        at = mutation.index + step
        while 0 <= at < len(bench.entry.instructions):
            if max(at, at - step) in bench.kernel.labelled:
                break
            other = bench.entry.instructions[at]
            if other.opcode == ins.opcode and other.operands == ins.operands:
                return f"line {other.line} is the same barrier, with nothing to order between"
            if bench.kernel.families[at].name not in allowed:
                break
            at += step
    return ""


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
            if bench.kernel.families[at].name not in REGISTERS:
                break
            at += step
    return ""


def repeated_publication(bench: Bench, mutation: Mutation) -> str:
    """Behind fence.mbarrier_init and a barrier of all threads stands the same pair, and nothing
    between them uses an mbarrier."""
    ins = bench.entry.instructions[mutation.index]
    if mutation.operator != "drop fence" or "mbarrier_init" not in ins.parts:
        return ""
    instructions, families = bench.entry.instructions, bench.kernel.families
    allowed = {*REGISTERS, "mbarrier_init", "cluster_arrive", "cluster_wait", "barrier"}
    at = mutation.index + 1
    while at < len(instructions) and instructions[at].opcode != ins.opcode:
        inside = families[at].name == "branch" and branch_target(instructions[at], bench.entry) > at
        some = families[at].name == "barrier" and len(instructions[at].operands) > 1
        if some or (not inside and families[at].name not in allowed):
            return ""
        at += 1
    following = (family.name for family in families[at + 1 :] if family.name not in REGISTERS)
    if at == len(instructions) or next(following) not in ("cluster_arrive", "barrier"):
        return ""
    return (
        f"line {instructions[at].line} is the same fence before another barrier of all threads; "
        "no thread uses an mbarrier between the two"
    )


def nothing_initialised(bench: Bench, mutation: Mutation) -> str:
    """fence.mbarrier_init with no mbarrier.init on any way back to the same fence or the start."""
    ins = bench.entry.instructions[mutation.index]
    if mutation.operator != "drop fence" or "mbarrier_init" not in ins.parts:
        return ""
    lowered = lower(bench.entry, deferred=True, checked=True)
    before = predecessors(lowered)
    seen, todo = {mutation.index}, list(before[mutation.index])
    while todo:
        at = todo.pop()
        if at in seen or bench.entry.instructions[at].opcode == ins.opcode:
            continue
        seen.add(at)
        todo += before[at]
        if lowered.families[at].name == "mbarrier_init":
            return ""
    return "no mbarrier.init leads to the fence since the last one: it has nothing to publish"


def empty_release(bench: Bench, mutation: Mutation) -> str:
    """fence.release before which nothing has been written that it could publish."""
    ins = bench.entry.instructions[mutation.index]
    if mutation.operator != "drop fence" or ins.parts[:2] != ("fence", "release"):
        return ""
    lowered = lower(bench.entry, deferred=True, checked=True)
    before = predecessors(lowered)
    silent = {*REGISTERS, "load", "branch", "hint", "barrier", "cluster_arrive", "cluster_wait",
              "grid_wait", "mbarrier_init", "tmem_alloc", "warp_barrier", "leave"}  # fmt: skip
    seen, todo = {mutation.index}, list(before[mutation.index])
    while todo:
        at = todo.pop()
        if at not in seen:
            seen.add(at)
            todo += before[at]
            if lowered.families[at].name not in silent:
                return ""
    return "no store, atomic or copy leads to the fence: it has nothing to release"


ARGUMENTS: tuple[Argument, ...] = (
    renamed_barrier,
    bracketed_barrier,
    empty_window,
    second_fence,
    second_barrier,
    repeated_publication,
    nothing_initialised,
    empty_release,
    observed.last_wait,
    observed.first_phase,
    observed.never_awaited,
    observed.one_thread,
    observed.covers_nothing,
    observed.same_groups,
    observed.same_decoding,
    observed.independent_copy,
    observed.never_performed,
    needless.unused_barrier,
    needless.idle_fence,
    needless.late_enough,
    needless.copies_late_enough,
)
