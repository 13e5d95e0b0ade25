"""Asynchronous operations as agents: what they know, what they touch, whom they tell.

An operation knows what its issuer knew when it issued, whenever it is performed. What it touches is
checked when it is performed, under the component of its kind (see ``layout``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rubin_moe.emulator.isa.footprint import Footprint
from rubin_moe.emulator.lower import RESULT_FAMILIES
from rubin_moe.emulator.order import layout
from rubin_moe.emulator.order.layout import (
    BULK_READ,
    BULK_WRITE,
    COUNT_BULK,
    COUNT_COPY,
    COUNT_LOAD,
    COUNT_STORE,
    COUNT_TENSOR,
    COUNT_WGMMA,
    EVERYTHING,
    LOAD,
    STORE,
    TENSOR,
)
from rubin_moe.emulator.order.model import ClusterOrder, LaunchOrder
from rubin_moe.emulator.order.sentences import stop

if TYPE_CHECKING:
    from rubin_moe.emulator.isa.handoff import UnitSite
    from rubin_moe.emulator.machine import Cluster, Warp

Perform = Callable[[], None]


class Row(NamedTuple):
    """A row, and its address."""

    clocks: NDArray[np.int32]
    address: int


class Place(NamedTuple):
    """Ranges (int64) of one memory for the checks, their number, and their address."""

    tensor: bool
    rank: int
    base: int
    ranges: NDArray[np.int64]
    count: int
    address: int


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What an operation hands on when it completes: a row, and its own component and clock."""

    row: Row
    component: int
    clock: int
    site: int


def result_ordinals(sites: Iterable[UnitSite]) -> dict[int, int]:
    """Number of each tcgen05.ld and wgmma by its index in the kernel."""
    found = sorted(site.index for site in sites if site.family in RESULT_FAMILIES)
    return {index: number for number, index in enumerate(found)}


def _address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


class Operations(ClusterOrder):
    """The race detector of one cluster, as the handlers of units use it."""

    def __init__(self, launch: LaunchOrder, cluster: Cluster) -> None:
        self._ordinals = result_ordinals(cluster.kernel.compiled.sites.values())
        super().__init__(launch, cluster, len(self._ordinals))
        self._rows: dict[tuple[int, int], tuple[int, Row]] = {}
        #: by operation and rank: the operation (kept alive), what it reads and writes
        self._known: dict[int, tuple[object, list[Place], list[Place]]] = {}
        self._arena = cluster.arena.address
        self._note_cells, self._note_ranges = self.hooks["note_cells"], self.hooks["note_ranges"]
        states = [warp.state for warp in cluster.warps]
        self.states[:] = [state.address for state in states]
        for number, state in enumerate(states):
            state.set_wide("order", self.address)
            state.set("order_warp", number)

    # ---- what an operation knows
    def number(self, warp: Warp) -> int:
        """Index of a warp in its cluster."""
        return warp.rank * int(self.block[layout.CTA_WARPS]) + warp.index

    def polled_by(self, warp: Warp) -> tuple[int, int]:
        """Address and instruction of the last strong load of a warp; instruction -1: none."""
        address, site = self.polled[self.number(warp)].tolist()
        return address, site

    def _row(self, warp: int, *in_order: int) -> Row:
        """The warp's row now; its own pipes ``in_order`` know all of themselves."""
        clock = int(self.rows[warp, int(self.block[layout.WARP0]) + warp])
        kept = self._rows.get((warp, in_order[0] if in_order else -1))
        if kept is not None and kept[0] == clock:
            return kept[1]
        clocks = self.rows[warp].copy()
        for kind in in_order:
            clocks[self.pipe(warp, kind)] = EVERYTHING
        row = Row(clocks, _address(clocks))
        self._rows[warp, in_order[0] if in_order else -1] = clock, row
        return row

    def _next(self, warp: int, counter: int) -> int:
        clock = int(self.counts[warp, counter]) + 1
        self.counts[warp, counter] = clock
        return clock

    @staticmethod
    def _epoch(site: UnitSite, lane: int, component: int, clock: int, atomic: int = 0) -> int:
        value = site.index | lane << layout.LANE_SHIFT | atomic << layout.ATOMIC_SHIFT
        value |= component << layout.COMPONENT_SHIFT | clock << layout.CLOCK_SHIFT
        return value - (value >> 63 << 64)  # as int64

    # ---- checks
    def _place(self, space: str, rank: int, ranges: NDArray[np.int64]) -> Place:
        ranges = np.ascontiguousarray(ranges, np.int64)
        base = self._arena + (rank << 24) if space == "smem" else 0
        return Place(space == "tmem", rank, base, ranges, len(ranges), _address(ranges))

    def _places(self, footprints: Sequence[Footprint]) -> list[Place]:
        return [self._place(place.space, place.rank, place.ranges) for place in footprints]

    def _touch(
        self, warp: Warp, places: Sequence[Place], row: int, mine: int, write: int, proxy: int
    ) -> None:
        for place in places:
            if place.tensor:
                ok = self._note_cells(
                    self.address, place.rank, place.address, place.count, row, mine, write
                )
            else:
                ok = self._note_ranges(
                    self.address, place.base, place.address, place.count, row, mine, write, proxy
                )
            if not ok:
                stop(self, warp)

    def _of(self, operation: Any) -> tuple[list[Place], list[Place]]:
        """Reads and writes of an operation that is decoded once for equal operands."""
        held = self._known.get(id(operation) << 4)
        if held is None:
            reads, writes = operation.reads(), operation.writes()
            written = {(place.rank, place.ranges.tobytes()) for place in writes}
            # what it writes is checked against everything; reading it too adds nothing
            reads = [x for x in reads if (x.rank, x.ranges.tobytes()) not in written]
            held = operation, self._places(reads), self._places(writes)
            self._known[id(operation) << 4] = held
        return held[1], held[2]

    # ---- kinds of operations: each returns what performs (and checks) it
    def tensor(self, warp: Warp, site: UnitSite, lane: int, op: Any, perform: Perform) -> Perform:
        """tcgen05.mma and cp."""
        number = self.number(warp)
        clock, row = self._next(number, COUNT_TENSOR), self._row(number, TENSOR)
        mine = self._epoch(site, lane, self.pipe(number, TENSOR), clock)
        reads, writes = self._of(op)

        def checked() -> None:
            self._touch(warp, reads, row.address, mine, 0, 1)
            self._touch(warp, writes, row.address, mine, 1, 1)
            perform()

        return checked

    def committed(self, warp: Warp, site: UnitSite) -> Knowledge:
        """What tcgen05.commit hands on: the pipe up to now."""
        number = self.number(warp)
        clock = int(self.counts[number, COUNT_TENSOR])
        return Knowledge(self._row(number), self.pipe(number, TENSOR), clock, site.index)

    def signalling(
        self,
        warp: Warp,
        site: UnitSite,
        lane: int,
        footprints: tuple[Sequence[Footprint], Sequence[Footprint]],
        signals: Sequence[tuple[int, int, int]],
        perform: Perform,
        proxy: int = 1,
        atomic: int = 0,
    ) -> tuple[Perform, list[Knowledge | None]]:
        """Copies that signal mbarriers, one signal a write; also what each hands on."""
        number = self.number(warp)
        row = self._row(number)
        numbers = []
        for rank, offset, _ in signals:
            component = int(self.block[layout.WARP0]) + number
            mine = self._epoch(site, lane, component, 0)
            place = self._arena + (rank << 24) + offset
            found = self.hooks["operation_mbarrier"](self.address, row.address, place, mine)
            if found == -2:
                stop(self, warp)
            numbers.append(found)
        first = int(self.block[layout.MBARRIER0])
        reads, writes = self._places(footprints[0]), self._places(footprints[1])

        def checked() -> None:
            for position, barrier in enumerate(numbers):
                if barrier < 0:
                    continue
                clock = int(self.phases[barrier]) + 1
                mine = self._epoch(site, lane, first + barrier, clock, atomic)
                if position == 0:
                    self._touch(warp, reads, row.address, mine, 0, proxy)
                touched = writes[position : position + 1]
                self._touch(warp, touched, row.address, mine, 1, proxy)
            perform()

        for barrier in numbers:
            self.issuers[barrier, site.index] = warp.rank, warp.index
        handed = [Knowledge(row, first + n, 0, site.index) if n >= 0 else None for n in numbers]
        return checked, handed

    def grouped(
        self, warp: Warp, site: UnitSite, lane: int, op: Any, perform: Perform, atomic: int
    ) -> Perform:
        """Bulk copies to global memory, by groups."""
        number = self.number(warp)
        clock, row = self._next(number, COUNT_BULK), self._row(number)
        source = self._epoch(site, lane, self.pipe(number, BULK_READ), clock)
        target = self._epoch(site, lane, self.pipe(number, BULK_WRITE), clock, atomic)
        reads = self._places([place for place in op.reads() if place.space == "smem"])
        writes = self._places(op.writes())

        def checked() -> None:
            self._touch(warp, reads, row.address, source, 0, 1)
            self._touch(warp, writes, row.address, target, 1, 1)
            perform()

        return checked

    def copies(
        self, warp: Warp, site: UnitSite, copies: Sequence[Any], perform: Perform
    ) -> Perform:
        """cp.async of the lanes of a warp."""
        number = self.number(warp)
        clock, row = self._next(number, COUNT_COPY), self._row(number)
        component = int(self.block[layout.COPY0]) + number
        mine = self._epoch(site, 0, component, clock)
        read = [(c.address, c.address + c.source_size) for c in copies if c.source_size]
        written = [((c.rank << 24) + c.offset, (c.rank << 24) + c.offset + c.size) for c in copies]
        reads = [self._place("gmem", 0, np.array(read, np.int64))] if read else []
        writes = [self._place("smem", 0, np.array(written, np.int64))]

        def checked() -> None:
            self._touch(warp, reads, row.address, mine, 0, 0)
            self._touch(warp, writes, row.address, mine, 1, 0)
            perform()

        return checked

    def copied(self, warp: Warp, site: UnitSite) -> Knowledge:
        """What cp.async.mbarrier.arrive hands on: the warp's copies up to now."""
        number = self.number(warp)
        component = int(self.block[layout.COPY0]) + number
        clock = int(self.counts[number, COUNT_COPY])
        return Knowledge(self._row(number), component, clock, site.index)

    def warpgroup(
        self, warps: Sequence[Warp], site: UnitSite, op: Any, perform: Perform
    ) -> Perform:
        """wgmma: each of the four warps has to know what it reads."""
        numbers = [self.number(warp) for warp in warps]
        clock = max(self._next(number, COUNT_WGMMA) for number in numbers)
        for number in numbers:
            self.hooks["warpgroup_issued"](self.address, number, self._ordinals[site.index])
        clocks = self.rows[numbers].min(axis=0)
        leader = numbers[0]
        component = self.pipe(leader, TENSOR)
        clocks[component] = EVERYTHING
        row = Row(clocks, _address(clocks))
        mine = self._epoch(site, 0, component, clock)
        reads = self._places(op.reads(warps[0].rank))

        def checked() -> None:
            self._touch(warps[0], reads, row.address, mine, 0, 1)
            perform()

        return checked

    def tensor_access(
        self, warp: Warp, site: UnitSite, op: Any, write: bool, perform: Perform
    ) -> Perform:
        """tcgen05.ld and st."""
        number = self.number(warp)
        counter, kind = (COUNT_STORE, STORE) if write else (COUNT_LOAD, LOAD)
        clock, row = self._next(number, counter), self._row(number, kind, LOAD + STORE - kind)
        if not write:
            self.hooks["load_issued"](self.address, number, self._ordinals[site.index])
        mine = self._epoch(site, 0, self.pipe(number, kind), clock)
        key = id(op) << 4 | warp.rank
        held = self._known.get(key)
        if held is None:
            held = op, self._places([op.footprint(warp.rank)]), []
            self._known[key] = held
        places = held[1]

        def checked() -> None:
            self._touch(warp, places, row.address, mine, int(write), 0)
            perform()

        return checked

    # ---- what a warp does through Python
    def warp_writes(self, warp: Warp, site: UnitSite, places: Sequence[Footprint]) -> None:
        """A write of the warp itself: an address by tcgen05.alloc, columns by dealloc."""
        number = self.number(warp)
        component = int(self.block[layout.WARP0]) + number
        mine = self._epoch(site, 0, component, int(self.rows[number, component]))
        row = int(self.rows[number].ctypes.data)
        self._touch(warp, self._places(places), row, mine, 1, 0)

    def event(self, warp: Warp, name: str, *arguments: int) -> None:
        """A wait of the warp is over, or a group committed: the hook of that name."""
        self.hooks[name](warp.state.address, *arguments)

    def arrival(self, update: Callable[[], int], address: int, by: Knowledge | None) -> int:
        """An operation's arrival at an mbarrier: ``update`` changes the word and returns it
        before."""
        if by is None:
            return update()
        row = by.row.address
        operation = by.component, by.clock, by.site
        if not self.hooks["operation_arrive"](self.address, address, row, *operation):
            stop(self, None)
        before = update()
        if not 0 <= before < 64:
            self.hooks["operation_arrived"](self.address, address, before)
        return before
