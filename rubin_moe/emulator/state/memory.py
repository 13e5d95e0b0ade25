"""Global memory made of registered host buffers, and the shared memory of a cluster.

Global addresses are host addresses: a kernel uses the pointers that its host code passed. Every
access must lie in one registered range; the check is in native code (``emu.check_global``) and in
:meth:`GlobalMemory.view`. Shared memory of CTA ``rank`` starts at ``rank << 24`` of one
arena, so that a shared::cluster address is an offset into it and distributed shared memory needs
no special case.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

RANK_SHIFT = 24


class MemoryFaultError(RuntimeError):
    """An access to global memory outside every registered buffer; names address and size."""

    rule = "memory: out of bounds"


class GlobalMemory:
    """The registered ranges ``[address, address + nbytes)``, each with its owner kept alive."""

    def __init__(self) -> None:
        self._owners: dict[tuple[int, int], Any] = {}
        self._views: list[tuple[int, int, NDArray[np.uint8]]] = []
        self._shadows: dict[tuple[int, int], NDArray[np.uint8]] = {}
        self._last = 0
        #: ``blocks.RANGE`` entries
        self.table: NDArray[np.uint64] = np.zeros((1, 4), np.uint64)

    def register_range(self, address: int, nbytes: int, owner: Any = None) -> None:
        """Make ``nbytes`` at ``address`` accessible. Registering a range again replaces its owner;
        touching neighbours stay separate, so that running over an end is seen."""
        if nbytes <= 0:
            return
        self._owners[address, nbytes] = owner
        self._rebuild()

    def register(self, buffer: Any) -> int:
        """Register a torch tensor, a NumPy array or anything with ``__array_interface__``.

        Returns its address. The memory spanned by a strided view is registered whole.
        """
        address, nbytes = address_range(buffer)
        self.register_range(address, nbytes, buffer)
        return address

    def unregister(self, address: int) -> None:
        """Forget the ranges that start at ``address``."""
        self._owners = {key: v for key, v in self._owners.items() if key[0] != address}
        self._shadows = {key: v for key, v in self._shadows.items() if key[0] != address}
        self._rebuild()

    def mark(self, address: int, nbytes: int, undefined: bool) -> None:
        """Make bytes undefined for checked launches, or defined again. Raises MemoryFaultError
        outside the ranges."""
        self.view(address, nbytes)
        low, high, data = self._views[self._last]
        shadow = self._shadows.get((low, high - low))
        if shadow is None:
            if not undefined:
                return
            shadow = aligned_like(data)
            shadow.fill(0)
            self._shadows[low, high - low] = shadow
            self._rebuild()
        shadow[address - low : address - low + nbytes] = 0xFF if undefined else 0

    def shadow(self, address: int, nbytes: int) -> NDArray[np.uint8] | None:
        """The shadow of ``nbytes`` of one range (0: defined), None where all of it is defined."""
        for (low, size), data in self._shadows.items():
            if low <= address and address + nbytes <= low + size:
                return data[address - low : address - low + nbytes]
        return None

    @property
    def shadows(self) -> dict[tuple[int, int], NDArray[np.uint8]]:
        """Shadows by (address, nbytes) of their range."""
        return self._shadows

    def _rebuild(self) -> None:
        keys = sorted(self._owners)
        self._views = []
        for address, nbytes in keys:
            raw = (ctypes.c_uint8 * nbytes).from_address(address)
            self._views.append((address, address + nbytes, np.ctypeslib.as_array(raw)))
        self._last = 0
        rows = [(1, 1, 0, 0)] if not self._views else []
        for low, high, _ in self._views:
            shadow = self._shadows.get((low, high - low))
            away = 0 if shadow is None else distance(int(shadow.ctypes.data), low)
            rows.append((low, high, away, 0))
        self.table = np.array(rows, np.uint64)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(address, nbytes) of every range, sorted."""
        return sorted(self._owners)

    def view(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """uint8 view of ``nbytes`` at ``address``. Raises MemoryFaultError outside the ranges."""
        if self._views:
            low, high, data = self._views[self._last]
            if low <= address and address + nbytes <= high:
                return data[address - low : address - low + nbytes]
        for index, (low, high, data) in enumerate(self._views):
            if low <= address and address + nbytes <= high:
                self._last = index
                return data[address - low : address - low + nbytes]
        raise MemoryFaultError(
            f"{nbytes} bytes at {address:#x} are not inside one registered buffer "
            f"({self._nearest(address)})"
        )

    def _nearest(self, address: int) -> str:
        best = min(self._views, key=lambda v: min(abs(address - v[0]), abs(address - v[1])),
                   default=None)  # fmt: skip
        if best is None:
            return "none is registered"
        return f"the nearest is {best[0]:#x}..{best[1]:#x}"


def address_range(buffer: Any) -> tuple[int, int]:
    """Address and size in bytes of the memory that a tensor or array spans."""
    if hasattr(buffer, "data_ptr"):
        if buffer.numel() == 0:
            return int(buffer.data_ptr()), 0
        spans = zip(buffer.shape, buffer.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in spans)
        return int(buffer.data_ptr()), (last + 1) * int(buffer.element_size())
    array = buffer if isinstance(buffer, np.ndarray) else np.asarray(buffer)
    if array.size == 0:
        return int(array.ctypes.data), 0
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    low = sum(r for r in reach if r < 0)
    high = sum(r for r in reach if r > 0)
    return int(array.ctypes.data) + low, high - low + array.itemsize


def distance(shadow: int, memory: int) -> int:
    """What added to an address of ``memory`` gives that of its shadow, modulo 2^64."""
    return (shadow - memory) & 0xFFFFFFFFFFFFFFFF


def aligned_like(buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Memory of the same size and place within 64 bytes as a buffer."""
    raw = np.empty(buffer.size + 64, np.uint8)
    start = (int(buffer.ctypes.data) - int(raw.ctypes.data)) % 64
    return raw[start : start + buffer.size]


class SharedArena:
    """Shared memory of the CTAs of one cluster, zero at first; untouched pages cost nothing."""

    def __init__(self, ctas: int, limit: int) -> None:
        self.limit = limit
        # a mapping of its own: an allocator would clear the gaps between the CTAs
        pages = mmap.mmap(-1, ((ctas - 1) << RANK_SHIFT) + limit)
        self.bytes: NDArray[np.uint8] = np.frombuffer(pages, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self._parts = [
            self.bytes[rank << RANK_SHIFT : (rank << RANK_SHIFT) + limit] for rank in range(ctas)
        ]

    def smem(self, rank: int) -> NDArray[np.uint8]:
        """uint8[limit] of one CTA."""
        return self._parts[rank]
