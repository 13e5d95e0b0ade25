"""What the handlers of all units share: operands of a lane, register vectors, issue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rubin_moe.emulator.async_ops import AsyncOperation
from rubin_moe.emulator.isa.handoff import Rows, Slots, UnitSite
from rubin_moe.emulator.machine import Cluster, LaunchContext, Warp
from rubin_moe.emulator.state.registers import LANES

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


def first_slot(site: UnitSite, position: int) -> int:
    plan = site.operands[position]
    assert isinstance(plan, Slots)
    return plan.first


def signal(cluster: Cluster, signals: tuple[tuple[int, int, int], ...]) -> None:
    for rank, offset, nbytes in signals:
        cluster.arrive(rank, offset, tx=-nbytes)


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
