"""Integer and bit instructions against NumPy or a bit-by-bit model."""

import numpy as np
import pytest

from tests.emulator.engine.harness import elementwise

EDGES = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 255, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000,
         0xFFFFFFFF, 0xDEADBEEF]  # fmt: skip


def samples(bits: int, count: int = 3) -> list[np.ndarray]:
    """``count`` arrays of unsigned values: all pairs of edges, then random ones."""
    rng = np.random.default_rng(bits)
    top = (1 << bits) - 1
    edges = np.array([e & top for e in EDGES] + [top, top >> 1, (top >> 1) + 1], np.uint64)
    first, second = (x.ravel() for x in np.meshgrid(edges, edges))
    out = [first, second, np.roll(second, 5)][:count]
    random = [rng.integers(0, 1 << bits, 400, dtype=np.uint64) for _ in range(count)]
    dtype = {16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    return [np.concatenate(pair).astype(dtype) for pair in zip(out, random, strict=True)]


REGISTER = {16: ("%h", "%h31"), 32: ("%r", "%r63"), 64: ("%d", "%d31")}


def check(opcode: str, bits: int, count: int, model) -> None:
    inputs = samples(bits, count)
    letter, dest = REGISTER[bits]
    operands = ", ".join(f"{letter}{j}" for j in range(count))
    ours = elementwise(f" {opcode} {dest}, {operands};", inputs, inputs[0].dtype)
    wide = [[int(v) for v in x] for x in inputs]
    expected = [model(*row) & ((1 << bits) - 1) for row in zip(*wide, strict=True)]
    np.testing.assert_array_equal(ours, np.array(expected, np.uint64).astype(inputs[0].dtype))


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_arithmetic(bits: int) -> None:
    def s(v: int) -> int:
        return signed(v, bits)

    check(f"add.u{bits}", bits, 2, lambda a, b: a + b)
    check(f"sub.s{bits}", bits, 2, lambda a, b: a - b)
    check(f"mul.lo.s{bits}", bits, 2, lambda a, b: a * b)
    check(f"mul.hi.u{bits}", bits, 2, lambda a, b: a * b >> bits)
    check(f"mul.hi.s{bits}", bits, 2, lambda a, b: s(a) * s(b) >> bits)
    check(f"mad.lo.u{bits}", bits, 3, lambda a, b, c: a * b + c)
    check(f"min.s{bits}", bits, 2, lambda a, b: min(s(a), s(b)))
    check(f"max.u{bits}", bits, 2, max)
    check(f"neg.s{bits}", bits, 1, lambda a: -a)
    check(f"abs.s{bits}", bits, 1, lambda a: abs(s(a)))
    check(f"sad.u{bits}", bits, 3, lambda a, b, c: abs(a - b) + c)
    check(f"xor.b{bits}", bits, 2, lambda a, b: a ^ b)
    check(f"not.b{bits}", bits, 1, lambda a: ~a)
    check(f"cnot.b{bits}", bits, 1, lambda a: int(a == 0))


@pytest.mark.parametrize("bits", [32, 64])
def test_division_truncates_and_survives_its_corners(bits: int) -> None:
    def divide(a: int, b: int) -> int:
        a, b = signed(a, bits), signed(b, bits)
        if b == 0:
            return -1
        quotient = abs(a) // abs(b)
        return quotient if (a < 0) == (b < 0) else -quotient

    def remainder(a: int, b: int) -> int:
        if b == 0:
            return a
        return signed(a, bits) - divide(a, b) * signed(b, bits)

    check(f"div.s{bits}", bits, 2, divide)
    check(f"rem.s{bits}", bits, 2, remainder)
    check(f"div.u{bits}", bits, 2, lambda a, b: a // b if b else -1)
    check(f"rem.u{bits}", bits, 2, lambda a, b: a % b if b else a)


def test_saturating_and_relu_forms() -> None:
    low, high = -(1 << 31), (1 << 31) - 1
    check("add.sat.s32", 32, 2, lambda a, b: max(low, min(high, signed(a, 32) + signed(b, 32))))
    check("sub.sat.s32", 32, 2, lambda a, b: max(low, min(high, signed(a, 32) - signed(b, 32))))
    check("max.relu.s32", 32, 2, lambda a, b: max(signed(a, 32), signed(b, 32), 0))


def test_wide_products() -> None:
    a, b = samples(32, 2)
    ours = elementwise(" mul.wide.s32 %d31, %r0, %r1;", [a, b], np.int64)
    np.testing.assert_array_equal(ours, a.view(np.int32).astype(np.int64) * b.view(np.int32))
    x, y = samples(16, 2)
    ours32 = elementwise(" mul.wide.s16 %r63, %h0, %h1;", [x, y], np.int32)
    np.testing.assert_array_equal(ours32, x.view(np.int16).astype(np.int32) * y.view(np.int16))


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts_clamp_at_the_width(bits: int) -> None:
    value = samples(bits, 1)[0]
    amount = np.resize(np.array([0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 0xFFFFFFFF], np.uint32),
                       len(value))  # fmt: skip
    letter, dest = REGISTER[bits]
    rows = list(zip((int(v) for v in value), (int(n) for n in amount), strict=True))
    top = (1 << bits) - 1
    models = {
        f"shl.b{bits}": [(v << n) & top if n < bits else 0 for v, n in rows],
        f"shr.u{bits}": [v >> n if n < bits else 0 for v, n in rows],
        f"shr.s{bits}": [(signed(v, bits) >> min(n, bits - 1)) & top for v, n in rows],
    }
    for opcode, expected in models.items():
        ours = elementwise(f" {opcode} {dest}, {letter}0, %r1;", [value, amount], value.dtype)
        np.testing.assert_array_equal(ours, np.array(expected, np.uint64).astype(value.dtype))
    constant = elementwise(f" shr.s{bits} {dest}, {letter}0, 100;", [value], value.dtype)
    expected = [(signed(v, bits) >> (bits - 1)) & top for v, _ in rows]
    np.testing.assert_array_equal(constant, np.array(expected, np.uint64).astype(value.dtype))


def test_funnel_shifts_and_byte_permutes() -> None:
    def left(a: int, b: int, c: int) -> int:
        return ((b << 32 | a) << min(c, 32)) >> 32

    check("shf.l.clamp.b32", 32, 3, left)
    check("shf.l.wrap.b32", 32, 3, lambda a, b, c: left(a, b, c & 31))
    check("shf.r.wrap.b32", 32, 3, lambda a, b, c: (b << 32 | a) >> (c & 31))

    def permute(a: int, b: int, c: int) -> int:
        out = 0
        for i in range(4):
            pick = c >> 4 * i & 15
            byte = (b << 32 | a) >> 8 * (pick & 7) & 255
            out |= (byte if pick < 8 else 255 * (byte >> 7)) << 8 * i
        return out

    check("prmt.b32", 32, 3, permute)


@pytest.mark.parametrize("table", [0x00, 0xE8, 0x96, 0x1B, 0xFF])
def test_lop3(table: int) -> None:
    a, b, c = samples(32, 3)
    ours = elementwise(f" lop3.b32 %r63, %r0, %r1, %r2, {table};", [a, b, c], np.uint32)
    expected = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            terms = [x if row >> s & 1 else ~x for x, s in ((a, 2), (b, 1), (c, 0))]
            expected |= terms[0] & terms[1] & terms[2]
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields(bits: int) -> None:
    value, other = samples(bits, 2)
    rng = np.random.default_rng(9)
    start, length = (rng.integers(0, bits + 8, len(value)).astype(np.uint32) for _ in range(2))
    letter, dest = REGISTER[bits]
    top = (1 << bits) - 1

    def extract(v: int, p: int, n: int, sign: bool) -> int:
        out = 0
        last = v >> min(p + n - 1, bits - 1) & 1 if n else 0
        for i in range(bits):
            inside = i < n and p + i < bits
            out |= (v >> p + i & 1 if inside else (last if sign else 0)) << i
        return out

    def insert(a: int, b: int, p: int, n: int) -> int:
        for i in range(n):
            if p + i < bits:
                b = b & ~(1 << p + i) | (a >> i & 1) << p + i
        return b

    rows = [tuple(int(x) for x in row) for row in zip(value, other, start, length, strict=True)]
    for kind in "us":
        text = f" bfe.{kind}{bits} {dest}, {letter}0, %r2, %r3;"
        ours = elementwise(text, [value, other, start, length], value.dtype)
        expected = [extract(v, p, n, kind == "s") & top for v, _, p, n in rows]
        np.testing.assert_array_equal(ours, np.array(expected, np.uint64).astype(value.dtype))
    text = f" bfi.b{bits} {dest}, {letter}0, {letter}1, %r2, %r3;"
    ours = elementwise(text, [value, other, start, length], value.dtype)
    expected = [insert(a, b, p, n) & top for a, b, p, n in rows]
    np.testing.assert_array_equal(ours, np.array(expected, np.uint64).astype(value.dtype))


@pytest.mark.parametrize("bits", [32, 64])
def test_counting(bits: int) -> None:
    value = samples(bits, 1)[0]
    letter = REGISTER[bits][0]
    rows = [int(v) for v in value]
    models = {
        f"popc.b{bits}": [v.bit_count() for v in rows],
        f"clz.b{bits}": [bits - v.bit_length() for v in rows],
        f"bfind.u{bits}": [v.bit_length() - 1 for v in rows],
        f"bfind.shiftamt.u{bits}": [bits - v.bit_length() if v else -1 for v in rows],
        f"bfind.s{bits}": [
            (~v & ((1 << bits) - 1) if v >> (bits - 1) else v).bit_length() - 1 for v in rows
        ],
    }
    for opcode, expected in models.items():
        ours = elementwise(f" {opcode} %r63, {letter}0;", [value], np.int32)
        np.testing.assert_array_equal(ours, expected)
    brev = elementwise(f" brev.b{bits} {REGISTER[bits][1]}, {letter}0;", [value], value.dtype)
    assert [int(x) for x in brev] == [int(f"{v:0{bits}b}"[::-1], 2) for v in rows]


def test_comparisons_and_selection() -> None:
    a, b = samples(32, 2)
    for kind, x, y in (("s", a.view(np.int32), b.view(np.int32)), ("u", a, b)):
        for name in ("eq", "ne", "lt", "le", "gt", "ge"):
            body = f" setp.{name}.{kind}32 %p1, %r0, %r1; selp.b32 %r63, 7, %r1, %p1;"
            ours = elementwise(body, [a, b], np.uint32)
            hit = getattr(np, {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal",
                               "gt": "greater", "ge": "greater_equal"}[name])(x, y)  # fmt: skip
            np.testing.assert_array_equal(ours, np.where(hit, 7, b))
    body = """ setp.lt.u32 %p2, %r0, 1000; setp.gt.and.s32 %p1|%p3, %r0, %r1, %p2;
     selp.b32 %r62, 1, 0, %p1; selp.b32 %r61, 2, 0, %p3; or.b32 %r63, %r61, %r62;"""
    ours = elementwise(body, [a, b], np.uint32)
    greater = a.view(np.int32) > b.view(np.int32)
    expected = np.where(greater & (a < 1000), 1, 0) | np.where(~greater & (a < 1000), 2, 0)
    np.testing.assert_array_equal(ours, expected)


def test_dot_products_of_bytes() -> None:
    a, b, c = samples(32, 3)
    ours = elementwise(" dp4a.s32.u32 %r63, %r0, %r1, %r2;", [a, b, c], np.int32)
    left = a.view(np.int8).reshape(-1, 4).astype(np.int64)
    right = b.view(np.uint8).reshape(-1, 4).astype(np.int64)
    total = (left * right).sum(1) + c.view(np.int32)
    np.testing.assert_array_equal(ours, total.astype(np.uint64).astype(np.uint32).view(np.int32))


def test_guarded_write_keeps_the_old_value() -> None:
    a, b = samples(32, 2)
    body = " mov.b32 %r63, %r1; setp.lt.u32 %p1, %r0, 100; @!%p1 add.u32 %r63, %r0, 1;"
    ours = elementwise(body, [a, b], np.uint32)
    np.testing.assert_array_equal(ours, np.where(a < 100, b, a + np.uint32(1)))


def test_vectors_pack_and_unpack() -> None:
    a = samples(64, 1)[0]
    body = """ { .reg .b16 x, y, z, w; .reg .b32 lo, hi; mov.b64 {x, y, z, w}, %d0;
     mov.b32 lo, {w, z}; mov.b32 hi, {y, x}; mov.b64 %d31, {lo, hi}; }"""
    ours = elementwise(body, [a], np.uint64)
    np.testing.assert_array_equal(
        ours, np.ascontiguousarray(a.view(np.uint16).reshape(-1, 4)[:, ::-1]).view(np.uint64)[:, 0]
    )
