"""The one table of rules: what the emulator refuses or reports, and on whose authority.

A rule's ``profile`` says what a violation does under ``launch(..., rules=...)``:

``always``    ends every launch, with or without ``rules``: nothing could be executed instead
``enforced``  ends a launch under ``rules="enforce"``, a finding under ``"report"``
``isa``       the letter of the ISA where kernels that run on silicon depart from it: a finding
``warning``   legal, but it may not do what was meant: a finding
``model``     ends every launch: the emulator does not model it, whatever the hardware does
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Profile = Literal["always", "enforced", "isa", "warning", "model"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: a short stable name, one sentence, where the sentence comes from."""

    id: str
    sentence: str
    source: str
    profile: Profile = "always"

    @property
    def severity(self) -> str:
        """What a finding of this rule is called: error, isa or warning."""
        return self.profile if self.profile in ("isa", "warning") else "error"


_MEMORY = (
    Rule(
        "memory: out of bounds",
        "An access lies in one registered buffer, or in the CTA's shared or the lane's local "
        "memory.",
        "PTX ISA, State Spaces",
    ),
    Rule(
        "memory: alignment",
        "An address is a multiple of the access size.",
        "PTX ISA, Addresses as Operands",
    ),
    Rule("trap", "The kernel does not execute trap.", "PTX ISA, trap"),
)

_POISON = (
    Rule(
        "poison: address",
        "No address is computed from memory or a register that nothing wrote.",
        "PTX ISA, State Spaces: contents are undefined until written",
        "enforced",
    ),
    Rule(
        "poison: branch",
        "No branch, guard or count depends on memory or a register that nothing wrote.",
        "PTX ISA, State Spaces: contents are undefined until written",
        "enforced",
    ),
    Rule(
        "poison: global store",
        "Nothing computed from memory or a register that nothing wrote reaches global memory.",
        "PTX ISA, State Spaces: contents are undefined until written",
        "enforced",
    ),
    Rule(
        "poison: operand",
        "No descriptor, coordinate, barrier or mbarrier operand is computed from memory or a "
        "register that nothing wrote.",
        "PTX ISA, State Spaces: contents are undefined until written",
        "enforced",
    ),
)

_ORDER = (
    Rule(
        "order: race",
        "Of two accesses of different warps to the same bytes, one a write and not both atomic, "
        "one happens before the other by barriers, mbarriers or fences.",
        "PTX ISA, Memory Consistency Model: data races",
        "enforced",
    ),
    Rule(
        "order: warp convergence",
        "A lane reads what another lane of its warp wrote only after bar.warp.sync or another "
        "collective of both.",
        "PTX ISA, bar.warp.sync: memory ordering among participating threads",
        "enforced",
    ),
    Rule(
        "order: asynchronous result",
        "What TMA, bulk copies, cp.async or st.async write is read after their mbarrier or group "
        "completed.",
        "PTX ISA, Asynchronous operations; completion mechanisms",
        "enforced",
    ),
    Rule(
        "order: overwritten source",
        "Nothing writes what an asynchronous operation or another warp may still read.",
        "PTX ISA, Asynchronous operations; cp.async.bulk.wait_group.read",
        "enforced",
    ),
    Rule(
        "order: proxy fence",
        "Between generic writes of shared memory and an asynchronous read of them lies "
        "fence.proxy.async.",
        "PTX ISA, Async proxy; fence.proxy.async",
        "enforced",
    ),
    Rule(
        "order: mbarrier initialisation",
        "Between mbarrier.init and its use by another CTA or an asynchronous operation lies "
        "fence.mbarrier_init or fence.proxy.async, and a barrier.",
        "PTX ISA, fence.mbarrier_init; CUTLASS pipelines",
        "enforced",
    ),
    Rule(
        "order: tensor memory",
        "tcgen05.mma and cp reach other warps through commit, tcgen05.st through wait::st, and "
        "columns are overwritten after every ld from them completed.",
        "toolchain.md, What the peers' kernels show about ordering",
        "enforced",
    ),
    Rule(
        "order: tcgen05 fence",
        "Between a barrier and tcgen05 operations of another warp lies tcgen05.fence.",
        "PTX ISA, tcgen05.fence; no peer kernel has one (toolchain.md)",
        "isa",
    ),
    Rule(
        "order: wait::ld",
        "Registers of tcgen05.ld are read after tcgen05.wait::ld.",
        "PTX ISA, tcgen05.wait; every peer kernel reads them before it (toolchain.md)",
        "isa",
    ),
    Rule(
        "order: asynchronous overwrite",
        "Between generic accesses of shared memory and an asynchronous write of the same bytes "
        "lies fence.proxy.async.",
        "PTX ISA, Async proxy",
        "isa",
    ),
)

_PROGRESS = (
    Rule(
        "deadlock: waiting",
        "Some warp or asynchronous operation can go on.",
        "PTX ISA, mbarrier, barrier: a wait without an arrival never ends",
    ),
    Rule(
        "deadlock: spinning",
        "A warp that polls a word waits for a write that something will make.",
        "CUDA Programming Guide, forward progress",
    ),
    Rule(
        "deadlock: collectives",
        "Lanes of a warp meet at the same collective.",
        "PTX ISA, .sync and .aligned instructions",
    ),
)

_MBARRIER = (
    Rule(
        "mbarrier: not initialised",
        "The word is an mbarrier: mbarrier.init made it, nothing overwrote it.",
        "PTX ISA, mbarrier.init",
    ),
    Rule(
        "mbarrier: arrival count",
        "A phase sees no more arrivals than it expects.",
        "PTX ISA, mbarrier.arrive: the pending count must stay in range",
    ),
    Rule(
        "mbarrier: transaction count",
        "The pending transaction count stays within 20 bits and a sign.",
        "PTX ISA, mbarrier contents: -(2^20 - 1) to 2^20 - 1",
    ),
    Rule(
        "mbarrier: count",
        "An mbarrier expects 1 to 2^20 - 1 arrivals.",
        "PTX ISA, mbarrier contents",
    ),
    Rule(
        "barrier: thread count",
        "All warps name the same number of threads at a barrier.",
        "PTX ISA, bar{.cta}: operand b",
    ),
    Rule("barrier: index", "A CTA has barriers 0 to 15.", "PTX ISA, bar{.cta}: operand a"),
)

TABLE: tuple[Rule, ...] = (*_MEMORY, *_POISON, *_ORDER, *_PROGRESS, *_MBARRIER)
RULES: dict[str, Rule] = {rule.id: rule for rule in TABLE}
