"""Runs a kernel with a fault in it under several seeds and says what, if anything, shows.

A fault is caught by a rule or trap, by a deadlock or exhausted budget, by a finding that the sound
kernel does not have, or by device memory that differs after the launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from rubin_moe.emulator import Device, EmulationError, Limits, Report
from rubin_moe.emulator.async_ops import DelayPolicy, Policy
from rubin_moe.emulator.compile import Kernel as LoadedKernel
from rubin_moe.emulator.compile import compile_entry
from rubin_moe.emulator.errors import EmulatorError
from rubin_moe.emulator.findings import Mode
from rubin_moe.emulator.ptx import parse_ptx
from rubin_moe.emulator.ptx.ast import Entry
from rubin_moe.emulator.saved import SavedLaunch, memory_at
from tests.emulator.mutants.edits import Mutation, apply
from tests.emulator.mutants.operators import OPERATORS, Kernel

#: A mutant may issue this many times the sound kernel's instructions, and some.
_BUDGET = 3
_SPARE = 50_000
_SPINS = 2000
#: Short turns: a CTA that polls waits for copies of others, which move between turns.
_SLICE, _ROUNDS = 16, 2


@dataclass(frozen=True)
class Verdict:
    """What showed a fault: ``kind`` is "rule", "deadlock", "budget", "value", "refused" (at load)
    or "" for a survivor; ``rule`` its id; ``seeds`` how many were run."""

    kind: str
    rule: str
    message: str
    seeds: int


@dataclass
class Bench:
    """A sound kernel in its memory: what it leaves behind, what it reports, what it executes."""

    launch: SavedLaunch
    arrays: list[NDArray[np.uint8]]
    rules: Mode | None
    expected: list[NDArray[np.uint8]] = field(default_factory=list)
    stable: list[NDArray[np.bool_]] = field(default_factory=list)
    known: set[tuple[str, int]] = field(default_factory=set)
    executed: set[int] = field(default_factory=set)
    budget: int = 0

    def __post_init__(self) -> None:
        self.module = parse_ptx(self.launch.ptx)
        self.entry: Entry = next(e for e in self.module.entries if e.name == self.launch.kernel)
        x, y, z = self.launch.cluster
        self.kernel = Kernel(self.entry, x * y * z)

    def load(self, entry: Entry) -> LoadedKernel:
        """Compile an entry, past the cache of compiled kernels."""
        return LoadedKernel(
            compile_entry(self.module, entry, deferred=True, checked=self.rules is not None)
        )

    def run(
        self,
        kernel: LoadedKernel,
        seed: int,
        budget: int | None = None,
        extra: Sequence[NDArray[np.generic]] = (),
        policy: Policy | None = None,
    ) -> Report:
        """One launch from the initial memory, with ``extra`` buffers of a probe; ``policy`` instead
        of the seed's."""
        device = Device(self.launch.arch)
        for buffer in extra:
            device.register(buffer)
        for array, saved in zip(self.arrays, self.launch.buffers, strict=True):
            array[:] = np.frombuffer(saved.data, np.uint8)
            device.register(array)
        launch = self.launch
        return device.launch(
            kernel, launch.grid, launch.block, launch.params, cluster=launch.cluster,
            dynamic_smem=launch.dynamic_smem_bytes, policy=policy or DelayPolicy(seed),
            rules=self.rules,
            limits=Limits(_SLICE, _ROUNDS, _SPINS, budget),
        )  # fmt: skip

    def learn(self, seeds: Sequence[int]) -> None:
        """Run the sound kernel; raises what it raises."""
        kernel = self.load(self.entry)
        results = []
        for seed in seeds:
            report = self.run(kernel, seed)
            results.append([array.copy() for array in self.arrays])
            self.known |= {(f.rule, f.line) for f in report.findings}
            self.budget = max(self.budget, _BUDGET * report.warp_instructions + _SPARE)
            lengths = [sum(n for _, n in opcodes) for opcodes in kernel.compiled.segments]
            for start, length, times in zip(
                accumulate(lengths, initial=0), lengths, report.executed, strict=False
            ):
                if times:
                    self.executed.update(range(start, start + length))
        self.expected = results[0]
        self.stable = [
            np.all([result[i] == results[0][i] for result in results], axis=0)
            for i in range(len(self.arrays))
        ]

    def mutations(self) -> dict[str, list[Mutation]]:
        """Every fault at an instruction that the sound kernel executes, by operator."""
        return {
            name: [m for m in operator(self.kernel) if m.index in self.executed]
            for name, operator in OPERATORS.items()
        }

    def judge(self, mutation: Mutation, seeds: Sequence[int]) -> Verdict:
        """Run a mutant until something shows."""
        entry = apply(self.entry, mutation)
        try:
            kernel = self.load(entry)
        except EmulatorError as error:
            return Verdict("refused", "", str(error), 0)
        for count, seed in enumerate(seeds, 1):
            try:
                report = self.run(kernel, seed, self.budget)
            except EmulationError as error:
                kind = {"trap": "rule"}.get(error.outcome, error.outcome)
                return Verdict(kind, error.rule or "", str(error).splitlines()[0], count)
            for finding in report.findings:
                if (finding.rule, finding.line) not in self.known:
                    return Verdict("rule", finding.rule, str(finding), count)
            wrong = self.wrong_bytes()
            if wrong:
                return Verdict("value", "", f"{wrong} bytes of device memory differ", count)
        return Verdict("", "", "", len(seeds))

    def wrong_bytes(self) -> int:
        """Bytes of device memory that differ from what the sound kernel leaves."""
        return sum(
            int(np.count_nonzero((array != expected) & stable))
            for array, expected, stable in zip(self.arrays, self.expected, self.stable, strict=True)
        )


@contextmanager
def bench(launch: SavedLaunch, rules: Mode | None) -> Iterator[Bench]:
    """A bench over fresh memory at the launch's own addresses."""
    with memory_at(launch.buffers) as arrays:
        yield Bench(launch, arrays, rules)
