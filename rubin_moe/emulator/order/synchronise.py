"""Synchronisation: what hands knowledge from one agent to another.

Functions compiled by numba, as in ``checks``. A warp's own clock moves on whenever its row changes
or is handed on, so that an equal clock means an equal row.
"""

from __future__ import annotations

from numba import njit

from .layout import (
    ARENA,
    BARRIER_ARRIVED,
    BULK_READ,
    BULK_WRITE,
    CLOCK_MASK,
    CLOCK_SHIFT,
    CLUSTER_ARRIVED,
    CLUSTER_DONE,
    COMPONENT_MASK,
    COMPONENT_SHIFT,
    COMPONENTS,
    COPY0,
    COUNT_BULK,
    COUNT_COPY,
    COUNT_LOAD,
    COUNT_STORE,
    COUNT_WGMMA,
    COUNTERS,
    COUNTS,
    CTA_WARPS,
    FENCE_AFTER,
    FENCE_BEFORE,
    FENCE_MEMORY,
    FENCE_PROXY,
    FENCE_RING,
    FENCE_VERSION,
    FENCE_WORDS,
    FENCED,
    FLAG_ROWS,
    FLAG_VERSION,
    FLAGS,
    GENERIC,
    GROUP_BULK,
    GROUP_COPY,
    GROUP_RING,
    GROUP_WGMMA,
    GROUPS,
    INIT,
    LENGTH,
    LOAD,
    LOAD_LAST,
    LOAD_SITES,
    MARK_COUNT,
    MARKS,
    MBARRIER0,
    MBARRIER_ARRIVED,
    MBARRIER_COUNT,
    MBARRIER_DONE,
    MBARRIER_FROM,
    MBARRIER_INIT,
    MBARRIER_LIMIT,
    MBARRIER_MAP,
    MBARRIER_MAP_WORDS,
    MBARRIER_PHASE,
    MBARRIER_PUBLISHED,
    NAMED_BARRIERS,
    PIPE0,
    ROWS,
    SAVED,
    SEEN,
    SEEN_DIRTY,
    SEEN_FLAG,
    STORE,
    TENSOR,
    TENSOR_FENCE,
    TENSOR_FENCED,
    TENSOR_FENCES,
    WAITED,
    WARP0,
    WARPS,
    WRITE,
)
from .raw import half, wide, word

inner = njit(error_model="numpy", nogil=True)
_KINDS = len(GROUPS)


@inner
def row_of(B, table, index):
    """Address of row ``index`` of a table of rows (a field of the block)."""
    b = wide(B)
    return b[table] + 4 * b[LENGTH] * index


@inner
def join(B, target, source):
    """The row at ``target`` learns what the one at ``source`` knows."""
    to, of = word(target), word(source)
    for i in range(wide(B)[LENGTH]):
        to[i] = max(to[i], of[i])


@inner
def copy(B, target, source):
    """The row at ``target`` becomes the one at ``source``."""
    to, of = word(target), word(source)
    for i in range(wide(B)[LENGTH]):
        to[i] = of[i]


@inner
def clear(B, target):
    """Forget a row."""
    to = word(target)
    for i in range(wide(B)[LENGTH]):
        to[i] = 0


@inner
def tick(B, warp):
    """The warp's clock moves on."""
    b = wide(B)
    word(row_of(B, ROWS, warp))[b[WARP0] + warp] += 1


@inner
def pipe(B, warp, kind):
    """Component of a warp's asynchronous work of a kind of PIPES."""
    b = wide(B)
    return b[PIPE0] + kind * b[WARPS] + warp


@inner
def count_of(B, warp, counter):
    """Operations of a kind that a warp has issued."""
    return wide(wide(B)[COUNTS] + 8 * COUNTERS * warp)[counter]


# ---- mbarriers


@inner
def mbarrier_at(B, address):
    """Number of the mbarrier at a host address in shared memory, or -1."""
    b = wide(B)
    offset = address - b[ARENA]
    slot = half(b[MBARRIER_MAP] + 2 * ((offset >> 24) * b[MBARRIER_MAP_WORDS]))
    return int(slot[(offset & 0xFFFFFF) >> 3]) - 1


@inner
def mbarrier_component(B, number):
    """Component of the copies that signal an mbarrier."""
    return wide(B)[MBARRIER0] + number


@inner
def mbarrier_init(B, warp, address, epoch):
    """An mbarrier starts; a word that was one before keeps its number and its phases."""
    b = wide(B)
    number = mbarrier_at(B, address)
    if number < 0:
        if b[MBARRIER_COUNT] >= b[MBARRIER_LIMIT]:
            return
        number = b[MBARRIER_COUNT]
        b[MBARRIER_COUNT] = number + 1
        offset = address - b[ARENA]
        slot = half(b[MBARRIER_MAP] + 2 * ((offset >> 24) * b[MBARRIER_MAP_WORDS]))
        slot[(offset & 0xFFFFFF) >> 3] = number + 1
    wide(b[MBARRIER_INIT])[number] = epoch
    word(b[MBARRIER_PUBLISHED])[number] = 0


@inner
def knows_init(B, row, number, asynchronous):
    """Whether the owner of ``row`` may use the mbarrier: it was initialised before."""
    b = wide(B)
    epoch = wide(b[MBARRIER_INIT])[number]
    component = (epoch >> COMPONENT_SHIFT) & COMPONENT_MASK
    clock = (epoch >> CLOCK_SHIFT) & CLOCK_MASK
    knows = word(row)
    published = word(b[MBARRIER_PUBLISHED])[number]
    if published != 0:
        maker = component - b[WARP0]
        if knows[pipe(B, maker, INIT)] >= published:
            return True
    if asynchronous:
        return knows[b[COMPONENTS] + component] >= clock
    return knows[component] >= clock


@inner
def mbarrier_arrive(B, warp, address, before):
    """A warp has arrived (or changed the transaction count); ``before`` is the word until then.

    Returns the epoch of an initialisation that the warp does not know of, else 0.
    """
    b = wide(B)
    number = mbarrier_at(B, address)
    if number < 0:
        return 0
    row = row_of(B, ROWS, warp)
    arrived = row_of(B, MBARRIER_ARRIVED, number)
    component = b[WARP0] + warp
    if word(arrived)[component] < word(row)[component]:
        join(B, arrived, row)
    phase(B, number, address, before)
    return 0 if knows_init(B, row, number, False) else wide(b[MBARRIER_INIT])[number]


@inner
def arrived_from(B, address, site):
    """Remember which instruction arrived last at an mbarrier."""
    number = mbarrier_at(B, address)
    if number >= 0:
        word(wide(B)[MBARRIER_FROM])[number] = site


@inner
def phase(B, number, address, before):
    """Complete the phase if the word's parity changed."""
    if ((wide(address)[0] ^ before) >> 61) & 1 == 0:
        return
    b = wide(B)
    phases = word(b[MBARRIER_PHASE])
    phases[number] += 1
    arrived = row_of(B, MBARRIER_ARRIVED, number)
    word(arrived)[mbarrier_component(B, number)] = phases[number]
    copy(B, row_of(B, MBARRIER_DONE, number), arrived)


@inner
def operation_arrive(B, address, row, component, clock):
    """An asynchronous operation is about to arrive: its issuer's knowledge and its own clock."""
    number = mbarrier_at(B, address)
    if number < 0:
        return
    arrived = row_of(B, MBARRIER_ARRIVED, number)
    known = word(arrived)[component]
    join(B, arrived, row)
    word(arrived)[component] = max(known, clock)


@inner
def operation_arrived(B, address, before):
    """The arrival has happened."""
    number = mbarrier_at(B, address)
    if number >= 0:
        phase(B, number, address, before)


@inner
def mbarrier_wait(B, warp, address):
    """A wait has found the phase complete; returns as ``mbarrier_arrive``."""
    b = wide(B)
    number = mbarrier_at(B, address)
    if number < 0:
        return 0
    row = row_of(B, ROWS, warp)
    if not knows_init(B, row, number, False):
        return wide(b[MBARRIER_INIT])[number]
    if word(row)[mbarrier_component(B, number)] < word(b[MBARRIER_PHASE])[number]:
        join(B, row, row_of(B, MBARRIER_DONE, number))
        tick(B, warp)
    return 0


# ---- barriers


@inner
def barrier_arrive(B, warp, index):
    """A warp arrives at a named barrier of its CTA."""
    b = wide(B)
    slot = (warp // b[CTA_WARPS]) * NAMED_BARRIERS + index
    join(B, row_of(B, BARRIER_ARRIVED, slot), row_of(B, ROWS, warp))
    tick(B, warp)


@inner
def barrier_complete(B, cta, index, waiting):
    """A named barrier is complete; bit i of ``waiting``: warp i of the CTA waits at it."""
    b = wide(B)
    arrived = row_of(B, BARRIER_ARRIVED, cta * NAMED_BARRIERS + index)
    for i in range(b[CTA_WARPS]):
        if (waiting >> i) & 1:
            warp = cta * b[CTA_WARPS] + i
            join(B, row_of(B, ROWS, warp), arrived)
            tick(B, warp)
    clear(B, arrived)


@inner
def cluster_arrive(B, warp, relaxed):
    """A warp arrives at the cluster barrier; relaxed: what a fence before it published."""
    b = wide(B)
    table = FENCED if relaxed else ROWS
    join(B, b[CLUSTER_ARRIVED], row_of(B, table, warp))
    tick(B, warp)


@inner
def cluster_complete(B):
    """Every warp has arrived."""
    b = wide(B)
    copy(B, b[CLUSTER_DONE], b[CLUSTER_ARRIVED])
    clear(B, b[CLUSTER_ARRIVED])


@inner
def cluster_wait(B, warp):
    """A warp goes on after the cluster barrier."""
    join(B, row_of(B, ROWS, warp), wide(B)[CLUSTER_DONE])
    tick(B, warp)


# ---- fences and flags


@inner
def tensor_fence(B, warp, number):
    """Clocks of tcgen05.ld and st that a warp's fence before a thread synchronisation covers."""
    slot = FENCE_RING * warp + number % FENCE_RING
    return word(wide(B)[TENSOR_FENCES] + 4 * FENCE_WORDS * slot)


@inner
def fence(B, warp, kind):
    """fence.acq_rel and membar; fence.proxy.async; fence.mbarrier_init; tcgen05.fence."""
    b = wide(B)
    row = row_of(B, ROWS, warp)
    me = b[WARP0] + warp
    if kind == FENCE_MEMORY:
        dirty = word(b[SEEN_DIRTY])
        if dirty[warp]:
            join(B, row, row_of(B, SEEN, warp))
            dirty[warp] = 0
        copy(B, row_of(B, FENCED, warp), row)
        word(b[FENCE_VERSION])[warp] += 1
    elif kind == FENCE_AFTER:
        copy(B, row_of(B, TENSOR_FENCED, warp), row)
    elif kind == FENCE_BEFORE:
        knows, own = word(row), pipe(B, warp, TENSOR_FENCE)
        knows[own] += 1
        held = tensor_fence(B, warp, knows[own])
        held[0], held[1] = knows[pipe(B, warp, LOAD)], knows[pipe(B, warp, STORE)]
    elif kind == FENCE_PROXY:
        knows = word(row)
        for i in range(b[GENERIC]):
            knows[b[COMPONENTS] + i] = max(knows[b[COMPONENTS] + i], knows[i])
    else:
        own = pipe(B, warp, INIT)
        number = word(row)[own] + 1
        word(row)[own] = number
        word(row_of(B, FENCED, warp))[own] = number
        published = word(b[MBARRIER_PUBLISHED])
        for i in range(b[MBARRIER_COUNT]):
            maker = (wide(b[MBARRIER_INIT])[i] >> COMPONENT_SHIFT) & COMPONENT_MASK
            if published[i] == 0 and maker == me:
                published[i] = number
    tick(B, warp)


@inner
def flag_access(B, warp, address, acquire, release, kind):
    """A strong access to a location hands on what was released there.

    Locations share rows by a hash of their address: a conflict may be missed that way.
    """
    b = wide(B)
    slot = ((address >> 2) * 0x9E3779B1 >> 12) & (FLAG_ROWS - 1)
    flag = row_of(B, FLAGS, slot)
    versions = word(b[FLAG_VERSION])
    row = row_of(B, ROWS, warp)
    if kind != WRITE and versions[slot] != 0:
        seen = word(b[SEEN_FLAG] + 8 * warp)
        if acquire:
            join(B, row, flag)
            tick(B, warp)
        elif seen[0] != slot or seen[1] != versions[slot]:
            seen[0], seen[1] = slot, versions[slot]
            join(B, row_of(B, SEEN, warp), flag)
            word(b[SEEN_DIRTY])[warp] = 1
    if kind != 0:
        if release:
            join(B, flag, row)
            versions[slot] += 1
            tick(B, warp)
        elif word(b[FENCE_VERSION])[warp] != 0:
            own, fenced = b[WARP0] + warp, row_of(B, FENCED, warp)
            if word(flag)[own] < word(fenced)[own]:  # else it is there already
                join(B, flag, fenced)
                versions[slot] += 1


# ---- groups of asynchronous operations, tensor memory


@inner
def group_commit(B, warp, kind):
    """The operations since the last commit become a group."""
    b = wide(B)
    counter = COUNT_COPY
    if kind == GROUP_BULK:
        counter = COUNT_BULK
    elif kind == GROUP_WGMMA:
        counter = COUNT_WGMMA
    slot = _KINDS * warp + kind
    number = wide(b[MARK_COUNT])[slot]
    wide(b[MARKS])[GROUP_RING * slot + number % GROUP_RING] = count_of(B, warp, counter)
    wide(b[MARK_COUNT])[slot] = number + 1


@inner
def group_wait(B, warp, kind, allowed, reads):
    """At most ``allowed`` groups are outstanding (-1: nothing at all); ``reads``: .read."""
    b = wide(B)
    slot = _KINDS * warp + kind
    if allowed < 0:
        clock = count_of(B, warp, COUNT_COPY)
    else:
        number = wide(b[MARK_COUNT])[slot] - allowed
        if number <= 0 or allowed >= GROUP_RING:
            return
        clock = wide(b[MARKS])[GROUP_RING * slot + (number - 1) % GROUP_RING]
    knows = word(row_of(B, ROWS, warp))
    if kind == GROUP_COPY:
        own = b[COPY0] + warp
        knows[own] = max(knows[own], clock)
    elif kind == GROUP_BULK:
        own = pipe(B, warp, BULK_READ)
        knows[own] = max(knows[own], clock)
        if not reads:
            own = pipe(B, warp, BULK_WRITE)
            knows[own] = max(knows[own], clock)
    else:
        for own in (pipe(B, warp - warp % b[CTA_WARPS] % 4, TENSOR), pipe(B, warp, WAITED)):
            knows[own] = max(knows[own], clock)
    tick(B, warp)


@inner
def tensor_wait(B, warp, stores):
    """tcgen05.wait::st or wait::ld."""
    knows = word(row_of(B, ROWS, warp))
    if stores:
        knows[pipe(B, warp, STORE)] = count_of(B, warp, COUNT_STORE)
    else:
        knows[pipe(B, warp, LOAD)] = count_of(B, warp, COUNT_LOAD)
    tick(B, warp)


@inner
def load_issued(B, warp, site):
    """A tcgen05.ld of the kernel's load number ``site`` has been issued."""
    b = wide(B)
    word(b[LOAD_LAST] + 4 * b[LOAD_SITES] * warp)[site] = count_of(B, warp, COUNT_LOAD)


@inner
def warpgroup_issued(B, warp, site):
    """wgmma number ``site`` (they are counted after the loads) has been issued by a warp."""
    b = wide(B)
    word(b[LOAD_LAST] + 4 * b[LOAD_SITES] * warp)[site] = count_of(B, warp, COUNT_WGMMA)


@inner
def warpgroup_done(B, warp, site):
    """Whether the warp has waited for its last wgmma number ``site``."""
    b = wide(B)
    clock = word(b[LOAD_LAST] + 4 * b[LOAD_SITES] * warp)[site]
    own = pipe(B, warp - warp % b[CTA_WARPS] % 4, TENSOR)
    return word(row_of(B, ROWS, warp))[own] >= clock


@inner
def load_read(B, warp, site):
    """A register that the load wrote is read: it, and those before it, are complete. Returns the
    load's clock where no wait::ld came before, else 0."""
    b = wide(B)
    clock = word(b[LOAD_LAST] + 4 * b[LOAD_SITES] * warp)[site]
    own = pipe(B, warp, LOAD)
    knows = word(row_of(B, ROWS, warp))
    if knows[own] >= clock:
        return 0
    knows[own] = clock
    tick(B, warp)
    return clock


@inner
def copies_begin(B, warp, begin):
    """Around cp.async.mbarrier.arrive: the arrival knows the copies that the warp does not."""
    b = wide(B)
    knows = word(row_of(B, ROWS, warp))
    saved = word(b[SAVED])
    own = b[COPY0] + warp
    if begin:
        saved[warp] = knows[own]
        knows[own] = count_of(B, warp, COUNT_COPY)
    else:
        knows[own] = saved[warp]
    tick(B, warp)
