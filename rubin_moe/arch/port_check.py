"""The ten points of porting a block-scaled kernel to sm_107a, point by point, with reasons.

Source: first seed, section 8. A PTX text does not show everything: what only a plan shows (buffer
addresses) or only the host (launch attributes, tensor maps) is said to be so, not guessed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rubin_moe.arch import instr_desc
from rubin_moe.arch.ptx_facts import MmaFact, PtxFacts, read_ptx, target_of
from rubin_moe.arch.sm107 import SM107A
from rubin_moe.arch.smem_plan import SmemPlan
from rubin_moe.errors import PlanError

Status = Literal["met", "missed", "not applicable"]


@dataclass(frozen=True)
class Point:
    """One point's verdict."""

    number: int
    title: str
    status: Status
    why: str

    def __str__(self) -> str:
        return f"{self.number:2}. {self.title}: {self.status}. {self.why}"


@dataclass(frozen=True)
class PlannedKernel:
    """What a plan fixes of a kernel before there is code.

    Attributes:
        descriptors: instruction descriptors, N = 0 where it is set at run time.
        columns: of tensor memory that are allocated.
        cp_async_buffers: names in ``smem`` of what ``cp.async.cg`` fills.
    """

    kind: str
    cta_group: int
    descriptors: tuple[int, ...]
    columns: int
    smem: SmemPlan
    cp_async_buffers: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """A kernel to check: its facts, and its shared-memory plan if there is one."""

    facts: PtxFacts
    smem: SmemPlan | None = None
    cp_async_buffers: tuple[str, ...] = ()

    @property
    def decoded(self) -> list[MmaFact]:
        return [m for m in self.facts.mmas if m.decoded is not None]


Verdict = tuple[Status, str]


def check_ptx(
    text: str, smem: SmemPlan | None = None, cp_async_buffers: tuple[str, ...] = ()
) -> list[Point]:
    """All ten points for a PTX text compiled for sm_107a. Raises PlanError for another target."""
    target = target_of(text)
    if target != SM107A.name:
        raise PlanError(f"compiled for {target}: the checklist is about {SM107A.name} code")
    return _points(Subject(read_ptx(text, SM107A), smem, cp_async_buffers))


def check_plan(plan: PlannedKernel) -> list[Point]:
    """All ten points for a plan alone: as for code that does what the plan says and no more. Raises
    PlanError for a descriptor that sm_107a does not have."""
    mmas = tuple(
        MmaFact(
            plan.kind, plan.cta_group, instr_desc.decode(SM107A, plan.kind, word), word,
            runtime_n=not word >> 17 & 0x3F, shifted_ids=False, masked_ids=False,
        )
        for word in plan.descriptors
    )  # fmt: skip
    copies = {"cp.async.cg"} if plan.cp_async_buffers else set()
    facts = PtxFacts(SM107A.name, frozenset(copies), mmas, (plan.columns,), 0, False)
    return _points(Subject(facts, plan.smem, plan.cp_async_buffers))


def _points(subject: Subject) -> list[Point]:
    return [
        Point(number, title, *rule(subject)) for number, (title, rule) in enumerate(RULES, start=1)
    ]


def _wide_k(s: Subject) -> Verdict:
    if not s.facts.mmas:
        return "not applicable", "no block-scaled MMA"
    if s.facts.absolute_leading:
        return "missed", "a shared-memory descriptor still sets the absolute leading mode (bit 52)"
    if not s.decoded:
        return "not applicable", "no descriptor constant was found in the text"
    narrow = {
        (m.kind, m.decoded.k)
        for m in s.decoded
        if m.decoded and m.decoded.k < SM107A.mma_k[m.kind][0]
    }
    if narrow:
        return "missed", "; ".join(
            f"{kind} runs K = {k}, {SM107A.mma_k[kind][0]} exists" for kind, k in sorted(narrow)
        )
    shapes = sorted({f"{m.kind} K = {m.decoded.k}" for m in s.decoded if m.decoded})
    return "met", ", ".join(shapes)


def _k_bits(s: Subject) -> Verdict:
    if not s.decoded:
        return "not applicable", "no descriptor constant was found in the text"
    for m in s.decoded:
        d = m.decoded
        if d and m.kind == "mxf8f6f4" and d.k == 64 and d.m != 128 * m.cta_group:
            return "missed", f"M = {d.m} with K = 64 and cta_group::{m.cta_group}"
    words = sorted({f"{m.word:#010x}" for m in s.decoded})
    return "met", f"idesc {', '.join(words)}"


def _packed_fp4(s: Subject) -> Verdict:
    mixed = [m.decoded for m in s.decoded if m.kind == "mxf8f6f4" and m.decoded]
    fp4 = [d for d in mixed if "e2m1" in (d.a, d.b)]
    if fp4:
        return "met", "FP4 operand with code 5; its packed tensor map is the host's"
    if any("e5m2" in (d.a, d.b) for d in mixed):
        return "not applicable", "an operand decodes to E5M2 (code 1): if FP4 was meant, it is 5"
    return "not applicable", "no FP4 operand in a mixed kind"


def _columns(s: Subject) -> Verdict:
    columns = s.facts.allocated_columns
    if not columns:
        return "not applicable", "no constant allocation of tensor memory"
    most = max(columns)
    legal = most <= SM107A.tmem_columns and (
        most % 32 == 0 if most > 512 else most >= 32 and most & (most - 1) == 0
    )
    if not legal:
        return "missed", f"{most} columns are no legal allocation"
    wide = any(m.decoded and m.decoded.n > 128 for m in s.decoded)
    if most == 512 and wide:
        return "missed", "512 columns at N > 128: 560 would hold two disjoint accumulators"
    return "met", f"{most} of {SM107A.tmem_columns} columns"


def _cp_async_low(s: Subject) -> Verdict:
    if not s.facts.uses("cp.async.cg"):
        return "not applicable", "no cp.async.cg"
    if s.smem is None:
        return "not applicable", "destinations are run-time addresses: give the plan to decide"
    limit = SM107A.cp_async_limit or 0
    for placed in s.smem.placed:
        if placed.name in s.cp_async_buffers and placed.offset + placed.nbytes > limit:
            return "missed", f"{placed} reaches {limit:#x}, where .cg may lose its cache hint"
    return "met", f"{', '.join(s.cp_async_buffers)} below {limit:#x}"


def _b_reuse(s: Subject) -> Verdict:
    fill, last = s.facts.uses("collector::b::fill"), s.facts.uses("collector::b::lastuse")
    if fill and last:
        return "met", "keep and reuse instructions"
    if fill or last:
        return "missed", "a fill without a last use, or the reverse"
    return "not applicable", "one instruction a K block: nothing to reuse"


def _interleaved(s: Subject) -> Verdict:
    if not s.facts.uses("collector::b::lastuse"):
        return "not applicable", "no B-reuse"
    if not s.facts.uses("tcgen05.cp"):
        return "not applicable", "scales do not come by tcgen05.cp"
    if any(m.kind == "mxf8f6f4" for m in s.facts.mmas):
        return "not applicable", "the interleaved order is FP4 x FP4's"
    run = s.facts.longest_copy_run
    # a 512-byte chunk a copy: keep SFA, SFB and reuse SFA of one K block are 2 + 2 N/128 + 2
    n = max((m.decoded.n for m in s.decoded if m.decoded), default=256)
    block = 4 + 2 * -(-n // 128)
    if run <= block:
        return "met", f"at most {run} copies before an MMA"
    return "missed", f"{run} copies in a row before an MMA; one K block needs {block}"


SEEN = "N at bit 17 at run time"
UNSEEN = "; a pair's shifted view of tokens and their compact scales are not to be seen here"


def _swap_ab(s: Subject) -> Verdict:
    if not any(m.runtime_n for m in s.facts.mmas):
        return "not applicable", "N is not set at run time"
    if not any(m.shifted_ids for m in s.facts.mmas):
        return "met", f"{SEEN}; scale ids are constants, none is or-ed in{UNSEEN}"
    if all(m.masked_ids for m in s.facts.mmas):
        return "met", f"{SEEN}, scale ids masked after their shifts{UNSEEN}"
    return "missed", "N is set at run time, and a scale id is or-ed in without a mask"


def _new_formats(s: Subject) -> Verdict:
    scales = {m.decoded.scale for m in s.decoded if m.decoded}
    if "ue5m3" in scales:
        return "met", "UE5M3 scale factors"
    if s.facts.uses("scaled::n1::ue8m0"):
        return "met", "FP8 conversion with its scale applied"
    if s.facts.uses("cvt.rp.satfinite.ue8m0x2.f32") and s.facts.uses("rcp.approx"):
        return "missed", "an MXFP8 quantizer with rcp.approx: cvt applies the scale itself"
    return "not applicable", "no MXFP8 output, and its scale format needs no wider range"


def _mixed_clusters(s: Subject) -> Verdict:
    return (
        "not applicable",
        "launch attributes and grids are the host's: arch.barriers has the rules",
    )


RULES: tuple[tuple[str, Callable[[Subject], Verdict]], ...] = (
    ("Twice the K an instruction, no circular descriptors", _wide_k),
    ("K-size bits 3 and 31, and M", _k_bits),
    ("Packed FP4 in mixed precision, format code 5", _packed_fp4),
    ("576 tensor-memory columns", _columns),
    ("cp.async.cg destinations below 248 KiB", _cp_async_low),
    ("B-reuse", _b_reuse),
    ("Interleaved scale copies with B-reuse", _interleaved),
    ("Swap-AB: run-time N and masked scale ids", _swap_ab),
    ("UE5M3 scales, scaled FP8 conversion", _new_formats),
    ("Mixed-cluster persistent launch", _mixed_clusters),
)
