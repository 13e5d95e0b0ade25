"""What a PTX text shows about its block-scaled MMAs, by reading it and not by running it.

Only what the ten points of `port_check` ask. Descriptors that are computed at run time are followed
through ``or``, ``mov`` and ``selp`` to the constants they start from.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from rubin_moe.arch import instr_desc
from rubin_moe.arch.instr_desc import Decoded
from rubin_moe.arch.spec import ArchSpec
from rubin_moe.errors import PlanError

_INSTRUCTION = re.compile(r"^\s*(?:@!?%?\w+\s+)?([a-z][\w.:]*)\s+(.*?);", re.MULTILINE)
_TARGET = re.compile(r"^\.target\s+(\w+)", re.MULTILINE)
_MMA = re.compile(r"tcgen05\.mma\.cta_group::(\d)\.kind::(\w+)\.block_scale")
_INTEGER = re.compile(r"^-?(?:0x[0-9a-fA-F]+|\d+)$")


@dataclass(frozen=True)
class Instruction:
    """One instruction: opcode with modifiers, operands as text."""

    opcode: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class MmaFact:
    """One ``tcgen05.mma``: kind, what its static descriptor decodes to, and how N is made.

    ``shifted_ids``: scale ids are shifted in from an address; ``masked_ids``: and masked.
    """

    kind: str
    cta_group: int
    decoded: Decoded | None
    word: int | None
    runtime_n: bool
    shifted_ids: bool
    masked_ids: bool


@dataclass(frozen=True)
class PtxFacts:
    """Everything `port_check` looks at."""

    target: str
    opcodes: frozenset[str]
    mmas: tuple[MmaFact, ...]
    allocated_columns: tuple[int, ...]
    longest_copy_run: int
    absolute_leading: bool

    def uses(self, part: str) -> bool:
        """Whether any opcode contains ``part``."""
        return any(part in opcode for opcode in self.opcodes)


def target_of(text: str) -> str:
    """The ``.target`` of a PTX text. Raises PlanError where there is none."""
    match = _TARGET.search(text)
    if match is None:
        raise PlanError("no .target directive: this is no PTX text")
    return match.group(1)


def read_ptx(text: str, arch: ArchSpec) -> PtxFacts:
    """The facts of one module compiled for ``arch``."""
    code = [_instruction(m.group(1), m.group(2)) for m in _INSTRUCTION.finditer(text)]
    defs: dict[str, list[Instruction]] = defaultdict(list)
    for ins in code:
        if ins.operands and ins.operands[0].startswith("%"):
            defs[ins.operands[0]].append(ins)
    return PtxFacts(
        target=target_of(text),
        opcodes=frozenset(ins.opcode for ins in code),
        mmas=tuple(_mma(ins, defs, arch) for ins in code if _MMA.match(ins.opcode)),
        allocated_columns=tuple(sorted(_allocations(code, defs))),
        longest_copy_run=_longest_copy_run(code),
        absolute_leading=any(
            ins.opcode.startswith("or.b64") and str(1 << 52) in ins.operands for ins in code
        ),
    )


def _instruction(opcode: str, rest: str) -> Instruction:
    depth, parts, current = 0, [], ""
    for ch in rest:
        depth += (ch in "[{(") - (ch in "]})")
        if ch == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += ch
    return Instruction(opcode, (*parts, current.strip()))


def _mma(ins: Instruction, defs: dict[str, list[Instruction]], arch: ArchSpec) -> MmaFact:
    match = _MMA.match(ins.opcode)
    assert match is not None
    group, kind = int(match.group(1)), match.group(2)
    chain = list(_chain(ins.operands[3], defs, _MASKED))
    word, decoded = None, None
    for candidate in _constants(chain):
        try:
            found = instr_desc.decode(arch, kind, candidate)
        except PlanError:
            continue
        if found.m and (decoded is None or not (found.a_negate or found.b_negate)):
            word, decoded = candidate, found
    made = list(_chain(ins.operands[3], defs, _ARITHMETIC))
    shifts = [i for i in made if i.opcode.startswith("shl") and i.operands[-1] in ("17", "14")]
    masks = {i.operands[-1] for i in made if i.opcode.startswith("and")}
    return MmaFact(
        kind,
        group,
        decoded,
        word,
        runtime_n=bool(shifts),
        shifted_ids=any(i.opcode.startswith("shr") and i.operands[-1] in _TO_ID for i in made),
        masked_ids=bool({"1610612736", "48"} & masks),
    )


_MERGING = ("or", "mov", "selp")
_MASKED = (*_MERGING, "and")  # of run-time N alone, which the compiler may do last
# ((tokens + 15) & -16) >> 3 << 17 leaves the compiler as one shift by 14, an addition and a mask
_ARITHMETIC = (*_MERGING, "and", "add")
_TO_ID = ("1", "26")  # from bits 30-31 of an address to bits 29-30 (A) and 4-5 (B)


def _chain(
    register: str, defs: dict[str, list[Instruction]], through: tuple[str, ...] = _MERGING
) -> Iterable[Instruction]:
    """Instructions that make a register, through those named; ends are yielded too."""
    todo, seen = [register], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for ins in defs.get(name, ()):
            yield ins
            if ins.opcode.split(".")[0] in through:
                todo += [o for o in ins.operands[1:] if o.startswith("%")]


def _constants(chain: Iterable[Instruction]) -> list[int]:
    merging = [i for i in chain if i.opcode.split(".")[0] in _MERGING]
    values = [int(o, 0) for i in merging for o in i.operands[1:] if _INTEGER.match(o)]
    return [v & 0xFFFFFFFF for v in values]


def _allocations(code: list[Instruction], defs: dict[str, list[Instruction]]) -> set[int]:
    found = set()
    for ins in code:
        if ins.opcode.startswith("tcgen05.alloc"):
            last = ins.operands[-1]
            found |= set(_constants(_chain(last, defs)) if last.startswith("%") else [int(last, 0)])
    return found


def _longest_copy_run(code: list[Instruction]) -> int:
    """Most ``tcgen05.cp`` in a row, in text order, before an MMA."""
    longest = run = 0
    for ins in code:
        if ins.opcode.startswith("tcgen05.cp"):
            run += 1
        elif ins.opcode.startswith("tcgen05.mma"):
            longest, run = max(longest, run), 0
    return longest
