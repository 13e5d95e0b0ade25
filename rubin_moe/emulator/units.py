"""From an instruction that Python performs to the functional unit that knows it.

``bind(site, context)`` makes the handler of one instruction: everything the opcode says is decoded
once, what registers and descriptors say is decoded at issue. A handler returns False when the warp
has to wait and must try again; asynchronous work goes to the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rubin_moe.emulator.async_ops import AsyncOperation
from rubin_moe.emulator.isa import bulk_copy, mma_sync, tcgen05_data, tcgen05_mma, wgmma
from rubin_moe.emulator.isa.handoff import Rows, Slots, UnitSite
from rubin_moe.emulator.machine import Cluster, Cta, EmulationError, LaunchContext, Warp
from rubin_moe.emulator.state.registers import FULL_MASK, LANES

Handler = Callable[[Warp, int], bool]
OFFSET = (1 << 24) - 1
_SF_VECTOR = {"block16": 16, "block32": 32, "scale_vec::1X": 32, "scale_vec::2X": 32,
              "scale_vec::4X": 16}  # fmt: skip


def lanes(mask: int) -> list[int]:
    """Lanes of a mask, lowest first."""
    if mask & (mask - 1) == 0:
        return [mask.bit_length() - 1] if mask else []
    return [lane for lane in range(LANES) if mask >> lane & 1]


def values(site: UnitSite, warp: Warp, lane: int) -> list[int]:
    """The scalar operands of one lane."""
    return warp.state.args[: site.slots, lane].tolist()  # type: ignore[no-any-return]


def issuing_lanes(site: UnitSite, warp: Warp, mask: int) -> list[int]:
    """Lanes that issue separate operations: one for all lanes with the same operands.

    TMA, bulk copies and tcgen05 run on the warp's uniform datapath, once for a warp whose operands
    agree; compilers rely on it (CuTe DSL stores tiles without electing a lane).
    """
    if mask & (mask - 1) == 0:
        return [mask.bit_length() - 1]
    seen: dict[bytes, int] = {}
    for lane in lanes(mask):
        seen.setdefault(warp.state.args[: site.slots, lane].tobytes(), lane)
    return list(seen.values())


def vector(site: UnitSite, warp: Warp, position: int) -> NDArray[np.uint32]:
    """A register vector operand, uint32[registers, 32]."""
    plan = site.operands[position]
    if isinstance(plan, Rows):
        if plan.contiguous:
            return warp.state.rows[plan.rows[0] : plan.rows[0] + len(plan.rows)]
        return warp.state.rows[list(plan.rows)]
    return warp.state.args[plan.first : plan.first + plan.count].astype(np.uint32)


def write_vector(site: UnitSite, warp: Warp, position: int, data: NDArray[np.uint32]) -> None:
    """Write a register vector operand."""
    plan = site.operands[position]
    assert isinstance(plan, Rows)
    if plan.contiguous:
        warp.state.rows[plan.rows[0] : plan.rows[0] + len(plan.rows)] = data
    else:
        warp.state.rows[list(plan.rows)] = data


def _first(site: UnitSite, position: int) -> int:
    plan = site.operands[position]
    assert isinstance(plan, Slots)
    return plan.first


def _signal(cluster: Cluster, signals: tuple[tuple[int, int, int], ...]) -> None:
    for rank, offset, nbytes in signals:
        cluster.arrive(rank, offset, tx=-nbytes)


# ---- bulk copies


def _bind_bulk_tensor(site: UnitSite, context: LaunchContext) -> Handler:
    if ".global.shared::cta" in site.opcode:
        return _bind_tensor_store(site, context)
    where = site.operands
    to, source, barrier = (_first(site, i) for i in range(3))
    coordinates = slice(source + 1, source + where[1].count)  # type: ignore[union-attr]
    mask_slot = _first(site, 3) if "multicast::cluster" in site.parts else None
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
            perform = partial(op.perform, cluster, context.memory)
            complete = partial(_signal, cluster, op.signals)
            _submit(warp, site, ("tma", id(op)), perform, complete)
        return True

    return handler


def _bind_tensor_store(site: UnitSite, context: LaunchContext) -> Handler:
    target, source = _first(site, 0), _first(site, 1)
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
            perform = partial(op.perform, warp.cta.cluster, context.memory)
            _submit_group(warp, site, perform)
        return True

    return handler


def _bind_bulk_copy(site: UnitSite, context: LaunchContext) -> Handler:
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
            perform = partial(op.perform, cluster, context.memory)
            if grouped:
                _submit_group(warp, site, perform)
            else:
                complete = partial(_signal, cluster, op.signals)
                _submit(warp, site, ("bulk", id(op)), perform, complete)
        return True

    return handler


def _submit(
    warp: Warp,
    site: UnitSite,
    pipe: tuple[object, ...],
    perform: Callable[[], None],
    complete: Callable[[], None],
) -> AsyncOperation | None:
    """Issue an asynchronous operation; at once when the policy defers nothing."""
    policy = warp.cta.cluster.context.policy
    if not policy.deferred:
        perform()
        complete()
        return None
    operation = AsyncOperation(
        site.opcode, pipe, perform, complete, warp.cta.rank, warp.index, site.line
    )
    policy.submit(operation)
    return operation


def _nothing() -> None:
    return None


def _submit_group(warp: Warp, site: UnitSite, perform: Callable[[], None]) -> None:
    pipe = ("bulk_group", id(warp), site.index)
    operation = _submit(warp, site, pipe, perform, _nothing)
    if operation is not None:
        warp.open_group.append(operation)


def _bind_bulk_group(site: UnitSite, context: LaunchContext) -> Handler:
    if "commit_group" in site.parts:
        return _commit_group
    return _bind_group_wait(site)


def _commit_group(warp: Warp, mask: int) -> bool:
    warp.groups.append(warp.open_group)
    warp.open_group = []
    return True


def _bind_group_wait(site: UnitSite) -> Handler:
    """At most N of the latest groups may be unfinished. Groups are kept for the warp: the
    elected thread that stores is the one that waits."""

    def handler(warp: Warp, mask: int) -> bool:
        allowed = values(site, warp, lanes(mask)[0])[0] if site.slots else 0
        older = warp.groups[: len(warp.groups) - allowed] if allowed else warp.groups
        if any(not op.done for group in older for op in group):
            return False
        del warp.groups[: len(older)]
        return True

    return handler


# ---- stores that signal an mbarrier


def _bind_async_store(site: UnitSite, context: LaunchContext) -> Handler:
    kind = site.parts[-1]
    nbytes = int(kind[1:]) // 8
    count = site.operands[1].count if isinstance(site.operands[1], Slots) else 1
    barrier = _first(site, 2)
    dtype = np.dtype({"s": "i", "f": "u", "b": "u", "u": "u"}[kind[0]] + str(nbytes))
    reduce = site.parts[-2] if site.parts[0] == "red" else ""

    def store(cluster: Cluster, address: int, data: NDArray[np.generic]) -> None:
        rank, offset = address >> 24, address & OFFSET
        size = data.nbytes
        if rank >= cluster.size or offset + size > cluster.arena.limit or offset % size:
            raise EmulationError("trap", f"line {site.line}: {site.opcode} to {address:#x}")
        cells = cluster.smem(rank)[offset : offset + size].view(dtype)
        cells[:] = _reduced(cells, data, reduce)

    def handler(warp: Warp, mask: int) -> bool:
        cluster = warp.cta.cluster
        for lane in lanes(mask):
            v = values(site, warp, lane)
            data = np.array(v[1 : 1 + count], np.uint64).astype(f"u{nbytes}").view(dtype)
            signals = ((v[barrier] >> 24, v[barrier] & OFFSET, data.nbytes),)
            perform = partial(store, cluster, v[0], data)
            complete = partial(_signal, cluster, signals)
            _submit(warp, site, ("st", id(data)), perform, complete)
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


# ---- tensor memory


def _bind_tmem_alloc(site: UnitSite, context: LaunchContext) -> Handler:
    what = site.parts[1]

    def handler(warp: Warp, mask: int) -> bool:
        cta = warp.cta
        tmem = cta.tmem
        if tmem is None:
            raise EmulationError("trap", f"line {site.line}: {context.arch} has no tensor memory")
        v = values(site, warp, lanes(mask)[0])
        if what == "alloc":
            address = tmem.allocate(v[1], "exclusive" in site.parts)
            if address is None:
                return False
            _store_word(cta, v[0], address)
            statistics = context.statistics
            statistics.peak_tmem_columns = max(statistics.peak_tmem_columns, tmem.peak)
        elif what == "dealloc":
            tmem.free(v[0], v[1])
        else:
            tmem.relinquish()
        return True

    return handler


def _store_word(cta: Cta, address: int, value: int) -> None:
    offset = address & OFFSET
    cta.cluster.smem(address >> 24)[offset : offset + 4].view(np.uint32)[0] = value


def _bind_tmem_load(site: UnitSite, context: LaunchContext) -> Handler:
    shape, num = _access_shape(site)
    packed = "pack::16b" in site.parts
    split = _first(site, 2) if len(site.operands) > 2 else None

    def handler(warp: Warp, mask: int) -> bool:
        v = values(site, warp, lanes(mask)[0])
        half = v[split] if split is not None else 0
        address = v[_first(site, 1)] & FULL_MASK
        op = tcgen05_data.decode_access(context.arch, shape, num, address, warp.index, packed, half)
        write_vector(site, warp, 0, op.load(warp.cta.cluster.tmem(warp.rank)))
        return True

    return handler


def _access_shape(site: UnitSite) -> tuple[str, int]:
    at = site.parts.index("aligned")
    return site.parts[at + 1], int(site.parts[at + 2][1:])


def _bind_tmem_store(site: UnitSite, context: LaunchContext) -> Handler:
    shape, num = _access_shape(site)
    packed = "unpack::16b" in site.parts
    data = len(site.operands) - 1
    split = _first(site, 1) if data == 2 else None

    def handler(warp: Warp, mask: int) -> bool:
        v = values(site, warp, lanes(mask)[0])
        half = v[split] if split is not None else 0
        op = tcgen05_data.decode_access(
            context.arch, shape, num, v[0] & FULL_MASK, warp.index, packed, half
        )
        op.store(warp.cta.cluster.tmem(warp.rank), vector(site, warp, data))
        return True

    return handler


def _tcgen05_pipe(warp: Warp, group: int) -> tuple[object, ...]:
    """cp, mma and commit of a CTA (pair) are performed in the order of issue."""
    return ("tcgen05", id(warp.cta.cluster), warp.rank // group if group == 2 else -1 - warp.rank)


def _cta_group(site: UnitSite) -> int:
    return 2 if "cta_group::2" in site.parts else 1


def _bind_tmem_copy(site: UnitSite, context: LaunchContext) -> Handler:
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
            context.statistics.bytes["UTCCP"] += op.nbytes * len(op.ranks)
            perform = partial(tcgen05_data.perform, op, cluster)
            _submit(warp, site, _tcgen05_pipe(warp, group), perform, _nothing)
        return True

    return handler


def _bind_tmem_commit(site: UnitSite, context: LaunchContext) -> Handler:
    multicast = "multicast::cluster" in site.parts
    group = _cta_group(site)

    def announce(cluster: Cluster, address: int, targets: list[int]) -> None:
        for rank in targets:
            cluster.arrive(rank, address & OFFSET, count=1)

    def handler(warp: Warp, mask: int) -> bool:
        cluster = warp.cta.cluster
        for lane in issuing_lanes(site, warp, mask):
            v = values(site, warp, lane)
            address = v[0] if not v[0] >> 32 else v[0] - cluster.arena.address
            targets = [address >> 24]
            if multicast:
                targets = [r for r in range(16) if v[1] >> r & 1]
            complete = partial(announce, cluster, address, targets)
            _submit(warp, site, _tcgen05_pipe(warp, group), _nothing, complete)
        return True

    return handler


def _bind_tcgen05_mma(site: UnitSite, context: LaunchContext) -> Handler:
    group = _cta_group(site)
    kind = next(p for p in site.parts if p.startswith("kind::"))[6:]
    scaled = "block_scale" in site.parts
    sf_vec = next((_SF_VECTOR[p] for p in site.parts if p in _SF_VECTOR), 32) if scaled else 0
    usage = {p.split("::")[1]: p.split("::")[2] for p in site.parts if p.startswith("collector")}
    a_in_tmem = isinstance(site.operands[1], Slots) and site.operands[1].memory
    d, a, b, idesc = (_first(site, i) for i in range(4))
    tail = site.operands[4:]
    statistics = context.statistics
    if scaled:
        sfa, sfb, enable = (_first(site, i) for i in range(4, 7))
    disabled, extra = None, None
    if not scaled:
        wide = [i for i, plan in enumerate(tail, 4) if isinstance(plan, Rows) or plan.count > 1]
        disabled = wide[0] if wide else None
        rest = [i for i in range(4, len(site.operands)) if i != disabled]
        enable = _first(site, rest[0])
        extra = _first(site, rest[1]) if len(rest) > 1 else None

    def handler(warp: Warp, mask: int) -> bool:
        cluster = warp.cta.cluster
        for lane in issuing_lanes(site, warp, mask):
            v = values(site, warp, lane)
            off = vector(site, warp, disabled)[:, lane].tolist() if disabled is not None else ()
            op = tcgen05_mma.decode_mma(
                arch=context.arch, kind=kind, cta_group=group, rank=warp.rank,
                d=v[d] & FULL_MASK, a=v[a], b=v[b], idesc=v[idesc] & FULL_MASK,
                enable_input_d=bool(v[enable]), a_in_tmem=a_in_tmem, sf_vec=sf_vec,
                sfa=v[sfa] & FULL_MASK if scaled else 0, sfb=v[sfb] & FULL_MASK if scaled else 0,
                collector_a=usage.get("a", "discard"), collector_b=usage.get("b", "discard"),
                disable_output_lane=off, scale_input_d=v[extra] if extra is not None else 0,
            )  # fmt: skip
            statistics.mma_count += 1
            statistics.mma_macs += op.macs
            statistics.tmem_places.add((op.d & 0xFFFF, op.idesc.n, "accumulator"))
            perform = partial(tcgen05_mma.perform, op, cluster)
            _submit(warp, site, _tcgen05_pipe(warp, group), perform, _nothing)
        return True

    return handler


# ---- matrix instructions on registers


def _bind_mma_sync(site: UnitSite, context: LaunchContext) -> Handler:
    types = [p for p in site.parts if p in mma_sync.TYPES or p in ("f32", "s32")]
    shape = next(p for p in site.parts if p.startswith("m") and "n8k" in p)
    d, a, b, c = types[-4:]
    op = mma_sync.decode_mma_sync(shape, d, a, b, c, "satfinite" in site.parts)

    def handler(warp: Warp, mask: int) -> bool:
        a_, b_, c_ = (vector(site, warp, i) for i in (1, 2, 3))
        write_vector(site, warp, 0, op.multiply(a_, b_, c_))
        context.statistics.mma_count += 1
        context.statistics.mma_macs += op.macs
        return True

    return handler


def _bind_wgmma(site: UnitSite, context: LaunchContext) -> Handler:
    """The four warps of a warpgroup meet here; the last one to issue does the work."""
    at = site.parts.index("aligned") + 1
    shape, d, a, b = site.parts[at : at + 4]
    from_registers = isinstance(site.operands[1], Rows)
    scalars = [i for i, plan in enumerate(site.operands) if isinstance(plan, Slots)]

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
        held = np.stack([vector(site, w, 0) for w in waiting])
        left = np.stack([vector(site, w, 1) for w in waiting]) if from_registers else None
        out = wgmma.multiply(op, cta.cluster.smem(cta.rank), held, left)
        for w, part in zip(waiting, out, strict=True):
            write_vector(site, w, 0, part)
            w.state.set("status", 0)
        context.statistics.mma_count += 1
        context.statistics.mma_macs += op.macs
        return True

    assert scalars
    return handler


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# ---- waits of deferred policies


def _bind_done(site: UnitSite, context: LaunchContext) -> Handler:
    """Complete when issued: loads and stores of tensor memory, wgmma, earlier launches."""

    def handler(warp: Warp, mask: int) -> bool:
        return True

    return handler


_BINDERS: dict[str, Callable[[UnitSite, LaunchContext], Handler]] = {
    "bulk_tensor": _bind_bulk_tensor,
    "bulk_copy": _bind_bulk_copy,
    "bulk_group": _bind_bulk_group,
    "async_store": _bind_async_store,
    "tmem_alloc": _bind_tmem_alloc,
    "tmem_load": _bind_tmem_load,
    "tmem_store": _bind_tmem_store,
    "tmem_copy": _bind_tmem_copy,
    "tmem_commit": _bind_tmem_commit,
    "tmem_wait": _bind_done,
    "tcgen05_mma": _bind_tcgen05_mma,
    "wgmma": _bind_wgmma,
    "wgmma_group": _bind_done,
    "mma_sync": _bind_mma_sync,
    "grid_wait": _bind_done,
}


def bind(site: UnitSite, context: LaunchContext) -> Handler:
    """The handler of one instruction for one launch."""
    return _BINDERS[site.family](site, context)
