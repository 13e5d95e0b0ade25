"""Runs one cluster for a turn: native code until an instruction needs Python, and what Python does.

A worker belongs to one thread. Native code interleaves the warps of the cluster and returns when an
instruction needs Python or nothing can run; a turn ends when the cluster is done or stuck, when its
warps only spin, or after many instructions that Python performs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rubin_moe.emulator import poison
from rubin_moe.emulator.compile import Kernel
from rubin_moe.emulator.errors import EmulationError, EmulatorError
from rubin_moe.emulator.issue import Handler
from rubin_moe.emulator.machine import Cluster, LaunchContext, Warp
from rubin_moe.emulator.native.blocks import (
    DONE,
    FAULT_RULES,
    FAULTS,
    IDLE,
    ORDER,
    POISON_FAULTS,
    QUEUE,
    SLICED,
)
from rubin_moe.emulator.order import sentences
from rubin_moe.emulator.register_pool import waits_for
from rubin_moe.emulator.state.memory import RANK_SHIFT
from rubin_moe.emulator.state.registers import FIELDS, LANES, Outcome, Status
from rubin_moe.emulator.units import bind

#: Instructions that Python performs in one turn.
_TURN = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """``slice``: backward branches a warp may take before it gives way; ``rounds``: used-up slices
    (and two a warp) before the next cluster's turn; ``spins``: turns of every cluster in flight
    without any event before spinning counts as deadlock; ``instructions``: budget of warp
    instructions, or None."""

    slice: int = 256
    rounds: int = 16
    spins: int = 20_000
    instructions: int | None = None


class Turn:
    """One cluster's place in the rotation.

    ``epoch`` is the scheduler's when the turn began; ``moved`` says whether the turn caused
    anything that another cluster could wait for.
    """

    def __init__(self, cluster: Cluster, kernel: Kernel, limits: Limits) -> None:
        self.cluster = cluster
        self.epoch = 0
        self.moved = False
        count = len(cluster.warps)
        self.queue = np.zeros(QUEUE["warps"] // 8 + count, np.uint64)
        u32 = self.queue.view(np.uint32)
        u32[QUEUE["count"] // 4] = count
        u32[QUEUE["budget"] // 4] = limits.slice
        u32[QUEUE["rounds"] // 4] = limits.rounds + 2 * count
        self.queue[QUEUE["run"] // 8] = kernel.address
        self.queue[QUEUE["cluster"] // 8] = cluster.block.ctypes.data
        first = QUEUE["warps"] // 8
        self.queue[first:] = [warp.state.address for warp in cluster.warps]
        self.address = int(self.queue.ctypes.data)
        #: site and lanes (upper half) of the warp that returned; quicker to read than an array
        self.returned = self.queue.data.cast("B").cast("Q")[QUEUE["site"] // 8 :]
        #: warps whose instruction at a site has to wait, with the lanes that execute it
        self.retries: list[tuple[Warp, int, int]] = []
        #: by warp: where its lanes were, and which were live, when all of them last waited
        self.stalled: dict[int, bytes] = {}

    def expire_waits(self) -> bool:
        """Let every try_wait return false once, as the hardware's time limit does."""
        found = False
        for warp in self.cluster.warps:
            if warp.state.get("status") == Status.MBARRIER:
                warp.state.set("timed_out", 1)
                warp.state.set("status", Status.READY)
                found = True
        return found

    def spins(self) -> bool:
        """Whether a warp could run on."""
        return any(warp.state.get("status") == Status.READY for warp in self.cluster.warps)

    def wants_registers(self, warp: Warp) -> bool:
        """Whether a warp waits at a setmaxnreg."""
        if warp.state.get("status") != Status.UNIT:
            return False
        site = self.cluster.kernel.compiled.sites[warp.state.get("site")]
        return site.family == "register_budget"

    def reason(self, warp: Warp) -> str:
        """What a warp waits for."""
        state, cluster = warp.state, self.cluster
        status = state.get("status")
        if status == Status.MBARRIER:
            address = state.get("wait_address")
            rank, offset = address >> RANK_SHIFT, address & 0xFFFFFF
            word = cluster.mbarrier_at(rank, offset)
            return f"mbarrier {offset:#x} of CTA {rank}, parity {state.get('wait_value')}: {word}"
        if status == Status.BARRIER:
            index = state.get("wait_address")
            arrived, expected = warp.cta.block[4 + 4 * index : 6 + 4 * index].tolist()
            needed = "all" if expected == 0xFFFFFFFF else str(expected)
            return f"named barrier {index}: {arrived} of {needed} threads"
        if status == Status.CLUSTER:
            return f"cluster barrier: {int(cluster.block[0])} warps of {int(cluster.block[2])}"
        if self.wants_registers(warp):
            return waits_for(warp.cta, int(warp.state.args[0, 0]))
        if status == Status.UNIT:
            return "an asynchronous operation or tensor-memory columns"
        return self._spin(warp)

    def _spin(self, warp: Warp) -> str:
        """What a warp polls that goes on without getting anywhere."""
        order = self.cluster.order
        if order is None:
            return "spinning"
        address, site = order.polled_by(warp)
        if site < 0:
            return "spinning"
        info = self.cluster.kernel.compiled.instructions[site]
        return (
            f"spinning: polls {sentences.place_text(order, address)} at line {info.line} "
            f"({info.opcode}), which nothing writes any more"
        )


def place_of(kernel: Kernel, warp: Warp, site: int) -> str:
    """Kernel, CTA, warp, line and opcode, for messages."""
    info = kernel.compiled.instructions[site]
    return (
        f"kernel {kernel.name}, CTA {warp.cta.coordinates} (rank {warp.rank}), "
        f"warp {warp.index}, line {info.line}: {info.opcode}"
    )


class Worker:
    """Executes the turns of clusters on one thread; ``stopped`` makes it give up."""

    def __init__(self, kernel: Kernel, context: LaunchContext) -> None:
        self.kernel, self.context = kernel, context
        self.stopped = False
        self.handlers: dict[int, Handler] = {
            index: bind(site, context) for index, site in kernel.compiled.sites.items()
        }
        self._schedule = context.runtime.schedule

    def run(self, turn: Turn) -> bool:
        """Run a turn; True when the cluster is done. Raises EmulationError: trap or deadlock."""
        cluster = turn.cluster
        if cluster.context is not self.context:
            cluster.move_to(self.context)
        turn.moved = False
        before = cluster.counter("effects")
        try:
            done = self._run(turn)
        finally:
            poison.drain(cluster)
        turn.moved |= cluster.counter("effects") != before
        return done

    def _run(self, turn: Turn) -> bool:
        performed = 0
        while not self.stopped:
            result = self._schedule(turn.address)
            outcome, index = result >> 32, result & 0xFFFFFFFF
            if outcome == Outcome.UNIT:
                self._perform(turn, turn.cluster.warps[index])
                performed += 1
                if performed == _TURN:
                    turn.moved = True
                    return False
            elif outcome == DONE:
                self._finish(turn.cluster)
                return True
            elif outcome == IDLE:
                if not self._retry(turn) and not self._advance(turn):
                    return False
            elif outcome == SLICED:
                if not self._retry(turn):
                    return False
            elif outcome == Outcome.STALL:
                self._stall(turn, turn.cluster.warps[index])
            else:
                self._trap(turn.cluster.warps[index])
        return False

    def _advance(self, turn: Turn) -> bool:
        moved = self.context.policy.advance()
        turn.moved |= moved
        return moved

    def _perform(self, turn: Turn, warp: Warp) -> None:
        packed = turn.returned[0]
        site, mask = packed & 0xFFFFFFFF, packed >> 32
        if not self._call(warp, site, mask):
            warp.state.set("status", Status.UNIT)
            if self.kernel.compiled.sites[site].family != "wgmma":
                turn.retries.append((warp, site, mask))

    def _call(self, warp: Warp, site: int, mask: int) -> bool:
        try:
            return self.handlers[site](warp, mask)
        except (ValueError, RuntimeError) as error:
            if isinstance(error, EmulatorError) and str(error).startswith("kernel "):
                raise
            place = place_of(self.kernel, warp, site)
            rule = getattr(error, "rule", None)
            raise EmulationError("trap", f"{place}: {error}", rule) from error

    def _retry(self, turn: Turn) -> bool:
        """Try the instructions that had to wait; True when one went through."""
        still: list[tuple[Warp, int, int]] = []
        moved = False
        for warp, site, mask in turn.retries:
            if self._call(warp, site, mask):
                warp.state.set("status", Status.READY)
                moved = True
            else:
                still.append((warp, site, mask))
        turn.retries = still
        turn.moved |= moved
        return moved

    def _stall(self, turn: Turn, warp: Warp) -> None:
        """All lanes wait at collectives: look again once, for lanes may have exited since."""
        first = FIELDS["pcs"] // 4
        places = warp.state.u32[first : first + LANES].tobytes()
        places += warp.state.get("live").to_bytes(4, "little")
        if turn.stalled.get(id(warp)) == places:
            lanes = warp.state.get("live")
            place = place_of(self.kernel, warp, warp.state.get("site"))
            raise EmulationError(
                "deadlock",
                f"{place}: lanes {lanes:#010x} wait at different warp collectives for one another",
                "deadlock: collectives",
            )
        turn.stalled[id(warp)] = places
        warp.state.set("suspended", 0)

    def _finish(self, cluster: Cluster) -> None:
        if cluster.order is not None:
            sentences.drain(cluster.order)
        copied = cluster.counter("cp_async_bytes")
        if copied:
            self.context.statistics.bytes["cp.async"] += copied
        for cta in cluster.ctas:
            cta.registers.check(len(cta.warps))
            if cta.tmem is not None and cta.tmem.allocations:
                held = dict(sorted(cta.tmem.allocations.items()))
                raise EmulationError(
                    "trap",
                    f"kernel {self.kernel.name}: CTA {cta.coordinates} exits holding tensor "
                    f"memory {held} (first column: columns)",
                    "tcgen05.alloc: never freed",
                )

    def _trap(self, warp: Warp) -> None:
        state = warp.state
        code = state.get("trap_code")
        if code in POISON_FAULTS:
            poison.trap(warp, code)
        if code == ORDER and warp.cta.cluster.order is not None:
            sentences.stop(warp.cta.cluster.order, warp)
        place = place_of(self.kernel, warp, state.get("site"))
        raise EmulationError(
            "trap",
            f"{place}: lane {state.get('trap_lane')}, "
            f"{state.get_wide('trap_address'):#x}: {FAULTS.get(code, f'fault {code}')}",
            FAULT_RULES.get(code),
        )
