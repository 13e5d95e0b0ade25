"""The state block of one warp, shared by native code and Python.

A block is ``uint32[rows, 32]``: a header of fixed fields, argument rows (``uint64[32]`` each) in
which native code leaves the operands of an instruction that Python performs, then one row (two for
64-bit registers) for each register that is live across a segment boundary. Predicates are 32-bit
lane masks packed after the vectors. In the checked form taints follow: for each row and then for
each predicate the mask of the lanes in which it is not defined.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LANES = 32
ROW_BYTES = 4 * LANES
FULL_MASK = 0xFFFFFFFF

#: Byte offsets of the header fields.
FIELDS = {
    "mask": 0,  # lanes that execute now
    "live": 4,  # lanes that have not exited
    "resume": 8,  # segment to resume at; -1: choose among the lanes' segments
    "site": 12,  # instruction that returned to the scheduler
    "budget": 16,  # backward branches left in this slice
    "exec": 20,  # lanes for which the instruction at `site` executes
    "suspended": 24,  # lanes that wait for the rest of the warp at a collective
    "status": 28,  # see Status
    "smem": 32,  # host address of the cluster's shared memory
    "params": 40,  # host address of the parameter block
    "cluster": 48,  # host address of the cluster block
    "cta": 56,  # host address of the CTA block
    "counts": 64,  # host address of this warp's segment counters
    "local": 72,  # host address of the warp's local memory
    "range_lo": 80,  # global range of the last access
    "range_hi": 88,
    "wait_address": 96,  # mbarrier (shared::cluster address) or named barrier waited for
    "wait_value": 100,  # parity, or generation at arrival
    "timed_out": 104,  # the scheduler lets a try_wait return false
    "floor": 108,  # divergence: prefer lanes at or after this segment (fairness)
    "trap_code": 112,
    "trap_lane": 116,
    "trap_address": 120,
    "cluster_token": 128,  # cluster barrier generation at arrival
    "warp": 132,  # warp index in its CTA
    "tmem": 136,  # host address of the CTA's tensor memory
    "range_poison": 144,  # distances from the last global range to its shadows, 0: none
    "range_order": 152,
    "smem_poison": 160,  # distance from shared memory to its shadows
    "smem_order": 168,
    "local_poison": 176,  # distance from local memory to its shadow
    "poison_site": 184,  # instruction that last read poison, and the shadow address where
    "poison_address": 208,
    "order": 192,  # host address of the cluster's order block, 0: accesses are not followed
    "order_warp": 200,  # warp index in the cluster
    "pending_loads": 204,  # tcgen05.ld that have issued and not happened
    "pcs": 256,  # each lane's segment while the warp is diverged
    "tid_x": 384,
    "tid_y": 512,
    "tid_z": 640,
    "specials": 768,  # uint32 scalars, see SPECIALS
    "arg_taints": 896,  # lanes in which an argument row is not defined, uint32 each
    "args": 1024,
}

#: Warp-uniform special registers, in the order of the ``specials`` field.
SPECIALS = (
    *(
        f"%{name}{axis}"
        for name in (
            "ctaid",
            "nctaid",
            "ntid",
            "cluster_ctaid",
            "cluster_nctaid",
            "clusterid",
            "nclusterid",
        )
        for axis in (".x", ".y", ".z")
    ),
    "%cluster_ctarank",
    "%cluster_nctarank",
    "%warpid",
    "%nwarpid",
    "%smid",
    "%nsmid",
    "%dynamic_smem_size",
    "%total_smem_size",
    "%gridid",
    "%is_explicit_cluster",
)

MAX_ARGS = 24
HEADER_ROWS = (FIELDS["args"] + MAX_ARGS * 8 * LANES) // ROW_BYTES


class Status:
    """Values of the ``status`` field: why a warp does not run."""

    READY = 0
    MBARRIER = 1
    BARRIER = 2
    CLUSTER = 3
    UNIT = 4  # waits for an asynchronous operation; Python decides
    EXITED = 5
    NAMES = ("ready", "mbarrier", "named barrier", "cluster barrier", "unit", "exited")


class Outcome:
    """What a warp's native function returns."""

    EXITED = 0
    UNIT = 1  # Python performs the instruction at `site`
    SLICE = 2  # its slice of backward branches is used up
    TRAP = 3
    WAIT = 4  # `status` says for what
    STALL = 5  # all lanes wait at collectives that need other lanes


@dataclass(frozen=True, slots=True)
class RegisterLayout:
    """Byte offset of each register that lives in the state block, and the block's size.

    ``taints`` are the offsets of the registers' taints (64-bit registers have two, one a row), from
    ``taint_base`` on; the plain form has none. ``defined`` are the words of those that code never
    writes, since nothing can taint the register.
    """

    offsets: dict[str, int]
    size: int
    taints: dict[str, int]
    taint_base: int
    defined: tuple[int, ...] = ()

    @staticmethod
    def of(vectors: dict[str, int], predicates: list[str], checked: bool = False) -> RegisterLayout:
        """Lay out ``vectors`` (name to bits, in order) and ``predicates``."""
        offsets, row = {}, HEADER_ROWS
        for name, bits in vectors.items():
            offsets[name] = row * ROW_BYTES
            row += max(bits // 32, 1)
        cursor = row * ROW_BYTES
        for name in predicates:
            offsets[name] = cursor
            cursor += 4
        base = -(-cursor // ROW_BYTES) * ROW_BYTES
        if not checked:
            return RegisterLayout(offsets, base, {}, base)
        taints = {name: base + 4 * (offsets[name] // ROW_BYTES - HEADER_ROWS) for name in vectors}
        cursor = base + 4 * (row - HEADER_ROWS)
        for name in predicates:
            taints[name] = cursor
            cursor += 4
        return RegisterLayout(offsets, -(-cursor // ROW_BYTES) * ROW_BYTES, taints, base)


class WarpState:
    """Python's view of one warp's block."""

    __slots__ = ("address", "args", "index", "layout", "memory", "rows", "taints", "u32", "u64")

    def __init__(self, layout: RegisterLayout, index: int) -> None:
        raw = np.zeros(layout.size + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self.memory: npt.NDArray[np.uint8] = raw[start : start + layout.size]
        self.u32: npt.NDArray[np.uint32] = self.memory.view(np.uint32)
        self.u64: npt.NDArray[np.uint64] = self.memory.view(np.uint64)
        self.rows = self.u32.reshape(-1, LANES)
        first = FIELDS["args"] // 8
        self.args = self.u64[first : first + MAX_ARGS * LANES].reshape(MAX_ARGS, LANES)
        #: by row from the first register on; a register that nothing wrote is not defined
        self.taints = self.u32[layout.taint_base // 4 :]
        self.taints.fill(FULL_MASK)
        self.taints[list(layout.defined)] = 0
        self.layout = layout
        self.index = index
        self.address = int(self.memory.ctypes.data)
        self.set("mask", FULL_MASK)
        self.set("live", FULL_MASK)
        self.set("warp", index)

    def get(self, field: str) -> int:
        """A 32-bit header field."""
        return int(self.u32[FIELDS[field] >> 2])

    def set(self, field: str, value: int) -> None:
        """Write a 32-bit header field."""
        self.u32[FIELDS[field] >> 2] = value & FULL_MASK

    def get_wide(self, field: str) -> int:
        """A 64-bit header field."""
        return int(self.u64[FIELDS[field] >> 3])

    def set_wide(self, field: str, value: int) -> None:
        """Write a 64-bit header field."""
        self.u64[FIELDS[field] >> 3] = value & 0xFFFFFFFFFFFFFFFF

    def set_special(self, name: str, value: int) -> None:
        """Set a warp-uniform special register."""
        self.u32[FIELDS["specials"] // 4 + SPECIALS.index(name)] = value & FULL_MASK
