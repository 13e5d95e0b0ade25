"""Memory blocks that native code and Python share, and the fault codes of native code.

All offsets are bytes. Effects: native code counts every event that another warp could wait for in
its cluster; an emulator that sees the counters stand still while every warp waits has found a
deadlock.
"""

from __future__ import annotations

#: One a cluster.
CLUSTER = {
    "arrived": 0,  # warps that arrived at the cluster barrier
    "generation": 4,
    "live": 8,  # warps that have not exited
    "size": 12,  # CTAs
    "smem_limit": 16,  # first illegal shared-memory offset
    "range_count": 20,
    "ranges": 24,  # host address of RANGE entries: legal global memory, sorted
    "tmem_columns": 32,
    "effects": 40,  # uint64: events so far that another warp may wait for
    "cp_async_bytes": 48,  # uint64: bytes that cp.async has written
    # checked launches
    "poison_log": 64,  # host address of POISON_LOG entries, after one that holds their number
    "poison_ranges": 72,  # global ranges that have a shadow
    "enforce": 76,  # whether the first use of poison ends the launch
    "smem_bytes": 80,  # uint64: size of the cluster's shared memory, gaps included
    "order": 88,  # host address of the order block, 0: accesses are not followed
}
CLUSTER_BYTES = 128

#: One entry of the table of ranges: ``[low, high)`` and the distances from there to its shadows
#: (0: it has none), all uint64.
RANGE = {"low": 0, "high": 8, "poison": 16, "order": 24}
RANGE_BYTES = 32

#: One entry of the log of poison that was used, and how many it holds.
POISON_LOG = {
    "site": 0, "rule": 4, "operand": 8, "lane": 12, "count": 16, "warp": 20, "rank": 24,
    "origin": 28, "address": 32, "bytes": 48, "entries": 64,
}  # fmt: skip

#: One a CTA: live warps, then 16 named barriers of four uint32.
CTA_LIVE = 0
CTA_BARRIERS = 16
BARRIER_BYTES = 16
NUM_BARRIERS = 16
BARRIER_ARRIVED, BARRIER_EXPECTED, BARRIER_GENERATION = 0, 4, 8
CTA_BYTES = CTA_BARRIERS + NUM_BARRIERS * BARRIER_BYTES
#: ``expected`` of a barrier that waits for every live thread of the CTA.
ALL_THREADS = 0xFFFFFFFF

#: The scheduler's work list.
QUEUE = {
    "count": 0,
    "cursor": 4,
    "run": 8,
    "budget": 16,
    "rounds": 20,
    "cluster": 24,
    "site": 32,  # of the warp that returned
    "exec": 36,
    "warps": 40,
}

#: What the scheduler returns besides a warp's Outcome.
IDLE, SLICED, DONE = 16, 17, 18

FAULTS = {
    1: "global address outside every registered buffer",
    2: "misaligned address",
    3: "shared-memory address outside the CTA's allocation",
    4: "word is not an initialised mbarrier",
    5: "mbarrier arrival beyond the expected count",
    6: "mbarrier transaction count out of range",
    7: "named barrier used with two different thread counts",
    8: "trap instruction",
    9: "local address outside the lane's local memory",
    10: "named barrier index above 15",
    11: "tensor-memory address outside the allocation, or lanes of another warp's quarter",
    12: "mbarrier count out of range",
    13: "poison in an address",
    14: "poison in a branch or guard",
    15: "poison stored to global memory",
    16: "poison in an operand",
    17: "accesses that nothing orders",
}
#: The rule (`rules.RULES`) behind each fault.
FAULT_RULES = {
    1: "memory: out of bounds",
    2: "memory: alignment",
    3: "memory: out of bounds",
    4: "mbarrier: not initialised",
    5: "mbarrier: arrival count",
    6: "mbarrier: transaction count",
    7: "barrier: thread count",
    8: "trap",
    9: "memory: out of bounds",
    10: "barrier: index",
    11: "tensor memory: not allocated",
    12: "mbarrier: count",
    13: "poison: address",
    14: "poison: branch",
    15: "poison: global store",
    16: "poison: operand",
    17: "order: race",
}
(
    GLOBAL_OUT_OF_BOUNDS,
    MISALIGNED,
    SHARED_OUT_OF_BOUNDS,
    NOT_AN_MBARRIER,
    MBARRIER_UNDERFLOW,
    MBARRIER_TX_RANGE,
    BARRIER_MISMATCH,
    TRAP_INSTRUCTION,
    LOCAL_OUT_OF_BOUNDS,
    BARRIER_INDEX,
    TMEM_OUT_OF_BOUNDS,
    MBARRIER_COUNT,
    POISON_ADDRESS,
    POISON_BRANCH,
    POISON_STORE,
    POISON_OPERAND,
    ORDER,
) = FAULTS
POISON_FAULTS = (POISON_ADDRESS, POISON_BRANCH, POISON_STORE, POISON_OPERAND)
