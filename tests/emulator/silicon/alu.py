"""Probes of conversions, arithmetic and approximations, one thread an element."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from .probe import Probe, elementwise

Words = NDArray[np.uint32]


def f32_words() -> Words:
    """float32 bit patterns: specials, ties of every narrower format, and random ones."""
    rng = np.random.RandomState(1)
    special = [0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]
    special += [0x7F800001, 0x7FFFFFFF, 0x33000000, 0x33000001, 0x38800000, 0x477FE000, 0x477FF000]
    # halves, quarters and eighths of small integers and powers of two: ties of FP8, FP6 and FP4
    grid = np.arange(64, dtype=np.float32) / 8
    ties = np.concatenate([grid * np.float32(2.0**e) for e in (-18, -12, -9, -7, -3, 0, 5, 9, 13)])
    near = ties.view(np.uint32)
    near = np.concatenate([near, near + 1, near[near > 0] - 1])
    # ties of 16-bit formats: a one just below the last kept bit
    random = rng.randint(0, 1 << 32, 400, dtype=np.uint32)
    tie16 = np.concatenate([(random & 0xFFFF0000) | 0x8000, (random & 0xFFFFE000) | 0x1000])
    positive = np.concatenate([np.array(special, np.uint32), near, random, tie16])
    return np.concatenate([positive, positive ^ np.uint32(0x80000000)])


def f16_words() -> Words:
    """Every float16 once, in the low or in the high half."""
    halves = np.random.RandomState(2).permutation(1 << 16).astype(np.uint32)
    return halves[::2] | halves[1::2] << 16


def moderate_floats(low: float, high: float, count: int = 2048) -> Words:
    """float32 values spread evenly over exponents between two magnitudes, both signs."""
    rng = np.random.RandomState(3)
    magnitude = 2.0 ** rng.uniform(np.log2(low), np.log2(high), count)
    return (magnitude * rng.choice([-1.0, 1.0], count)).astype(np.float32).view(np.uint32)


def conversions() -> list[Probe]:
    """cvt to and from FP8, 16-bit floats and integers."""
    out = []
    f, g = f32_words(), np.random.RandomState(4).permutation(f32_words())
    for relu, kind in itertools.product(("", ".relu"), ("e4m3x2", "e5m2x2")):
        op = f"cvt.rn.satfinite{relu}.{kind}.f32"
        out.append(elementwise(op, op, f"{op} %h0, %a0, %a1;\ncvt.u32.u16 %d0, %h0;", [f, g]))
        op = f"cvt.rn.satfinite{relu}.{kind}.f16x2"
        out.append(elementwise(op, op, f"{op} %h0, %a0;\ncvt.u32.u16 %d0, %h0;", [f16_words()]))
        op = f"cvt.rn{relu}.f16x2.{kind}"
        codes = np.arange(1 << 16, dtype=np.uint32)
        out.append(elementwise(op, op, f"cvt.u16.u32 %h0, %a0;\n{op} %d0, %h0;", [codes]))
    for mode, relu, kind in itertools.product(("rn", "rz"), ("", ".relu"), ("f16", "bf16")):
        op = f"cvt.{mode}{relu}.{kind}.f32"
        out.append(elementwise(op, op, f"{op} %h0, %a0;\ncvt.u32.u16 %d0, %h0;", [f]))
        op = f"cvt.{mode}{relu}.{kind}x2.f32"
        out.append(elementwise(op, op, f"{op} %d0, %a0, %a1;", [f, g]))
    for kind in ("f16", "bf16"):
        op = f"cvt.f32.{kind}"
        codes = np.arange(1 << 16, dtype=np.uint32)
        out.append(elementwise(op, op, f"cvt.u16.u32 %h0, %a0;\n{op} %d0, %h0;", [codes]))
    for mode, kind in itertools.product(("rni", "rzi", "rmi", "rpi"), ("s32", "u32", "s64", "u64")):
        op = f"cvt.{mode}.{kind}.f32"
        if kind.endswith("64"):
            body, width = f"{op} %q0, %a0;\nmov.b64 {{%d0, %d1}}, %q0;", 2
        else:
            body, width = f"{op} %d0, %a0;", 1
        out.append(elementwise(op, op, body, [f], width))
    whole = np.random.RandomState(5).randint(0, 1 << 32, 4096, dtype=np.uint32)
    whole = np.concatenate([whole, whole >> 8, whole >> 20, [0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]])
    for mode, kind in itertools.product(("rn", "rz", "rm", "rp"), ("s32", "u32")):
        op = f"cvt.{mode}.f32.{kind}"
        out.append(elementwise(op, op, f"{op} %d0, %a0;", [whole.astype(np.uint32)]))
    for source in ("s8", "u8", "s16", "u16"):
        for target in ("s32", "u32"):
            op = f"cvt.{target}.{source}"
            register = "%h0"
            body = f"cvt.u16.u32 %h0, %a0;\n{op} %d0, {register};"
            out.append(elementwise(op, op, body, [whole.astype(np.uint32)]))
    return out


def arithmetic() -> list[Probe]:
    """Exactly rounded float32, bfloat16 and float16 arithmetic, minima and maxima."""
    out = []
    f = f32_words()[::2]
    g, h = (np.random.RandomState(i).permutation(f) for i in (6, 7))
    for op in ("add", "sub", "mul"):
        for suffix in (".rn.f32", ".rn.ftz.f32"):
            out.append(
                elementwise(op + suffix, op + suffix, f"{op}{suffix} %d0, %a0, %a1;", [f, g])
            )
    for suffix in (".rn.f32", ".rn.ftz.f32"):
        name = "fma" + suffix
        out.append(elementwise(name, name, f"{name} %d0, %a0, %a1, %a2;", [f, g, h]))
    for op, suffix in itertools.product(
        ("min", "max"), (".f32", ".ftz.f32", ".NaN.f32", ".xorsign.abs.f32", ".NaN.xorsign.abs.f32")
    ):
        name = op + suffix
        out.append(elementwise(name, name, f"{name} %d0, %a0, %a1;", [f, g]))
    for op in ("abs", "neg", "abs.ftz", "neg.ftz"):
        name = op + ".f32"
        out.append(elementwise(name, name, f"{name} %d0, %a0;", [f]))
    x, y, z = (np.random.RandomState(i).permutation(f16_words())[:4096] for i in (8, 9, 10))
    for kind in ("f16x2", "bf16x2"):
        for op in ("add.rn", "sub.rn", "mul.rn", "min", "max", "min.NaN", "max.NaN"):
            name = f"{op}.{kind}"
            out.append(elementwise(name, name, f"{name} %d0, %a0, %a1;", [x, y]))
        for op in ("fma.rn", "fma.rn.relu"):
            name = f"{op}.{kind}"
            out.append(elementwise(name, name, f"{name} %d0, %a0, %a1, %a2;", [x, y, z]))
    for relation in ("eq", "ne", "lt", "leu", "gt", "geu", "num", "nan"):
        name = f"setp.{relation}.f32"
        body = f"{name} %p0, %a0, %a1;\nselp.b32 %d0, 1, 0, %p0;"
        out.append(elementwise(name, name, body, [f, g]))
    return out


def approximations() -> list[Probe]:
    """MUFU functions: results are open within the ISA's bound, so the comparison is in ulps."""
    wide = np.concatenate([f32_words(), moderate_floats(2.0**-20, 2.0**20)])
    ranges = {
        "ex2.approx.f32": (np.concatenate([wide, moderate_floats(2.0**-6, 140)]), 2),
        "ex2.approx.ftz.f32": (np.concatenate([wide, moderate_floats(2.0**-6, 140)]), 2),
        "rcp.approx.f32": (wide, 1),
        "rcp.approx.ftz.f32": (wide, 1),
        "rsqrt.approx.f32": (wide & 0x7FFFFFFF, 2),
        "rsqrt.approx.ftz.f32": (wide & 0x7FFFFFFF, 2),
        "sqrt.approx.ftz.f32": (wide & 0x7FFFFFFF, 2),
        "lg2.approx.ftz.f32": (moderate_floats(2.0, 2.0**20) & 0x7FFFFFFF, 4),
        "tanh.approx.f32": (moderate_floats(2.0**-10, 12), 1 << 13),
    }
    out = [
        elementwise(name, name, f"{name} %d0, %a0;", [words.astype(np.uint32)], ulps=ulps)
        for name, (words, ulps) in ranges.items()
    ]
    for name in ("sqrt.rn.f32", "rcp.rn.f32"):
        out.append(elementwise(name, name, f"{name} %d0, %a0;", [wide]))
    shuffled = np.random.RandomState(10).permutation(wide)
    out.append(
        elementwise("div.rn.f32", "div.rn.f32", "div.rn.f32 %d0, %a0, %a1;", [wide, shuffled])
    )
    near = [moderate_floats(2.0**-8, 2.0**8), moderate_floats(2.0**-7, 2.0**9)[::-1]]
    for name in ("div.full.f32", "div.approx.f32"):
        out.append(elementwise(name, name, f"{name} %d0, %a0, %a1;", near, ulps=4))
    return out


def integers() -> list[Probe]:
    """Integer and bit instructions."""
    rng = np.random.RandomState(11)
    edge = np.array([0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF], np.uint32)
    pairs = np.array(list(itertools.product(edge, edge)), np.uint32)
    a = np.concatenate([pairs[:, 0], rng.randint(0, 1 << 32, 2000, dtype=np.uint32)])
    b = np.concatenate([pairs[:, 1], rng.randint(0, 64, 2000, dtype=np.uint32)])
    c = rng.permutation(a)
    two = ["mul.hi.u32", "mul.hi.s32", "mul.lo.s32", "div.u32", "rem.s32", "min.s32", "max.u32"]
    two += ["shl.b32", "shr.u32", "shr.s32", "min.relu.s32", "max.relu.s32", "add.sat.s32"]
    three = ["mad.lo.s32", "mad.hi.u32", "shf.l.wrap.b32", "shf.r.clamp.b32", "prmt.b32"]
    three += ["bfe.u32", "bfe.s32", "sad.s32", "dp4a.s32.s32", "dp4a.u32.u32"]
    one = ["popc.b32", "clz.b32", "brev.b32", "bfind.u32", "bfind.s32", "bfind.shiftamt.u32"]
    one += ["abs.s32", "neg.s32", "not.b32", "cnot.b32"]
    out = [elementwise(n, n, f"{n} %d0, %a0;", [a]) for n in one]
    divisors = np.where(b == 0, 7, b).astype(np.uint32)
    for n in two:
        second = divisors if n.startswith(("div", "rem")) else b
        out.append(elementwise(n, n, f"{n} %d0, %a0, %a1;", [a, second]))
    out += [elementwise(n, n, f"{n} %d0, %a0, %a1, %a2;", [a, b, c]) for n in three[:5]]
    out += [elementwise(n, n, f"{n} %d0, %a0, %a1, %a2;", [a, b, c & 63]) for n in three[5:7]]
    out += [elementwise(n, n, f"{n} %d0, %a0, %a1, %a2;", [a, c, b]) for n in three[7:]]
    out.append(
        elementwise("bfi.b32", "bfi.b32", "bfi.b32 %d0, %a0, %a1, %a2, %a3;", [a, c, b, b[::-1]])
    )
    for table in (0x80, 0xE8, 0x96, 0xCA, 0x1B):
        body = f"lop3.b32 %d0, %a0, %a1, %a2, {table};"
        out.append(elementwise(f"lop3.b32 {table:#x}", "lop3.b32", body, [a, b, c]))
    body = "mov.b64 %q0, {%a0, %a1};\nmov.b64 %q1, {%a2, %a0};\nmul.lo.s64 %q2, %q0, %q1;\n"
    body += "mov.b64 {%d0, %d1}, %q2;"
    out.append(elementwise("mul.lo.s64", "mul.lo.s64", body, [a, b, c], 2))
    body = "mul.wide.s32 %q2, %a0, %a1;\nmov.b64 {%d0, %d1}, %q2;"
    out.append(elementwise("mul.wide.s32", "mul.wide.s32", body, [a, c], 2))
    return out


def refused() -> list[Probe]:
    """Forms that sm_90a does not have: the driver refuses to load them, so must the emulator."""
    words = np.zeros(4, np.uint32)
    out = []
    for name, body in [
        (
            "add.rn.f32x2",
            "mov.b64 %q0, {%a0, %a0};\nadd.rn.f32x2 %q1, %q0, %q0;\nmov.b64 {%d0, %d1}, %q1;",
        ),
        (
            "cvt.rn.satfinite.e2m1x2.f32",
            "{\n.reg .b8 %x;\ncvt.rn.satfinite.e2m1x2.f32 %x, %a0, %a0;\ncvt.u32.u8 %d0, %x;\n}",
        ),
    ]:
        plain = elementwise(name, name, body, [words])
        out.append(Probe(name, name, plain.ptx, plain.data, plain.out_bytes, refused=True))
    return out


def probes() -> list[Probe]:
    """All of this file."""
    return conversions() + arithmetic() + approximations() + integers() + refused()
