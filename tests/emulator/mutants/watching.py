"""Looks into a sound kernel as it runs: hooks before instructions, logs and traps in its code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import numpy as np

from rubin_moe.emulator import EmulationError, units, worker
from rubin_moe.emulator.async_ops import AsyncOperation
from rubin_moe.emulator.isa.footprint import Footprint
from rubin_moe.emulator.isa.handoff import UnitSite
from rubin_moe.emulator.issue import Handler
from rubin_moe.emulator.machine import LaunchContext, Warp
from rubin_moe.emulator.ptx.ast import Imm, Instruction, Mem, Operand
from tests.emulator.mutants.edits import Mutation, apply, make, with_operand
from tests.emulator.mutants.trial import Bench

#: Schedules under which a kernel is looked at.
SEEDS = (1, 2)
#: Families that touch nothing but the warp's own registers.
REGISTERS = {"integer", "bits", "float", "special_function", "compare", "move", "convert_integer",
              "convert_float", "convert_small", "warp_shuffle", "warp_vote", "warp_elect",
              "warp_mask", "sleep"}  # fmt: skip


@dataclass
class LatePolicy:
    """Operations of some kinds of pipes happen when nothing else can move, others at issue."""

    kinds: tuple[str, ...]
    deferred: bool = True
    _held: deque[AsyncOperation] = field(default_factory=deque)

    def submit(self, operation: AsyncOperation) -> None:
        """Hold it back, or perform and complete it."""
        if operation.pipe[0] in self.kinds:
            self._held.append(operation)
        else:
            operation.finish()

    def advance(self) -> bool:
        """Finish the oldest."""
        if not self._held:
            return False
        self._held.popleft().finish()
        return True

    def drain(self, pipe: tuple[object, ...]) -> None:
        """Finish all of a pipe, in order."""
        for operation in [o for o in self._held if o.pipe == pipe]:
            operation.finish()
            self._held.remove(operation)

    def outstanding(self) -> list[AsyncOperation]:
        """What is held back."""
        return list(self._held)


@contextmanager
def watching(look: Callable[[UnitSite, Warp, int], None], *sites: int) -> Iterator[None]:
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


def traps(bench: Bench, probe: Mutation) -> bool:
    """Whether a kernel with traps in it executes one, under any of the seeds."""
    kernel = bench.load(apply(bench.entry, probe))
    for seed in SEEDS:
        try:
            bench.run(kernel, seed, 2 * bench.budget)
        except EmulationError:
            return True
    return False


_LOG_ENTRIES = 1 << 19


def log_waits(bench: Bench, seed: int) -> list[list[int]]:
    """Site, thread, CTA, address and parity of every mbarrier wait of a plain run, in order."""
    zero = Imm(0)
    places = {
        index: (ins.operands[1], ins.operands[2] if "parity" in ins.parts else zero)
        for index, ins in bench.kernel.of("mbarrier_wait")
    }
    return log(bench, seed, places)


def log(bench: Bench, seed: int, places: dict[int, tuple[Operand, Operand]]) -> list[list[int]]:
    """Site, thread, CTA and the values of two operands at some instructions of a plain run."""
    entries = np.zeros((_LOG_ENTRIES + 1, 8), np.uint32)
    registers = {f"%log{i}": "b64" for i in range(2)} | {f"%log{i}": "b32" for i in range(2, 8)}
    edits: dict[int, tuple[Instruction, ...]] = {}
    for index, (place, value) in places.items():
        ins = bench.entry.instructions[index]
        base, offset = (place.base, place.offset) if isinstance(place, Mem) else (place, 0)
        text = (
            f"mov.b64 %log0, {entries.ctypes.data}",
            "atom.global.add.u32 %log2, [%log0], 1",
            "mul.wide.u32 %log1, %log2, 32",
            "add.s64 %log1, %log1, %log0",
            "mov.u32 %log3, %tid.x",
            "mov.u32 %log4, %ctaid.x",
            "mov.u32 %log5, %ctaid.y",
            "mad.lo.u32 %log4, %log5, 1024, %log4",
            "mov.u32 %log5, %ctaid.z",
            "mad.lo.u32 %log4, %log5, 1048576, %log4",
        )
        lines = [make(line, ins.line) for line in text]
        second = make("mov.b32 %log6, 0", ins.line)
        where = make("add.s32 %log7, 0, 0", ins.line)
        lines += [
            with_operand(second, 1, value),
            with_operand(with_operand(where, 1, base), 2, Imm(offset)),
            make("st.global.v2.b32 [%log1+32], {%log3, %log4}", ins.line),
            make("st.global.v2.b32 [%log1+40], {%log7, %log6}", ins.line),
            make(f"mov.b32 %log2, {index}", ins.line),
            make("st.global.b32 [%log1+48], %log2", ins.line),
        ]
        guarded = (replace(x, guard=ins.guard, guard_negated=ins.guard_negated) for x in lines)
        edits[index] = (*guarded, ins)
    probe = Mutation("probe", 0, 0, "", "log", edits, registers)
    plain = replace(bench, rules=None)
    plain.run(plain.load(apply(bench.entry, probe)), seed, extra=(entries,))
    count = int(entries[0, 0])
    assert count < _LOG_ENTRIES
    rows = entries[1 : count + 1, [4, 0, 1, 2, 3]]
    return rows.tolist()  # type: ignore[no-any-return]


def meet(a: Footprint, b: Footprint) -> bool:
    """Whether two footprints share a cell of tensor memory."""
    if (a.space, b.space) != ("tmem", "tmem") or a.rank != b.rank:
        return False
    x, y = a.ranges[:, None], b.ranges[None]
    rows = (x[..., 0] < y[..., 1]) & (y[..., 0] < x[..., 1])
    columns = (x[..., 2] < y[..., 3]) & (y[..., 2] < x[..., 3])
    return bool(np.any(rows & columns))
