"""A PTX entry to a loaded kernel: lower, generate, compile, or take it from the cache."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass

from rubin_moe.emulator.codegen import (
    KERNEL_SYMBOL,
    EmitFunction,
    Emitter,
    SymbolPlan,
    generate,
)
from rubin_moe.emulator.forms import UnsupportedInstructionError
from rubin_moe.emulator.isa import (
    barrier,
    control,
    cvt,
    floating,
    handoff,
    integer,
    mbarrier,
    memory,
    move,
    warp,
)
from rubin_moe.emulator.isa.handoff import UnitSite, plan_site, results_site
from rubin_moe.emulator.lower import DEFERRED_FAMILIES, UNIT_FAMILIES, Lowered, lower
from rubin_moe.emulator.native.compiler import (
    NativeCode,
    cache_key,
    cached,
    compile_object,
    runtime,
)
from rubin_moe.emulator.ptx import parse_ptx
from rubin_moe.emulator.ptx.ast import Entry, Instruction, Param, PtxModule, Variable
from rubin_moe.emulator.register_pool import most_registers
from rubin_moe.emulator.state.registers import RegisterLayout
from rubin_moe.emulator.taint import CheckedEmitter, operand_text
from rubin_moe.emulator.targets import missing_on

#: Shared memory below this offset belongs to the system (sm_90 and later).
RESERVED_SMEM = 1024
_OPT_LEVEL = 0

EMITTERS: dict[str, EmitFunction] = {
    **integer.EMITTERS,
    **floating.EMITTERS,
    **move.EMITTERS,
    **cvt.EMITTERS,
    **memory.EMITTERS,
    **warp.EMITTERS,
    **barrier.EMITTERS,
    **mbarrier.EMITTERS,
    **control.EMITTERS,
    **dict.fromkeys(UNIT_FAMILIES, handoff.emit_unit),
}


@dataclass(frozen=True, slots=True)
class SiteInfo:
    """What a fault report says of an instruction; operands and guard in the checked form."""

    opcode: str
    line: int
    operands: tuple[str, ...] = ()
    guard: str = ""


@dataclass(frozen=True)
class CompiledEntry:
    """Machine code of one entry and what a launch needs to know about it (picklable)."""

    name: str
    target: str
    params: tuple[Param, ...]
    param_bytes: int
    pointer_bytes: int  # parameter block with the addresses of global variables appended
    globals: tuple[tuple[Variable, int], ...]  # variable, byte offset of its address
    static_smem: int  # first byte of dynamic shared memory
    dynamic_align: int
    local_bytes: int
    layout: RegisterLayout
    segments: tuple[tuple[tuple[str, int], ...], ...]  # opcode counts of each segment
    sites: dict[int, UnitSite]
    instructions: tuple[SiteInfo, ...]
    max_threads: int
    max_registers: int  # of a thread
    cluster: tuple[int, ...]
    code: bytes
    deferred: bool
    checked: bool


def _align(value: int, align: int) -> int:
    return -(-value // align) * align


def _plan_symbols(module: PtxModule, entry: Entry) -> tuple[SymbolPlan, int, int]:
    """Places of all variables; also the start and alignment of dynamic shared memory."""
    variables = module.variables + entry.variables
    shared: dict[str, int] = {}
    local: dict[str, int] = {}
    pointers: dict[str, int] = {}
    cursor, frame, slot = RESERVED_SMEM, 0, _align(entry.param_bytes, 8)
    for variable in variables:
        if variable.space == "shared" and not variable.extern:
            cursor = _align(cursor, variable.align)
            shared[variable.name] = cursor
            cursor += variable.size
        elif variable.space == "local":
            frame = _align(frame, variable.align)
            local[variable.name] = frame
            frame += variable.size
        elif variable.space in ("global", "const"):
            pointers[variable.name] = slot
            slot += 8
    dynamic = [v for v in variables if v.space == "shared" and v.extern]
    align = max((v.align for v in dynamic), default=16)
    if dynamic:
        cursor = _align(cursor, align)
    for variable in dynamic:
        shared[variable.name] = cursor
    return SymbolPlan(shared, local, pointers, _align(frame, 16)), cursor, align


def _segment_counts(lowered: Lowered) -> tuple[tuple[tuple[str, int], ...], ...]:
    counts = []
    for segment in lowered.segments:
        opcodes = lowered.entry.instructions[segment.start : segment.stop]
        counts.append(tuple(sorted(Counter(ins.opcode for ins in opcodes).items())))
    return tuple(counts)


def _directive(entry: Entry, name: str) -> tuple[int, ...]:
    return entry.directives.get(name, ())


def compile_entry(
    module: PtxModule, entry: Entry, deferred: bool, checked: bool = False
) -> CompiledEntry:
    """Compile one entry. Raises UnsupportedInstructionError by name and line."""
    for ins in entry.instructions:
        reason = missing_on(ins.opcode, module.target)
        if reason:
            raise UnsupportedInstructionError(ins.opcode, ins.line, reason)
    lowered = lower(entry, deferred, checked)
    symbols, dynamic, align = _plan_symbols(module, entry)
    emitters = EMITTERS | dict.fromkeys(DEFERRED_FAMILIES if deferred else (), handoff.emit_unit)
    units = {name for name, emit in emitters.items() if emit is handoff.emit_unit}
    emitter = (CheckedEmitter if checked else Emitter)(lowered, symbols, deferred)
    code = compile_object(generate(emitter, emitters), _OPT_LEVEL)
    threads = 1
    for dimension in _directive(entry, "reqntid") or _directive(entry, "maxntid") or (1024,):
        threads *= dimension
    variables = {v.name: v for v in module.variables + entry.variables}
    sites = {
        index: plan_site(index, lowered)
        for index, family in enumerate(lowered.families)
        if family.name in units
    }
    if lowered.awaits:
        sites[len(lowered.families)] = results_site(len(lowered.families))
    return CompiledEntry(
        name=entry.name,
        target=module.target,
        params=tuple(entry.params),
        param_bytes=entry.param_bytes,
        pointer_bytes=_align(entry.param_bytes, 8) + 8 * len(symbols.pointers),
        globals=tuple((variables[name], slot) for name, slot in symbols.pointers.items()),
        static_smem=dynamic,
        dynamic_align=align,
        local_bytes=symbols.local_bytes,
        layout=emitter.layout,
        segments=_segment_counts(lowered),
        sites=sites,
        instructions=(
            *(_site_info(ins, checked) for ins in entry.instructions),
            SiteInfo("registers of tcgen05.ld", 0),  # the site that results_site makes
        ),
        max_threads=threads,
        max_registers=most_registers(entry),
        cluster=_directive(entry, "reqnctapercluster"),
        code=code,
        deferred=deferred,
        checked=checked,
    )


def _site_info(ins: Instruction, checked: bool) -> SiteInfo:
    if not checked:
        return SiteInfo(ins.opcode, ins.line)
    guard = operand_text(ins.guard) if ins.guard is not None else ""
    sign = "!" if ins.guard_negated else ""
    operands = tuple(operand_text(operand) for operand in ins.operands)
    return SiteInfo(ins.opcode, ins.line, operands, f"@{sign}{guard}")


class Kernel:
    """A compiled entry loaded into this process."""

    def __init__(self, compiled: CompiledEntry) -> None:
        runtime()  # its functions must be known before the object is linked
        self.compiled = compiled
        self._native = NativeCode(compiled.code)
        self.address = self._native.address(KERNEL_SYMBOL)
        self.run_warp = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(self.address)

    @property
    def name(self) -> str:
        """Name of the entry."""
        return self.compiled.name


class Module:
    """A loaded PTX file. ``entries`` are loaded kernels by name."""

    def __init__(self, compiled: list[CompiledEntry], text: str) -> None:
        self.text = text
        self.target = compiled[0].target
        self.entries = {entry.name: Kernel(entry) for entry in compiled}

    def entry(self, name: str | None = None) -> Kernel:
        """The kernel of that name; None when the file has only one."""
        if name is None:
            if len(self.entries) != 1:
                raise ValueError(f"name one of the entries: {', '.join(self.entries)}")
            return next(iter(self.entries.values()))
        if name not in self.entries:
            raise KeyError(f"no entry {name!r}; the module has {', '.join(self.entries)}")
        return self.entries[name]


def _compile_module(text: str, deferred: bool, checked: bool) -> list[CompiledEntry]:
    module = parse_ptx(text)
    return [compile_entry(module, entry, deferred, checked) for entry in module.entries]


def load_ptx(text: str, deferred: bool = False, checked: bool = False) -> Module:
    """Load PTX text.

    ``deferred`` compiles waits and asynchronous copies so that a policy may delay them; ``checked``
    makes the code carry poison and report its accesses, for launches with ``rules``. Raises
    PtxSyntaxError or UnsupportedInstructionError (both ValueError) that name the line, before
    anything runs.
    """
    key = cache_key("module", str(deferred), str(checked), text)
    compiled = cached(key, lambda: _compile_module(text, deferred, checked))
    return Module(compiled, text)
