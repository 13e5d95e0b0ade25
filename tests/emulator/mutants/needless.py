"""Arguments that what a fault takes away is not needed in the launch at hand: waits that later ones
stand in for, shown by operations that happen as late as they may; fences that others stand in for.
"""

from __future__ import annotations

from dataclasses import replace

from rubin_moe.emulator import EmulationError
from rubin_moe.emulator.ptx.ast import Imm, Mem, Operand
from tests.emulator.mutants.edits import Mutation, apply
from tests.emulator.mutants.trial import Bench
from tests.emulator.mutants.watching import SEEDS, LatePolicy, log

_OFFSET = (1 << 24) - 1
_GROUPED = {"wgmma": "wgmma", "wgmma_group": "wgmma", "cp_async": "cp.async",
            "cp_async_group": "cp.async", "bulk_tensor": "bulk", "bulk_copy": "bulk",
            "bulk_group": "bulk"}  # fmt: skip


def late_enough(bench: Bench, mutation: Mutation) -> str:
    """A wait or commit of a group that nothing needs: the operations happen as late as the waits
    that are left allow, and everything else at once, and the results are the same."""
    family = bench.kernel.families[mutation.index].name
    if mutation.operator not in ("drop wait", "drop commit", "swap") or family not in _GROUPED:
        return ""
    kind = _GROUPED[family]
    if not _same_when_late(bench, mutation, kind):
        return ""
    return (
        f"performed as late as the waits that are left allow, each {kind} operation reads and "
        "writes the same"
    )


def _same_when_late(bench: Bench, mutation: Mutation, *kinds: str) -> bool:
    """Whether the mutant leaves the same when such operations happen as late as they may."""
    try:
        kernel = bench.load(apply(bench.entry, mutation))
        bench.run(kernel, 0, 2 * bench.budget, policy=LatePolicy(kinds))
    except EmulationError:
        return False
    return not bench.wrong_bytes()


def copies_late_enough(bench: Bench, mutation: Mutation) -> str:
    """A wait for copies that nothing needs: they happen as late as the waits that are left allow,
    and everything else at once, and the results are the same. Other waits are for warps."""
    if bench.kernel.families[mutation.index].name != "mbarrier_wait":
        return ""
    if mutation.operator not in ("drop wait", "flip phase"):
        return ""
    wait = bench.entry.instructions[mutation.index]
    places: dict[int, tuple[Operand, Operand]] = {
        mutation.index: (wait.operands[1], Imm(0)),
        **{i: (ins.operands[0], Imm(0)) for i, ins in bench.kernel.of("cp_async_arrive")},
    }
    for index, ins in bench.kernel.of("bulk_copy", "bulk_tensor"):
        if "mbarrier::complete_tx::bytes" in ins.parts:
            places[index] = [o for o in ins.operands if isinstance(o, Mem)][2], Imm(0)
    rows = [(site, address & _OFFSET) for site, _, _, address, _ in log(bench, SEEDS[0], places)]
    signalled = {address for site, address in rows if site != mutation.index}
    waited = {address for site, address in rows if site == mutation.index}
    if not waited <= signalled or not _same_when_late(bench, mutation, "tma", "bulk", "cp.async"):
        return ""
    return (
        "performed as late as the waits that are left allow, the copies that complete its phases "
        "leave the same"
    )


def unused_barrier(bench: Bench, mutation: Mutation) -> str:
    """mbarrier.init of a neighbour that is initialised with the same count anyway. What is left out
    is not used in this launch: that would be a trap."""
    if bench.kernel.families[mutation.index].name != "mbarrier_init":
        return ""
    if mutation.operator != "shift barrier":
        return ""
    places = {i: (ins.operands[0], ins.operands[1]) for i, ins in bench.kernel.of("mbarrier_init")}
    rows = log(bench, SEEDS[0], places)
    step = int(mutation.what.split()[1])
    for site, _, cta, address, count in rows:
        if site == mutation.index:
            there = {row[4] for row in rows if row[2:4] == [cta, address + step]}
            if there != {count}:
                return ""
    return (
        "the neighbour is initialised with the same count anyway, and the mbarrier that is left "
        "out is not used (that would be a trap)"
    )


_FENCES = (("fence.proxy.async", "fence.mbarrier_init"), ("tcgen05.fence",))
_FENCE_RULES = ("order: proxy fence", "order: cp.async proxy fence", "order: tcgen05 fence",
                "order: asynchronous overwrite", "order: mbarrier fence",
                "order: mbarrier initialisation")  # fmt: skip


def idle_fence(bench: Bench, mutation: Mutation) -> str:
    """A fence of a proxy, of mbarriers or of tcgen05 that orders nothing, even with all the others
    gone, or nothing that the others do not order too."""
    ins = bench.entry.instructions[mutation.index]
    kinds = next((names for names in _FENCES if ins.opcode.startswith(names)), ())
    if mutation.operator != "drop fence" or not kinds:
        return ""
    reporting = replace(bench, rules="report")

    def lacking(*dropped: int) -> set[tuple[object, ...]]:
        probe = replace(mutation, edits=dict.fromkeys(dropped, ()))
        report = reporting.run(reporting.load(apply(bench.entry, probe)), SEEDS[0])
        return {
            (f.rule, f.line, f.other.line if f.other else 0)
            for f in report.findings
            if f.rule in _FENCE_RULES
        }

    others = [
        index
        for index, other in bench.kernel.of("hint")
        if other.opcode.startswith(kinds) and index != mutation.index
    ]
    alone, none = lacking(*others), lacking(*others, mutation.index)
    if alone == none:
        return "with all other fences of its kind gone it still orders nothing"
    if lacking(mutation.index) == lacking():
        return "what it orders, other fences on the way order too: with all gone accesses lack one"
    return ""
