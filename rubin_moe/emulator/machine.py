"""The clusters, CTAs and warps of a launch, as the functional units and the scheduler see them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rubin_moe.emulator.async_ops import AsyncOperation, Policy
from rubin_moe.emulator.compile import Kernel
from rubin_moe.emulator.errors import EmulationError
from rubin_moe.emulator.findings import Access, Findings
from rubin_moe.emulator.isa.footprint import Footprint
from rubin_moe.emulator.native.blocks import (
    CLUSTER,
    CLUSTER_BYTES,
    CTA_BYTES,
    CTA_LIVE,
    FAULT_RULES,
    FAULTS,
    POISON_LOG,
)
from rubin_moe.emulator.native.compiler import Runtime
from rubin_moe.emulator.order.model import LaunchOrder
from rubin_moe.emulator.order.operations import Knowledge, Operations
from rubin_moe.emulator.register_pool import RegisterPool
from rubin_moe.emulator.report import Statistics
from rubin_moe.emulator.state import mbarrier
from rubin_moe.emulator.state.memory import (
    RANK_SHIFT,
    GlobalMemory,
    SharedArena,
    aligned_like,
    distance,
)
from rubin_moe.emulator.state.registers import FIELDS, FULL_MASK, LANES, SPECIALS, WarpState
from rubin_moe.emulator.state.shadow import POISON, ClusterShadow
from rubin_moe.emulator.state.tmem import CAPACITY, TensorMemory


@dataclass(frozen=True, slots=True)
class Geometry:
    """Grid, block and cluster dimensions, and dynamic shared memory in bytes."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return -(-self.threads // LANES)

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]

    @property
    def clusters(self) -> int:
        """Clusters of the grid."""
        return math.prod(self.grid) // self.cluster_size

    def threads_of(self, warp: int) -> tuple[int, NDArray[np.uint32]]:
        """Lanes of a warp that are threads, and their tid.x, tid.y, tid.z (32 each, in a row)."""
        return _threads_of(self.block, warp)

    def cluster_origins(self) -> Iterator[tuple[int, int, int]]:
        """First CTA of every cluster, x fastest."""
        for z in range(0, self.grid[2], self.cluster[2]):
            for y in range(0, self.grid[1], self.cluster[1]):
                for x in range(0, self.grid[0], self.cluster[0]):
                    yield x, y, z


@lru_cache(maxsize=1024)
def _threads_of(block: tuple[int, int, int], warp: int) -> tuple[int, NDArray[np.uint32]]:
    thread = np.arange(warp * LANES, (warp + 1) * LANES)
    bx, by, bz = block
    live = sum(1 << lane for lane in range(LANES) if thread[lane] < bx * by * bz)
    return live, np.concatenate([thread % bx, thread // bx % by, thread // (bx * by)])


@dataclass(slots=True, eq=False)
class Warp:
    """One warp: native state and what Python keeps beside it."""

    state: WarpState
    cta: Cta
    index: int
    #: by kind (bulk, cp.async, wgmma): operations since the last commit, and committed groups
    open_group: defaultdict[str, list[AsyncOperation]] = field(
        default_factory=lambda: defaultdict(list)
    )
    groups: defaultdict[str, list[list[AsyncOperation]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    @property
    def rank(self) -> int:
        """Rank of the CTA in its cluster."""
        return self.cta.rank

    def found(
        self,
        rule: str,
        sentence: str,
        line: int,
        opcode: str,
        lane: int = -1,
        other: Access | None = None,
    ) -> None:
        """Record a violation by this warp in a checked launch (`Findings.add`)."""
        cluster = self.cta.cluster
        if cluster.context.findings is not None:
            cluster.context.findings.add(
                rule, sentence, kernel=cluster.kernel.name, cta=self.cta.coordinates,
                warp=self.index, line=line, opcode=opcode, lane=lane, other=other,
            )  # fmt: skip


@dataclass(slots=True, eq=False)
class Cta:
    """One CTA of a cluster."""

    rank: int
    coordinates: tuple[int, int, int]
    cluster: Cluster
    block: NDArray[np.uint32]
    tmem: TensorMemory | None
    local: NDArray[np.uint8]
    registers: RegisterPool
    warps: list[Warp] = field(default_factory=list)
    #: operations whose tensor-memory columns lay inside the allocations of now
    columns_checked: dict[int, object] = field(default_factory=dict)
    #: in a checked launch: shadow of local memory, and its distance
    local_shadow: NDArray[np.uint8] | None = None
    local_poison: int = 0


class Cluster:
    """A cluster in flight. What the functional units call: ``smem``, ``tmem``, ``collectors``."""

    def __init__(
        self,
        kernel: Kernel,
        geometry: Geometry,
        origin: tuple[int, int, int],
        context: LaunchContext,
    ) -> None:
        self.kernel, self.geometry, self.context = kernel, geometry, context
        self.size = geometry.cluster_size
        self.collectors: dict[tuple[int, str], Any] = {}
        self.rendezvous: dict[tuple[int, ...], list[Warp]] = {}
        limit = kernel.compiled.static_smem + geometry.dynamic_smem
        self.arena = SharedArena(self.size, limit)
        self.shadow: ClusterShadow | None = None
        self.block = np.zeros(CLUSTER_BYTES // 4, np.uint32)
        self._counters = self.block.view(np.uint64)
        self._update_mbarrier = partial(
            context.runtime.mbarrier_update, int(self.block.ctypes.data)
        )
        self._set("live", self.size * geometry.warps)
        self._set("size", self.size)
        self._set("smem_limit", limit)
        self._set("tmem_columns", CAPACITY.get(context.arch, 0))
        if kernel.compiled.checked:
            self._check(limit)
        self.refresh_ranges()
        self.ctas = [self._cta(rank, origin) for rank in range(self.size)]
        self.warps = [warp for cta in self.ctas for warp in cta.warps]
        self.order: Operations | None = None
        if context.order is not None:
            self.order = Operations(context.order, self)
            self._counters[CLUSTER["order"] // 8] = self.order.address

    def _set(self, field_name: str, value: int) -> None:
        self.block[CLUSTER[field_name] // 4] = value

    def _check(self, limit: int) -> None:
        """What a kernel in the checked form needs."""
        context = self.context
        self.shadow = ClusterShadow(self.size, limit, context.arch in CAPACITY)
        self.poison_log = np.zeros((POISON_LOG["entries"] + 1) * POISON_LOG["bytes"], np.uint8)
        self._counters[CLUSTER["poison_log"] // 8] = self.poison_log.ctypes.data
        self._counters[CLUSTER["smem_bytes"] // 8] = self.arena.bytes.size
        self._set("poison_ranges", len(context.memory.shadows))
        self._set("enforce", context.findings is not None and context.findings.mode == "enforce")

    def counter(self, name: str) -> int:
        """Native code's counter of this cluster: ``effects`` or ``cp_async_bytes``."""
        return int(self._counters[CLUSTER[name] // 8])

    def move_to(self, context: LaunchContext) -> None:
        """Go on with another worker, in whose statistics it counts from now on."""
        self.context = context
        for warp in self.warps:
            address = context.statistics.counter_address(warp.index)
            warp.state.set_wide("counts", address)

    def refresh_ranges(self) -> None:
        """Tell native code the registered global ranges, plus windows for generic accesses."""
        own = [
            (self.context.params.ctypes.data, self.context.params.size),
            (self.arena.address, self.arena.bytes.size),
        ]
        # shared memory is told from global memory by its address, before this table is asked
        extra = np.array([(low, low + size, 0, 0) for low, size in own], np.uint64)
        self._table = np.concatenate([self.context.memory.table, extra])
        self._set("range_count", len(self._table))
        self.block[CLUSTER["ranges"] // 4 : CLUSTER["ranges"] // 4 + 2] = np.array(
            [self._table.ctypes.data], np.uint64
        ).view(np.uint32)

    def _cta(self, rank: int, origin: tuple[int, int, int]) -> Cta:
        shape = self.geometry.cluster
        inside = rank % shape[0], rank // shape[0] % shape[1], rank // (shape[0] * shape[1])
        coordinates = tuple(o + i for o, i in zip(origin, inside, strict=True))
        block = np.zeros(CTA_BYTES // 4, np.uint32)
        block[CTA_LIVE // 4] = self.geometry.warps
        tmem = TensorMemory(self.context.arch) if self.context.arch in CAPACITY else None
        lane_bytes = self.kernel.compiled.local_bytes
        local = np.zeros(max(lane_bytes * LANES * self.geometry.warps, 16) + 64, np.uint8)
        pool = RegisterPool(self.geometry.warps, self.kernel.compiled.max_registers)
        cta = Cta(rank, coordinates, self, block, tmem, local, pool)  # type: ignore[arg-type]
        if self.shadow is not None:
            cta.local_shadow = aligned_like(local)
            cta.local_shadow.fill(POISON)
            cta.local_poison = distance(cta.local_shadow.ctypes.data, local.ctypes.data)
        specials = self._specials(cta, inside)
        cta.warps = [self._warp(cta, index, specials) for index in range(self.geometry.warps)]
        return cta

    def _warp(self, cta: Cta, index: int, specials: NDArray[np.uint32]) -> Warp:
        compiled = self.kernel.compiled
        state = WarpState(compiled.layout, index)
        state.set_wide("smem", self.arena.address)
        state.set_wide("params", self.context.params.ctypes.data)
        state.set_wide("cluster", self.block.ctypes.data)
        state.set_wide("cta", cta.block.ctypes.data)
        state.set_wide("counts", self.context.statistics.counter_address(index))
        if self.shadow is not None:
            away = distance(self.shadow.arena.address, self.arena.address)
            state.set_wide("smem_poison", away)
            state.set_wide("local_poison", cta.local_poison)
            state.set("poison_site", FULL_MASK)
        lane_bytes = compiled.local_bytes
        local = -(-cta.local.ctypes.data // 64) * 64 + index * LANES * lane_bytes
        state.set_wide("local", local)
        if cta.tmem is not None:
            state.set_wide("tmem", cta.tmem.cells.ctypes.data)
        live, threads = self.geometry.threads_of(index)
        state.set("mask", live)
        state.set("live", live)
        first = FIELDS["tid_x"] // 4
        state.u32[first : first + threads.size] = threads
        first = FIELDS["specials"] // 4
        state.u32[first : first + specials.size] = specials
        state.set_special("%warpid", index)
        return Warp(state, cta, index)

    def _specials(self, cta: Cta, inside: tuple[int, int, int]) -> NDArray[np.uint32]:
        """Special registers of a CTA, in the order of SPECIALS."""
        g = self.geometry
        cluster_id = [c // s for c, s in zip(cta.coordinates, g.cluster, strict=True)]
        clusters = [-(-n // s) for n, s in zip(g.grid, g.cluster, strict=True)]
        vectors = {
            "%ctaid": cta.coordinates, "%nctaid": g.grid, "%ntid": g.block,
            "%cluster_ctaid": inside, "%cluster_nctaid": g.cluster,
            "%clusterid": cluster_id, "%nclusterid": clusters,
        }  # fmt: skip
        values = {
            f"{name}.{axis}": vector[i]
            for name, vector in vectors.items()
            for i, axis in enumerate("xyz")
        }
        linear = (cta.coordinates[2] * g.grid[1] + cta.coordinates[1]) * g.grid[0]
        values |= {
            "%cluster_ctarank": cta.rank,
            "%cluster_nctarank": self.size,
            "%nwarpid": g.warps,
            "%smid": (linear + cta.coordinates[0]) % self.context.num_sms,
            "%nsmid": self.context.num_sms,
            "%dynamic_smem_size": g.dynamic_smem,
            "%total_smem_size": self.arena.limit,
            "%is_explicit_cluster": int(self.size > 1),
        }
        assert values.keys() <= set(SPECIALS)
        return np.array([values.get(name, 0) for name in SPECIALS], np.uint32)

    # -- what units use
    def smem(self, rank: int) -> NDArray[np.uint8]:
        """Shared memory of a CTA, uint8[limit] (offset 0 is the start of the window)."""
        return self.arena.smem(rank)

    def tmem(self, rank: int) -> NDArray[np.uint32]:
        """Tensor memory of a CTA, uint32[128 lanes, 576 columns]."""
        tmem = self.ctas[rank].tmem
        assert tmem is not None
        return tmem.cells

    def arrive(
        self, rank: int, offset: int, count: int = 0, tx: int = 0, by: Knowledge | None = None
    ) -> None:
        """Arrive at the mbarrier at ``offset`` of a CTA, or change its transaction count; ``by``
        is what the operation that arrives hands on.

        Raises EmulationError (trap) when the word is no mbarrier or a count leaves its range.
        """
        if not (0 <= rank < self.size and 0 <= offset <= self.arena.limit - 8):
            raise EmulationError(
                "trap", f"mbarrier at {offset:#x} of CTA {rank} does not exist", "mbarrier: address"
            )
        self.context.statistics.smem_places.add((offset, 8, "mbarrier"))
        address = self.arena.address + (rank << RANK_SHIFT) + offset
        update = partial(self._update_mbarrier, address, count, tx, 0)
        old = update() if self.order is None else self.order.arrival(update, address, by)
        if 0 <= old < 64:
            raise EmulationError(
                "trap", f"mbarrier at {offset:#x} of CTA {rank}: {FAULTS[old]}", FAULT_RULES[old]
            )

    def store_word(self, address: int, value: int) -> None:
        """Write a 32-bit word at a shared::cluster address."""
        rank, offset = address >> RANK_SHIFT, address & ((1 << RANK_SHIFT) - 1)
        if rank >= self.size or offset > self.arena.limit - 4 or offset % 4:
            raise EmulationError(
                "trap",
                f"shared-memory address {address:#x} is not legal",
                "memory: out of bounds",
            )
        self.smem(rank)[offset : offset + 4].view(np.uint32)[0] = value
        if self.shadow is not None:
            self.shadow.smem(rank)[offset : offset + 4] = 0

    def require_columns(
        self, operation: object, cta: Cta, footprints: Callable[[], list[Footprint]]
    ) -> bool:
        """Trap unless the operation's tensor-memory columns are allocated in their CTAs; whether
        this was its first check.

        Operations are decoded once for the same operands, so each is checked once for each state
        of the allocations.
        """
        if id(operation) in cta.columns_checked:
            return False
        for place in footprints():
            if place.space != "tmem":
                continue
            tmem = self.ctas[place.rank].tmem
            assert tmem is not None
            for first, stop in {(int(low), int(high)) for _, _, low, high in place.ranges}:
                if not tmem.owns(first, stop - first):
                    raise EmulationError(
                        "trap",
                        f"tensor-memory columns {first}..{stop - 1} of CTA {place.rank} are not "
                        f"allocated (held: {dict(sorted(tmem.allocations.items()))})",
                        "tensor memory: not allocated",
                    )
        cta.columns_checked[id(operation)] = operation
        return True

    def mbarrier_at(self, rank: int, offset: int) -> mbarrier.MbarrierWord | None:
        """The decoded mbarrier, for reports."""
        word = self.smem(rank)[offset : offset + 8].view(np.uint64)
        return mbarrier.unpack(int(word[0]))


@dataclass(slots=True)
class LaunchContext:
    """What the clusters that one worker runs share: its own statistics, the launch's memory."""

    arch: str
    memory: GlobalMemory
    params: NDArray[np.uint8]
    statistics: Statistics
    policy: Policy
    num_sms: int
    runtime: Runtime
    order: LaunchOrder | None = None
    #: where a checked launch records violations, shared by its workers; None: unchecked
    findings: Findings | None = None
    _maps: dict[int, bytes] = field(default_factory=dict)

    def tensor_map(self, address: int) -> bytes:
        """The 128 bytes of a tensor map in the parameter block or in global memory."""
        raw = self._maps.get(address)
        if raw is not None:
            return raw
        base = int(self.params.ctypes.data)
        if base <= address and address + 128 <= base + self.params.size:
            raw = self.params[address - base : address - base + 128].tobytes()
            self._maps[address] = raw  # parameters do not change while a kernel runs
            return raw
        return self.memory.view(address, 128).tobytes()
