"""Asynchronous operations as agents: what they know, what they touch, whom they tell.

An operation knows what its issuer knew when it issued, whenever it is performed. What it touches is
checked when it is performed, under the component of its kind (see ``layout``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rubin_moe.emulator.isa.bulk_copy import TensorLoad
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
    COUNTERS,
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


class Registers(NamedTuple):
    """A store of registers to shared memory that signals an mbarrier."""

    target: Footprint
    signals: tuple[tuple[int, int, int], ...]

    def reads(self) -> list[Footprint]:
        """Nothing: registers are read at issue."""
        return []

    def writes(self) -> list[Footprint]:
        """The target."""
        return [self.target]


class Table(NamedTuple):
    """What an operation touches, as the hook ``note`` takes it, and what has to live as long."""

    entries: array[int]
    address: int
    length: int
    kept: tuple[object, ...]


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


def _address(values: NDArray[Any]) -> int:
    return values.__array_interface__["data"][0]  # type: ignore[no-any-return]


def _table(entries: Sequence[Sequence[int]], *kept: object) -> Table:
    flat = array("q", [value for entry in entries for value in entry])
    return Table(flat, flat.buffer_info()[0], len(entries), kept)


class Operations(ClusterOrder):
    """The race detector of one cluster, as the handlers of units use it."""

    def __init__(self, launch: LaunchOrder, cluster: Cluster) -> None:
        self._ordinals = result_ordinals(cluster.kernel.compiled.sites.values())
        super().__init__(launch, cluster, len(self._ordinals))
        self._rows: dict[tuple[int, tuple[int, ...]], tuple[int, Row]] = {}
        #: by operation and rank: the operation (kept alive), what it touches
        self._known: dict[int, tuple[object, Table]] = {}
        self._arena = cluster.arena.address
        self._hook, self._signal = self.hooks["note"], self.hooks["operation_mbarrier"]
        states = [warp.state for warp in cluster.warps]
        self.states[:] = [state.address for state in states]
        for number, state in enumerate(states):
            state.set_wide("order", self.address)
            state.set("order_warp", number)

    # ---- what an operation knows
    def number(self, warp: Warp) -> int:
        """Index of a warp in its cluster."""
        return warp.cta.rank * self.cta_warps + warp.index

    def polled_by(self, warp: Warp) -> tuple[int, int]:
        """Address and instruction of the last strong load of a warp; instruction -1: none."""
        address, site = self.polled[self.number(warp)].tolist()
        return address, site

    def _row(self, warp: int, *in_order: int) -> Row:
        """The warp's row now; its own pipes ``in_order`` know all of themselves."""
        clock = self.flat_rows[warp * self.length + self.warp0 + warp]
        kept = self._rows.get((warp, in_order))
        if kept is not None and kept[0] == clock:
            return kept[1]
        clocks = self.rows[warp].copy()
        for kind in in_order:
            clocks[self.pipe(warp, kind)] = EVERYTHING
        row = Row(clocks, _address(clocks))
        self._rows[warp, in_order] = clock, row
        return row

    def _next(self, warp: int, counter: int) -> int:
        place = COUNTERS * warp + counter
        clock = self.counts[place] + 1
        self.counts[place] = clock
        return clock

    @staticmethod
    def _epoch(site: UnitSite, lane: int, component: int, clock: int, atomic: int = 0) -> int:
        value = site.index | lane << layout.LANE_SHIFT | atomic << layout.ATOMIC_SHIFT
        value |= component << layout.COMPONENT_SHIFT | clock << layout.CLOCK_SHIFT
        return value - (value >> 63 << 64)  # as int64

    # ---- checks
    def _span(self, rank: int, low: int, high: int, write: int) -> list[int]:
        """An entry: bytes of the shared memory of a CTA."""
        return [layout.NOTE_SPAN, self._arena + (rank << 24), low, high, write]

    def _entry(self, place: Footprint, write: int, kept: list[object]) -> list[int]:
        """An entry: a footprint."""
        ranges = np.ascontiguousarray(place.ranges, np.int64)
        kept.append(ranges)
        tail = [_address(ranges), len(ranges), write]
        if place.space == "tmem":
            return [layout.NOTE_CELLS, place.rank, *tail]
        base = self._arena + (place.rank << 24) if place.space == "smem" else 0
        return [layout.NOTE_RANGES, base, *tail]

    def _table_of(self, reads: Sequence[Footprint], writes: Sequence[Footprint]) -> Table:
        """A table of footprints."""
        kept: list[object] = []
        entries = [self._entry(place, 0, kept) for place in reads]
        entries += [self._entry(place, 1, kept) for place in writes]
        return _table(entries, *kept)

    def _note(self, warp: Warp, table: Table, row: Row, mine: int, proxy: int) -> None:
        """Check what an operation touches."""
        if not self._hook(self.address, table.address, table.length, row.address, mine, proxy):
            stop(self, warp)

    def _perform(
        self, warp: Warp, table: Table, row: Row, mine: int, proxy: int, perform: Perform
    ) -> None:
        if not self._hook(self.address, table.address, table.length, row.address, mine, proxy):
            stop(self, warp)
        perform()

    def _of(self, operation: Any) -> Table:
        """Of an operation that is decoded once for equal operands."""
        held = self._known.get(id(operation) << 4)
        if held is None:
            reads, writes = operation.reads(), operation.writes()
            written = {(place.rank, place.ranges.tobytes()) for place in writes}
            # what it writes is checked against everything; reading it too adds nothing
            reads = [x for x in reads if (x.rank, x.ranges.tobytes()) not in written]
            held = operation, self._table_of(reads, writes)
            self._known[id(operation) << 4] = held
        return held[1]

    def _load_tables(self, op: Any) -> list[Table]:
        """Of a copy to shared memory: what it reads and writes first, then further writes."""
        if isinstance(op, TensorLoad) and not op.rows and op.map.inside(op.coordinates):
            ranges = op.map.box_ranges
            base = op.map.offset(op.coordinates)
            entry = [layout.NOTE_RANGES, base, _address(ranges), len(ranges), 0]
            spans = [self._span(rank, op.offset, op.offset + op.extent, 1) for rank in op.ranks]
            return [_table([entry, spans[0]], ranges), *(_table([span]) for span in spans[1:])]
        writes = op.writes()
        first = self._table_of(op.reads(), writes[:1])
        return [first, *(self._table_of((), [place]) for place in writes[1:])]

    # ---- kinds of operations: each returns what performs (and checks) it
    def tensor(self, warp: Warp, site: UnitSite, lane: int, op: Any, perform: Perform) -> Perform:
        """tcgen05.mma and cp."""
        number = self.number(warp)
        clock, row = self._next(number, COUNT_TENSOR), self._row(number, TENSOR)
        mine = self._epoch(site, lane, self.pipe(number, TENSOR), clock)
        return partial(self._perform, warp, self._of(op), row, mine, 1, perform)

    def committed(self, warp: Warp, site: UnitSite) -> Knowledge:
        """What tcgen05.commit hands on: the pipe up to now."""
        number = self.number(warp)
        clock = self.counts[COUNTERS * number + COUNT_TENSOR]
        return Knowledge(self._row(number), self.pipe(number, TENSOR), clock, site.index)

    def signalling(
        self,
        warp: Warp,
        site: UnitSite,
        lane: int,
        op: Any,
        perform: Perform,
        proxy: int = 1,
        atomic: int = 0,
    ) -> tuple[Perform, list[Knowledge | None]]:
        """Copies that signal mbarriers, one signal (``op.signals``) a write; also what each hands
        on."""  # fmt: skip
        number = self.number(warp)
        row, first = self._row(number), self.mbarrier0
        tables, barriers = self._load_tables(op), []
        own = self._epoch(site, lane, self.warp0 + number, 0)
        for rank, offset, _ in op.signals:
            place = self._arena + (rank << 24) + offset
            found = self._signal(self.address, row.address, place, own)
            if found == -2:
                stop(self, warp)
            self.issuers[found, site.index] = warp.rank, warp.index
            barriers.append(found)

        def checked() -> None:
            for barrier, table in zip(barriers, tables, strict=False):
                if barrier >= 0:
                    clock = self.phases[barrier] + 1
                    mine = self._epoch(site, lane, first + barrier, clock, atomic)
                    self._note(warp, table, row, mine, proxy)
            perform()

        return checked, [
            Knowledge(row, first + n, 0, site.index) if n >= 0 else None for n in barriers
        ]

    def grouped(
        self, warp: Warp, site: UnitSite, lane: int, op: Any, perform: Perform, atomic: int
    ) -> Perform:
        """Bulk copies to global memory, by groups."""
        number = self.number(warp)
        clock, row = self._next(number, COUNT_BULK), self._row(number)
        source = self._epoch(site, lane, self.pipe(number, BULK_READ), clock)
        target = self._epoch(site, lane, self.pipe(number, BULK_WRITE), clock, atomic)
        reads = self._table_of([place for place in op.reads() if place.space == "smem"], ())
        writes = self._table_of((), op.writes())

        def checked() -> None:
            self._note(warp, reads, row, source, 1)
            self._perform(warp, writes, row, target, 1, perform)

        return checked

    def copies(
        self, warp: Warp, site: UnitSite, copies: Sequence[Any], perform: Perform
    ) -> Perform:
        """cp.async of the lanes of a warp."""
        number = self.number(warp)
        clock, row = self._next(number, COUNT_COPY), self._row(number)
        mine = self._epoch(site, 0, self.copy0 + number, clock)
        entries = [
            [layout.NOTE_SPAN, 0, c.address, c.address + c.source_size, 0]
            for c in copies if c.source_size
        ]  # fmt: skip
        entries += [self._span(c.rank, c.offset, c.offset + c.size, 1) for c in copies]
        return partial(self._perform, warp, _table(entries), row, mine, 0, perform)

    def copied(self, warp: Warp, site: UnitSite) -> Knowledge:
        """What cp.async.mbarrier.arrive hands on: the warp's copies up to now."""
        number = self.number(warp)
        component = self.copy0 + number
        clock = self.counts[COUNTERS * number + COUNT_COPY]
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
        key = id(op) << 4 | warps[0].rank
        held = self._known.get(key)
        if held is None:
            self._known[key] = held = op, self._table_of(op.reads(warps[0].rank), ())
        return partial(self._perform, warps[0], held[1], row, mine, 1, perform)

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
        key = id(op) << 4 | warp.rank << 1 | int(write)
        held = self._known.get(key)
        if held is None:
            places = [op.footprint(warp.rank)]
            table = self._table_of(() if write else places, places if write else ())
            self._known[key] = held = op, table
        return partial(self._perform, warp, held[1], row, mine, 0, perform)

    # ---- what a warp does through Python
    def warp_writes(self, warp: Warp, site: UnitSite, places: Sequence[Footprint]) -> None:
        """A write of the warp itself: an address by tcgen05.alloc, columns by dealloc."""
        number = self.number(warp)
        component = self.warp0 + number
        mine = self._epoch(site, 0, component, int(self.rows[number, component]))
        row = Row(self.rows[number], _address(self.rows[number]))
        self._note(warp, self._table_of((), places), row, mine, 0)

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
