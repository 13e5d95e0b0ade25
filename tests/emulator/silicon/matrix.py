"""Probes of matrix instructions: mma.sync, ldmatrix, stmatrix, movmatrix and wgmma."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.emulator.units.machine import put_k_major, xor_swizzle

from .probe import Probe, entry

DTYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
}


def _values(rng: np.random.RandomState, name: str, shape: tuple[int, ...], small: bool):
    if name in ("s8", "u8"):
        info = np.iinfo(DTYPES[name])
        return rng.randint(info.min, info.max + 1, shape).astype(DTYPES[name])
    values = rng.randint(-2, 3, shape) if small else rng.standard_normal(shape)
    return np.asarray(values, np.float32).astype(DTYPES[name])


def _registers(count: int, prefix: str, first: int = 0) -> str:
    return ", ".join(f"%{prefix}{first + i}" for i in range(count))


def mma_sync() -> list[Probe]:
    """Every type and depth, small integers (exact) and normal values."""
    cases = [("f16", 8, "f32"), ("f16", 16, "f32"), ("f16", 8, "f16"), ("f16", 16, "f16")]
    cases += [("bf16", 8, "f32"), ("bf16", 16, "f32"), ("tf32", 4, "f32"), ("tf32", 8, "f32")]
    cases += [("e4m3", 32, "f32"), ("e5m2", 32, "f32"), ("s8", 16, "s32"), ("s8", 32, "s32")]
    cases += [("u8", 32, "s32")]
    out = []
    for (name, k, form), small in itertools.product(cases, (True, False)):
        rng = np.random.RandomState(k)
        bits = 8 * np.dtype(DTYPES[name]).itemsize
        na, nb, nc = 16 * k * bits // 1024, 8 * k * bits // 1024, 2 if form == "f16" else 4
        # fragments as they come: every lane's registers one after another
        a, b = (_values(rng, name, (32 * n * 32 // bits,), small) for n in (na, nb))
        c = _values(rng, {"f16": "f16", "f32": "tf32", "s32": "s8"}[form], (32 * nc * 4,), small)
        words = [x.view(np.uint8)[: 128 * n] for x, n in ((a, na), (b, nb), (c, nc))]
        body, at, names = "", 0, []
        for n in (na, nb, nc):
            body += f"mul.wide.u32 %q4, %t, {4 * n};\nadd.u64 %q4, %q4, %in;\n"
            for i in range(n):
                body += f"ld.global.b32 %a{len(names) + i}, [%q4+{at + 4 * i}];\n"
            names += [f"%a{len(names) + i}" for i in range(n)]
            at += 128 * n
        groups = [names[:na], names[na : na + nb], names[na + nb :]]
        operands = ", ".join("{" + ", ".join(g) + "}" for g in groups)
        op = f"mma.sync.aligned.m16n8k{k}.row.col.{form}.{name}.{name}.{form}"
        body += f"{op} {{{_registers(nc, 'd')}}}, {operands};\n"
        body += f"mul.wide.u32 %q4, %t, {4 * nc};\nadd.u64 %q4, %q4, %out;\n"
        body += "".join(f"st.global.b32 [%q4+{4 * i}], %d{i};\n" for i in range(nc))
        out.append(
            Probe(
                f"{op} {'integers' if small else 'normal'}",
                op,
                entry(body),
                np.concatenate(words),
                128 * nc,
            )
        )
    return out


def matrix_moves() -> list[Probe]:
    """ldmatrix and stmatrix through shared memory, movmatrix in registers."""
    data = np.random.RandomState(31).randint(0, 256, 2048).astype(np.uint8)
    fill = "mov.u32 %r0, dyn;\nshl.b32 %r2, %t, 4;\n"
    fill += "mul.wide.u32 %q4, %t, 64;\nadd.u64 %q4, %q4, %in;\nshl.b32 %r3, %t, 6;\n"
    fill += "add.u32 %r3, %r3, %r0;\n"
    fill += "".join(
        f"ld.global.b32 %r4, [%q4+{4 * i}];\nst.shared.b32 [%r3+{4 * i}], %r4;\n" for i in range(16)
    )
    fill += "bar.sync 0;\n"
    # rows 48 bytes apart, in an order that no matrix has
    rows = "xor.b32 %r5, %t, 5;\nmad.lo.u32 %r6, %r5, 48, %r0;\n"
    out = []
    for num, trans in itertools.product((1, 2, 4), ("", ".trans")):
        op = f"ldmatrix.sync.aligned.m8n8.x{num}{trans}.shared.b16"
        body = fill + rows + f"{op} {{{_registers(num, 'd')}}}, [%r6];\n"
        body += f"mul.wide.u32 %q5, %t, {4 * num};\nadd.u64 %q5, %q5, %out;\n"
        body += "".join(f"st.global.b32 [%q5+{4 * i}], %d{i};\n" for i in range(num))
        out.append(Probe(op, op, entry(body), data, 128 * num, smem=2048))
        op = f"stmatrix.sync.aligned.m8n8.x{num}{trans}.shared.b16"
        body = fill + rows
        body += "".join(f"ld.global.b32 %d{i}, [%q4+{4 * i}];\n" for i in range(num))
        body += f"{op} [%r6], {{{_registers(num, 'd')}}};\nbar.sync 0;\n"
        body += "mul.wide.u32 %q5, %t, 64;\nadd.u64 %q5, %q5, %out;\n"
        body += "".join(
            f"ld.shared.b32 %r4, [%r3+{4 * i}];\nst.global.b32 [%q5+{4 * i}], %r4;\n"
            for i in range(16)
        )
        out.append(Probe(op, op, entry(body), data, 2048, smem=2048))
    op = "movmatrix.sync.aligned.m8n8.trans.b16"
    body = "mul.wide.u32 %q4, %t, 4;\nadd.u64 %q5, %q4, %in;\nld.global.b32 %a0, [%q5];\n"
    body += f"{op} %d0, %a0;\nadd.u64 %q5, %q4, %out;\nst.global.b32 [%q5], %d0;\n"
    out.append(Probe(op, op, entry(body), data[:128], 128))
    return out


def _desc_bits(lbo: int, sbo: int, swizzle: int, base_offset: int = 0) -> int:
    code = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    return (lbo >> 4) << 16 | (sbo >> 4) << 32 | base_offset << 49 | code << 62


def _mn_major(smem: NDArray[np.uint8], start: int, tile: NDArray[np.generic], swizzle: int):
    """Write 16-bit ``tile`` [K, MN] MN-major; returns ``(lbo, sbo)``."""
    k, mn = tile.shape
    for i in range(k):
        for j in range(0, mn, 8):
            chunk = j // 8
            if swizzle == 0:
                lbo, sbo = 128 * (mn // 8), 128
                at = start + chunk * sbo + (i // 8) * lbo + (i % 8) * 16
            else:
                width = swizzle // 16
                sbo, lbo = 8 * swizzle, k * swizzle
                at = (chunk // width) * lbo + (i // 8) * sbo + (i % 8) * swizzle
                at = xor_swizzle(start + at + (chunk % width) * 16, swizzle)
            smem[at : at + 16] = tile[i, j : j + 8].view(np.uint8)
    return lbo, sbo


B_AT = 16384
SMEM = B_AT + 32768


def wgmma_probe(
    name: str,
    form: str,
    n: int,
    swizzle: int,
    *,
    small: bool = True,
    registers: bool = False,
    trans: tuple[int, int] = (0, 0),
    signs: tuple[int, int] = (1, 1),
    shift: int = 0,
) -> Probe:
    """One warpgroup: D = A B, then D += A B again, all registers written out.

    ``shift`` moves A's tile by rows of the swizzle and says so in the base offset.
    """
    rng = np.random.RandomState(n + swizzle)
    dtype = DTYPES[name]
    k = 32 // np.dtype(dtype).itemsize
    a, b = (_values(rng, name, (rows, k), small) for rows in (64, n))
    smem = np.zeros(SMEM, np.uint8)
    strides = []
    for matrix, at, transposed in ((a, 0, trans[0]), (b, B_AT, trans[1])):
        if transposed:
            strides.append(_mn_major(smem, at, np.ascontiguousarray(matrix.T), swizzle))
        else:
            strides.append(put_k_major(smem, at, matrix.view(np.uint8), swizzle))
    if shift:
        smem[shift : shift + 64 * swizzle] = smem[: 64 * swizzle].copy()
        smem[:shift] = 0
    count = n // 4 if form == "f16" else n // 2
    body = "mov.u32 %r0, dyn;\nshl.b32 %r2, %t, 4;\nLOAD:\n"
    body += "cvt.u64.u32 %q4, %r2;\nadd.u64 %q4, %q4, %in;\nadd.u32 %r3, %r0, %r2;\n"
    body += "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%q4];\n"
    body += "st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7};\nadd.u32 %r2, %r2, 2048;\n"
    body += f"setp.lt.u32 %p1, %r2, {SMEM};\n@%p1 bra LOAD;\n"
    body += "fence.proxy.async.shared::cta;\nbar.sync 0;\n"
    body += "shr.u32 %r8, %r0, 4;\ncvt.u64.u32 %q6, %r8;\n"
    base_offset = (shift >> 7) & 7
    a_bits = _desc_bits(*strides[0], swizzle, base_offset) + (shift >> 4)
    b_bits = _desc_bits(*strides[1], swizzle) + (B_AT >> 4)
    body += f"add.u64 %q7, %q6, {a_bits:#x};\nadd.u64 %q8, %q6, {b_bits:#x};\n"
    left = "%q7"
    if registers:
        # the fragment of m64k: warp w's rows, as mma.sync has them
        size, per = np.dtype(dtype).itemsize, 4 // np.dtype(dtype).itemsize
        body += "shr.u32 %r9, %t, 5;\nand.b32 %r10, %t, 31;\nshr.u32 %r11, %r10, 2;\n"
        body += "and.b32 %r12, %t, 3;\nmad.lo.u32 %r11, %r9, 16, %r11;\n"
        body += f"mul.lo.u32 %r13, %r12, {per * size};\nmad.lo.u32 %r13, %r11, {k * size}, %r13;\n"
        body += "cvt.u64.u32 %q9, %r13;\nadd.u64 %q9, %q9, %in;\n"
        for j in range(4):
            at = SMEM + (j % 2) * 8 * k * size + (j // 2) * 4 * per * size
            body += f"ld.global.b32 %a{j}, [%q9+{at}];\n"
        left = "{%a0, %a1, %a2, %a3}"
    op = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{form}.{name}.{name}"
    tail = f", {signs[0]}, {signs[1]}" if name not in ("s8", "u8") else ""
    if name in ("f16", "bf16"):
        tail += f", {trans[1]}" if registers else f", {trans[0]}, {trans[1]}"
    body += "".join(f"mov.b32 %d{i}, 0;\n" for i in range(count))
    body += "setp.ne.u32 %p3, %n, %n;\nsetp.eq.u32 %p4, %n, %n;\n"
    body += "wgmma.fence.sync.aligned;\n"
    for scale in ("%p3", "%p4"):
        body += f"{op} {{{_registers(count, 'd')}}}, {left}, %q8, {scale}{tail};\n"
    body += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
    body += f"mul.wide.u32 %q4, %t, {4 * count};\nadd.u64 %q4, %q4, %out;\n"
    body += "".join(f"st.global.b32 [%q4+{4 * i}], %d{i};\n" for i in range(count))
    label = f"{op} swizzle {swizzle}" + (" A in registers" if registers else "")
    label += f" trans {trans}" if any(trans) else ""
    label += f" signs {signs}" if signs != (1, 1) else ""
    label += f" base offset {base_offset}" if shift else ""
    label += "" if small else " normal"
    return Probe(
        label,
        op,
        entry(body),
        np.concatenate([smem, a.reshape(-1).view(np.uint8)]),
        128 * 4 * count,
        block=128,
        smem=SMEM,
    )


def wgmma() -> list[Probe]:
    """Types, sizes, swizzles, majors, signs, A in registers, base offsets."""
    out = []
    for name, form in (
        ("bf16", "f32"),
        ("f16", "f32"),
        ("f16", "f16"),
        ("tf32", "f32"),
        ("e4m3", "f32"),
        ("e5m2", "f32"),
        ("e4m3", "f16"),
        ("s8", "s32"),
        ("u8", "s32"),
    ):
        for n, swizzle in ((8, 128), (64, 64), (128, 32), (32, 0)):
            out.append(wgmma_probe(name, form, n, swizzle))
        out.append(wgmma_probe(name, form, 64, 128, registers=True))
        if form != "s32":
            out.append(wgmma_probe(name, form, 64, 128, small=False))
    for n in (24, 96, 192, 256):
        out.append(wgmma_probe("bf16", "f32", n, 128))
    for swizzle, trans in itertools.product((0, 32, 64, 128), ((1, 0), (0, 1), (1, 1))):
        # M and N of 64: one swizzle row is enough at 128 bytes
        out.append(wgmma_probe("bf16", "f32", 64, swizzle, trans=trans))
    for signs in ((-1, 1), (1, -1), (-1, -1)):
        out.append(wgmma_probe("f16", "f32", 16, 128, signs=signs))
    for shift in (128, 384, 512):
        out.append(wgmma_probe("bf16", "f32", 16, 128, shift=shift))
    return out


def probes() -> list[Probe]:
    """All of this file."""
    return mma_sync() + matrix_moves() + wgmma()
