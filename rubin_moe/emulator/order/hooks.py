"""What native code calls: one function for each event of a warp, given its state block ``S``.

Arguments and results are int64. A result of 0 means that the launch has to stop.
"""

from __future__ import annotations

from numba import njit

from ..state.registers import FIELDS, Status
from . import checks, synchronise
from .layout import (
    CLOCK_SHIFT,
    COMPONENT_SHIFT,
    CTA_WARPS,
    EXITED,
    FACTORS,
    INIT_FENCE,
    LANE_SHIFT,
    MASK_SHIFT,
    MBARRIER_INIT,
    READS_A,
    REGISTERS,
    ROWS,
    SITE_MASK,
    STATES,
    UNINITIALISED,
    UNWAITED,
    WARP0,
    WARPS,
    WHOLE_WORD,
)
from .raw import wide, word

inner = njit(error_model="numpy", nogil=True)
_ORDER, _WARP, _SITE = FIELDS["order"], FIELDS["order_warp"], FIELDS["site"]
_STATUS, _WAIT_ADDRESS = FIELDS["status"], FIELDS["wait_address"]
_AT_BARRIER, _AT_CLUSTER = Status.BARRIER, Status.CLUSTER


@inner
def _block(S):
    return wide(S + _ORDER)[0]


@inner
def _warp(S):
    return word(S + _WARP)[0]


@inner
def _epoch(S, lane):
    B, warp, site = _block(S), _warp(S), word(S + _SITE)[0]
    b = wide(B)
    component = b[WARP0] + warp
    clock = word(synchronise.row_of(B, ROWS, warp))[component]
    return site | lane << LANE_SHIFT | component << COMPONENT_SHIFT | clock << CLOCK_SHIFT


def access(S, addresses, mask, size, kind, site):
    """A load, store, atomic or cp.async, after its bounds were checked."""
    return checks.access(_block(S), _warp(S), addresses, mask & 0xFFFFFFFF, size, kind, site)


def converge(S):
    """Lanes of the warp meet at a collective."""
    synchronise.tick(_block(S), _warp(S))
    return 1


def mbarrier_init(S, address, lane):
    """mbarrier.init of one lane."""
    B, warp = _block(S), _warp(S)
    mine = _epoch(S, lane)
    row = synchronise.row_of(B, ROWS, warp)
    ok = checks.note_bytes(B, address, 8, row, mine, 1, 0)
    synchronise.mbarrier_init(B, warp, address, mine | WHOLE_WORD << MASK_SHIFT)
    return ok


def mbarrier_arrive(S, address, before, lane):
    """An arrival of one lane has been counted."""
    B, warp = _block(S), _warp(S)
    unknown = synchronise.mbarrier_arrive(B, warp, address, before)
    mine = _epoch(S, lane)
    synchronise.arrived_from(B, address, mine & SITE_MASK)
    if checks.has_exited(B, address):
        return checks.log(B, EXITED, mine, mine, address)
    if unknown == 0:
        return 1
    return checks.log(B, UNINITIALISED, mine, unknown, address)


def mbarrier_wait(S, addresses, mask):
    """Lanes of ``mask`` have found their phase complete."""
    B, warp = _block(S), _warp(S)
    lane, before = 0, 0
    while mask != 0:
        if mask & 1:
            address = wide(addresses)[lane]
            if address != before:
                unknown = synchronise.mbarrier_wait(B, warp, address)
                if unknown != 0:
                    mine = _epoch(S, lane)
                    if not checks.log(B, UNINITIALISED, mine, unknown, address):
                        return 0
                before = address
        mask = (mask & 0xFFFFFFFF) >> 1
        lane += 1
    return 1


def barrier_arrive(S, index):
    """A warp arrives at a named barrier."""
    synchronise.barrier_arrive(_block(S), _warp(S), index)
    return 1


def barrier_complete(S, index, own):
    """The named barrier of the warp's CTA is complete; ``own``: the warp goes on after it."""
    B, warp = _block(S), _warp(S)
    b = wide(B)
    cta = warp // b[CTA_WARPS]
    waiting = 0
    for i in range(b[CTA_WARPS]):
        state = wide(b[STATES])[cta * b[CTA_WARPS] + i]
        waits = word(state + _STATUS)[0] == _AT_BARRIER
        if waits and word(state + _WAIT_ADDRESS)[0] == index:
            waiting |= 1 << i
    if own:
        waiting |= 1 << (warp % b[CTA_WARPS])
    synchronise.barrier_complete(B, cta, index, waiting)
    return 1


def cluster_arrive(S, relaxed):
    """A warp arrives at the cluster barrier."""
    synchronise.cluster_arrive(_block(S), _warp(S), relaxed)
    return 1


def cluster_complete(B):
    """The cluster barrier is complete: warps that wait at it go on."""
    synchronise.cluster_complete(B)
    b = wide(B)
    for warp in range(b[WARPS]):
        if word(wide(b[STATES])[warp] + _STATUS)[0] == _AT_CLUSTER:
            synchronise.cluster_wait(B, warp)
    return 1


def cluster_wait(S):
    """A warp has passed the cluster barrier."""
    synchronise.cluster_wait(_block(S), _warp(S))
    return 1


def leave(S):
    """A warp has exited."""
    return checks.leave(_block(S), _warp(S), _epoch(S, 0))


def registers_used(S, site, how):
    """Another instruction touches registers of wgmma number ``site``."""
    B, warp = _block(S), _warp(S)
    if synchronise.warpgroup_done(B, warp, site):
        return 1
    mine = _epoch(S, 0)
    return checks.log(B, FACTORS if how == READS_A else REGISTERS, mine, mine, site)


def fence(S, kind):
    """A fence of one of the FENCE kinds."""
    synchronise.fence(_block(S), _warp(S), kind)
    return 1


def group_commit(S, kind):
    """commit_group of a warp."""
    synchronise.group_commit(_block(S), _warp(S), kind)
    return 1


def group_wait(S, kind, allowed, reads):
    """wait_group of a warp is over."""
    if allowed == 0xFFFFFFFF:  # wait_all, which native code passes as -1
        allowed = -1
    synchronise.group_wait(_block(S), _warp(S), kind, allowed, reads)
    return 1


def tensor_wait(S, stores):
    """tcgen05.wait of a warp is over."""
    synchronise.tensor_wait(_block(S), _warp(S), stores)
    return 1


def load_read(S, site):
    """A register is read that tcgen05.ld number ``site`` wrote."""
    clock = synchronise.load_read(_block(S), _warp(S), site)
    if clock != 0:
        mine = _epoch(S, 0)
        checks.log(_block(S), UNWAITED, mine, mine, site)
    return 1


def copies_begin(S, begin):
    """Around the arrival of cp.async.mbarrier.arrive."""
    synchronise.copies_begin(_block(S), _warp(S), begin)
    return 1


def warpgroup_issued(B, warp, site):
    """See ``synchronise``."""
    synchronise.warpgroup_issued(B, warp, site)
    return 1


def load_issued(B, warp, site):
    """See ``synchronise``."""
    synchronise.load_issued(B, warp, site)
    return 1


def operation_arrive(B, address, row, component, clock, site):
    """See ``synchronise``; ``site`` issued the operation."""
    synchronise.operation_arrive(B, address, row, component, clock)
    synchronise.arrived_from(B, address, site)
    if not checks.has_exited(B, address):
        return 1
    mine = site | component << COMPONENT_SHIFT | clock << CLOCK_SHIFT
    return checks.log(B, EXITED, mine, mine, address)


def operation_arrived(B, address, before):
    """See ``synchronise``."""
    synchronise.operation_arrived(B, address, before)
    return 1


def operation_mbarrier(B, row, address, mine):
    """Whether an asynchronous operation may signal the mbarrier; its number, -1 where unknown."""
    number = synchronise.mbarrier_at(B, address)
    if number >= 0 and not synchronise.knows_init(B, row, number, True):
        unknown = wide(wide(B)[MBARRIER_INIT])[number]
        known = synchronise.knows_init(B, row, number, False)
        if not checks.log(B, INIT_FENCE if known else UNINITIALISED, mine, unknown, address):
            return -2
    return number


def note(B, table, count, row, mine, proxy):
    """See ``checks``."""
    return checks.note(B, table, count, row, mine, proxy)
