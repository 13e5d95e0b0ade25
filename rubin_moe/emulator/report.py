"""What a launch did: instruction counts by opcode and warp, bytes moved, MMAs, memory maps."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rubin_moe.emulator.findings import Finding

#: A warp's role is the first of these of which it executes something.
_ROLES = (
    ("mma", ("tcgen05.mma", "wgmma.mma_async")),
    ("tma load", ("cp.async.bulk.tensor", "cp.async.bulk.shared")),
    ("gather", ("cp.async.cg", "cp.async.ca")),
    ("tensor memory store", ("tcgen05.st",)),
    ("epilogue", ("tcgen05.ld",)),
)


def role_of(opcodes: Counter[str]) -> str:
    """Role of a warp from what it executed."""
    for role, prefixes in _ROLES:
        for opcode, count in opcodes.items():
            if not count or not opcode.startswith(prefixes):
                continue
            if role != "tma load" or ".global.shared" not in opcode:
                return role
    return "other"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A named stretch of shared memory (bytes) or tensor memory (columns) of a CTA."""

    start: int
    size: int
    use: str


class Statistics:
    """Counters of a running launch; native code counts segments, units count the rest."""

    def __init__(self, warps: int, segments: int) -> None:
        self.segments: NDArray[np.int64] = np.zeros((warps, segments + 1), np.int64)
        self.bytes: Counter[str] = Counter()
        self.mma_count = 0
        self.mma_macs = 0
        self.mma_forms: Counter[str] = Counter()  # tcgen05.mma by what its descriptor decodes to
        self.smem_places: set[tuple[int, int, str]] = set()  # fields of Place
        self.tmem_places: set[tuple[int, int, str]] = set()
        self.peak_tmem_columns = 0

    def merge(self, other: Statistics) -> None:
        """Add the counts of another worker of the same launch."""
        self.segments += other.segments
        self.bytes.update(other.bytes)
        self.mma_count += other.mma_count
        self.mma_macs += other.mma_macs
        self.mma_forms.update(other.mma_forms)
        self.smem_places |= other.smem_places
        self.tmem_places |= other.tmem_places
        self.peak_tmem_columns = max(self.peak_tmem_columns, other.peak_tmem_columns)

    def instructions(self, contents: tuple[tuple[tuple[str, int], ...], ...]) -> int:
        """Warp instructions issued so far."""
        lengths = np.array([sum(n for _, n in opcodes) for opcodes in contents], np.int64)
        return int(self.segments.sum(0)[: len(lengths)] @ lengths)

    def counter_address(self, warp: int) -> int:
        """Host address of a warp's segment counters."""
        return int(self.segments[warp].ctypes.data)

    def opcodes(self, warp: int, contents: tuple[tuple[tuple[str, int], ...], ...]) -> Counter[str]:
        """Instructions executed by warps of this index, by opcode."""
        out: Counter[str] = Counter()
        for times, opcodes in zip(self.segments[warp].tolist(), contents, strict=False):
            if times:
                for opcode, count in opcodes:
                    out[opcode] += times * count
        return out


@dataclass(slots=True)
class Report:
    """Summary of a finished launch.

    ``instructions`` are warp instructions issued (guards included) by opcode; ``roles`` the same by
    warp role; ``bytes`` by kind of copy; ``mma_macs`` counts padded multiply-adds, and
    ``useful_macs`` those of the problem where the caller gave them. ``workers`` threads ran it.
    ``mma_forms`` counts tcgen05.mma by what the instruction descriptor decodes to.
    ``findings`` are what a checked launch found; ``findings_dropped`` did not fit.
    ``executed`` counts how often warps entered each piece of straight code, in the order of the PTX
    (`CompiledEntry.segments`; not in the JSON).
    """

    kernel: str
    target: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    instructions: dict[str, int]
    roles: dict[str, dict[str, int]]
    warps: dict[str, list[int]]
    bytes: dict[str, int]
    mma_count: int
    mma_macs: int
    useful_macs: int | None
    peak_tmem_columns: int
    mma_forms: dict[str, int] = field(default_factory=dict)
    smem_map: list[Place] = field(default_factory=list)
    tmem_map: list[Place] = field(default_factory=list)
    seconds: float = 0.0
    workers: int = 1
    outcome: str = "done"
    findings: list[Finding] = field(default_factory=list)
    findings_dropped: int = 0
    executed: list[int] = field(default_factory=list)

    @property
    def warp_instructions(self) -> int:
        """Warp instructions issued."""
        return sum(self.instructions.values())

    def to_json(self) -> str:
        """The report as JSON."""
        fields = asdict(self) | {"warp_instructions": self.warp_instructions}
        del fields["executed"]
        return json.dumps(fields, indent=1)

    def __str__(self) -> str:
        lines = [
            f"{self.kernel} ({self.target}): {self.outcome}",
            f"  grid {self.grid} block {self.block} cluster {self.cluster} "
            f"shared {self.shared_bytes} B",
            f"  {self.warp_instructions:,} warp instructions in {self.seconds:.3f} s on the CPU"
            + (f" ({self.workers} threads)" if self.workers > 1 else ""),
        ]
        for role, opcodes in self.roles.items():
            top = sorted(opcodes.items(), key=lambda item: -item[1])[:4]
            shown = ", ".join(f"{name} {count:,}" for name, count in top)
            lines.append(f"  {role} (warps {self.warps[role]}): {sum(opcodes.values()):,}: {shown}")
        for kind, count in sorted(self.bytes.items()):
            lines.append(f"  {kind}: {count:,} B")
        if self.mma_count:
            share = ""
            if self.useful_macs is not None and self.mma_macs:
                share = f", {100 * self.useful_macs / self.mma_macs:.1f} % useful"
            lines.append(f"  {self.mma_count:,} MMAs, {self.mma_macs:,} multiply-adds{share}")
            lines += [f"    {count:,} of {form}" for form, count in self.mma_forms.items()]
        if self.peak_tmem_columns:
            lines.append(f"  {self.peak_tmem_columns} tensor-memory columns at the peak")
        for name, places in (("shared memory", self.smem_map), ("tensor memory", self.tmem_map)):
            if places:
                lines.append(f"  {name}:")
                lines += [f"    {p.start:7d} +{p.size:<6d} {p.use}" for p in places]
        for finding in self.findings:
            times = f" ({finding.count} times)" if finding.count > 1 else ""
            lines.append(f"  {finding.severity}: {finding}{times}")
        if self.findings_dropped:
            lines.append(f"  {self.findings_dropped} more findings")
        return "\n".join(lines)


def summarise(statistics: Statistics, contents: Any, head: dict[str, Any]) -> Report:
    """Build the report; ``head`` holds its descriptive fields."""
    total: Counter[str] = Counter()
    roles: dict[str, Counter[str]] = {}
    warps: dict[str, list[int]] = {}
    for warp in range(len(statistics.segments)):
        opcodes = statistics.opcodes(warp, contents)
        role = role_of(opcodes)
        roles.setdefault(role, Counter()).update(opcodes)
        warps.setdefault(role, []).append(warp)
        total.update(opcodes)
    return Report(
        instructions=dict(total.most_common()),
        roles={role: dict(c.most_common()) for role, c in roles.items()},
        warps=warps,
        bytes=dict(sorted(statistics.bytes.items())),
        mma_count=statistics.mma_count,
        mma_macs=statistics.mma_macs,
        peak_tmem_columns=statistics.peak_tmem_columns,
        mma_forms=dict(statistics.mma_forms.most_common()),
        executed=statistics.segments.sum(0)[: len(contents)].tolist(),
        smem_map=[Place(*place) for place in sorted(statistics.smem_places)],
        tmem_map=[Place(*place) for place in sorted(statistics.tmem_places)],
        **head,
    )
