"""Violations of the order as findings: both accesses, with kernel, CTA, warp, lane and line."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rubin_moe.emulator.findings import Access
from rubin_moe.emulator.order import layout

if TYPE_CHECKING:
    from rubin_moe.emulator.machine import Warp
    from rubin_moe.emulator.order.model import ClusterOrder

_PHRASES = {
    "warp": "access of the warp", "cp.async": "cp.async", "tensor": "tensor pipe",
    "load": "tcgen05.ld", "store": "tcgen05.st", "bulk read": "read by a bulk copy",
    "bulk write": "write by a bulk copy", "init": "initialisation",
    "mbarrier": "copy that signals an mbarrier",
}  # fmt: skip


class _Agent(NamedTuple):
    kind: str
    cta: tuple[int, int, int]
    warp: int
    lane: int
    line: int
    opcode: str


def _agent(order: ClusterOrder, epoch: int) -> _Agent:
    component = epoch >> layout.COMPONENT_SHIFT & layout.COMPONENT_MASK
    slot, kind, warp = order.launch.agent(component)
    cluster = order.launch.owners[slot] or order.cluster
    info = cluster.kernel.compiled.instructions[epoch & layout.SITE_MASK]
    rank, index = divmod(warp, int(order.block[layout.CTA_WARPS]))
    if kind == "mbarrier":
        owner = cluster.order or order
        rank, index = owner.issuers.get((warp, epoch & layout.SITE_MASK), (0, -1))
    lane = epoch >> layout.LANE_SHIFT & layout.LANE_MASK if kind == "warp" else -1
    cta = cluster.ctas[rank].coordinates
    return _Agent(kind, cta, index, lane, info.line, info.opcode)


def place_text(order: ClusterOrder, place: int) -> str:
    """Where an access went: shared, tensor or global memory."""
    if place >> layout.TENSOR_PLACE & 1:
        rank, cell = place >> 48 & 0xFF, place & 0xFFFFFFFF
        column, part = divmod(cell, layout.CELLS_A_COLUMN)
        lane = part * layout.LANES_A_CELL
        return (
            f"tensor memory column {column}, lanes {lane}..{lane + layout.LANES_A_CELL - 1} of "
            f"CTA {order.cluster.ctas[rank].coordinates}"
        )
    offset = place - int(order.block[layout.ARENA])
    if 0 <= offset < int(order.block[layout.ARENA_BYTES]):
        cta = order.cluster.ctas[offset >> 24].coordinates
        return f"shared memory {offset & 0xFFFFFF:#x} of CTA {cta}"
    return f"global memory {place:#x}"


_SENTENCES = {
    layout.RACE_READ: "reads {place}, and nothing orders it after the write there",
    layout.RACE_WRITE: "writes {place}, and nothing orders it after the write there",
    layout.RACE_OVERWRITE: "overwrites {place}, and nothing orders it after the read there",
    layout.LANES: "another lane of the warp touched {place} and they have not met since",
    layout.PROXY: "reads {place} through the asynchronous proxy, and no fence.proxy.async lies "
    "between it and the generic write there",
    layout.PROXY_OVERWRITE: "overwrites {place} through the asynchronous proxy, and no "
    "fence.proxy.async lies between it and the generic write there",
    layout.PROXY_COPY: "reads {place} through the asynchronous proxy, and no fence.proxy.async "
    "lies between it and the cp.async there",
    layout.INIT_FENCE: "uses the mbarrier at {place}, and neither fence.mbarrier_init nor "
    "fence.proxy.async lies between it and the initialisation",
    layout.REPEATED: "writes {place} again while an earlier bulk store of the warp may not be over",
    layout.UNFENCED: "touches {place}, and tcgen05.fence does not stand on both sides of what "
    "synchronises it with another warp's access there",
    layout.UNWAITED: "touches a register of tcgen05.ld before tcgen05.wait::ld",
    layout.EXIT_PENDING: "the CTA exits, and nothing says that {place} is no longer touched",
    layout.EXIT_ARRIVAL: "the CTA exits, and none of its warps has seen the last arrival from "
    "outside at the mbarrier at {place}",
    layout.EXITED: "touches {place}, whose warps have all exited",
    layout.REGISTERS: "touches registers of a wgmma that no wait_group has covered",
    layout.FACTORS: "reads a register that is A of a wgmma that no wait_group has covered",
    layout.WARPGROUP: "overwrites {place}, and one of the four warps has not waited for the wgmma "
    "that reads it",
    layout.UNINITIALISED: "uses the mbarrier at {place}, whose initialisation nothing published "
    "to it",
}


_FIXED = {
    layout.LANES: "order: warp convergence",
    layout.PROXY: "order: proxy fence",
    layout.PROXY_OVERWRITE: "order: asynchronous overwrite",
    layout.UNINITIALISED: "order: mbarrier initialisation",
    layout.PROXY_COPY: "order: cp.async proxy fence",
    layout.INIT_FENCE: "order: mbarrier fence",
    layout.REPEATED: "order: repeated bulk store",
    layout.UNFENCED: "order: tcgen05 fence",
    layout.UNWAITED: "order: wait::ld",
    layout.EXIT_PENDING: "order: exit",
    layout.EXIT_ARRIVAL: "order: exit",
    layout.EXITED: "order: exit",
    layout.REGISTERS: "order: wgmma registers",
    layout.FACTORS: "order: wgmma factors",
    layout.WARPGROUP: "order: wgmma warps",
}


def _rule(code: int, mine: str, other: str, tensor: bool) -> str:
    if code in _FIXED:
        return _FIXED[code]
    if tensor:
        return "order: tensor memory"
    if code == layout.RACE_OVERWRITE:
        return "order: race" if mine == other == "warp" else "order: overwritten source"
    return "order: race" if other == "warp" else "order: asynchronous result"


def _report(order: ClusterOrder, entry: list[int], warp: Warp | None) -> None:
    code, mine, other, place = entry[:4]
    now, before = _agent(order, mine), _agent(order, other)
    tensor = bool(place >> layout.TENSOR_PLACE & 1) and place > 0
    rule = _rule(code, now.kind, before.kind, tensor)
    sentence = _SENTENCES[code].format(place=place_text(order, place))
    index = now.warp if now.warp >= 0 or warp is None else warp.index
    cta = now.cta if now.warp >= 0 or warp is None else warp.cta.coordinates
    findings = order.cluster.context.findings
    assert findings is not None
    access = None
    if mine != other:
        where = before.cta, before.warp, before.lane, before.line
        access = Access(_PHRASES[before.kind], *where, before.opcode)
    findings.add(
        rule, sentence, kernel=order.cluster.kernel.name, cta=cta, warp=index,
        line=now.line, opcode=now.opcode, lane=now.lane, other=access,
    )  # fmt: skip


def stop(order: ClusterOrder, warp: Warp | None) -> None:
    """Raise EmulationError for the last violation of the log."""
    _report(order, order.log[int(order.block[layout.LOG_COUNT]) - 1].tolist(), warp)
    raise AssertionError("the last violation of the log is of a rule that is not enforced")


def drain(order: ClusterOrder) -> None:
    """Hand the log over to the findings of the launch; only at the end of a cluster."""
    for entry in order.log[: int(order.block[layout.LOG_COUNT])].tolist():
        _report(order, entry, None)
    order.forget_log()
