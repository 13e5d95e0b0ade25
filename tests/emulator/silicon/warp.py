"""Probes of warp collectives, mbarriers and atomics."""

from __future__ import annotations

import numpy as np

from .probe import Probe, elementwise, entry

RNG = np.random.RandomState


def collectives() -> list[Probe]:
    """shfl with every kind of width, votes, reductions, matches, elect."""
    out = []
    values = RNG(41).randint(0, 1 << 32, 4096, dtype=np.uint32)
    lanes = RNG(42).randint(0, 40, 4096, dtype=np.uint32)
    for mode in ("idx", "up", "down", "bfly"):
        for width in (32, 16, 8):
            clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
            op = f"shfl.sync.{mode}.b32"
            body = f"{op} %d0|%p0, %a0, %a1, {clamp:#x}, 0xffffffff;\nselp.b32 %d1, 1, 0, %p0;"
            out.append(elementwise(f"{op} width {width}", op, body, [values, lanes], 2))
    small = values & 7
    for op in ("add.u32", "add.s32", "min.u32", "min.s32", "max.u32", "max.s32"):
        name = f"redux.sync.{op}"
        out.append(elementwise(name, name, f"{name} %d0, %a0, 0xffffffff;", [values]))
    for op in ("and.b32", "or.b32", "xor.b32"):
        name = f"redux.sync.{op}"
        out.append(elementwise(name, name, f"{name} %d0, %a0, 0xffffffff;", [values]))
    pred = "setp.lt.u32 %p0, %a0, 3;\n"
    name = "vote.sync.ballot.b32"
    out.append(elementwise(name, name, pred + f"{name} %d0, %p0, 0xffffffff;", [small]))
    for op in ("any", "all", "uni"):
        name = f"vote.sync.{op}.pred"
        body = pred + f"{name} %p1, %p0, 0xffffffff;\nselp.b32 %d0, 1, 0, %p1;"
        sparse = np.where(RNG(43).random_sample(values.size) < 0.97, 0, 9).astype(np.uint32)
        out.append(elementwise(name, name, body, [sparse]))
    name = "match.any.sync.b32"
    out.append(elementwise(name, name, f"{name} %d0, %a0, 0xffffffff;", [small]))
    name = "match.all.sync.b32"
    runs = np.repeat(values[:128] & 1, 32).astype(np.uint32)
    body = f"{name} %d0|%p0, %a0, 0xffffffff;\nselp.b32 %d1, 1, 0, %p0;"
    out.append(elementwise(name, name, body, [np.where(values[:4096] % 37 == 0, 5, runs)], 2))
    body = "elect.sync %d0|%p0, 0xffffffff;\nselp.b32 %d1, 1, 0, %p0;"
    out.append(elementwise("elect.sync", "elect.sync", body, [values[:256]], 2))
    # divergent: half of the lanes, each half its own mask
    body = "and.b32 %r0, %t, 1;\nsetp.eq.u32 %p0, %r0, 0;\n@%p0 bra EVEN;\n"
    body += "redux.sync.add.s32 %d0, %a0, 0xaaaaaaaa;\nbra JOIN;\nEVEN:\n"
    body += "redux.sync.max.s32 %d0, %a0, 0x55555555;\nJOIN:\nactivemask.b32 %r1;\n"
    out.append(elementwise("redux.sync divergent", "redux.sync.add.s32", body, [values]))
    return out


def barriers() -> list[Probe]:
    """One thread drives an mbarrier through phases and writes what test_wait says in between."""
    steps = [
        ("init", "mbarrier.init.shared.b64 [%r0], 3;"),
        ("arrive", "mbarrier.arrive.shared.b64 %q6, [%r0];"),
        ("arrive 2", "mbarrier.arrive.shared.b64 %q6, [%r0], 2;"),
        ("expect 64", "mbarrier.arrive.expect_tx.shared.b64 %q6, [%r0], 64;"),
        ("arrive 2", "mbarrier.arrive.shared.b64 %q6, [%r0], 2;"),
        ("complete 48", "mbarrier.complete_tx.shared.b64 [%r0], 48;"),
        ("complete 16", "mbarrier.complete_tx.shared.b64 [%r0], 16;"),
        ("expect early", "mbarrier.expect_tx.relaxed.cta.shared.b64 [%r0], 16;"),
        ("arrive 3", "mbarrier.arrive.shared.b64 %q6, [%r0], 3;"),
        ("complete 16", "mbarrier.complete_tx.shared.b64 [%r0], 16;"),
        ("drop", "mbarrier.arrive_drop.shared.b64 %q6, [%r0];"),
        ("arrive", "mbarrier.arrive.shared.b64 %q6, [%r0];"),
        ("arrive", "mbarrier.arrive.shared.b64 %q6, [%r0];"),
        ("arrive", "mbarrier.arrive.shared.b64 %q6, [%r0];"),
        ("arrive", "mbarrier.arrive.shared.b64 %q6, [%r0];"),
    ]
    body = "mov.u32 %r0, dyn;\nsetp.ne.u32 %p0, %t, 0;\n@%p0 bra END;\n"
    for i, (_, step) in enumerate(steps):
        body += step + "\n"
        for parity in (0, 1):
            body += f"mbarrier.test_wait.parity.shared.b64 %p1, [%r0], {parity};\n"
            body += "selp.b32 %r1, 1, 0, %p1;\n"
            body += f"st.global.b32 [%out+{8 * i + 4 * parity}], %r1;\n"
    body += "END:\n"
    data = np.zeros(16, np.uint8)
    return [Probe("mbarrier phases", "mbarrier", entry(body), data, 8 * len(steps), smem=64)]


def atomics() -> list[Probe]:
    """Global and shared atomics by one warp: final values, which no order changes."""
    out = []
    values = RNG(44).randint(0, 1 << 32, 32, dtype=np.uint32)
    for op in ("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "inc.u32"):
        body = "setp.ne.u32 %p0, %t, 0;\nmov.u32 %r0, dyn;\n@!%p0 st.shared.b32 [%r0], 77;\n"
        body += "@!%p0 st.global.b32 [%out], 77;\nbar.sync 0;\n"
        body += "mul.wide.u32 %q4, %t, 4;\nadd.u64 %q4, %q4, %in;\nld.global.b32 %a0, [%q4];\n"
        body += f"atom.global.{op} %r1, [%out], %a0;\natom.shared.{op} %r1, [%r0], %a0;\n"
        body += "bar.sync 0;\n@%p0 bra END;\nld.shared.b32 %r2, [%r0];\n"
        body += "st.global.b32 [%out+4], %r2;\nEND:\n"
        name = f"atom.{op}"
        out.append(Probe(name, name, entry(body), values.view(np.uint8), 8, smem=64))
    return out


def probes() -> list[Probe]:
    """All of this file."""
    return collectives() + barriers() + atomics()
