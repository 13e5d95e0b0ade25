"""Descriptors that tensor-core instructions take, decoded from this module's own tables.

``decode_instruction``      32-bit instruction descriptor of ``tcgen05.mma``
``decode_tcgen05_smem``     64-bit shared-memory descriptor of ``tcgen05.mma`` and ``tcgen05.cp``
``decode_wgmma_smem``       64-bit shared-memory descriptor of ``wgmma`` (sm_90a)
``SmemDescriptor.chunks``   where each 16-byte piece of an operand tile lies

Sources: PTX ISA, "tcgen05 instruction descriptor", "matrix descriptor" and "canonical layouts" for
sm_100a; what the CuTe DSL 4.8 emits and accepts for sm_103a and sm_107a. A field that the
architecture does not define must be zero; anything else raises ``IllegalOperationError`` with the
name of the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .elements import Element, ScaleFormat
from .footprint import intervals
from .legality import refuse, require

TCGEN05_ARCHS: Final = ("sm_100a", "sm_103a", "sm_107a")
BLOCK_SCALED: Final = ("mxf4", "mxf4nvf4", "mxf8f6f4")
PLAIN: Final = ("f16", "tf32", "f8f6f4", "i8")

_F8F6F4 = {0: Element.E4M3, 1: Element.E5M2, 3: Element.E2M3, 4: Element.E3M2, 5: Element.E2M1}
_FORMATS: Final[dict[str, dict[int, Element]]] = {
    "f16": {0: Element.F16, 1: Element.BF16},
    "tf32": {2: Element.TF32},
    "f8f6f4": _F8F6F4,
    "i8": {0: Element.U8, 1: Element.S8},
    "mxf8f6f4": _F8F6F4,
    "mxf4": {1: Element.E2M1},
    "mxf4nvf4": {1: Element.E2M1},
}
_ACCUMULATORS = {0: "f16", 1: "f32", 2: "s32"}
_MN_MAJOR_FORMATS = {
    Element.F16,
    Element.BF16,
    Element.TF32,
    Element.E4M3,
    Element.E5M2,
    Element.U8,
    Element.S8,
}


@dataclass(frozen=True)
class InstructionDescriptor:
    """Shape and formats of one ``tcgen05.mma``; M and N of the whole instruction (both CTAs).

    ``scale`` and ``sf_vec`` are None and 0 for the kinds without block scales; ``d`` is the
    accumulator format ``"f16"``, ``"f32"`` or ``"s32"``.
    """

    kind: str
    arch: str
    cta_group: int
    m: int
    n: int
    k: int
    a: Element
    b: Element
    d: str
    a_negate: bool
    b_negate: bool
    a_mn_major: bool
    b_mn_major: bool
    saturate: bool = False
    scale: ScaleFormat | None = None
    sf_vec: int = 0
    a_sf_id: int = 0
    b_sf_id: int = 0

    @property
    def num_scales(self) -> int:
        """Scales a row that the instruction reads."""
        return self.k // self.sf_vec if self.sf_vec else 0

    @cached_property
    def text(self) -> str:
        """What the descriptor decodes to, in a line: a wrong code of the right kind shows here."""
        shape = f"{self.kind} cta_group::{self.cta_group} {self.m}x{self.n}x{self.k}"
        scales = f", {self.scale.name} a {self.sf_vec}" if self.scale is not None else ""
        return f"{shape}: {self.a.label} x {self.b.label}{scales} -> {self.d}"

    def packed(self, element: Element) -> bool:
        """Whether ``element`` lies in shared memory without padding.

        Sub-byte elements of the f8f6f4 kinds take a byte of shared memory each (sixteen of them
        packed at the front of every 16 bytes, PTX "b4x16_p64", "b6x16_p32"). The 64-element
        instructions of sm_107a read E2M1 packed, unless the other operand has six bits.
        """
        if element.bits >= 8 or self.kind.startswith("mxf4"):
            return True
        wide = self.arch == "sm_107a" and self.k == 64
        return wide and element.bits == 4 and 6 not in (self.a.bits, self.b.bits)

    def row_bytes(self, element: Element) -> int:
        """Bytes of shared memory that one row of K elements takes."""
        return self.k * element.bits // 8 if self.packed(element) else self.k


def _field(word: int, low: int, width: int) -> int:
    return (word >> low) & ((1 << width) - 1)


def _zero(word: int, low: int, width: int, name: str, arch: str) -> None:
    require(
        _field(word, low, width) == 0,
        "instruction descriptor: undefined field",
        f"bits {low}-{low + width - 1} ({name}) of {word:#010x} are not defined on {arch}",
    )


@lru_cache(maxsize=1024)
def decode_instruction(
    word: int, kind: str, arch: str, cta_group: int, sf_vec: int = 0
) -> InstructionDescriptor:
    """Decode a 32-bit instruction descriptor.

    ``kind``, ``cta_group`` and ``sf_vec`` (the ``.block16``/``.block32``/``.scale_vec`` modifier in
    elements, 0 without block scales) come from the opcode; everything else from ``word``.
    """
    require(arch in TCGEN05_ARCHS, "tensor memory: architecture", f"{arch} has no tcgen05.mma")
    require(cta_group in (1, 2), "tcgen05.mma: cta_group", f"cta_group {cta_group}")
    if kind in BLOCK_SCALED:
        desc = _decode_block_scaled(word, kind, arch, cta_group, sf_vec)
    elif kind in PLAIN:
        require(sf_vec == 0, "tcgen05.mma: block scale", f"kind::{kind} takes no block scales")
        desc = _decode_plain(word, kind, arch, cta_group)
    else:
        refuse("tcgen05.mma: kind", f"kind::{kind} is not modelled")
    _check_shape(desc)
    return desc


def _formats(word: int, kind: str, b_bits: int) -> tuple[Element, Element]:
    table = _FORMATS[kind]
    codes = (_field(word, 7, 3), _field(word, 10, b_bits))
    for side, code in zip("AB", codes, strict=True):
        legal = ", ".join(f"{c} {e.label}" for c, e in table.items())
        require(
            code in table,
            "instruction descriptor: format code",
            f"format code {code} of {side} has no meaning under kind::{kind} (legal: {legal})",
        )
    return table[codes[0]], table[codes[1]]


def _decode_block_scaled(
    word: int, kind: str, arch: str, cta_group: int, sf_vec: int
) -> InstructionDescriptor:
    rubin, fp4 = arch == "sm_107a", kind != "mxf8f6f4"
    require(
        _field(word, 0, 3) == 0, "instruction descriptor: sparsity", "sparse MMA is not modelled"
    )
    if not (rubin and fp4):
        _zero(word, 3, 1, "K size, upper bit", arch)
    _zero(word, 6, 1, "reserved", arch)
    if not rubin:
        _zero(word, 24, 1, "scale format, upper bit", arch)
    _zero(word, 25, 1, "reserved", arch)
    _zero(word, 26, 1, "SFA layout", arch)
    # bit 12 of the FP4 kinds is the sparsity version on sm_107a, meaningless for a dense product
    a, b = _formats(word, kind, 2 if rubin and fp4 else 3)
    scale_code = _field(word, 23, 2)
    require(scale_code < 3, "instruction descriptor: scale format", f"scale format {scale_code}")
    return InstructionDescriptor(
        kind=kind,
        arch=arch,
        cta_group=cta_group,
        m=_field(word, 27, 2) << 7,
        n=_field(word, 17, 6) << 3,
        k=_block_scaled_k(kind, arch, _field(word, 3, 1), _field(word, 31, 1)),
        a=a,
        b=b,
        d="f32",
        a_negate=bool(_field(word, 13, 1)),
        b_negate=bool(_field(word, 14, 1)),
        a_mn_major=bool(_field(word, 15, 1)),
        b_mn_major=bool(_field(word, 16, 1)),
        scale=_scale_format(ScaleFormat(scale_code), kind, arch, sf_vec),
        sf_vec=sf_vec,
        a_sf_id=_field(word, 29, 2),
        b_sf_id=_field(word, 4, 2),
    )


def _block_scaled_k(kind: str, arch: str, bit3: int, bit31: int) -> int:
    """K of the instruction from the K-size bits."""
    if kind == "mxf8f6f4":
        table = {"sm_107a": {(0, 0): 32, (0, 1): 64}}.get(arch, {(0, 0): 32})
    else:
        table = {
            "sm_100a": {(0, 0): 64},
            "sm_103a": {(0, 0): 64, (0, 1): 96},
            "sm_107a": {(0, 0): 64, (1, 0): 128},
        }[arch]
    k = table.get((bit3, bit31))
    if k is None:
        refuse(
            "instruction descriptor: K size",
            f"bit 3 = {bit3}, bit 31 = {bit31} is not defined for kind::{kind} on {arch}",
        )
    return k


def _scale_format(scale: ScaleFormat, kind: str, arch: str, sf_vec: int) -> ScaleFormat:
    legal: dict[int, set[ScaleFormat]]
    every = set(ScaleFormat)
    if kind == "mxf8f6f4" or kind == "mxf4":
        legal = {32: {ScaleFormat.UE8M0}}
    elif arch == "sm_107a":
        legal = {16: every, 32: every}
    else:
        legal = {16: {ScaleFormat.UE4M3, ScaleFormat.UE8M0}, 32: {ScaleFormat.UE8M0}}
    require(
        sf_vec in legal,
        "tcgen05.mma: scale vector",
        f"kind::{kind} takes one scale for {sorted(legal)} elements, not {sf_vec}",
    )
    require(
        scale in legal[sf_vec],
        "instruction descriptor: scale format",
        f"{scale.name} with one scale for {sf_vec} elements is not legal for kind::{kind} on {arch}"
        f" (legal: {', '.join(s.name for s in ScaleFormat if s in legal[sf_vec])})",
    )
    return scale


def _decode_plain(word: int, kind: str, arch: str, cta_group: int) -> InstructionDescriptor:
    require(
        kind != "i8" or arch == "sm_100a",
        "tcgen05.mma: kind",
        f"kind::i8 is not available on {arch}",
    )
    require(
        _field(word, 0, 3) == 0, "instruction descriptor: sparsity", "sparse MMA is not modelled"
    )
    if kind != "i8":
        _zero(word, 3, 1, "saturate", arch)
    _zero(word, 6, 1, "reserved", arch)
    _zero(word, 23, 1, "reserved", arch)
    wide_k = arch == "sm_107a" and kind == "f8f6f4"
    if not wide_k:
        _zero(word, 29, 1, "K size", arch)
    require(
        _field(word, 30, 2) == 0,
        "instruction descriptor: max shift",
        "the shift of .ws instructions is not modelled",
    )
    a, b = _formats(word, kind, 3)
    d = _ACCUMULATORS.get(_field(word, 4, 2), "?")
    legal = {"f16": ("f16", "f32"), "tf32": ("f32",), "f8f6f4": ("f16", "f32"), "i8": ("s32",)}
    require(
        d in legal[kind] and not (d == "f16" and Element.BF16 in (a, b)),
        "instruction descriptor: accumulator format",
        f"accumulator code {_field(word, 4, 2)} is not legal for kind::{kind} of {a.label}",
    )
    k = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}[kind]
    if wide_k and _field(word, 29, 1):
        k = 64
        require(
            a.bits == b.bits == 8,
            "instruction descriptor: K size",
            f"K = 64 of kind::f8f6f4 takes 8-bit formats, not {a.label} and {b.label}",
        )
    return InstructionDescriptor(
        kind=kind,
        arch=arch,
        cta_group=cta_group,
        m=_field(word, 24, 5) << 4,
        n=_field(word, 17, 6) << 3,
        k=k,
        a=a,
        b=b,
        d=d,
        a_negate=bool(_field(word, 13, 1)),
        b_negate=bool(_field(word, 14, 1)),
        a_mn_major=bool(_field(word, 15, 1)),
        b_mn_major=bool(_field(word, 16, 1)),
        saturate=bool(_field(word, 3, 1)),
    )


def _check_shape(d: InstructionDescriptor) -> None:
    name = f"kind::{d.kind} with cta_group::{d.cta_group} on {d.arch}"
    if d.kind in BLOCK_SCALED or d.k == 64:
        # the FP8 and FP4 instructions of double K drop the half-M forms (FlashInfer's sm_107 notes)
        legal_m: tuple[int, ...] = (128 * d.cta_group,)
    else:
        legal_m = (64, 128) if d.cta_group == 1 else (128, 256)
    half = d.kind in BLOCK_SCALED and d.arch != "sm_107a" and (d.cta_group, d.m) == (2, 128)
    require(
        not half,
        "instruction descriptor: M",
        "block-scaled M = 128 over two CTAs (scale factors of the 2x2 data path) is not modelled",
    )
    require(
        d.m in legal_m, "instruction descriptor: M", f"M = {d.m}, K = {d.k}: {name} takes {legal_m}"
    )
    step = 8 * d.cta_group
    if d.b_mn_major and d.b.bits == 8:
        step *= 2
    if d.kind == "i8" and d.n > 32:
        step = max(step, 16)
    require(
        step <= d.n <= 256 and d.n % step == 0,
        "instruction descriptor: N",
        f"N = {d.n}: {name} takes multiples of {step} from {step} to 256",
    )
    for side, element, mn in (("A", d.a, d.a_mn_major), ("B", d.b, d.b_mn_major)):
        require(
            not mn or (element in _MN_MAJOR_FORMATS and not d.kind.startswith("mxf4")),
            "instruction descriptor: major",
            f"{side} of {element.label} under kind::{d.kind} must be K-major",
        )


# ---- shared-memory descriptors

_TCGEN05_SWIZZLE = {0: 0, 2: 128, 4: 64, 6: 32}
_WGMMA_SWIZZLE = {0: 0, 1: 128, 2: 64, 3: 32}


@dataclass(frozen=True)
class ChunkTable:
    """Where the 16-byte chunks of a tile lie: ``base + offsets``, in bytes of shared memory.

    ``offsets`` is int32 ``[rows, chunks]``: K-major, row r of the tile and K chunk c; MN-major,
    K index k and chunk c along M or N. ``base`` is a multiple of 1024. ``ranges`` are the merged
    intervals relative to ``base``; ``bottom`` and ``top`` bound them.
    """

    offsets: NDArray[np.int32]
    ranges: NDArray[np.int64]
    bottom: int
    top: int


@dataclass(frozen=True)
class SmemDescriptor:
    """A decoded shared-memory descriptor; all fields in bytes.

    ``lbo`` is an address instead of an offset where ``absolute_lbo`` is set (sm_103a's circular
    buffers). ``swizzle`` is the row width 0, 32, 64 or 128.
    """

    start: int
    lbo: int
    sbo: int
    base_offset: int
    swizzle: int
    absolute_lbo: bool = False

    def chunks(self, rows: int, count: int, mn_major: bool = False) -> tuple[int, ChunkTable]:
        """``(base, table)`` of a tile with ``count`` 16-byte chunks in each of ``rows`` rows.

        K-major tiles have M or N rows of ``count`` chunks along K; MN-major tiles have K rows of
        ``count`` chunks along M or N.
        """
        base = self.start & ~1023
        lbo = self.lbo - base if self.absolute_lbo else self.lbo
        relative = replace(self, start=self.start - base, lbo=lbo)
        return base, _chunk_table(relative, rows, count, mn_major)


@lru_cache(maxsize=8192)
def _chunk_table(d: SmemDescriptor, rows: int, count: int, mn_major: bool) -> ChunkTable:
    linear = _mn_major_chunks(d, rows, count) if mn_major else _k_major_chunks(d, rows, count)
    address = swizzle_address(linear, d.swizzle, d.base_offset)
    offsets = np.ascontiguousarray(address.astype(np.int32))
    offsets.flags.writeable = False
    merged = intervals(offsets, 16)
    return ChunkTable(offsets, merged, int(merged[0, 0]), int(merged[-1, 1]))


def swizzle_address(
    address: NDArray[np.int64], swizzle: int, base_offset: int = 0
) -> NDArray[np.int64]:
    """Apply the shared-memory swizzle of row width ``swizzle`` (0, 32, 64, 128) to byte addresses.

    128: bits 4-6 are XORed with bits 7-9; 64: bits 4-5 with 7-8; 32: bit 4 with bit 7. A base
    offset shifts the phase of a pattern that does not start on its own alignment.
    """
    if swizzle == 0:
        return address
    mask = swizzle // 16 - 1
    phase = ((address >> 7) - base_offset) & mask
    return address ^ (phase << 4)


def _k_major_chunks(d: SmemDescriptor, rows: int, count: int) -> NDArray[np.int64]:
    r = np.arange(rows, dtype=np.int64)[:, None]
    c = np.arange(count, dtype=np.int64)[None, :]
    row = (r // 8) * d.sbo
    if d.swizzle == 0:
        require(
            not d.absolute_lbo,
            "shared-memory descriptor: leading dimension mode",
            "an absolute leading dimension is modelled for swizzled K-major tiles only",
        )
        return d.start + row + (r % 8) * 16 + c * d.lbo
    row = row + (r % 8) * d.swizzle
    first = d.start & (d.swizzle - 1)
    inside = first + 16 * c < d.swizzle
    here = d.start + row + 16 * c
    if bool(inside.all()):
        return here
    require(
        d.absolute_lbo,
        "shared-memory descriptor: K extent",
        f"{16 * count} bytes along K from offset {first} leave the {d.swizzle}-byte swizzle row",
    )
    there = d.lbo + row + (first + 16 * c - d.swizzle)
    return np.where(inside, here, there)


def _mn_major_chunks(d: SmemDescriptor, rows: int, count: int) -> NDArray[np.int64]:
    require(
        not d.absolute_lbo,
        "shared-memory descriptor: leading dimension mode",
        "an absolute leading dimension is modelled for K-major tiles only",
    )
    k = np.arange(rows, dtype=np.int64)[:, None]
    c = np.arange(count, dtype=np.int64)[None, :]
    if d.swizzle == 0:
        return d.start + c * d.sbo + (k % 8) * 16 + (k // 8) * d.lbo
    width = d.swizzle // 16
    along = (c % width) * 16 + (c // width) * d.lbo
    return d.start + along + (k % 8) * d.swizzle + (k // 8) * d.sbo


@lru_cache(maxsize=65536)
def decode_tcgen05_smem(word: int, arch: str) -> SmemDescriptor:
    """Decode the shared-memory descriptor of ``tcgen05.mma`` and ``tcgen05.cp``.

    Bits: 0-14 start / 16 (0-13 on sm_100a and sm_103a), 16-30 leading byte offset / 16, 32-45
    stride byte offset / 16, 46-48 the constant 1, 49-51 base offset, 52 absolute leading dimension
    (not on sm_100a), 61-63 swizzle (0 none, 2 128 B, 4 64 B, 6 32 B).
    """
    wide = arch == "sm_107a"
    rule = "shared-memory descriptor: undefined field"
    width = 15 if wide else 14
    for low, stop, name in ((width, 16, "start address"), (16 + width, 32, "leading byte offset")):
        require(
            _field(word, low, stop - low) == 0,
            rule,
            f"bits {low}-{stop - 1} above the {name} of {word:#018x} are not defined on {arch}",
        )
    require(
        _field(word, 46, 3) == 1,
        "shared-memory descriptor: version",
        f"bits 46-48 of {word:#018x} hold {_field(word, 46, 3)}; tcgen05 takes 1",
    )
    absolute = bool(_field(word, 52, 1))
    require(not absolute or arch != "sm_100a", rule, f"bit 52 of {word:#018x} on {arch}")
    require(_field(word, 53, 8) == 0, rule, f"bits 53-60 of {word:#018x} on {arch}")
    code = _field(word, 61, 3)
    require(
        code in _TCGEN05_SWIZZLE,
        "shared-memory descriptor: swizzle",
        f"swizzle code {code} is not modelled (0 none, 2 128 B, 4 64 B, 6 32 B)",
    )
    return SmemDescriptor(
        start=_field(word, 0, width) << 4,
        lbo=_field(word, 16, width) << 4,
        sbo=_field(word, 32, 14) << 4,
        base_offset=_field(word, 49, 3),
        swizzle=_TCGEN05_SWIZZLE[code],
        absolute_lbo=absolute,
    )


@lru_cache(maxsize=65536)
def decode_wgmma_smem(word: int) -> SmemDescriptor:
    """Decode the shared-memory descriptor of ``wgmma`` (sm_90a).

    Bits: 0-13 start / 16, 16-29 leading byte offset / 16, 32-45 stride byte offset / 16, 49-51
    base offset, 62-63 swizzle (0 none, 1 128 B, 2 64 B, 3 32 B).
    """
    for low, width in ((14, 2), (30, 2), (46, 3), (52, 10)):
        require(
            _field(word, low, width) == 0,
            "shared-memory descriptor: undefined field",
            f"bits {low}-{low + width - 1} of {word:#018x} are not defined on sm_90a",
        )
    return SmemDescriptor(
        start=_field(word, 0, 14) << 4,
        lbo=_field(word, 16, 14) << 4,
        sbo=_field(word, 32, 14) << 4,
        base_offset=_field(word, 49, 3),
        swizzle=_WGMMA_SWIZZLE[_field(word, 62, 2)],
    )
