"""Runs the clusters of a launch until all are done, or says why they cannot go on.

Native code interleaves the warps of one cluster and returns when an instruction needs Python or
nothing can run. Clusters are admitted in order, at most ``resident`` at a time; a cluster keeps
running until it is stuck or its warps only spin, then the next one gets its turn: so clusters that
wait for each other through global memory make progress, up to the residency a GPU would have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from rubin_moe.emulator.compile import Kernel
from rubin_moe.emulator.issue import Handler
from rubin_moe.emulator.machine import Cluster, EmulationError, Geometry, LaunchContext, Warp
from rubin_moe.emulator.native.blocks import DONE, FAULTS, IDLE, QUEUE, SLICED
from rubin_moe.emulator.state.memory import RANK_SHIFT
from rubin_moe.emulator.state.registers import Outcome, Status
from rubin_moe.emulator.units import bind


@dataclass(frozen=True, slots=True)
class Limits:
    """``slice``: backward branches a warp may take before it gives way; ``rounds``: used-up slices
    (and two a warp) before the next cluster's turn; ``spins``: turns of the whole launch without
    any event before spinning counts as deadlock; ``instructions``: budget of warp instructions, or
    None."""

    slice: int = 256
    rounds: int = 16
    spins: int = 2000
    instructions: int | None = None


#: Instructions that Python performs between two looks at the budget.
_BUDGET_CHECK = 4096


class _Turn:
    """One cluster's place in the rotation."""

    def __init__(self, cluster: Cluster, kernel: Kernel, limits: Limits) -> None:
        self.cluster = cluster
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
        self.retries: list[tuple[Warp, Handler, int]] = []
        self.stalled: set[int] = set()


class Scheduler:
    """Executes one launch."""

    def __init__(
        self, kernel: Kernel, geometry: Geometry, context: LaunchContext, limits: Limits
    ) -> None:
        self.kernel, self.geometry, self.context, self.limits = kernel, geometry, context, limits
        self.handlers: dict[int, Handler] = {
            index: bind(site, context) for index, site in kernel.compiled.sites.items()
        }
        self._schedule = context.runtime.schedule
        self._performed = 0

    def run(self) -> None:
        """Run to the end. Raises EmulationError: trap, deadlock or budget."""
        waiting = self.geometry.cluster_origins()
        resident = max(self.context.num_sms // self.geometry.cluster_size, 1)
        turns: deque[_Turn] = deque()
        self._admit(turns, waiting)
        quiet = 0
        while turns:
            turn = turns[0]
            before = self.context.runtime.effects
            if self._run_cluster(turn):
                turns.popleft()
                if not turns:
                    self._admit(turns, waiting)
                quiet = 0
                continue
            self._check_budget(*turns)
            turns.rotate(-1)
            quiet = 0 if self.context.runtime.effects != before else quiet + 1
            if quiet < len(turns):
                continue
            if len(turns) < resident and self._admit(turns, waiting):
                turns.rotate(1)  # the newcomer goes first
                quiet = 0
                continue
            quiet = self._nothing_moves(turns, quiet)

    def _admit(self, turns: deque[_Turn], waiting: Iterator[tuple[int, int, int]]) -> bool:
        origin = next(waiting, None)
        if origin is None:
            return False
        cluster = Cluster(self.kernel, self.geometry, origin, self.context)
        turns.append(_Turn(cluster, self.kernel, self.limits))
        return True

    def _nothing_moves(self, turns: deque[_Turn], quiet: int) -> int:
        """A whole round without an event: finish asynchronous work, let waits time out, or stop."""
        if self.context.policy.advance():
            self.context.runtime.count_effect()
            return 0
        spinning = any(self._spins(turn) for turn in turns)
        if quiet > (self.limits.spins if spinning else 4) * len(turns):
            self._deadlock(turns)
        expired = [self._expire_waits(turn) for turn in turns]
        if not spinning and not any(expired):
            self._deadlock(turns)
        return quiet + 1

    @staticmethod
    def _expire_waits(turn: _Turn) -> bool:
        """Let every try_wait return false once, as the hardware's time limit does."""
        found = False
        for warp in turn.cluster.warps:
            if warp.state.get("status") == Status.MBARRIER:
                warp.state.set("timed_out", 1)
                warp.state.set("status", Status.READY)
                found = True
        return found

    @staticmethod
    def _spins(turn: _Turn) -> bool:
        return any(warp.state.get("status") == Status.READY for warp in turn.cluster.warps)

    def _run_cluster(self, turn: _Turn) -> bool:
        """Run until the cluster is done (True), stuck, or only spins (False)."""
        while True:
            result = self._schedule(turn.address)
            outcome, index = result >> 32, result & 0xFFFFFFFF
            if outcome == Outcome.UNIT:
                self._perform(turn, turn.cluster.warps[index])
                self._performed += 1
                if self._performed % _BUDGET_CHECK == 0:
                    self._check_budget(turn)
            elif outcome == DONE:
                self._finish(turn.cluster)
                return True
            elif outcome == IDLE:
                if not self._retry(turn) and not self._advance_while_stuck():
                    return False
            elif outcome == SLICED:
                if not self._retry(turn):
                    return False
            elif outcome == Outcome.STALL:
                self._stall(turn, turn.cluster.warps[index])
            else:
                self._trap(turn.cluster.warps[index])

    def _advance_while_stuck(self) -> bool:
        if self.context.policy.advance():
            self.context.runtime.count_effect()
            return True
        return False

    def _perform(self, turn: _Turn, warp: Warp) -> None:
        packed = turn.returned[0]
        site, mask = packed & 0xFFFFFFFF, packed >> 32
        handler = self.handlers[site]
        if turn.stalled:
            turn.stalled.discard(id(warp))
        if not self._call(handler, warp, mask, site):
            warp.state.set("status", Status.UNIT)
            if self.kernel.compiled.sites[site].family != "wgmma":
                turn.retries.append((warp, handler, mask))

    def _call(self, handler: Handler, warp: Warp, mask: int, site: int) -> bool:
        try:
            return handler(warp, mask)
        except (ValueError, RuntimeError) as error:
            if isinstance(error, EmulationError) and str(error).startswith("kernel "):
                raise
            raise EmulationError("trap", f"{self._where(warp, site)}: {error}") from error

    def _retry(self, turn: _Turn) -> bool:
        """Try the instructions that had to wait; True when one went through."""
        still: list[tuple[Warp, Handler, int]] = []
        moved = False
        for warp, handler, mask in turn.retries:
            if self._call(handler, warp, mask, warp.state.get("site")):
                warp.state.set("status", Status.READY)
                moved = True
            else:
                still.append((warp, handler, mask))
        turn.retries = still
        if moved:
            self.context.runtime.count_effect()
        return moved

    def _stall(self, turn: _Turn, warp: Warp) -> None:
        """All lanes wait at collectives: look again once, for lanes may have exited since."""
        if id(warp) in turn.stalled:
            lanes = warp.state.get("live")
            raise EmulationError(
                "deadlock",
                f"{self._where(warp, warp.state.get('site'))}: lanes {lanes:#010x} wait at "
                "different warp collectives for one another",
            )
        turn.stalled.add(id(warp))
        warp.state.set("suspended", 0)

    def _finish(self, cluster: Cluster) -> None:
        for cta in cluster.ctas:
            if cta.tmem is not None and cta.tmem.allocations:
                held = dict(sorted(cta.tmem.allocations.items()))
                raise EmulationError(
                    "trap",
                    f"kernel {self.kernel.name}: CTA {cta.coordinates} exits holding tensor "
                    f"memory {held} (first column: columns)",
                )

    def _check_budget(self, *turns: _Turn) -> None:
        limit = self.limits.instructions
        if limit is None:
            return
        done = self.context.statistics.instructions(self.kernel.compiled.segments)
        if done > limit:
            raise EmulationError(
                "budget",
                f"kernel {self.kernel.name}: {done} warp instructions issued, "
                f"the budget is {limit}; " + self._waiters(turns),
            )

    # -- reports of failure
    def _where(self, warp: Warp, site: int) -> str:
        info = self.kernel.compiled.instructions[site]
        return (
            f"kernel {self.kernel.name}, CTA {warp.cta.coordinates} (rank {warp.rank}), "
            f"warp {warp.index}, line {info.line}: {info.opcode}"
        )

    def _trap(self, warp: Warp) -> None:
        state = warp.state
        code = state.get("trap_code")
        raise EmulationError(
            "trap",
            f"{self._where(warp, state.get('site'))}: lane {state.get('trap_lane')}, "
            f"{state.get_wide('trap_address'):#x}: {FAULTS.get(code, f'fault {code}')}",
        )

    def _deadlock(self, turns: deque[_Turn]) -> None:
        raise EmulationError(
            "deadlock", f"kernel {self.kernel.name}: nothing can move. {self._waiters(turns)}"
        )

    def _waiters(self, turns: Iterable[_Turn]) -> str:
        lines = []
        for turn in turns:
            for warp in turn.cluster.warps:
                status = warp.state.get("status")
                if status != Status.EXITED:
                    where = self._where(warp, warp.state.get("site"))
                    lines.append(f"{where}: {self._reason(turn.cluster, warp, status)}")
        return "\n".join(["waiting:", *lines])

    def _reason(self, cluster: Cluster, warp: Warp, status: int) -> str:
        state = warp.state
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
        if status == Status.UNIT:
            return "an asynchronous operation or tensor-memory columns"
        return "spinning"
