"""Handlers of tensor memory and of the matrix instructions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from rubin_moe.emulator import poison
from rubin_moe.emulator.errors import EmulationError
from rubin_moe.emulator.isa import mma_sync, shadow_ops, tcgen05_data, tcgen05_mma, wgmma
from rubin_moe.emulator.isa.footprint import Footprint, rectangle
from rubin_moe.emulator.isa.handoff import Rows, Slots, UnitSite
from rubin_moe.emulator.issue import (
    OFFSET,
    Handler,
    both,
    first_slot,
    issuing_lanes,
    lanes,
    nothing,
    submit,
    submit_group,
    taints,
    values,
    vector,
    write_taints,
    write_vector,
)
from rubin_moe.emulator.machine import Cluster, LaunchContext, Warp
from rubin_moe.emulator.order.operations import Knowledge
from rubin_moe.emulator.state.registers import FULL_MASK, Status

_SF_VECTOR = {"block16": 16, "block32": 32, "scale_vec::1X": 32, "scale_vec::2X": 32,
              "scale_vec::4X": 16}  # fmt: skip


# ---- tensor memory


def bind_tmem_alloc(site: UnitSite, context: LaunchContext) -> Handler:
    what = site.parts[1]

    def handler(warp: Warp, mask: int) -> bool:
        cta = warp.cta
        tmem = cta.tmem
        if tmem is None:
            raise EmulationError(
                "trap",
                f"line {site.line}: {context.arch} has no tensor memory",
                "tensor memory: architecture",
            )
        v = values(site, warp, lanes(mask)[0])
        for member in cta.cluster.ctas:
            member.columns_checked.clear()
        if what == "alloc":
            address = tmem.allocate(v[1], "exclusive" in site.parts)
            if address is None:
                return False
            cta.cluster.store_word(v[0], address)
            if cta.cluster.order is not None:
                place = np.array([[v[0] & OFFSET, (v[0] & OFFSET) + 4]], np.int64)
                cta.cluster.order.warp_writes(
                    warp, site, [Footprint("smem", v[0] >> 24 & 0xFF, place)]
                )
            if cta.cluster.shadow is not None:
                cta.cluster.shadow.poison_columns(cta.rank, address, v[1])
            statistics = context.statistics
            statistics.peak_tmem_columns = max(statistics.peak_tmem_columns, tmem.peak)
        elif what == "dealloc":
            tmem.free(v[0], v[1])
            if cta.cluster.order is not None:
                place = rectangle(0, 128, v[0] & 0xFFFF, v[1])
                cta.cluster.order.warp_writes(warp, site, [Footprint("tmem", cta.rank, place)])
            if cta.cluster.shadow is not None:
                cta.cluster.shadow.poison_columns(cta.rank, v[0], v[1])
        else:
            tmem.relinquish()
        return True

    return handler


def bind_tmem_load(site: UnitSite, context: LaunchContext) -> Handler:
    shape, num = _access_shape(site)
    packed = "pack::16b" in site.parts
    split = first_slot(site, 2) if len(site.operands) > 2 else None

    def fetch(warp: Warp, op: tcgen05_data.WarpAccess) -> None:
        cluster = warp.cta.cluster
        write_vector(site, warp, 0, op.load(cluster.tmem(warp.rank)))
        if cluster.shadow is not None:
            masks = shadow_ops.load_registers(op, cluster.shadow.tmem(warp.rank))
            write_taints(site, warp, 0, masks)
        if context.policy.deferred:
            warp.state.set("pending_loads", warp.state.get("pending_loads") - 1)

    def handler(warp: Warp, mask: int) -> bool:
        v = values(site, warp, lanes(mask)[0])
        half = v[split] if split is not None else 0
        address = v[first_slot(site, 1)] & FULL_MASK
        op = tcgen05_data.decode_access(context.arch, shape, num, address, warp.index, packed, half)
        cluster = warp.cta.cluster
        cluster.require_columns(op, warp.cta, lambda: [op.footprint(warp.rank)])
        perform: Callable[[], None] = partial(fetch, warp, op)
        if cluster.order is not None:
            perform = cluster.order.tensor_access(warp, site, op, False, perform)
        if context.policy.deferred:
            warp.state.set("pending_loads", warp.state.get("pending_loads") + 1)
        submit_group(warp, site, "wait::ld", _tmem_pipe(warp), perform)
        return True

    return handler


def _access_shape(site: UnitSite) -> tuple[str, int]:
    at = site.parts.index("aligned")
    return site.parts[at + 1], int(site.parts[at + 2][1:])


def bind_tmem_store(site: UnitSite, context: LaunchContext) -> Handler:
    shape, num = _access_shape(site)
    packed = "unpack::16b" in site.parts
    data = len(site.operands) - 1
    split = first_slot(site, 1) if data == 2 else None

    def handler(warp: Warp, mask: int) -> bool:
        v = values(site, warp, lanes(mask)[0])
        half = v[split] if split is not None else 0
        op = tcgen05_data.decode_access(
            context.arch, shape, num, v[0] & FULL_MASK, warp.index, packed, half
        )
        cluster = warp.cta.cluster
        cluster.require_columns(op, warp.cta, lambda: [op.footprint(warp.rank)])
        context.statistics.tmem_places.add((*op.box[2:], "tcgen05.st"))
        held = vector(site, warp, data)
        if context.policy.deferred:
            held = held.copy()  # read at issue
        work: Callable[[], None] = partial(op.store, cluster.tmem(warp.rank), held)
        if cluster.shadow is not None:
            cells, masks = cluster.shadow.tmem(warp.rank), taints(site, warp, data)
            work = both(work, partial(shadow_ops.store_registers, op, cells, masks))
        if cluster.order is not None:
            work = cluster.order.tensor_access(warp, site, op, True, work)
        submit_group(warp, site, "wait::st", _tmem_pipe(warp), work)
        return True

    return handler


def bind_tmem_wait(site: UnitSite, context: LaunchContext) -> Handler:
    """wait::ld and wait::st: the warp's earlier loads or stores are complete."""
    kind = site.parts[1]

    def handler(warp: Warp, mask: int) -> bool:
        if not all(op.done for op in warp.open_group[kind]):
            return False
        warp.open_group[kind].clear()
        if warp.cta.cluster.order is not None:
            warp.cta.cluster.order.event(warp, "tensor_wait", int(kind == "wait::st"))
        return True

    return handler


def bind_tmem_results(site: UnitSite, context: LaunchContext) -> Handler:
    """The first touch of a register that tcgen05.ld writes: the warp's loads happen now."""

    def handler(warp: Warp, mask: int) -> bool:
        context.policy.drain(_tmem_pipe(warp))
        warp.open_group["wait::ld"].clear()
        return True

    return handler


def _tmem_pipe(warp: Warp) -> tuple[object, ...]:
    """A warp's own loads and stores of tensor memory are performed in the order of issue."""
    return ("tmem", id(warp))


def _tcgen05_pipe(warp: Warp, group: int) -> tuple[object, ...]:
    """cp, mma and commit of a CTA (pair) are performed in the order of issue."""
    return ("tcgen05", id(warp.cta.cluster), warp.rank // group if group == 2 else -1 - warp.rank)


def _cta_group(site: UnitSite) -> int:
    return 2 if "cta_group::2" in site.parts else 1


def bind_tmem_copy(site: UnitSite, context: LaunchContext) -> Handler:
    if site.parts[1] == "shift":
        tcgen05_data.refuse_shift()
    group = _cta_group(site)
    at = site.parts.index(f"cta_group::{group}") + 1
    shape = site.parts[at]
    rest = site.parts[at + 1 :]
    multicast = rest[0] if rest and rest[0].startswith("warpx") else ""
    expansion = ".".join(rest[1 if multicast else 0 :])

    def handler(warp: Warp, mask: int) -> bool:
        cluster = warp.cta.cluster
        for lane in issuing_lanes(site, warp, mask):
            v = values(site, warp, lane)
            op = tcgen05_data.decode_copy(
                context.arch, shape, multicast, group, warp.rank, v[0] & FULL_MASK, v[1], expansion
            )
            if cluster.require_columns(op, warp.cta, op.writes):
                columns = 4 * op.table.offsets.shape[1]
                context.statistics.tmem_places.add((op.column, columns, "tcgen05.cp"))
            context.statistics.bytes["UTCCP"] += op.nbytes * len(op.ranks)
            perform: Callable[[], None] = partial(tcgen05_data.perform, op, cluster)
            if cluster.shadow is not None:
                perform = both(perform, partial(tcgen05_data.perform, op, cluster.shadow))
            if cluster.order is not None:
                perform = cluster.order.tensor(warp, site, lane, op, perform)
            submit(warp, site, _tcgen05_pipe(warp, group), perform, nothing)
        return True

    return handler


def bind_tmem_commit(site: UnitSite, context: LaunchContext) -> Handler:
    multicast = "multicast::cluster" in site.parts
    group = _cta_group(site)

    def announce(cluster: Cluster, address: int, targets: list[int], by: Knowledge | None) -> None:
        for rank in targets:
            cluster.arrive(rank, address & OFFSET, count=1, by=by)

    def handler(warp: Warp, mask: int) -> bool:
        cluster = warp.cta.cluster
        for lane in issuing_lanes(site, warp, mask):
            v = values(site, warp, lane)
            address = v[0] if not v[0] >> 32 else v[0] - cluster.arena.address
            targets = [address >> 24]
            if multicast:
                targets = [r for r in range(16) if v[1] >> r & 1]
            by = cluster.order.committed(warp, site) if cluster.order is not None else None
            complete = partial(announce, cluster, address, targets, by)
            submit(warp, site, _tcgen05_pipe(warp, group), nothing, complete)
        return True

    return handler


def _touched(op: tcgen05_mma.Tcgen05Mma) -> list[Footprint]:
    return [*op.reads(), *op.writes()]


def bind_tcgen05_mma(site: UnitSite, context: LaunchContext) -> Handler:
    group = _cta_group(site)
    kind = next(p for p in site.parts if p.startswith("kind::"))[6:]
    scaled = "block_scale" in site.parts
    sf_vec = next((_SF_VECTOR[p] for p in site.parts if p in _SF_VECTOR), 32) if scaled else 0
    usage = {p.split("::")[1]: p.split("::")[2] for p in site.parts if p.startswith("collector")}
    a_in_tmem = isinstance(site.operands[1], Slots) and site.operands[1].memory
    d, a, b, idesc = (first_slot(site, i) for i in range(4))
    tail = site.operands[4:]
    statistics = context.statistics
    if scaled:
        sfa, sfb, enable = (first_slot(site, i) for i in range(4, 7))
    disabled, extra = None, None
    if not scaled:
        wide = [i for i, plan in enumerate(tail, 4) if isinstance(plan, Rows) or plan.count > 1]
        disabled = wide[0] if wide else None
        rest = [i for i in range(4, len(site.operands)) if i != disabled]
        enable = first_slot(site, rest[0])
        extra = first_slot(site, rest[1]) if len(rest) > 1 else None

    def handler(warp: Warp, mask: int) -> bool:
        cluster = warp.cta.cluster
        for lane in issuing_lanes(site, warp, mask):
            v = values(site, warp, lane)
            off = vector(site, warp, disabled)[:, lane].tolist() if disabled is not None else ()
            if disabled is not None and warp.cta.cluster.shadow is not None:
                poison.require_defined(warp, site, disabled, lane)
            op = tcgen05_mma.decode_mma(
                arch=context.arch, kind=kind, cta_group=group, rank=warp.rank,
                d=v[d] & FULL_MASK, a=v[a], b=v[b], idesc=v[idesc] & FULL_MASK,
                enable_input_d=bool(v[enable]), a_in_tmem=a_in_tmem, sf_vec=sf_vec,
                sfa=v[sfa] & FULL_MASK if scaled else 0, sfb=v[sfb] & FULL_MASK if scaled else 0,
                collector_a=usage.get("a", "discard"), collector_b=usage.get("b", "discard"),
                disable_output_lane=off, scale_input_d=v[extra] if extra is not None else 0,
            )  # fmt: skip
            if cluster.require_columns(op, warp.cta, partial(_touched, op)):
                place = (op.d & 0xFFFF, op.idesc.n, "accumulator")
                statistics.tmem_places.add(place)
            statistics.mma_count += 1
            statistics.mma_macs += op.macs
            statistics.mma_forms[op.idesc.text] += 1
            perform: Callable[[], None] = partial(tcgen05_mma.perform, op, cluster)
            if cluster.shadow is not None:
                perform = both(perform, partial(shadow_ops.multiply, op, cluster.shadow))
            if cluster.order is not None:
                perform = cluster.order.tensor(warp, site, lane, op, perform)
            submit(warp, site, _tcgen05_pipe(warp, group), perform, nothing)
        return True

    return handler


# ---- matrix instructions on registers


def bind_mma_sync(site: UnitSite, context: LaunchContext) -> Handler:
    types = [p for p in site.parts if p in mma_sync.TYPES or p in ("f32", "s32")]
    shape = next(p for p in site.parts if p.startswith("m") and "n8k" in p)
    d, a, b, c = types[-4:]
    op = mma_sync.decode_mma_sync(shape, d, a, b, c, "satfinite" in site.parts)

    def handler(warp: Warp, mask: int) -> bool:
        a_, b_, c_ = (vector(site, warp, i) for i in (1, 2, 3))
        if warp.cta.cluster.shadow is not None:
            a, b, c = (taints(site, warp, i) for i in (1, 2, 3))
            registers = len(vector(site, warp, 0))
            write_taints(site, warp, 0, shadow_ops.multiply_registers(op, a, b, c, registers))
        write_vector(site, warp, 0, op.multiply(a_, b_, c_))
        context.statistics.mma_count += 1
        context.statistics.mma_macs += op.macs
        return True

    return handler


def bind_wgmma(site: UnitSite, context: LaunchContext) -> Handler:
    """The four warps of a warpgroup meet here; the last one to issue does the work."""
    at = site.parts.index("aligned") + 1
    shape, d, a, b = site.parts[at : at + 4]
    accumulator, from_registers = site.operands[0], isinstance(site.operands[1], Rows)
    in_place = isinstance(accumulator, Rows) and accumulator.view

    def decode(v: list[int]) -> wgmma.Wgmma:
        rest = list(v)
        a_desc = None if from_registers else rest.pop(0)
        b_desc = rest.pop(0)
        scale_d = bool(rest.pop(0)) if rest else True
        scale_a, scale_b = (_signed(x) for x in rest[:2]) if len(rest) >= 2 else (1, 1)
        trans = rest[2:] if len(rest) > 2 else []
        trans_a = 0 if from_registers or not trans else trans[0]
        trans_b = trans[-1] if trans else 0
        return wgmma.decode_wgmma(
            shape, d, a, b, b_desc, a_desc, scale_d, scale_a, scale_b, trans_a, trans_b,
            "satfinite" in site.parts,
        )  # fmt: skip

    def perform(op: wgmma.Wgmma, group: list[Warp]) -> None:
        held = [vector(site, w, 0) for w in group]
        left = [vector(site, w, 1) for w in group] if from_registers else None
        cluster = group[0].cta.cluster
        if cluster.shadow is not None:
            d = np.stack([taints(site, w, 0) for w in group])
            a = np.stack([taints(site, w, 1) for w in group]) if from_registers else None
            masks = shadow_ops.multiply_warpgroup(op, cluster.shadow.smem(group[0].rank), d, a)
            for w, own in zip(group, masks, strict=True):
                write_taints(site, w, 0, own)
        wgmma.multiply(op, cluster.smem(group[0].rank), held, left)
        if not in_place:
            for w, part in zip(group, held, strict=True):
                write_vector(site, w, 0, part)

    def handler(warp: Warp, mask: int) -> bool:
        cta = warp.cta
        key = (cta.rank, warp.index // 4, site.index)
        waiting = cta.cluster.rendezvous.setdefault(key, [])
        waiting.append(warp)
        if len(waiting) < 4:
            return False
        del cta.cluster.rendezvous[key]
        waiting.sort(key=lambda w: w.index)
        op = decode(values(site, warp, lanes(mask)[0]))
        pipe = ("wgmma", id(cta), warp.index // 4)
        work: Callable[[], None] = partial(perform, op, waiting)
        if cta.cluster.order is not None:
            work = cta.cluster.order.warpgroup(waiting, site, op, work)
        submit_group(warp, site, "wgmma", pipe, work, waiting)
        for member in waiting:
            member.state.set("status", Status.READY)
        context.statistics.mma_count += 1
        context.statistics.mma_macs += op.macs
        return True

    return handler


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
