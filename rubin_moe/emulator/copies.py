"""Handlers of copies: TMA, bulk copies, ``cp.async``, and stores that signal an mbarrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rubin_moe.emulator import poison
from rubin_moe.emulator.errors import EmulationError
from rubin_moe.emulator.isa import bulk_copy, shadow_ops
from rubin_moe.emulator.isa.footprint import Footprint
from rubin_moe.emulator.isa.handoff import Slots, UnitSite
from rubin_moe.emulator.issue import (
    OFFSET,
    Binder,
    Handler,
    argument_tainted,
    both,
    first_slot,
    issuing_lanes,
    lanes,
    nothing,
    signal,
    submit,
    submit_group,
    values,
)
from rubin_moe.emulator.machine import Cluster, LaunchContext, Warp
from rubin_moe.emulator.order.layout import GROUPS
from rubin_moe.emulator.order.operations import Knowledge, Registers
from rubin_moe.emulator.state.registers import FULL_MASK
from rubin_moe.emulator.state.shadow import POISON

# ---- bulk copies


def bind_bulk_tensor(site: UnitSite, context: LaunchContext) -> Handler:
    if ".global.shared::cta" in site.opcode:
        return bind_tensor_store(site, context)
    where = site.operands
    to, source, barrier = (first_slot(site, i) for i in range(3))
    coordinates = slice(source + 1, source + where[1].count)  # type: ignore[union-attr]
    mask_slot = first_slot(site, 3) if "multicast::cluster" in site.parts else None
    mode = "tile::gather4" if "tile::gather4" in site.parts else "tile"
    group = 2 if "cta_group::2" in site.parts else 1
    statistics = context.statistics

    def handler(warp: Warp, mask: int) -> bool:
        cluster = warp.cta.cluster
        for lane in issuing_lanes(site, warp, mask):
            v = values(site, warp, lane)
            multicast = v[mask_slot] & 0xFFFF if mask_slot is not None else None
            op = bulk_copy.decode_tensor_load(
                context.tensor_map(v[source]), v[coordinates], v[to], v[barrier],
                mode=mode, multicast=multicast, cta_group=group,
            )  # fmt: skip
            statistics.bytes["TMA load"] += op.nbytes * len(op.ranks)
            statistics.smem_places.add((op.offset, op.nbytes, "TMA load"))
            perform: Callable[[], None] = partial(op.perform, cluster, context.memory)
            if cluster.shadow is not None:
                move = partial(shadow_ops.load_tensor, op, cluster.shadow, context.memory)
                perform = both(perform, move)
            by: Sequence[Knowledge | None] = ()
            if cluster.order is not None:
                perform, by = cluster.order.signalling(warp, site, lane, op, perform)
            complete = partial(signal, cluster, op.signals, by)
            submit(warp, site, ("tma", id(op)), perform, complete)
        return True

    return handler


def bind_tensor_store(site: UnitSite, context: LaunchContext) -> Handler:
    target, source = first_slot(site, 0), first_slot(site, 1)
    coordinates = slice(target + 1, target + site.operands[0].count)  # type: ignore[union-attr]
    mode = "tile::scatter4" if "tile::scatter4" in site.parts else "tile"
    reduction = site.parts[site.parts.index("shared::cta") + 1] if "reduce" in site.parts else ""

    def handler(warp: Warp, mask: int) -> bool:
        for lane in issuing_lanes(site, warp, mask):
            v = values(site, warp, lane)
            op = bulk_copy.decode_tensor_store(
                context.tensor_map(v[target]), v[coordinates], v[source], mode=mode,
                reduction=reduction,
            )  # fmt: skip
            context.statistics.bytes["TMA store"] += op.nbytes
            context.statistics.smem_places.add((op.offset, op.nbytes, "TMA store"))
            cluster = warp.cta.cluster
            perform: Callable[[], None] = partial(op.perform, cluster, context.memory)
            if cluster.shadow is not None:
                check = partial(poison.store, shadow_ops.store_tensor, op, warp, site)
                perform = both(check, perform)
            order = cluster.order
            if order is not None:
                perform = order.grouped(warp, site, lane, op, perform, int(bool(reduction)))
            submit_group(warp, site, "bulk", ("bulk", id(op)), perform)
        return True

    return handler


def bind_bulk_copy(site: UnitSite, context: LaunchContext) -> Handler:
    start = site.parts.index("bulk") + 1
    target_space, source_space = (
        "gmem" if part == "global" else "smem" for part in site.parts[start : start + 2]
    )
    reduction = element = ""
    if "reduce" in site.parts:
        tail = [p for p in site.parts[start + 3 :] if p not in ("L2::cache_hint", "noftz")]
        reduction, element = tail[0], tail[1]
    grouped = "bulk_group" in site.parts
    multicast = "multicast::cluster" in site.parts
    kind = "bulk reduction" if reduction else "bulk copy"

    def handler(warp: Warp, mask: int) -> bool:
        cluster = warp.cta.cluster
        for lane in issuing_lanes(site, warp, mask):
            v = values(site, warp, lane)
            op = bulk_copy.decode_bulk_copy(
                source_space, v[1], target_space, v[0], v[2],
                mbarrier=None if grouped else v[3],
                multicast=v[4] & 0xFFFF if multicast else None,
                reduction=reduction, element=element,
            )  # fmt: skip
            context.statistics.bytes[kind] += op.nbytes * len(op.targets)
            perform: Callable[[], None] = partial(op.perform, cluster, context.memory)
            if cluster.shadow is not None:
                check = partial(poison.store, shadow_ops.copy_bulk, op, warp, site)
                perform = both(check, perform)
            order, atomic = cluster.order, int(bool(reduction))
            if grouped:
                if order is not None:
                    perform = order.grouped(warp, site, lane, op, perform, atomic)
                submit_group(warp, site, "bulk", ("bulk", id(op)), perform)
            else:
                by: Sequence[Knowledge | None] = ()
                if order is not None:
                    perform, by = order.signalling(warp, site, lane, op, perform, 1, atomic)
                complete = partial(signal, cluster, op.signals, by)
                submit(warp, site, ("bulk", id(op)), perform, complete)
        return True

    return handler


def bind_group(kind: str) -> Binder:
    """commit_group, wait_group and wait_all of one kind.

    Groups are kept for the warp and not for each thread: the threads that copy are the ones that
    commit and wait.
    """

    number = GROUPS.index(kind)

    def commit(warp: Warp, mask: int) -> bool:
        warp.groups[kind].append(warp.open_group.pop(kind, []))
        if warp.cta.cluster.order is not None:
            warp.cta.cluster.order.event(warp, "group_commit", number)
        return True

    def bind_group(site: UnitSite, context: LaunchContext) -> Handler:
        if "commit_group" in site.parts:
            return commit
        reads = "read" in site.parts

        def wait(warp: Warp, mask: int) -> bool:
            allowed = values(site, warp, lanes(mask)[0])[0] if site.slots else 0
            groups = warp.groups[kind]
            older = groups[: max(len(groups) - allowed, 0)]
            pending = [op for group in older for op in group]
            everything = "wait_all" in site.parts
            if everything:
                pending += warp.open_group[kind]
            if not all(op.performed if reads else op.done for op in pending):
                return False
            if not reads:
                del groups[: len(older)]
            order = warp.cta.cluster.order
            if order is not None:
                allowed = -1 & FULL_MASK if everything else allowed
                order.event(warp, "group_wait", number, allowed, int(reads))
            return True

        return wait

    return bind_group


# ---- cp.async, when it is deferred


def _cp_async_pipe(warp: Warp) -> tuple[object, ...]:
    return ("cp.async", id(warp))


def bind_cp_async(site: UnitSite, context: LaunchContext) -> Handler:
    has_source_size = len(site.operands) - ("L2::cache_hint" in site.parts) > 3
    bypass = "cg" in site.parts

    def perform(cluster: Cluster, copies: list[bulk_copy.AsyncCopy]) -> None:
        for copy in copies:
            copy.perform(cluster, context.memory)
            if cluster.shadow is not None:
                shadow_ops.copy_async(copy, cluster.shadow, context.memory)

    def handler(warp: Warp, mask: int) -> bool:
        copies = []
        for lane in lanes(mask):
            v = values(site, warp, lane)
            size = min(v[3] & FULL_MASK, v[2]) if has_source_size else None
            copies.append(bulk_copy.decode_async_copy(v[0], v[1], v[2], size, bypass))
        context.statistics.bytes["cp.async"] += sum(copy.size for copy in copies)
        work: Callable[[], None] = partial(perform, warp.cta.cluster, copies)
        if warp.cta.cluster.order is not None:
            work = warp.cta.cluster.order.copies(warp, site, copies, work)
        submit_group(warp, site, "cp.async", _cp_async_pipe(warp), work)
        return True

    return handler


def bind_cp_async_arrive(site: UnitSite, context: LaunchContext) -> Handler:
    """Arrives when the warp's earlier copies are complete: they share one pipe."""
    noinc = "noinc" in site.parts

    def announce(cluster: Cluster, addresses: list[int], by: Knowledge | None) -> None:
        for address in addresses:
            cluster.arrive(address >> 24, address & OFFSET, count=1, by=by)

    def handler(warp: Warp, mask: int) -> bool:
        cluster = warp.cta.cluster
        addresses = [values(site, warp, lane)[0] for lane in lanes(mask)]
        if not noinc:
            for address in addresses:
                cluster.arrive(address >> 24, address & OFFSET, count=-1)
        by = cluster.order.copied(warp, site) if cluster.order is not None else None
        complete = partial(announce, cluster, addresses, by)
        submit(warp, site, _cp_async_pipe(warp), nothing, complete)
        return True

    return handler


# ---- stores that signal an mbarrier


def bind_async_store(site: UnitSite, context: LaunchContext) -> Handler:
    kind = site.parts[-1]
    nbytes = int(kind[1:]) // 8
    count = site.operands[1].count if isinstance(site.operands[1], Slots) else 1
    barrier = first_slot(site, 2)
    dtype = np.dtype({"s": "i", "f": "u", "b": "u", "u": "u"}[kind[0]] + str(nbytes))
    reduce = site.parts[-2] if site.parts[0] == "red" else ""

    def store(cluster: Cluster, address: int, data: NDArray[np.generic], tainted: bool) -> None:
        rank, offset = address >> 24, address & OFFSET
        size, rule = data.nbytes, "memory: out of bounds"
        if rank >= cluster.size or offset + size > cluster.arena.limit or offset % size:
            raise EmulationError("trap", f"line {site.line}: {site.opcode} to {address:#x}", rule)
        cells = cluster.smem(rank)[offset : offset + size].view(dtype)
        cells[:] = _reduced(cells, data, reduce)
        if cluster.shadow is not None:
            marks = cluster.shadow.smem(rank)[offset : offset + size]
            if tainted or not reduce:
                marks[:] = POISON if tainted else 0

    def handler(warp: Warp, mask: int) -> bool:
        cluster = warp.cta.cluster
        for lane in lanes(mask):
            v = values(site, warp, lane)
            data = np.array(v[1 : 1 + count], np.uint64).astype(f"u{nbytes}").view(dtype)
            signals = ((v[barrier] >> 24, v[barrier] & OFFSET, data.nbytes),)
            tainted = cluster.shadow is not None and argument_tainted(warp, 1, count, lane)
            perform: Callable[[], None] = partial(store, cluster, v[0], data, tainted)
            by: Sequence[Knowledge | None] = ()
            if cluster.order is not None:
                start = v[0] & OFFSET
                place = np.array([[start, start + data.nbytes]], np.int64)
                op = Registers(Footprint("smem", v[0] >> 24, place), signals)
                perform, by = cluster.order.signalling(
                    warp, site, lane, op, perform, 0, int(bool(reduce))
                )
            complete = partial(signal, cluster, signals, by)
            submit(warp, site, ("st", id(data)), perform, complete)
        return True

    return handler


def _reduced(
    cells: NDArray[np.generic], data: NDArray[np.generic], operation: str
) -> NDArray[np.generic]:
    combine: dict[str, Callable[..., NDArray[np.generic]]] = {
        "": lambda a, b: b, "add": np.add, "min": np.minimum, "max": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    if operation not in combine:
        raise EmulationError("trap", f"red.async.{operation} on shared memory is not modelled")
    return np.asarray(combine[operation](cells, data))
