"""Clocks and shadows of a launch and of each of its clusters, as the hooks find them."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rubin_moe.emulator.order import layout
from rubin_moe.emulator.order.sentences import drain
from rubin_moe.emulator.state.memory import GlobalMemory

if TYPE_CHECKING:
    from rubin_moe.emulator.machine import Cluster, Geometry
    from rubin_moe.emulator.native.compiler import OrderHooks

#: Components of all clusters that rows have room for; more clusters share them, which may hide a
#: conflict between two that share.
_COMPONENTS = 4096
_MAX_SLOTS = 16
_NO_RESERVE = 0x4000  # MAP_NORESERVE: most of a shadow is never touched


def _planes(words: int) -> NDArray[np.int64]:
    """Zeroed shadow memory, int64 [PLANES, words]; untouched pages cost nothing."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    pages = mmap.mmap(-1, 8 * layout.PLANES * words, flags=flags)
    return np.frombuffer(pages, np.int64).reshape(layout.PLANES, words)


def _address(array: NDArray[np.generic]) -> int:
    return int(array.ctypes.data)


def _has_wgmma(cluster: Cluster) -> bool:
    sites = cluster.kernel.compiled.sites.values()
    return any(site.family == "wgmma" for site in sites)


class LaunchOrder:
    """What the clusters of one launch share: components, global memory, flags.

    ``hooks`` are the race detector's functions; ``enforce`` makes violations of enforced rules
    stop the access. ``owners[slot]`` is the cluster that uses a slot of the components.
    """

    def __init__(
        self,
        geometry: Geometry,
        memory: GlobalMemory,
        hooks: OrderHooks,
        enforce: bool,
    ) -> None:
        self.hooks, self.enforce = hooks, enforce
        self.warps = geometry.cluster_size * geometry.warps
        self.mbarriers = geometry.cluster_size * layout.MBARRIERS_A_CTA
        each = self.warps * (2 + len(layout.PIPES)) + self.mbarriers
        self.slots = max(1, min(geometry.clusters, _MAX_SLOTS, _COMPONENTS // each))
        self.generic = 2 * self.slots * self.warps
        self.own = self.warps * len(layout.PIPES) + self.mbarriers
        self.components = self.generic + self.slots * self.own
        self.length = -(-(self.components + self.generic) // 16) * 16
        self.owners: list[Cluster | None] = [None] * self.slots
        self._next = 0
        self._shadows = []
        entries = []
        for low, nbytes in memory.ranges:
            words = (low + nbytes + 3) // 4 - low // 4
            shadow = _planes(words)
            self._shadows.append(shadow)
            entries.append((low, low + nbytes, _address(shadow), 8 * words))
        self.ranges = np.array(entries or [(0, 0, 0, 0)], np.int64)
        self.flags = np.zeros((layout.FLAG_ROWS, self.length), np.int32)
        self.flag_versions = np.zeros(layout.FLAG_ROWS, np.int32)

    def take_slot(self, cluster: Cluster) -> int:
        """A slot of components for a cluster that starts."""
        slot = self._next % self.slots
        self._next += 1
        last = self.owners[slot]
        if last is not None and last.order is not None:
            drain(last.order)
        self.owners[slot] = cluster
        return slot

    def drain(self) -> None:
        """Hand what was found to the findings of the launch."""
        for cluster in self.owners:
            if cluster is not None and cluster.order is not None:
                drain(cluster.order)

    def agent(self, component: int) -> tuple[int, str, int]:
        """Slot, kind and warp in the cluster (number, for an mbarrier) of a component."""
        if component < self.generic:
            kind = "warp" if component < self.generic // 2 else "cp.async"
            slot, warp = divmod(component % (self.generic // 2), self.warps)
            return slot, kind, warp
        slot, rest = divmod(component - self.generic, self.own)
        kind_number, warp = divmod(rest, self.warps)
        if kind_number >= len(layout.PIPES):
            return slot, "mbarrier", rest - self.warps * len(layout.PIPES)
        return slot, layout.PIPES[kind_number], warp


class ClusterOrder:
    """Clocks and shadows of one cluster; ``block`` is what native code sees."""

    def __init__(self, launch: LaunchOrder, cluster: Cluster, load_sites: int) -> None:
        self.launch, self.cluster, self.hooks = launch, cluster, launch.hooks.call
        self.slot = launch.take_slot(cluster)
        self.block = np.zeros(layout.BLOCK_FIELDS, np.int64)
        #: by mbarrier and instruction: CTA rank and warp that last issued such a copy
        self.issuers: dict[tuple[int, int], tuple[int, int]] = {}
        self.address = _address(self.block)
        warps, length = launch.warps, launch.length
        self.rows = self._table(layout.ROWS, (warps, length))
        #: the same, quicker to index
        self.flat_rows = self.rows.reshape(-1).data
        self.length = length
        self._table(layout.FENCED, (warps, length))
        self._table(layout.SEEN, (warps, length))
        self._table(layout.TENSOR_FENCED, (warps, length))
        self._table(layout.TENSOR_FENCES, (warps, layout.FENCE_RING, layout.FENCE_WORDS))
        counts = self._table(layout.COUNTS, (warps, layout.COUNTERS), np.int64)
        self.counts = counts.reshape(-1).data
        self.states = self._table(layout.STATES, (warps,), np.int64)
        self._shadow_memory(cluster)
        self._synchronisation(cluster)
        self._table(layout.MARKS, (warps, len(layout.GROUPS), layout.GROUP_RING), np.int64)
        self._table(layout.MARK_COUNT, (warps, len(layout.GROUPS)), np.int64)
        self._table(layout.LOAD_LAST, (warps, max(load_sites, 1)))
        self._table(layout.SAVED, (warps,))
        self.polled = self._table(layout.POLLED, (warps, 2), np.int64)
        self.polled[:, 1] = -1
        limit = 2048
        self.log = self._table(layout.LOG, (limit, layout.LOG_WORDS), np.int64)
        self._log_keys = self._table(layout.LOG_KEYS, (2 * limit, 2), np.int64)
        self._table(layout.LEFT, (cluster.size, length))
        self._table(layout.LEFT_COUNT, (cluster.size,))
        codes = set(range(1, layout.LAST_CODE + 1)) - set(layout.REPORTED)
        generic, slot = launch.generic, self.slot
        fields = {
            layout.LENGTH: length, layout.COMPONENTS: launch.components, layout.GENERIC: generic,
            layout.WARPS: warps, layout.CTA_WARPS: warps // cluster.size,
            layout.WARP0: slot * warps, layout.COPY0: generic // 2 + slot * warps,
            layout.PIPE0: generic + slot * launch.own,
            layout.MBARRIER0: generic + slot * launch.own + warps * len(layout.PIPES),
            layout.RANGES: _address(launch.ranges), layout.RANGE_COUNT: len(launch.ranges),
            layout.FLAGS: _address(launch.flags),
            layout.FLAG_VERSION: _address(launch.flag_versions),
            layout.WARPGROUPS: int(_has_wgmma(cluster)), layout.LOAD_SITES: max(load_sites, 1),
            layout.LOG_LIMIT: limit, layout.LOG_KEY_LIMIT: 2 * limit,
            layout.ENFORCE: sum(1 << code for code in codes) if launch.enforce else 0,
        }  # fmt: skip
        for number, value in fields.items():
            self.block[number] = value
        self.block[layout.FIRST_HOOK :] = launch.hooks.addresses
        self.warp0, self.copy0, self.pipe0, self.mbarrier0, self.cta_warps = (
            fields[number]
            for number in (
                layout.WARP0, layout.COPY0, layout.PIPE0, layout.MBARRIER0, layout.CTA_WARPS
            )
        )  # fmt: skip
        for warp in range(warps):
            self.rows[warp, self.warp0 + warp] = 1

    def _table(
        self, number: int, shape: tuple[int, ...], kind: type[np.generic] = np.int32
    ) -> NDArray[np.generic]:
        """A zeroed array whose address is a field of the block."""
        array = np.zeros(shape, kind)
        self.block[number] = _address(array)
        self._kept = [*getattr(self, "_kept", ()), array]
        return array

    def _shadow_memory(self, cluster: Cluster) -> None:
        arena = cluster.arena
        words = -(-arena.limit // 4)
        self._smem = _planes(cluster.size * words)
        self.block[layout.ARENA] = arena.address
        self.block[layout.ARENA_BYTES] = arena.bytes.size
        self.block[layout.SMEM_WORDS] = words
        self.block[layout.SMEM_SHADOW] = _address(self._smem)
        self.block[layout.SMEM_PLANE] = self._smem.strides[0]
        self._tmem = _planes(cluster.size * layout.CELLS)
        self.block[layout.TMEM_SHADOW] = _address(self._tmem)
        self.block[layout.TMEM_PLANE] = self._tmem.strides[0]

    def _synchronisation(self, cluster: Cluster) -> None:
        warps, length, count = self.launch.warps, self.launch.length, self.launch.mbarriers
        words = -(-cluster.arena.limit // layout.MBARRIER_BYTES)
        self._table(layout.MBARRIER_MAP, (cluster.size, words), np.uint16)
        self.block[layout.MBARRIER_MAP_WORDS] = words
        self.block[layout.MBARRIER_LIMIT] = count
        self._table(layout.MBARRIER_ARRIVED, (count, length))
        self._table(layout.MBARRIER_DONE, (count, length))
        self.phases = self._table(layout.MBARRIER_PHASE, (count,)).data
        self._table(layout.MBARRIER_INIT, (count,), np.int64)
        self._table(layout.MBARRIER_PUBLISHED, (count,))
        self._table(layout.MBARRIER_FROM, (count,))
        self._table(layout.BARRIER_ARRIVED, (cluster.size * layout.NAMED_BARRIERS, length))
        self._table(layout.CLUSTER_ARRIVED, (1, length))
        self._table(layout.CLUSTER_DONE, (1, length))
        self._table(layout.FENCE_VERSION, (warps,))
        self._table(layout.SEEN_FLAG, (warps, 2))
        self._table(layout.SEEN_DIRTY, (warps,))

    def forget_log(self) -> None:
        """Start the log anew."""
        self.block[layout.LOG_COUNT] = 0
        self._log_keys[:] = 0

    def pipe(self, warp: int, kind: int) -> int:
        """Component of a warp's asynchronous work of a kind of PIPES."""
        return self.pipe0 + kind * self.launch.warps + warp
