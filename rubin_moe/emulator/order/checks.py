"""Accesses against shadow memory: of a warp lane by lane, of a unit over whole ranges.

Every function is compiled by numba and works on addresses; ``B`` is that of the order block. A
check returns 1 when the access may go ahead, 0 when it has to stop: the log then ends with the
violation.

Shadow memory has four planes of epochs. The first holds the last write of a word, the others up to
three reads since then of which none is known to the next; a fourth takes the last one's place. A
write forgets reads, since it was checked against them. So a conflict may be missed, but none is
made up.
"""

from __future__ import annotations

from numba import njit

from .layout import (
    ACQUIRE,
    ARENA,
    ARENA_BYTES,
    ATOMIC,
    ATOMIC_SHIFT,
    BULK_WRITE,
    CELLS,
    CELLS_A_COLUMN,
    CLOCK_MASK,
    CLOCK_SHIFT,
    COMPONENT_MASK,
    COMPONENT_SHIFT,
    COMPONENTS,
    COPY0,
    COPY_ENGINE,
    COUNT_COPY,
    COUNTERS,
    COUNTS,
    CTA_WARPS,
    ENFORCE,
    EXIT_ARRIVAL,
    EXIT_PENDING,
    EXITED,
    GENERIC,
    LANE_MASK,
    LANE_SHIFT,
    LANES,
    LANES_A_CELL,
    LEFT,
    LEFT_COUNT,
    LENGTH,
    LOAD,
    LOG,
    LOG_COUNT,
    LOG_KEY_LIMIT,
    LOG_KEYS,
    LOG_LIMIT,
    LOG_WORDS,
    MASK_SHIFT,
    MBARRIER_ARRIVED,
    MBARRIER_FROM,
    MBARRIER_MAP,
    MBARRIER_MAP_WORDS,
    MIXED_SHIFT,
    NOTE_CELLS,
    NOTE_RANGES,
    NOTE_WORDS,
    PIPE0,
    PLANES,
    POLLED,
    PROXY,
    PROXY_COPY,
    PROXY_OVERWRITE,
    RACE_OVERWRITE,
    RACE_READ,
    RACE_WRITE,
    RANGE_COUNT,
    RANGE_LAST,
    RANGES,
    RELEASE,
    REPEATED,
    ROWS,
    SITE_MASK,
    SMEM_PLANE,
    SMEM_SHADOW,
    SMEM_WORDS,
    STORE,
    STRONG,
    TENSOR,
    TENSOR_FENCE,
    TENSOR_FENCED,
    TENSOR_PLACE,
    TMEM_PLANE,
    TMEM_SHADOW,
    UNFENCED,
    WAITED,
    WARP0,
    WARPGROUP,
    WARPGROUPS,
    WARPS,
    WHOLE_WORD,
    WRITE,
)
from .raw import half, wide, word
from .synchronise import flag_access, join, pipe, tensor_fence

inner = njit(error_model="numpy", nogil=True)


@inner
def log(B, code, mine, other, place):
    """Record a violation, once for the same two instructions; 0 when it ends the launch."""
    b = wide(B)
    key = code | (mine & SITE_MASK) << 8 | (other & SITE_MASK) << 24
    keys, entries = wide(b[LOG_KEYS]), wide(b[LOG])
    last = b[LOG_KEY_LIMIT] - 1
    at = ((key * 0x9E3779B1) >> 20) & last
    for _ in range(b[LOG_KEY_LIMIT]):
        if keys[2 * at] == key:
            entries[LOG_WORDS * keys[2 * at + 1] + 4] += 1
            break
        if keys[2 * at] == 0:
            number = b[LOG_COUNT]
            if number < b[LOG_LIMIT]:
                keys[2 * at], keys[2 * at + 1] = key, number
                b[LOG_COUNT] = number + 1
                first = LOG_WORDS * number
                entries[first], entries[first + 1], entries[first + 2] = code, mine, other
                entries[first + 3], entries[first + 4] = place, 1
            break
        at = (at + 1) & last
    return 1 - ((b[ENFORCE] >> code) & 1)


@inner
def conflict(B, row, mine, other, code, proxy, place):
    """Check ``mine`` against an earlier access that is not a read by both; 1: go on."""
    if ((mine >> MASK_SHIFT) & (other >> MASK_SHIFT) & WHOLE_WORD) == 0:
        return 1
    component = (other >> COMPONENT_SHIFT) & COMPONENT_MASK
    clock = (other >> CLOCK_SHIFT) & CLOCK_MASK
    knows = word(row)
    if knows[component] < clock:
        if (mine >> ATOMIC_SHIFT) & (other >> ATOMIC_SHIFT) & 1:
            return 1
        first = wide(B)[PIPE0] + BULK_WRITE * wide(B)[WARPS]
        stored = first <= component < first + wide(B)[WARPS] and code == RACE_WRITE
        if stored and component == (mine >> COMPONENT_SHIFT) & COMPONENT_MASK:
            code = REPEATED
        return log(B, code, mine, other, place)
    if (mine ^ other) >> COMPONENT_SHIFT == 0:
        lane, before = (mine >> LANE_SHIFT) & LANE_MASK, (other >> LANE_SHIFT) & LANE_MASK
        one_lane = ((mine | other) >> MIXED_SHIFT) & 1 == 0
        if lane != before and one_lane and component < wide(B)[COPY0]:
            if (mine >> ATOMIC_SHIFT) & (other >> ATOMIC_SHIFT) & 1:
                return 1
            return log(B, LANES, mine, other, place)
    if code == RACE_OVERWRITE:
        return warpgroup_waited(B, row, mine, other, place)
    generic = proxy and component < wide(B)[GENERIC]
    if generic and knows[wide(B)[COMPONENTS] + component] < clock:
        if code != RACE_READ:
            return log(B, PROXY_OVERWRITE, mine, other, place)
        copied = component >= wide(B)[GENERIC] >> 1
        return log(B, PROXY_COPY if copied else PROXY, mine, other, place)
    return 1


@inner
def warpgroup_waited(B, row, mine, other, place):
    """Report a write of what a wgmma has read, when a warp of the warpgroup has not waited for it
    as far as the writer knows. 1: go on."""
    b = wide(B)
    warp = ((other >> COMPONENT_SHIFT) & COMPONENT_MASK) - b[PIPE0]
    if b[WARPGROUPS] and 0 <= warp < b[WARPS]:  # the tensor pipe comes first
        clock = (other >> CLOCK_SHIFT) & CLOCK_MASK
        for i in range(4):
            if word(row)[b[PIPE0] + WAITED * b[WARPS] + warp + i] < clock:
                return log(B, WARPGROUP, mine, other, place)
    return 1


@inner
def merged(mine, held):
    """One epoch for two accesses of a warp at the same clock, to bytes of one word."""
    rest = held & (WHOLE_WORD << MASK_SHIFT) & ~mine
    if rest == 0:
        return mine
    mixed = (held >> MIXED_SHIFT) & 1
    if ((held ^ mine) >> LANE_SHIFT) & LANE_MASK:
        mixed = 1
    return mine | rest | mixed << MIXED_SHIFT


@inner
def note_read(B, entry, plane, row, mine, proxy, place):
    """A read of (part of) one word."""
    other = wide(entry)[0]
    if other != 0 and not conflict(B, row, mine, other, RACE_READ, proxy, place):
        return 0
    knows = word(row)
    mask = (mine >> MASK_SHIFT) & WHOLE_WORD
    for i in range(1, PLANES):
        slot = wide(entry + i * plane)
        held = slot[0]
        if held == 0 or held == mine:
            slot[0] = mine
            return 1
        covered = (held >> MASK_SHIFT) & WHOLE_WORD & ~mask == 0
        if (held ^ mine) >> COMPONENT_SHIFT == 0:
            if covered:
                slot[0] = mine
                return 1
            if (held ^ mine) & SITE_MASK == 0:
                slot[0] = merged(mine, held)
                return 1
        elif covered:
            component = (held >> COMPONENT_SHIFT) & COMPONENT_MASK
            if knows[component] >= (held >> CLOCK_SHIFT) & CLOCK_MASK:
                slot[0] = mine
                return 1
    wide(entry + (PLANES - 1) * plane)[0] = mine
    return 1


@inner
def note_write(B, entry, plane, row, mine, proxy, place):
    """A write of (part of) one word."""
    slot = wide(entry)
    other = slot[0]
    if other == mine and wide(entry + plane)[0] == 0:
        return 1
    if other != 0 and not conflict(B, row, mine, other, RACE_WRITE, proxy, place):
        return 0
    whole = (mine >> MASK_SHIFT) & WHOLE_WORD == WHOLE_WORD
    for i in range(1, PLANES):
        reads = wide(entry + i * plane)
        held = reads[0]
        if held == 0:
            break
        if not conflict(B, row, mine, held, RACE_OVERWRITE, 0, place):
            return 0
        if whole:
            reads[0] = 0
    slot[0] = merged(mine, other) if (other ^ mine) >> COMPONENT_SHIFT == 0 else mine
    return 1


@inner
def note_words(B, entry, plane, count, row, mine, write, proxy, place, step):
    """An access to ``count`` whole words (or cells) in a row; ``place`` grows by ``step``.

    Neighbours mostly have the same history: what was found good for one is so for the next.
    """
    mine |= WHOLE_WORD << MASK_SHIFT
    written, read = wide(entry), wide(entry + plane)
    further = wide(entry + 2 * plane)
    good, good_read = 0, 0
    for i in range(count):
        before, seen = written[i], read[i]
        unread = seen == 0 or seen == mine
        if (before == good or before == 0) and (unread or seen == good_read):
            if write:
                if seen == 0:
                    written[i] = mine
                    continue
                if seen == good_read and further[i] == 0:
                    written[i], read[i] = mine, 0
                    continue
            else:
                read[i] = mine
                continue
        place_here = place + step * i
        if write:
            ok = note_write(B, entry + 8 * i, plane, row, mine, proxy, place_here)
        else:
            ok = note_read(B, entry + 8 * i, plane, row, mine, proxy, place_here)
        if not ok:
            return 0
        good = before
        if further[i] == 0 and (write or read[i] == mine):
            good_read = seen
    return 1


@inner
def find_range(B, address):
    """Entry of the registered range that holds a global address, or 0."""
    b = wide(B)
    table = b[RANGES]
    entry = table + 32 * b[RANGE_LAST]
    if wide(entry)[0] <= address < wide(entry)[1]:
        return entry
    for i in range(b[RANGE_COUNT]):
        entry = table + 32 * i
        if wide(entry)[0] <= address < wide(entry)[1]:
            b[RANGE_LAST] = i
            return entry
    return 0


@inner
def note_bytes(B, address, size, row, mine, write, proxy):
    """An access of ``size`` bytes at a host address (global or shared memory)."""
    b = wide(B)
    offset = address - b[ARENA]
    if 0 <= offset < b[ARENA_BYTES]:
        if word(b[LEFT_COUNT])[offset >> 24] == b[CTA_WARPS]:
            return log(B, EXITED, mine, mine, address)
        first = (offset >> 24) * b[SMEM_WORDS] + ((offset & 0xFFFFFF) >> 2)
        entry, plane = b[SMEM_SHADOW] + 8 * first, b[SMEM_PLANE]
    else:
        found = find_range(B, address)
        if found == 0:
            return 1
        entry = wide(found)[2] + 8 * ((address - (wide(found)[0] & -4)) >> 2)
        plane = wide(found)[3]
    start = address & 3
    if start == 0 and size & 3 == 0:
        return note_words(B, entry, plane, size >> 2, row, mine, write, proxy, address, 4)
    while size > 0:
        part = min(size, 4 - start)
        touched = mine | (((1 << part) - 1) << start) << MASK_SHIFT
        if write:
            ok = note_write(B, entry, plane, row, touched, proxy, address)
        else:
            ok = note_read(B, entry, plane, row, touched, proxy, address)
        if not ok:
            return 0
        size -= part
        address += part
        entry += 8
        start = 0
    return 1


@inner
def access(B, warp, addresses, mask, size, kind, site):
    """An access of one warp: ``size`` bytes at each address of the lanes of ``mask``."""
    b = wide(B)
    row = b[ROWS] + 4 * b[LENGTH] * warp
    if kind & COPY_ENGINE:
        component = b[COPY0] + warp
        count = wide(b[COUNTS] + 8 * COUNTERS * warp)
        clock = count[COUNT_COPY] + 1
        if kind & WRITE:
            count[COUNT_COPY] = clock
    else:
        component = b[WARP0] + warp
        clock = word(row)[component]
    strong = 1 if kind & STRONG else 0
    mine = site | strong << ATOMIC_SHIFT | component << COMPONENT_SHIFT | clock << CLOCK_SHIFT
    write = kind & (WRITE | ATOMIC)
    lanes = mask
    lane = 0
    while lanes != 0:
        if lanes & 1:
            address = wide(addresses)[lane]
            if not note_bytes(B, address, size, row, mine | lane << LANE_SHIFT, write, 0):
                return 0
        lanes >>= 1
        lane += 1
    if kind & STRONG:
        if not write:
            polled = wide(b[POLLED] + 16 * warp)
            polled[1] = site
        lanes, lane = mask, 0
        while lanes != 0:
            if lanes & 1:
                address = wide(addresses)[lane]
                if not write:
                    wide(b[POLLED] + 16 * warp)[0] = address
                flag_access(B, warp, address, kind & ACQUIRE, kind & RELEASE, kind & 3)
            lanes >>= 1
            lane += 1
    return 1


@inner
def has_exited(B, address):
    """Whether a host address lies in the shared memory of a CTA whose warps have all exited."""
    b = wide(B)
    return word(b[LEFT_COUNT])[(address - b[ARENA]) >> 24] == b[CTA_WARPS]


@inner
def leave(B, warp, mine):
    """A warp exits. With the last of its CTA, everything that touches the CTA's shared memory has
    to be over, and arrivals from outside at its mbarriers seen, as far as its warps know."""
    b = wide(B)
    cta = warp // b[CTA_WARPS]
    left = b[LEFT] + 4 * b[LENGTH] * cta
    join(B, left, b[ROWS] + 4 * b[LENGTH] * warp)
    word(b[LEFT_COUNT])[cta] += 1
    if word(b[LEFT_COUNT])[cta] < b[CTA_WARPS]:
        return 1
    own = b[WARP0] + cta * b[CTA_WARPS]
    ok = 1
    for i in range(b[SMEM_WORDS]):
        entry = b[SMEM_SHADOW] + 8 * (cta * b[SMEM_WORDS] + i)
        for plane in range(PLANES):
            held = wide(entry + plane * b[SMEM_PLANE])[0]
            if held == 0:
                if plane > 0:
                    break
                continue
            component = (held >> COMPONENT_SHIFT) & COMPONENT_MASK
            if own <= component < own + b[CTA_WARPS]:
                continue
            if word(left)[component] < (held >> CLOCK_SHIFT) & CLOCK_MASK:
                ok &= log(B, EXIT_PENDING, mine, held, b[ARENA] + (cta << 24) + 4 * i)
    return ok & leave_mbarriers(B, warp, left, mine)


@inner
def leave_mbarriers(B, warp, left, mine):
    """Arrivals by others at the mbarriers of a CTA that exits."""
    b = wide(B)
    cta = warp // b[CTA_WARPS]
    slots = half(b[MBARRIER_MAP] + 2 * (cta * b[MBARRIER_MAP_WORDS]))
    ok = 1
    for i in range(b[MBARRIER_MAP_WORDS]):
        number = int(slots[i]) - 1
        if number < 0:
            continue
        arrived = word(b[MBARRIER_ARRIVED] + 4 * b[LENGTH] * number)
        for other in range(b[WARPS]):
            for kind in range(3):
                component = b[WARP0] + other
                if kind == 1:
                    component = b[COPY0] + other
                elif kind == 2:
                    component = b[PIPE0] + TENSOR * b[WARPS] + other
                if kind == 0 and other // b[CTA_WARPS] == cta:
                    continue
                if arrived[component] > word(left)[component]:
                    epoch = word(b[MBARRIER_FROM])[number] | component << COMPONENT_SHIFT
                    epoch |= arrived[component] << CLOCK_SHIFT
                    place = b[ARENA] + (cta << 24) + 8 * i
                    ok &= log(B, EXIT_ARRIVAL, mine, epoch, place)
    return ok


@inner
def note_ranges(B, base, ranges, count, row, mine, write, proxy):
    """A unit's access to byte ranges (int64 [count, 2]) relative to the host address ``base``."""
    table = wide(ranges)
    for i in range(count):
        low, high = table[2 * i], table[2 * i + 1]
        if not note_bytes(B, base + low, high - low, row, mine, write, proxy):
            return 0
    return 1


@inner
def warp_of(B, component):
    """Warp of the cluster whose own, or whose asynchronous work's, a component is."""
    b = wide(B)
    if component >= b[PIPE0]:
        return (component - b[PIPE0]) % b[WARPS]
    return component - b[WARP0]


@inner
def is_fenced(B, fenced, warp, held):
    """Whether tcgen05.fence lies on both sides of the synchronisation between what another warp did
    to tensor memory and ``warp``, which knew ``fenced`` at its last fence after one. A commit is a
    fence before one itself."""
    b = wide(B)
    component = (held >> COMPONENT_SHIFT) & COMPONENT_MASK
    clock = (held >> CLOCK_SHIFT) & CLOCK_MASK
    other = warp_of(B, component)
    if other == warp:
        return True
    if fenced[component] < clock:
        return False
    kind = (component - b[PIPE0]) // b[WARPS]
    if component < b[PIPE0] or (kind != LOAD and kind != STORE):
        return True
    number = fenced[pipe(B, other, TENSOR_FENCE)]
    return number > 0 and tensor_fence(B, other, number)[kind - LOAD] >= clock


@inner
def unfenced(B, entry, plane, count, mine, write, place):
    """Report accesses of other warps to tensor memory that no tcgen05.fence orders before this
    one: writes, and, before a write that is not tcgen05.dealloc, reads."""
    b = wide(B)
    component = (mine >> COMPONENT_SHIFT) & COMPONENT_MASK
    warp = warp_of(B, component)
    fenced = word(b[TENSOR_FENCED] + 4 * b[LENGTH] * warp)
    for number in range(PLANES if write and component >= b[PIPE0] else 1):
        seen, good = wide(entry + number * plane), 0
        for i in range(count):
            held = seen[i]
            if held != good and held != 0:
                if is_fenced(B, fenced, warp, held):
                    good = held
                else:
                    log(B, UNFENCED, mine, held, place + i)


@inner
def note_cells(B, rank, boxes, count, row, mine, write):
    """An access to rectangles of tensor memory (int64 [count, 4]: lanes, then columns)."""
    b, table = wide(B), wide(boxes)
    for i in range(count):
        low = table[4 * i] // LANES_A_CELL
        high = (table[4 * i + 1] + LANES_A_CELL - 1) // LANES_A_CELL
        first, stop = table[4 * i + 2], table[4 * i + 3]
        runs, length = stop - first, high - low
        if length == CELLS_A_COLUMN:
            runs, length = 1, length * runs  # columns follow one another
        for run in range(runs):
            cell = (first + run) * CELLS_A_COLUMN + low
            entry = b[TMEM_SHADOW] + 8 * (rank * CELLS + cell)
            place = 1 << TENSOR_PLACE | rank << 48 | cell
            unfenced(B, entry, b[TMEM_PLANE], length, mine, write, place)
            if not note_words(B, entry, b[TMEM_PLANE], length, row, mine, write, 0, place, 1):
                return 0
    return 1


@inner
def note(B, table, count, row, mine, proxy):
    """All that an operation touches, from a table of ``count`` entries (see ``layout``)."""
    for i in range(count):
        entry = wide(table + 8 * NOTE_WORDS * i)
        kind, start, first, number, write = entry[0], entry[1], entry[2], entry[3], entry[4]
        if kind == NOTE_CELLS:
            ok = note_cells(B, start, first, number, row, mine, write)
        elif kind == NOTE_RANGES:
            ok = note_ranges(B, start, first, number, row, mine, write, proxy)
        else:
            ok = note_bytes(B, start + first, number - first, row, mine, write, proxy)
        if not ok:
            return 0
    return 1
