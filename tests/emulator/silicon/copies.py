"""Probes of TMA, bulk copies and cp.async: what lands where, byte by byte."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .probe import MapSpec, Probe, entry

TABLE = 1024
"""Bytes of coordinates ahead of the tensor in a probe's input."""

BARRIER = 1024
"""Bytes ahead of the data: the barrier, alone so that the data starts at a multiple of 1024."""

FILL_SHARED = """
mov.u32 %r1, dyn;
add.u32 %r0, %r1, 1024;
shl.b32 %r2, %t, 2;
FILL:
add.u32 %r3, %r0, %r2;
mad.lo.u32 %r4, %r2, {step}, {start};
st.shared.b32 [%r3], %r4;
add.u32 %r2, %r2, 512;
setp.lt.u32 %p1, %r2, {size};
@%p1 bra FILL;
setp.eq.u32 %p0, %t, 0;
@%p0 mbarrier.init.shared.b64 [%r1], 1;
fence.mbarrier_init.release.cluster;
fence.proxy.async.shared::cta;
bar.sync 0;
"""

# bounded, so that a wrong byte count ends in a wrong answer and not in a hung device
WAIT = """
mov.u32 %r5, 0;
WAIT:
mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
@%p1 bra DONE;
add.u32 %r5, %r5, 1;
setp.lt.u32 %p2, %r5, 100000;
@%p2 bra WAIT;
DONE:
bar.sync 0;
"""

# whether the barrier completed with the bytes that were announced
FLAG = """
selp.b32 %r7, 0x600d600d, 0x0bad0bad, %p1;
@%p0 st.shared.b32 [%r0+{at}], %r7;
bar.sync 0;
"""

DUMP_SHARED = """
mad.lo.u32 %r6, %c, {size}, 0;
cvt.u64.u32 %q4, %r6;
add.u64 %q4, %q4, %out;
shl.b32 %r2, %t, 2;
DUMP:
add.u32 %r3, %r0, %r2;
ld.shared.b32 %r4, [%r3];
cvt.u64.u32 %q5, %r2;
add.u64 %q5, %q5, %q4;
st.global.b32 [%q5], %r4;
add.u32 %r2, %r2, 512;
setp.lt.u32 %p1, %r2, {size};
@%p1 bra DUMP;
"""

SHAPES: dict[int, tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    1: ((200,), (32,), ((0,), (176,), (-16,), (304,))),
    2: ((80, 24), (32, 8), ((0, 0), (16, 3), (64, 20), (-16, -5), (64, -4))),
    3: ((48, 6, 5), (32, 2, 3), ((0, 0, 0), (32, 5, 4), (-16, -1, -2))),
    4: ((32, 3, 4, 3), (16, 2, 2, 2), ((0, 0, 0, 0), (16, 2, 3, 2), (16, -1, 1, -1))),
    5: ((32, 2, 3, 2, 3), (16, 2, 2, 1, 2), ((0,) * 5, (16, 1, 2, 1, 2), (16, -1, 0, 0, -1))),
}
DRIVER_TYPES = {1: 0, 2: 1, 4: 2, 8: 4}
"""Element bytes -> CU_TENSOR_MAP_DATA_TYPE_UINT8, 16, 32, 64."""


def _tensor(dims: tuple[int, ...], size: int) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
    data = np.random.RandomState(size).randint(1, 256, (*dims[::-1], size)).astype(np.uint8)
    inner = dims[0] * size
    pitch = -(-inner // 16) * 16
    rows = np.zeros((int(np.prod(dims[1:], dtype=int)), pitch), np.uint8)
    rows[:, :inner] = data.reshape(-1, inner)
    strides = tuple(pitch * int(np.prod(dims[1:d], dtype=int)) for d in range(1, len(dims)))
    return rows.reshape(-1), strides


def _input(places: tuple[tuple[int, ...], ...], tensor: NDArray[np.uint8]) -> NDArray[np.uint8]:
    table = np.zeros((TABLE // 32, 8), np.int32)
    for i, place in enumerate(places):
        table[i, : len(place)] = place
    return np.concatenate([table.reshape(-1).view(np.uint8), tensor])


def tile_load(spec: MapSpec, element: int, places: tuple[tuple[int, ...], ...], name: str) -> Probe:
    """One CTA a place: fill shared memory, load the box, dump shared memory."""
    rank, nbytes = len(spec.dims), int(np.prod(spec.box)) * element
    rows = int(np.prod(spec.box[1:], dtype=int))
    pitch = spec.swizzle or spec.box[0] * element
    size = -(-(rows * pitch + 256) // 512) * 512
    tensor, strides = _tensor(spec.dims, element)
    coordinates = ", ".join(f"%r{16 + i}" for i in range(rank))
    body = FILL_SHARED.format(step=0, start=0xEEEEEEEE, size=size)
    body += "shl.b32 %r6, %c, 5;\ncvt.u64.u32 %q4, %r6;\nadd.u64 %q4, %q4, %in;\n"
    body += "".join(f"ld.global.b32 %r{16 + i}, [%q4+{4 * i}];\n" for i in range(rank))
    body += f"@%p0 mbarrier.arrive.expect_tx.shared.b64 %q6, [%r1], {nbytes};\n"
    body += f"@%p0 cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile"
    body += f".mbarrier::complete_tx::bytes [%r0], [%map0, {{{coordinates}}}], [%r1];\n"
    body += WAIT + FLAG.format(at=size - 4) + DUMP_SHARED.format(size=size)
    spec = MapSpec(
        spec.dtype, spec.dims, strides, spec.box, spec.swizzle, spec.fill_nan, offset=TABLE
    )
    return Probe(
        name,
        f"cp.async.bulk.tensor.{rank}d load",
        entry(body, maps=1),
        _input(places, tensor),
        size * len(places),
        block=128,
        grid=len(places),
        smem=BARRIER + size,
        maps=(spec,),
    )


def tile_loads() -> list[Probe]:
    """Every rank, element size and swizzle, inside and outside the tensor."""
    out = []
    for rank, size, swizzle in itertools.product(SHAPES, DRIVER_TYPES, (0, 32, 64, 128)):
        dims, box, places = SHAPES[rank]
        box = (max(box[0] // size, 16 // size), *box[1:])
        if swizzle and box[0] * size > swizzle:
            box = (swizzle // size, *box[1:])
        spec = MapSpec(DRIVER_TYPES[size], dims, (), box, swizzle)
        name = f"tma load {rank}d {8 * size}-bit swizzle {swizzle}"
        out.append(tile_load(spec, size, places, name))
    for swizzle in (32, 64, 128):
        # rows as wide as the swizzle over two of its periods
        spec = MapSpec(0, (256, 40), (), (swizzle, 32), swizzle)
        out.append(tile_load(spec, 1, ((0, 0), (128, 16)), f"tma load full rows swizzle {swizzle}"))
    spec = MapSpec(0, (256, 8), (), (32, 8), 0)
    unaligned = tile_load(spec, 1, ((8, 0),), "tma load unaligned coordinate")
    out.append(replace(unaligned, faults=True))
    for dtype, size, name in ((6, 2, "f16"), (9, 2, "bf16"), (7, 4, "f32")):
        dims, box, places = SHAPES[2]
        spec = MapSpec(dtype, dims, (), (box[0] // size, box[1]), 0, fill_nan=True)
        out.append(tile_load(spec, size, places, f"tma load NaN fill {name}"))
    return out


def tile_stores() -> list[Probe]:
    """Stores and reductions: the tensor after boxes were written to several places."""
    out = []
    cases = [("", 1, 1, 2), ("", 2, 2, 128), ("", 3, 4, 0), ("", 4, 2, 32), ("", 5, 1, 0)]
    cases += [(".add", 2, 4, 0), (".max", 2, 4, 64), (".xor", 3, 4, 0), (".inc", 2, 4, 0)]
    for reduction, rank, size, swizzle in cases:
        swizzle = swizzle if swizzle in (0, 32, 64, 128) else 0
        dims, box, places = SHAPES[rank]
        box = (max(box[0] // size, 16 // size), *box[1:])
        if swizzle and box[0] * size > swizzle:
            box = (swizzle // size, *box[1:])
        spec = MapSpec(DRIVER_TYPES[size], dims, (), box, swizzle)
        name = (
            f"tma {'reduce' + reduction if reduction else 'store'} {rank}d {8 * size}-bit {swizzle}"
        )
        inside = tuple(place for place in places if min(place) >= 0)
        out.append(tile_store(spec, size, inside, reduction, name))
    for dtype, kind in ((6, "f16"), (9, "bf16")):
        spec = MapSpec(dtype, (80, 24), (), (16, 8), 0)
        places = ((0, 0), (16, 3), (72, 20))
        out.append(tile_store(spec, 2, places, ".add", f"tma reduce.add 2d {kind}"))
    # what lies beyond the end is not written; a store that starts before the tensor faults
    edges = {
        "high inner": ((64, 3),),
        "high outer": ((16, 20),),
        "outside": ((80, 3), (16, 24)),
        "low inner": ((-16, 3),),
        "low outer": ((16, -5),),
    }
    for name, places in edges.items():
        spec = MapSpec(0, (80, 24), (), (32, 8), 32)
        probe = tile_store(spec, 1, places, "", f"tma store {name}")
        out.append(replace(probe, faults=name.startswith("low")))
    return out


def tile_store(
    spec: MapSpec, element: int, places: tuple[tuple[int, ...], ...], reduction: str, name: str
) -> Probe:
    """Fill shared memory with a pattern, write it to every place, dump the tensor."""
    rank = len(spec.dims)
    rows = int(np.prod(spec.box[1:], dtype=int))
    size = -(-rows * (spec.swizzle or spec.box[0] * element) // 512) * 512
    tensor, strides = _tensor(spec.dims, element)
    if spec.dtype in (6, 9):
        tensor = tensor.reshape(-1, 2) & np.array([0xFF, 0x3F], np.uint8)
        tensor = tensor.reshape(-1)
    total = -(-tensor.size // 512) * 512
    tensor = np.concatenate([tensor, np.zeros(total - tensor.size, np.uint8)])
    step = 0x00000101 if spec.dtype in (6, 9) else 0x01030509
    body = FILL_SHARED.format(step=step, start=0x34013402, size=size)
    op = "cp.reduce.async" if reduction else "cp.async"
    for place in places:
        coordinates = ", ".join(str(c) for c in place)
        body += f"@%p0 {op}.bulk.tensor.{rank}d.global.shared::cta{reduction}.tile.bulk_group "
        body += f"[%map0, {{{coordinates}}}], [%r0];\n"
        body += "@%p0 cp.async.bulk.commit_group;\n@%p0 cp.async.bulk.wait_group 0;\n"
    body += "fence.proxy.async;\nbar.sync 0;\n"
    body += "shl.b32 %r2, %t, 2;\nDUMP:\ncvt.u64.u32 %q4, %r2;\nadd.u64 %q5, %q4, %in;\n"
    body += f"ld.global.b32 %r4, [%q5+{TABLE}];\nadd.u64 %q5, %q4, %out;\n"
    body += "st.global.b32 [%q5], %r4;\nadd.u32 %r2, %r2, 512;\n"
    body += f"setp.lt.u32 %p1, %r2, {total};\n@%p1 bra DUMP;\n"
    spec = MapSpec(spec.dtype, spec.dims, strides, spec.box, spec.swizzle, offset=TABLE)
    return Probe(
        name,
        f"cp{'.reduce' if reduction else ''}.async.bulk.tensor.{rank}d store",
        entry(body, maps=1),
        _input((), tensor),
        total,
        block=128,
        smem=BARRIER + size,
        maps=(spec,),
    )


def bulk_copies() -> list[Probe]:
    """cp.async.bulk both ways and its reductions."""
    data = np.random.RandomState(21).randint(0, 256, 2048).astype(np.uint8)
    body = FILL_SHARED.format(step=0, start=0xEEEEEEEE, size=1024)
    body += "@%p0 mbarrier.arrive.expect_tx.shared.b64 %q6, [%r1], 560;\n"
    body += "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    body += "[%r0+64], [%in+16], 512, [%r1];\n"
    body += "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    body += "[%r0+800], [%in+1024], 48, [%r1];\n"
    body += WAIT + DUMP_SHARED.format(size=1024)
    out = [
        Probe("bulk load", "cp.async.bulk", entry(body), data, 1024, block=128, smem=BARRIER + 1024)
    ]
    operations = ["add.u32", "add.s32", "add.u64", "min.u32", "max.s32", "and.b32", "or.b32"]
    operations += ["xor.b32", "inc.u32", "dec.u32", "add.noftz.f16", "add.noftz.bf16", "add.f32"]
    for operation in operations:
        halves = operation.endswith("f16")
        mask = np.array([0xFF, 0x3F] if halves else [0xFF, 0xFF, 0xFF, 0x3F], np.uint8)
        clean = (data.reshape(-1, mask.size) & mask).reshape(-1)
        step = 0x01010101 if halves else 0x01030509
        body = FILL_SHARED.format(step=step, start=0x34013402, size=512)
        body += "shl.b32 %r2, %t, 2;\ncvt.u64.u32 %q4, %r2;\nadd.u64 %q5, %q4, %in;\n"
        body += "ld.global.b32 %r4, [%q5];\nadd.u64 %q5, %q4, %out;\nst.global.b32 [%q5], %r4;\n"
        body += "fence.proxy.async;\nbar.sync 0;\n"
        body += f"@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation} "
        body += "[%out], [%r0], 512;\n"
        body += "@%p0 cp.async.bulk.commit_group;\n@%p0 cp.async.bulk.wait_group 0;\n"
        name = f"cp.reduce.async.bulk.{operation}"
        out.append(Probe(name, name, entry(body), clean, 512, block=128, smem=BARRIER + 512))
    return out


def async_copies() -> list[Probe]:
    """cp.async with every source size: the rest of the destination is zero."""
    data = np.random.RandomState(22).randint(1, 256, 4096).astype(np.uint8)
    out = []
    for size, cache in ((4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")):
        body = FILL_SHARED.format(step=0, start=0xEEEEEEEE, size=2048)
        body += f"mul.lo.u32 %r7, %t, {size};\nadd.u32 %r8, %r0, %r7;\n"
        body += f"mul.wide.u32 %q5, %t, {2 * size};\nadd.u64 %q5, %q5, %in;\n"
        body += f"rem.u32 %r9, %t, {size + 1};\n"
        body += f"cp.async.{cache}.shared.global [%r8], [%q5], {size}, %r9;\n"
        body += "cp.async.commit_group;\ncp.async.wait_group 0;\nbar.sync 0;\n"
        body += DUMP_SHARED.format(size=2048)
        name = f"cp.async.{cache} {size} bytes"
        probe = Probe(
            name, f"cp.async.{cache}", entry(body), data, 2048, block=128, smem=BARRIER + 2048
        )
        out.append(probe)
    return out


def probes() -> list[Probe]:
    """All of this file."""
    return tile_loads() + tile_stores() + bulk_copies() + async_copies()


def map_specs() -> list[MapSpec]:
    """Tensor maps whose encoding by the driver is recorded besides the probes'."""
    out = [
        MapSpec(dtype, (256, 96), (2048,), (32, 8), swizzle)
        for dtype, swizzle in itertools.product((0, 1, 2, 3, 6, 7, 9, 10, 11, 12), (0, 128))
        if not (swizzle and dtype == 4)
    ]
    out += [MapSpec(6, (256, 96), (2048,), (32, 8), 64, fill_nan=True)]
    out += [
        MapSpec(1, (256, 96), (2048,), (32, 8), 0, element_strides=s)
        for s in ((1, 2), (2, 1), (1, 3))
    ]
    out += [MapSpec(1, (256, 96, 5, 7, 3), (512, 1 << 20, 1 << 36, 1 << 38), (64, 200, 1, 2, 1))]
    return out
