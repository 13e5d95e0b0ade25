"""Clocks, epochs and the order block: what the checks in native code and Python agree on.

**Components.** Each warp is one. Its asynchronous work has further ones, since knowing a warp says
nothing about what the warp set going: ``cp.async``, the tensor pipe (tcgen05.mma, cp and commit, or
wgmma), tcgen05.ld, tcgen05.st, reads and writes of bulk copies by groups; and counts of published
mbarrier initialisations and of tcgen05.fence::before_thread_sync. Copies that signal an mbarrier
share that mbarrier's component, whose clock is the phase in which they count.

**Rows.** What an agent knows is a row of int32: the clock of every component (V), then, for the
components that access memory through the generic proxy, the clocks that a proxy fence has covered
(A). Joining two rows is their elementwise maximum.

**Epochs.** An access is a 64-bit number, 0 for none: site, lane, bytes of the word touched, whether
it was atomic, whether its bytes are of several lanes, component, clock.

The order block is an array of int64, one a cluster; its fields are numbered below.
"""

from __future__ import annotations

# epochs
LANE_SHIFT, MASK_SHIFT, ATOMIC_SHIFT, MIXED_SHIFT, COMPONENT_SHIFT, CLOCK_SHIFT = (
    16, 21, 25, 26, 27, 42,
)  # fmt: skip
SITE_MASK, LANE_MASK, COMPONENT_MASK, CLOCK_MASK = 0xFFFF, 31, 0x7FFF, 0x3FFFFF
WHOLE_WORD = 15
#: Clock that every operation of an in-order pipe knows of its own pipe.
EVERYTHING = CLOCK_MASK

#: Kinds of components that each warp has besides itself and its cp.async, in order.
PIPES = ("tensor", "load", "store", "bulk read", "bulk write", "init", "tensor fence")
TENSOR, LOAD, STORE, BULK_READ, BULK_WRITE, INIT, TENSOR_FENCE = range(len(PIPES))
#: With wgmma, which has no tcgen05 beside it: what each warp has waited for itself. The tensor pipe
#: of the first warp of a warpgroup stands for the products of all four.
WAITED = LOAD
#: How another instruction touches a register of a wgmma in flight.
READS_D, WRITES, READS_A = range(3)

# access kinds (bits), as native code passes them
READ, WRITE, ATOMIC = 0, 1, 2
STRONG, ACQUIRE, RELEASE, COPY_ENGINE = 4, 8, 16, 32

# what a violation is
(
    RACE_READ, RACE_WRITE, RACE_OVERWRITE, LANES, PROXY, PROXY_OVERWRITE, UNINITIALISED,
    EXIT_PENDING, EXIT_ARRIVAL, EXITED, REGISTERS, PROXY_COPY, INIT_FENCE, REPEATED,
    UNFENCED, UNWAITED, FACTORS, WARPGROUP,
) = range(1, 19)  # fmt: skip
LAST_CODE = WARPGROUP
#: Kernels that run on silicon do without.
REPORTED = (
    PROXY_OVERWRITE, PROXY_COPY, INIT_FENCE, REPEATED, UNFENCED, UNWAITED, FACTORS, WARPGROUP,
)  # fmt: skip

# groups of asynchronous operations of a warp
GROUPS = ("cp.async", "bulk", "wgmma")
GROUP_COPY, GROUP_BULK, GROUP_WGMMA = range(3)
GROUP_RING = 64

# fences
FENCE_MEMORY, FENCE_PROXY, FENCE_INIT, FENCE_AFTER, FENCE_BEFORE = range(5)
#: Fences before a thread synchronisation that each warp remembers, and what of each.
FENCE_RING, FENCE_WORDS = 256, 2

#: Barriers of a CTA, bytes of shared memory that an mbarrier takes, mbarriers that are followed.
NAMED_BARRIERS = 16
MBARRIER_BYTES = 8
MBARRIERS_A_CTA = 128
#: Rows of releases at memory locations, by hash of the address.
FLAG_ROWS = 256

#: Tensor memory is followed by columns of 16 lanes, shared and global memory by words.
LANES_A_CELL = 16
CELLS_A_COLUMN = 8
COLUMNS = 576
CELLS = COLUMNS * CELLS_A_COLUMN

#: Planes of shadow memory: the last write, and three reads since that nothing orders.
PLANES = 4

# fields of the order block
(
    ARENA, ARENA_BYTES, SMEM_WORDS, SMEM_SHADOW, SMEM_PLANE, TMEM_SHADOW, TMEM_PLANE,
    RANGES, RANGE_COUNT, RANGE_LAST,
    ROWS, FENCED, SEEN, LENGTH, COMPONENTS, GENERIC,
    WARP0, COPY0, PIPE0, MBARRIER0, WARPS, CTA_WARPS, STATES,
    MBARRIER_MAP, MBARRIER_MAP_WORDS, MBARRIER_COUNT, MBARRIER_LIMIT, MBARRIER_ARRIVED,
    MBARRIER_DONE, MBARRIER_PHASE, MBARRIER_INIT, MBARRIER_PUBLISHED,
    BARRIER_ARRIVED, CLUSTER_ARRIVED, CLUSTER_DONE,
    FLAGS, FLAG_VERSION, FENCE_VERSION, SEEN_FLAG, SEEN_DIRTY,
    COUNTS, MARKS, MARK_COUNT, LOAD_LAST, LOAD_SITES, SAVED,
    ENFORCE, LOG, LOG_LIMIT, LOG_COUNT, LOG_KEYS, LOG_KEY_LIMIT, POLLED,
    LEFT, LEFT_COUNT, MBARRIER_FROM, TENSOR_FENCED, WARPGROUPS, TENSOR_FENCES,
) = range(59)  # fmt: skip
#: Addresses of the hooks follow, in this order; arguments and results are int64.
HOOKS = (
    "access", "converge", "mbarrier_init", "mbarrier_arrive", "mbarrier_wait", "barrier_arrive",
    "barrier_complete", "leave", "registers_used", "cluster_arrive", "cluster_complete",
    "cluster_wait", "fence", "group_commit", "group_wait", "tensor_wait", "load_read",
    "copies_begin", "load_issued", "warpgroup_issued", "operation_arrive", "operation_arrived",
    "operation_mbarrier", "note",
)  # fmt: skip
FIRST_HOOK = 64
BLOCK_FIELDS = FIRST_HOOK + len(HOOKS)

#: int64 words of one entry of the log: code, own epoch, other epoch, place, times, warp.
LOG_WORDS = 6
#: Bit of a log entry's place that says tensor memory: CTA rank in bits 48-55, cell below.
TENSOR_PLACE = 62
#: What an operation touches: a table of int64, ``NOTE_WORDS`` an entry: kind, start (host address
#: that ranges are relative to, or CTA rank for tensor memory), address of the ranges (or the first
#: byte of a span), their number (or the byte past the last), and whether it is a write.
NOTE_WORDS = 5
NOTE_CELLS, NOTE_RANGES, NOTE_SPAN = range(3)
#: Counters of asynchronous operations of a warp, in ``COUNTS``.
COUNTERS = 6
COUNT_COPY, COUNT_TENSOR, COUNT_LOAD, COUNT_STORE, COUNT_BULK, COUNT_WGMMA = range(COUNTERS)
