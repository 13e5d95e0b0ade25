"""From an instruction that Python performs to the functional unit that knows it.

``bind(site, context)`` makes the handler of one instruction: everything the opcode says is decoded
once, what registers and descriptors say is decoded at issue. A handler returns False when the warp
has to wait and must try again; asynchronous work goes to the policy.
"""

from __future__ import annotations

from rubin_moe.emulator import copies, register_pool, tensor_core
from rubin_moe.emulator.isa.handoff import UnitSite
from rubin_moe.emulator.issue import OFFSET, Binder, Handler, lanes, values
from rubin_moe.emulator.machine import LaunchContext, Warp

#: Shared memory from here on may lose the cache hint of cp.async.cg on sm_107a.
_HIGH = 248 << 10


def _bind_done(site: UnitSite, context: LaunchContext) -> Handler:
    """Nothing is outstanding: earlier launches are over."""

    def handler(warp: Warp, mask: int) -> bool:
        return True

    return handler


_BINDERS: dict[str, Binder] = {
    "bulk_tensor": copies.bind_bulk_tensor,
    "bulk_copy": copies.bind_bulk_copy,
    "bulk_group": copies.bind_group("bulk"),
    "cp_async": copies.bind_cp_async,
    "cp_async_arrive": copies.bind_cp_async_arrive,
    "cp_async_group": copies.bind_group("cp.async"),
    "async_store": copies.bind_async_store,
    "tmem_alloc": tensor_core.bind_tmem_alloc,
    "tmem_load": tensor_core.bind_tmem_load,
    "tmem_store": tensor_core.bind_tmem_store,
    "tmem_copy": tensor_core.bind_tmem_copy,
    "tmem_commit": tensor_core.bind_tmem_commit,
    "tmem_wait": tensor_core.bind_tmem_wait,
    "tmem_results": tensor_core.bind_tmem_results,
    "tcgen05_mma": tensor_core.bind_tcgen05_mma,
    "wgmma": tensor_core.bind_wgmma,
    "wgmma_group": copies.bind_group("wgmma"),
    "mma_sync": tensor_core.bind_mma_sync,
    "grid_wait": _bind_done,
    "register_budget": register_pool.bind_setmaxnreg,
}


def _with_faults(site: UnitSite, handler: Handler) -> Handler:
    """Records what is wrong with the instruction where it stands, each time it executes."""

    def faulty(warp: Warp, mask: int) -> bool:
        for rule, reason in site.faults:
            warp.found(rule, reason, site.line, site.opcode)
        return handler(warp, mask)

    return faulty


def _with_high_destinations(site: UnitSite, handler: Handler) -> Handler:
    """Warns of cp.async.cg destinations from `_HIGH` on."""

    def warning(warp: Warp, mask: int) -> bool:
        for lane in lanes(mask):
            offset = values(site, warp, lane)[0] & OFFSET
            if offset >= _HIGH:
                reason = f"the destination {offset:#x} is not below {_HIGH:#x}"
                warp.found("cp.async: high destination", reason, site.line, site.opcode, lane)
                break
        return handler(warp, mask)

    return warning


def bind(site: UnitSite, context: LaunchContext) -> Handler:
    """The handler of one instruction for one launch."""
    handler = _BINDERS[site.family](site, context)
    if context.findings is None:
        return handler
    if site.faults:
        handler = _with_faults(site, handler)
    if context.arch == "sm_107a" and site.family == "cp_async" and "cg" in site.parts:
        handler = _with_high_destinations(site, handler)
    return handler
