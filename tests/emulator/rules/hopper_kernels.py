"""A Hopper prefill kernel in small: gathered tokens, A from registers, stages handed on and back.

Warpgroup 0 gathers tokens with 16-byte ``cp.async`` whose mbarrier the copies signal themselves;
warpgroups 1 and 2 multiply 64 rows each. What orders the accesses is in ``ORDER``, one text each,
so that a test can take it away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from rubin_moe.emulator import Report
from rubin_moe.emulator.isa.mma_sync import TYPES, a_fragment
from tests.emulator.engine.harness import module, run

TILES, STAGES, WARPGROUPS = 3, 2, 2
#: Bytes of a row of a tile: 128 along K, one swizzle row, four instructions.
ROW = 128
DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
#: What hands bytes and registers from one agent to the next.
ORDER = {
    "announce": "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%full];",
    "proxy": "fence.proxy.async.shared::cta;",
    "registers": "wgmma.fence.sync.aligned;",
    "older": "wgmma.wait_group.sync.aligned 1;",
    "last": "wgmma.wait_group.sync.aligned 0;",
    "together": "",
    "touch": "",
}
#: Instead of one arrival of each warp: one of each warpgroup.
LEADER = {"first": "%leads"}


@dataclass
class Problem:
    """Operands of one launch; ``tokens`` [rows, K] and the ``index`` of those gathered."""

    a: np.ndarray
    tokens: np.ndarray
    index: np.ndarray
    names: tuple[str, str]
    out: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        n = len(self.index)
        self.out = np.zeros((WARPGROUPS, 4, 32, n // 2), np.float32)

    def fragments(self) -> np.ndarray:
        """A as each thread loads it, uint32 [tile, k block, warpgroup, thread, 4]."""
        k = 32 // self.a.dtype.itemsize
        element = TYPES[self.names[0]]
        index = a_fragment(k, element)
        out = np.empty((TILES, 4, WARPGROUPS, 4, 32, 4), np.uint32)
        codes = np.ascontiguousarray(self.a).view(f"u{self.a.dtype.itemsize}")
        for tile, block, group, warp in np.ndindex(out.shape[:4]):
            row = 64 * group + 16 * warp
            part = codes[row : row + 16, (4 * tile + block) * k : (4 * tile + block + 1) * k]
            picked = np.ascontiguousarray(part[index[..., 0], index[..., 1]])
            out[tile, block, group, warp] = picked.view(np.uint32)[..., 0].T
        return out

    def expected(self) -> np.ndarray:
        """float64 [rows, gathered tokens]."""
        return self.a.astype(np.float64) @ self.tokens.astype(np.float64)[self.index].T

    def result(self) -> np.ndarray:
        """The accumulators as a matrix."""
        rows = np.empty((64 * WARPGROUPS, len(self.index)))
        for group, warp, lane, i in np.ndindex(self.out.shape):
            row = 64 * group + 16 * warp + lane // 4 + 8 * (i // 2 % 2)
            rows[row, 8 * (i // 4) + 2 * (lane % 4) + i % 2] = self.out[group, warp, lane, i]
        return rows


def problem(n: int, a: str, b: str) -> Problem:
    """Small integers: every sum is exact."""
    rng = np.random.default_rng(n)
    k = TILES * ROW // np.dtype(DTYPES[a]).itemsize
    values = rng.integers(-2, 3, (64 * WARPGROUPS, k)), rng.integers(-2, 3, (2 * n, k))
    pairs = zip(values, (a, b), strict=True)
    left, right = (v.astype(np.float32).astype(DTYPES[name]) for v, name in pairs)
    return Problem(left, right, rng.integers(0, 2 * n, n).astype(np.uint32), (a, b))


def kernel(n: int, a: str, b: str, order: dict[str, str] | None = None) -> str:
    """PTX for ``n`` gathered tokens; ``order`` replaces entries of ORDER."""
    use = {**ORDER, "first": "%first", **(order or {})}
    acc = ", ".join(f"%f{i}" for i in range(n // 2))
    k = 16 if a in ("bf16", "f16") else 32
    op = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{a}.{b}"
    tail = ", 1, 1, 0" if k == 16 else ", 1, 1"
    stage = n * ROW
    arrivals = WARPGROUPS if use["first"] == "%leads" else 4 * WARPGROUPS
    lines = [
        f"""
 .extern .shared .align 1024 .b8 s[]; .reg .f32 %f<{n // 2}>; .reg .b32 %a<32>; .reg .b64 %ptr<8>;
 .reg .pred %first; .reg .pred %leads; .reg .pred %more; .reg .pred %fresh; .reg .b32 %full;
 .reg .b32 %free; .reg .b32 %c; .reg .b32 %row; .reg .b32 %to; .reg .b32 %at; .reg .b32 %base;
 mov.u32 %i0, %tid.x; mov.u32 %r1, s; and.b32 %i1, %i0, 31; and.b32 %i2, %i0, 127;
 setp.eq.u32 %first, %i1, 0; setp.eq.u32 %leads, %i2, 0; setp.eq.u32 %p1, %i0, 0;
 add.u32 %base, %r1, 1024;"""
    ]
    for s in range(STAGES):
        lines.append(f" @%p1 mbarrier.init.shared::cta.b64 [%r1+{8 * s}], 128;")
        lines.append(f" @%p1 mbarrier.init.shared::cta.b64 [%r1+{64 + 8 * s}], {arrivals};")
    lines.append(""" fence.mbarrier_init.release.cluster; bar.sync 0;
 ld.param.u64 %ptr0, [a]; ld.param.u64 %ptr1, [tokens]; ld.param.u64 %ptr2, [index];
 ld.param.u64 %ptr3, [out]; shr.u32 %i3, %i0, 7; setp.gt.u32 %p2, %i3, 0; @%p2 bra CONSUME;
 setmaxnreg.dec.sync.aligned.u32 40;""")
    for tile in range(TILES):
        lines.append(_produce(tile, n, stage, use))
    lines.append(""" cp.async.wait_all; bra END;
CONSUME: setmaxnreg.inc.sync.aligned.u32 232; sub.u32 %i3, %i3, 1;""")
    for tile in range(TILES):
        lines.append(_consume(tile, stage, op, acc, tail, use))
    lines.append(f" {use['last']} {use['touch']}")
    lines.append(_store(n))
    lines.append("END:")
    params = ", ".join(f".param .u64 {name}" for name in ("a", "tokens", "index", "out"))
    return module("\n".join(lines), params, target="sm_90a")


def _wait(name: str, barrier: str, parity: int) -> str:
    return (
        f"{name}: mbarrier.try_wait.parity.shared::cta.b64 %more, [{barrier}], {parity}; "
        f"@!%more bra {name};"
    )


def _produce(tile: int, n: int, stage: int, use: dict[str, str]) -> str:
    s = tile % STAGES
    wait = _wait(f"FREE{tile}", "%free", tile // STAGES - 1 & 1) if tile >= STAGES else ""
    return f"""
 add.u32 %full, %r1, {8 * s}; add.u32 %free, %r1, {64 + 8 * s}; {wait} mov.b32 %c, %i2;
COPY{tile}: setp.ge.u32 %more, %c, {8 * n}; @%more bra DONE{tile};
 shr.u32 %row, %c, 3; and.b32 %at, %c, 7; mul.wide.u32 %ptr4, %row, 4;
 add.s64 %ptr4, %ptr2, %ptr4; ld.global.b32 %r5, [%ptr4]; mul.wide.u32 %ptr4, %r5, {TILES * ROW};
 add.s64 %ptr4, %ptr1, %ptr4; mul.wide.u32 %ptr5, %at, 16; add.s64 %ptr4, %ptr4, %ptr5;
 and.b32 %r6, %row, 7; xor.b32 %at, %at, %r6; shl.b32 %to, %row, 7; shl.b32 %at, %at, 4;
 add.u32 %to, %to, %at; add.u32 %to, %to, %base;
 cp.async.cg.shared.global [%to+{s * stage}], [%ptr4+{tile * ROW}], 16;
 add.u32 %c, %c, 128; bra COPY{tile}; DONE{tile}: {use["announce"]}"""


def _consume(tile: int, stage: int, op: str, acc: str, tail: str, use: dict[str, str]) -> str:
    s, bank = tile % STAGES, 16 * (tile % 2)
    lines = []
    for block in range(4):
        at = (tile * 4 + block) * WARPGROUPS * 128 * 16
        held = ", ".join(f"%a{bank + 4 * block + i}" for i in range(4))
        lines.append(
            f" mad.lo.u32 %at, %i3, 128, %i2; mul.wide.u32 %ptr4, %at, 16; "
            f"add.s64 %ptr4, %ptr0, %ptr4; ld.global.v4.b32 {{{held}}}, [%ptr4+{at}];"
        )
    lines.append(f" add.u32 %full, %r1, {8 * s}; " + _wait(f"FULL{tile}", "%full", tile // 2 & 1))
    lines.append(f" {use['proxy']} {use['registers']}")
    for block in range(4):
        held = ", ".join(f"%a{bank + 4 * block + i}" for i in range(4))
        first = "ne" if tile == block == 0 else "eq"
        lines.append(
            f" add.u32 %to, %base, {s * stage + 32 * block}; shr.u32 %to, %to, 4; "
            f"cvt.u64.u32 %ptr4, %to; or.b64 %ptr4, %ptr4, {1 << 62 | 64 << 32 | 1 << 16}; "
            f"setp.{first}.u32 %fresh, 0, 0; {op} {{{acc}}}, {{{held}}}, %ptr4, %fresh{tail};"
        )
    lines.append(" wgmma.commit_group.sync.aligned;")
    if tile > 0:
        before = (tile - 1) % STAGES
        lines.append(
            f" {use['older']} {use['together']} add.u32 %free, %r1, {64 + 8 * before}; "
            f"@{use['first']} mbarrier.arrive.shared::cta.b64 _, [%free];"
        )
    return "\n".join(lines)


def _store(n: int) -> str:
    lines = [f" mad.lo.u32 %at, %i3, 128, %i2; mul.wide.u32 %ptr4, %at, {2 * n};"]
    lines.append(" add.s64 %ptr4, %ptr3, %ptr4;")
    for i in range(0, n // 2, 4):
        held = ", ".join(f"%f{i + j}" for j in range(4))
        lines.append(f" st.global.v4.f32 [%ptr4+{4 * i}], {{{held}}};")
    return "\n".join(lines)


def launch(text: str, p: Problem, seed: int | None = None, rules: str | None = "enforce") -> Report:
    """Run a kernel on a problem."""
    smem = 1024 + STAGES * len(p.index) * ROW
    return run(
        text, [p.fragments(), np.ascontiguousarray(p.tokens).view(np.uint8), p.index, p.out],
        block=128 * (1 + WARPGROUPS), dynamic_smem=smem, seed=seed, rules=rules,
    )  # fmt: skip
