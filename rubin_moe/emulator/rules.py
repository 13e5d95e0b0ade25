"""The one table of rules: what the emulator refuses or reports, and on whose authority.

A rule's ``profile`` says what a violation does:

``always``    ends every launch, with or without ``launch(..., rules=...)``
``enforced``  ends a launch under ``rules="enforce"``; a finding under ``"report"``
``isa``       the letter of the ISA where kernels that run on silicon depart from it: a finding
``warning``   legal, but it may not do what was meant: a finding
``model``     ends every launch: not modelled, whatever the hardware does
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
    profile: Profile

    @property
    def severity(self) -> str:
        """What a finding of this rule is called: error, isa or warning."""
        return self.profile if self.profile in ("isa", "warning") else "error"


def _rules(profile: Profile, source: str, sentences: dict[str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(name, text, source, profile) for name, text in sentences.items())


#: FlashInfer's 47 block-scaled kernels for sm_100a and sm_107a, which run on real parts.
_PEERS = "FlashInfer's kernels for Blackwell and Rubin"
#: What CuTe DSL 4.8 emits and accepts where the ISA text does not reach (sm_103a, sm_107a).
_DSL = "CuTe DSL 4.8"
_H200 = "measured on an H200"

_MEMORY = (
    *_rules(
        "always",
        "PTX ISA, State Spaces; Addresses as Operands",
        {
            "memory: out of bounds": "An access lies in one registered buffer, in the CTA's shared "
            "or in the lane's local memory.",
            "memory: alignment": "An address is a multiple of the access size.",
            "shared memory: out of bounds": "An asynchronous or matrix access to shared memory "
            "lies in the CTA's allocation.",
            "shared memory: alignment": "A tensor copy starts at a multiple of 128 bytes, its "
            "mbarrier at a multiple of 8.",
            "matrix load/store: alignment": "Row addresses of ldmatrix and stmatrix are multiples "
            "of 16.",
            "bulk copy: alignment": "Addresses and size of a bulk copy are multiples of 16.",
            "cp.async: alignment": "Addresses of cp.async are multiples of its size.",
            "cp.async: size": "cp.async copies 4, 8 or 16 bytes, with .cg 16.",
            "cp.async: source size": "cp.async reads no more bytes than it writes.",
        },
    ),
    *_rules("always", "PTX ISA, trap", {"trap": "The kernel executes no trap."}),
    *_rules(
        "warning",
        "a comment in FlashInfer's sm_107 kernels",
        {
            "cp.async: high destination": "On sm_107a the destination of cp.async.cg lies below "
            "248 KiB; above, its cache hint may be lost.",
        },
    ),
)

_POOL = _rules(
    "always",
    "PTX ISA, setmaxnreg",
    {
        "setmaxnreg: count": "A thread gets a multiple of 8 registers from 24 to 256.",
        "setmaxnreg: pool": "What setmaxnreg.inc asks for is in the CTA's pool sooner or later: "
        "the registers of a thread at launch, times the threads.",
        "setmaxnreg: warpgroup": "All warps of a warpgroup execute the same setmaxnreg.",
    },
)

_POISON = _rules(
    "enforced",
    "PTX ISA, State Spaces: contents are undefined until written",
    {
        "poison: address": "No address comes from memory or a register that nothing wrote.",
        "poison: branch": "No branch, guard or count depends on memory or a register that nothing "
        "wrote.",
        "poison: global store": "Nothing computed from memory or a register that nothing wrote "
        "reaches global memory.",
        "poison: operand": "No descriptor, coordinate or barrier comes from memory or a register "
        "that nothing wrote.",
    },
)

_ORDER = (
    *_rules(
        "enforced",
        "PTX ISA, Memory Consistency Model",
        {
            "order: race": "Of two accesses of different warps to the same bytes, one a write and "
            "not both atomic, one happens before the other.",
            "order: warp convergence": "A lane reads what another lane of its warp wrote after "
            "bar.warp.sync or another collective of both.",
        },
    ),
    *_rules(
        "enforced",
        "PTX ISA, Asynchronous operations; Async proxy",
        {
            "order: asynchronous result": "What TMA, bulk copies, cp.async or st.async write is "
            "read after their mbarrier or group completed.",
            "order: overwritten source": "Nothing writes what an asynchronous operation or another "
            "warp may still read.",
            "order: proxy fence": "Between generic writes of shared memory and an asynchronous "
            "read of them lies fence.proxy.async.",
            "order: exit": "A CTA exits after everything that touches its shared memory is over, "
            "and after its warps have seen the last arrival from other CTAs at its mbarriers.",
            "order: wgmma registers": "Registers of wgmma are read or overwritten after a "
            "wait_group that covers it, but for reads of A's.",
            "order: mbarrier initialisation": "Between mbarrier.init and its use by another CTA or "
            "an asynchronous operation lie a fence and a barrier.",
        },
    ),
    *_rules(
        "enforced",
        _PEERS,
        {
            "order: tensor memory": "tcgen05.mma and cp reach other warps through commit, "
            "tcgen05.st through wait::st; columns are overwritten after every ld from them "
            "completed.",
        },
    ),
    *_rules(
        "isa",
        "PTX ISA, tcgen05 memory consistency model; Async proxy",
        {
            "order: tcgen05 fence": "tcgen05.fence stands before and after a synchronisation that "
            "orders tcgen05 operations of two warps; a commit is the first one itself (no peer "
            "kernel has one).",
            "order: wait::ld": "Registers of tcgen05.ld are read after tcgen05.wait::ld (every "
            "peer kernel reads them before).",
            "order: cp.async proxy fence": "Between cp.async into shared memory and an "
            "asynchronous read of it lies fence.proxy.async (FlashInfer's gather kernels have "
            "none).",
            "order: wgmma factors": "Registers of A are read by another instruction after a "
            "wait_group that covers the wgmma (reading them changes nothing).",
            "order: wgmma warps": "What a wgmma reads is overwritten after all four warps waited "
            "for it (CUTLASS hands stages back when one of them has).",
            "order: repeated bulk store": "A warp's bulk store waits for an earlier one to the "
            "same bytes (FlashInfer's masked kernel over two CTAs stores some tiles twice).",
            "order: mbarrier fence": "Between mbarrier.init and an asynchronous operation on it "
            "lies fence.mbarrier_init or fence.proxy.async (Triton's kernels have none).",
            "order: asynchronous overwrite": "Between generic accesses of shared memory and an "
            "asynchronous write of the same bytes lies fence.proxy.async.",
        },
    ),
)

_PROGRESS = (
    *_rules(
        "always",
        "PTX ISA, mbarrier, bar, .aligned",
        {
            "deadlock: waiting": "Some warp or asynchronous operation can go on.",
            "deadlock: spinning": "A warp that polls a word waits for a write that something will "
            "make.",
            "deadlock: collectives": "Lanes of a warp meet at the same collective.",
            "barrier: thread count": "All warps name the same number of threads at a barrier.",
            "barrier: index": "A CTA has barriers 0 to 15.",
            "mbarrier: not initialised": "The word is an mbarrier: mbarrier.init made it, nothing "
            "overwrote it.",
            "mbarrier: arrival count": "A phase sees no more arrivals than it expects.",
            "mbarrier: transaction count": "The pending transaction count stays within 20 bits and "
            "a sign.",
            "mbarrier: count": "An mbarrier expects 1 to 2^20 - 1 arrivals.",
            "mbarrier: address": "An mbarrier lies in shared memory of a CTA of the cluster.",
        },
    ),
)

_INSTRUCTION_DESCRIPTOR = (
    *_rules(
        "always",
        f"PTX ISA, tcgen05 instruction descriptor; {_DSL}",
        {
            "instruction descriptor: undefined field": "Bits that the architecture does not define "
            "are zero.",
            "instruction descriptor: format code": "The format codes of A and B have a meaning "
            "under the kind (E2M1 is 5 under mxf8f6f4, 1 under the FP4 kinds).",
            "instruction descriptor: scale format": "The scale format goes with kind, scale vector "
            "and architecture; UE5M3 is of sm_107a.",
            "instruction descriptor: accumulator format": "The accumulator format goes with the "
            "kind.",
            "instruction descriptor: N": "N is a multiple of 8, of 16 over two CTAs, twice that "
            "for MN-major bytes, and at most 256.",
            "instruction descriptor: major": "Only formats that can be transposed are MN-major.",
            "tcgen05.mma: kind": "The architecture has the kind.",
            "tcgen05.mma: block scale": "Only block-scaled kinds take scales.",
            "tcgen05.mma: scale vector": "The kind takes one scale for 16 or for 32 elements as "
            "its table says.",
            "tcgen05.mma: cta_group": "cta_group is 1 or 2.",
            "tcgen05.mma: collector": "A collector buffer is used after a fill of the same shape; "
            "collector::b is of sm_107a.",
            "tcgen05.mma: disable-output-lane": "The lane mask has four words a CTA, and no block "
            "scales.",
            "tcgen05.mma: scale-input-d": "D is scaled by 2^-0 to 2^-15, kinds f16 and tf32.",
        },
    ),
    *_rules(
        "always",
        "FlashInfer's sm_107 kernels",
        {
            "instruction descriptor: K size": "Bits 3 and 31 form a K size of the kind: FP4 K = "
            "128 is (1, 0), mxf8f6f4 K = 64 is (0, 1) on sm_107a.",
            "instruction descriptor: M": "M is 64 or 128 a CTA, and 128 a CTA with block scales or "
            "K = 64.",
            "tcgen05.mma: scale factor id": "The id in a scale address's bits 30-31 is that of the "
            "descriptor, and starts a group of the scales that one instruction reads.",
        },
    ),
    *_rules(
        "always",
        f"PTX ISA, tcgen05 data path layouts; {_PEERS}",
        {
            "tcgen05.mma: accumulator lane": "D starts in lane 0, or in 16 with M = 64.",
            "tcgen05.mma: scale factor lane": "Scales start in lane 0.",
            "tcgen05.mma: scale factor copies": "The four lane quarters hold the same scales.",
        },
    ),
    *_rules(
        "model",
        "limits of the emulator",
        {
            "instruction descriptor: sparsity": "Sparse products are not modelled.",
            "instruction descriptor: max shift": "The shift of .ws instructions is not modelled.",
            "tcgen05.mma: A in tensor memory": "A in tensor memory is K-major, of 8 bits or FP4, "
            "and starts in D's lane.",
            "tcgen05.shift: not modelled": "tcgen05.shift is not modelled.",
        },
    ),
)

_SHARED_DESCRIPTOR = (
    *_rules(
        "always",
        f"PTX ISA, matrix descriptor; {_DSL}",
        {
            "shared-memory descriptor: undefined field": "Bits that the architecture does not "
            "define are zero.",
            "shared-memory descriptor: version": "Bits 46-48 hold 1 for tcgen05.",
            "shared-memory descriptor: swizzle": "The swizzle code is that of none, 32, 64 or 128 "
            "bytes.",
            "shared-memory descriptor: K extent": "Bytes along K stay in one swizzle row, or go on "
            "in an absolute leading dimension.",
        },
    ),
    *_rules(
        "model",
        "limits of the emulator",
        {
            "shared-memory descriptor: leading dimension mode": "An absolute leading dimension is "
            "modelled for swizzled K-major tiles.",
        },
    ),
)

_TENSOR_MEMORY = (
    *_rules(
        "always",
        f"PTX ISA, tensor memory allocation and access restrictions; {_DSL} (576 columns)",
        {
            "tensor memory: architecture": "The architecture has tensor memory.",
            "tensor memory: column": "Columns lie in the capacity: 512, or 576 on sm_107a.",
            "tensor memory: not allocated": "Columns that are touched are allocated.",
            "tensor memory: lane quarter": "A warp touches its own quarter of the lanes.",
            "tcgen05.alloc: columns": "Allocations are powers of two from 32, and 544 or 576 on "
            "sm_107a.",
            "tcgen05.alloc: permit": "A CTA that relinquished its permit allocates no more.",
            "tcgen05.alloc: never freed": "Allocations are freed before the CTA exits.",
            "tcgen05.dealloc: allocation": "What is freed is an allocation, with its size.",
            "tcgen05.ld/st: shape": "The shape of ld and st is one of the table.",
            "tcgen05.ld/st: repeat": "The repeat of ld and st is one that the shape has.",
            "tcgen05.cp: shape": "The shape and multicast of cp is one of the table.",
            "tcgen05.cp: lane": "cp starts in lane 0.",
        },
    ),
    *_rules(
        "model",
        "limits of the emulator",
        {"tcgen05.cp: format": "Decompression by cp is modelled for the formats of the table."},
    ),
)

_TENSOR_COPY = (
    *_rules(
        "always",
        f"PTX ISA, cp.async.bulk.tensor; {_H200}",
        {
            "tensor copy: mbarrier": "An mbarrier counts copies into its own CTA, or into its pair "
            "with cta_group::2.",
            "tensor copy: multicast": "A multicast names a CTA.",
            "tensor copy: negative store coordinate": "A store starts inside the tensor.",
            "tensor copy: padded format": "Padded formats are loaded only.",
            "tensor copy: rank": "There are as many coordinates as the tensor map has dimensions.",
            "tensor copy: rows of four": "gather4 and scatter4 take rank 2 and boxes of one row.",
            "tensor copy: coordinate": "The coordinate of a packed or padded format is a multiple "
            "of its chunk.",
            "bulk reduction: type": "The reduction is defined on the type.",
            "tensor map: size": "A tensor map has 128 bytes.",
            "tensor map: rank": "A tensor map has one to five dimensions.",
            "tensor map: element format": "The element format is one of the table.",
            "tensor map: base address": "The tensor is 16-byte aligned.",
            "tensor map: inner box": "The inner box is a multiple of 16 bytes.",
            "tensor map: swizzle": "The inner box fits the swizzle.",
            "tensor map: padded format": "Padded formats take 32-byte aligned tensors and boxes of "
            "128 elements.",
        },
    ),
    *_rules(
        "model",
        "limits of the emulator",
        {
            "tensor copy: mode": "Modes tile, gather4 and scatter4 are modelled.",
            "tensor map: interleave": "Interleaved layouts are not modelled.",
            "tensor map: traversal stride": "Traversal strides are one.",
        },
    ),
)

_MATRIX = _rules(
    "always",
    "PTX ISA, wgmma.mma_async; mma; ldmatrix",
    {
        "wgmma: shape": "The shape of wgmma is one of the table.",
        "wgmma: type": "The types of wgmma's A and B go together.",
        "wgmma: N": "N of wgmma is a multiple of 8 (of 16 above 32 for integers) up to 256.",
        "wgmma: accumulator": "The accumulator of wgmma goes with A and B.",
        "wgmma: scale": "wgmma's operands are scaled by 1 or -1, integers not at all.",
        "wgmma: transpose": "Only 16-bit operands in shared memory are transposed.",
        "mma.sync: shape": "The shape of mma is one of the table.",
        "mma.sync: type": "The types of mma's A and B go together.",
        "mma.sync: accumulator": "The accumulator of mma goes with A and B.",
        "mma.sync: satfinite": "Only integer mma saturates.",
        "matrix load/store: count": "ldmatrix and stmatrix move one, two or four matrices.",
    },
)

_REGISTERS = (
    *_rules(
        "enforced",
        "PTX ISA, wgmma.fence",
        {"wgmma: first fence": "wgmma.fence stands before the first wgmma of a kernel."},
    ),
    *_rules(
        "isa",
        "PTX ISA, wgmma.fence; CuTe DSL clears accumulators after it",
        {
            "wgmma: register fence": "wgmma.fence stands between an access to a register and a "
            "wgmma that accesses it.",
        },
    ),
)

TABLE: tuple[Rule, ...] = (
    *_MEMORY,
    *_POISON,
    *_ORDER,
    *_PROGRESS,
    *_POOL,
    *_INSTRUCTION_DESCRIPTOR,
    *_SHARED_DESCRIPTOR,
    *_TENSOR_MEMORY,
    *_TENSOR_COPY,
    *_MATRIX,
    *_REGISTERS,
)
RULES: dict[str, Rule] = {rule.id: rule for rule in TABLE}
assert len(RULES) == len(TABLE), "a rule is listed twice"
