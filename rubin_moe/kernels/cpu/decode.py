"""Code that turns FP4 codes and block scale codes into numbers, 16 rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

from rubin_moe.kernels.cpu.ir import F16, F32, I8, I16, I32, Function, Value, vec
from rubin_moe.kernels.cpu.isa import LANES, Isa

F32V, I32V = vec(F32, LANES), vec(I32, LANES)
I16V = vec(I16, 2 * LANES)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = _MAGNITUDES + tuple(-v for v in _MAGNITUDES)
_BF16 = (0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0)
_BF16_VALUES = _BF16 + tuple(code | 0x8000 for code in _BF16)
_DOUBLED_SIGNED = tuple(int(2 * v) for v in _VALUES)
INT8_BIAS = 12
_BIASED = tuple(v + INT8_BIAS for v in _DOUBLED_SIGNED)
_DOUBLED = 0xC8643210
"""Twice the magnitude of code ``c`` is nibble ``c``."""

HALF_TRICK = 2.0**8
"""``scale`` gives UE4M3 scales divided by this where fp16 is converted by instructions."""


def weights_f32(f: Function, isa: Isa, word: Value) -> Iterator[tuple[int, Value]]:
    """Eight fp32 vectors from ``word``, 16 rows of 8 codes: element of K, values.

    The values are those of the codes divided by ``isa.panel_scale``.
    """
    if isa.lookup == "avx2":
        yield from _avx2(f, word)
    else:
        one = _avx512 if isa.lookup == "avx512" else _shift
        for n in range(8):
            yield n, one(f, word, 4 * n)


def weights_bf16(f: Function, word: Value) -> Iterator[tuple[int, Value]]:
    """Four vectors of bf16 pairs: n, and in 32-bit lanes elements n (low half) and n + 4 of K."""
    halves = f.cast("bitcast", word, I16V)
    table = f.const(I16V, _BF16_VALUES * 2)  # the look-up reads 5 bits, a code has 4
    for n in range(4):
        index = halves >> 4 * n if n else halves
        pair = f.intrinsic("llvm.x86.avx512.permvar.hi.512", I16V, table, index)
        yield n, f.cast("bitcast", pair, I32V)


def weights_int8(f: Function, isa: Isa, word: Value) -> Iterator[Value]:
    """Two vectors of bytes: twice the value plus `INT8_BIAS`, of the even and the odd elements."""
    for odd in (0, 1):
        nibbles = ((word >> 4) if odd else word) & 0x0F0F0F0F
        yield _byte_lookup(f, isa, nibbles)


def _byte_lookup(f: Function, isa: Isa, nibbles: Value) -> Value:
    if isa.lookup == "avx512":
        return _pshufb(f, "llvm.x86.avx512.pshuf.b.512", _BIASED, nibbles)
    if isa.lookup == "avx2":
        halves = [f.shuffle(nibbles, range(low, low + 8)) for low in (0, 8)]
        return f.concat(*(_pshufb(f, "llvm.x86.avx2.pshuf.b", _BIASED, h) for h in halves))
    parts = None
    for byte in range(4):
        code = (nibbles >> 8 * byte) & 15
        doubled = (f.const(I32V, _DOUBLED - 2**32) >> ((code & 7) << 2)) & 15
        negative = f.select(code > 7, f.const(I32V, INT8_BIAS) - doubled, doubled + INT8_BIAS)
        parts = negative if parts is None else parts | (negative << 8 * byte)
    assert parts is not None
    return parts


def _pshufb(f: Function, name: str, table: tuple[int, ...], nibbles: Value) -> Value:
    """Bytes of a 16-entry table, picked by bytes below 16."""
    as_bytes = vec(I8, 4 * nibbles.type.count)
    index = f.cast("bitcast", nibbles, as_bytes)
    lookup = f.const(as_bytes, table * (as_bytes.count // 16))
    return f.cast("bitcast", f.intrinsic(name, as_bytes, lookup, index), nibbles.type)


def _avx512(f: Function, word: Value, bit: int) -> Value:
    table = f.const(F32V, _VALUES)
    return f.intrinsic("llvm.x86.avx512.permvar.sf.512", F32V, table, word >> bit if bit else word)


def _avx2(f: Function, word: Value) -> Iterator[tuple[int, Value]]:
    """Codes become signed bytes by a look-up of 32; a byte moved to the top is an integer.

    Only as much is computed ahead as fits the registers, so the even elements come first.
    """
    for odd in (0, 1):
        found = []
        for low in (0, 8):
            codes = f.shuffle(word, range(low, low + 8))
            nibbles = ((codes >> 4) if odd else codes) & 0x0F0F0F0F
            found.append(_pshufb(f, "llvm.x86.avx2.pshuf.b", _DOUBLED_SIGNED, nibbles))
        for byte in range(4):
            yield 2 * byte + odd, f.concat(*(_top_byte(f, ints, byte) for ints in found))


def _top_byte(f: Function, ints: Value, byte: int) -> Value:
    moved = ints << (24 - 8 * byte) if byte < 3 else ints
    return f.cast("sitofp", moved & -(2**24) if byte else moved, vec(F32, 8))


def _shift(f: Function, word: Value, bit: int) -> Value:
    codes = word >> bit
    doubled = (f.const(I32V, _DOUBLED - 2**32) >> ((codes & 7) << 2)) & 15
    half = f.cast("bitcast", f.cast("sitofp", doubled, F32V) * 0.5, I32V)
    return f.cast("bitcast", half ^ ((codes << 28) & -(2**31)), F32V)


def scale(f: Function, isa: Isa, scale_type: str, codes: Value) -> Value:
    """fp32 from 16 bytes of codes (NaN codes are refused when weights are prepared).

    UE8M0 code 0 is 2^-127, a subnormal. E4M3 and E5M3 subnormals are counted in units of the
    smallest one; fp16 has E4M3's subnormals in the same place, 2^8 lower.
    """
    if scale_type == "ue4m3" and isa.half:
        half = f.cast("zext", codes, vec(I16, LANES)) << 7
        return f.cast("fpext", f.cast("bitcast", half, vec(F16, LANES)), F32V)
    wide = f.cast("zext", codes, I32V)
    if scale_type == "ue8m0":
        bits = wide << 23
        least = f.const(I32V, 0x00400000)
        return f.cast("bitcast", f.select(wide.equals(0), least, bits), F32V)
    bias = {"ue4m3": 7, "ue5m3": 15}[scale_type]
    normal = f.cast("bitcast", (wide << 20) + ((127 - bias) << 23), F32V)
    subnormal = f.cast("sitofp", wide, F32V) * 2.0 ** (-2 - bias)
    return f.select(wide < 8, subnormal, normal)


def scale_factor(isa: Isa, scale_type: str) -> float:
    """What a sum of products with `scale`'s values is still to be multiplied with."""
    return HALF_TRICK if scale_type == "ue4m3" and isa.half else 1.0
