"""What the handlers of all units share: operands of a lane, register vectors, issue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from rubin_moe.emulator.async_ops import AsyncOperation
from rubin_moe.emulator.isa.handoff import Rows, Slots, UnitSite
from rubin_moe.emulator.machine import Cluster, LaunchContext, Warp
from rubin_moe.emulator.order.operations import Knowledge
from rubin_moe.emulator.state.registers import FIELDS, LANES

#: Performs one instruction for the lanes of a mask; False: the warp must wait and try again.
Handler = Callable[[Warp, int], bool]
Binder = Callable[[UnitSite, LaunchContext], Handler]
OFFSET = (1 << 24) - 1


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
    """A register vector operand, uint32[registers, 32]: a view where the plan says so."""
    plan = site.operands[position]
    if isinstance(plan, Rows):
        return warp.state.rows[plan.index]
    return warp.state.args[plan.first : plan.first + plan.count].astype(np.uint32)


def write_vector(site: UnitSite, warp: Warp, position: int, data: NDArray[np.uint32]) -> None:
    """Write a register vector operand."""
    plan = site.operands[position]
    assert isinstance(plan, Rows)
    warp.state.rows[plan.index] = data


def first_slot(site: UnitSite, position: int) -> int:
    plan = site.operands[position]
    assert isinstance(plan, Slots)
    return plan.first


def signal(
    cluster: Cluster,
    signals: tuple[tuple[int, int, int], ...],
    by: Sequence[Knowledge | None] = (),
) -> None:
    """Count copied bytes at mbarriers; ``by`` is what each copy hands on."""
    for (rank, offset, nbytes), knowledge in zip_longest(signals, by):
        cluster.arrive(rank, offset, tx=-nbytes, by=knowledge)


def submit(
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


def both(first: Callable[[], None], second: Callable[[], object]) -> Callable[[], None]:
    """One after the other: an operation, and what it does to poison."""

    def perform() -> None:
        first()
        second()

    return perform


def taints(site: UnitSite, warp: Warp, position: int) -> NDArray[np.uint32]:
    """Taints of a register vector operand (a copy), uint32 [registers]; zeros for other values."""
    plan = site.operands[position]
    if not isinstance(plan, Rows):
        return np.zeros(plan.count, np.uint32)
    return warp.state.taints[plan.taints].copy()


def argument_tainted(warp: Warp, first: int, count: int, lane: int) -> bool:
    """Whether one of some argument rows that hold data is not defined in a lane."""
    start = FIELDS["arg_taints"] // 4 + first
    return bool((warp.state.u32[start : start + count] >> np.uint32(lane) & 1).any())


def write_taints(site: UnitSite, warp: Warp, position: int, masks: NDArray[np.uint32]) -> None:
    """Set the taints of a register vector; one that is not zero names the site as its origin."""
    plan = site.operands[position]
    assert isinstance(plan, Rows)
    warp.state.taints[plan.taints] = masks
    if masks.any():
        warp.state.set("poison_site", site.index)
        warp.state.set_wide("poison_address", 0)


def nothing() -> None:
    return None


def submit_group(
    warp: Warp,
    site: UnitSite,
    kind: str,
    pipe: tuple[object, ...],
    perform: Callable[[], None],
    members: Sequence[Warp] = (),
) -> None:
    """Issue an operation that belongs to the open group of the warp (or of ``members``)."""
    operation = submit(warp, site, pipe, perform, nothing)
    if operation is not None:
        for member in members or (warp,):
            member.open_group[kind].append(operation)
