"""Runs the clusters of a launch until all are done, or says why they cannot go on.

Clusters are admitted in order, as many as there are workers. A cluster whose turn ends without an
event rests until there is one; when all rest, the next cluster is admitted, up to the residency a
GPU would have: so clusters that wait for each other through global memory make progress, whatever
the number of workers. When all rest that may be in flight, waits time out; it is a deadlock when
every warp comes back to a state that it was in before.

The lock guards the rotation only; turns run outside it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

from rubin_moe.emulator.compile import Kernel
from rubin_moe.emulator.errors import EmulationError
from rubin_moe.emulator.machine import Cluster, Geometry, LaunchContext
from rubin_moe.emulator.state.registers import Status
from rubin_moe.emulator.worker import Limits, Turn, Worker, place_of

#: Seconds after which a resting cluster looks again while others are in the middle of their turn.
_POLL = 0.002
#: Seconds that an interrupted launch waits for the turns of other threads.
_GRACE = 10.0


class Scheduler:
    """Executes one launch with one worker for each context; the caller's thread is the first."""

    def __init__(
        self,
        kernel: Kernel,
        geometry: Geometry,
        contexts: Sequence[LaunchContext],
        limits: Limits,
    ) -> None:
        self.kernel, self.geometry, self.limits = kernel, geometry, limits
        self.workers = [Worker(kernel, context) for context in contexts]
        self._policy = contexts[0].policy
        self._resident = max(contexts[0].num_sms // geometry.cluster_size, 1)
        self._origins = geometry.cluster_origins()
        self._changed = threading.Condition()
        self._ready: deque[Turn] = deque()
        #: clusters whose last turn began in this epoch and ended without an event
        self._resting: list[Turn] = []
        self._running = 0
        self._epoch = 0
        self._rounds = 0
        #: by warp: its states at the ends of rounds since the last event, as hashes
        self._states: dict[int, set[int]] = {}
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Run to the end. Raises EmulationError: trap, deadlock or budget.

        An interrupt of the caller's thread (Ctrl-C, the time limit of a test) ends the launch even
        if another thread never comes back from its turn: it keeps alive what it works on.
        """
        threads = [
            threading.Thread(target=self._work, args=(worker,), name="emulator", daemon=True)
            for worker in self.workers[1:]
        ]
        for thread in threads:
            thread.start()
        self._work(self.workers[0])
        interrupted = not isinstance(self._failure, Exception | None)
        for thread in threads:
            thread.join(_GRACE if interrupted else None)
        failure = self._failure
        if failure is not None:
            if not any(thread.is_alive() for thread in threads):
                self._failure = None  # else a thread that comes back would go on
            raise failure

    def _work(self, worker: Worker) -> None:
        try:
            while (turn := self._take(worker)) is not None:
                self._give(turn, worker.run(turn))
        except BaseException as error:  # the caller's thread raises it
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        """The first failure ends the launch."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            for worker in self.workers:
                worker.stopped = True
            self._changed.notify_all()

    # -- the rotation, under the lock
    def _take(self, worker: Worker) -> Turn | None:
        """The next turn, or None when the launch has ended."""
        with self._changed:
            while self._failure is None:
                if self._ready:
                    turn = self._ready.popleft()
                    turn.epoch = self._epoch
                    self._running += 1
                    return turn
                busy = self._running + len(self._resting)
                if busy < len(self.workers) and self._admit(worker):
                    continue
                if self._running:
                    if not self._changed.wait(_POLL if self._resting else None):
                        self._wake()
                elif self._resting:
                    self._nothing_moves(worker)
                else:
                    return None
            return None

    def _give(self, turn: Turn, done: bool) -> None:
        """A turn has ended."""
        with self._changed:
            self._running -= 1
            if done or turn.moved:
                self._event()
            if not done:
                (self._resting if turn.epoch == self._epoch else self._ready).append(turn)
                self._check_budget()
            self._changed.notify_all()

    def _event(self) -> None:
        """Something happened that any cluster may have waited for."""
        self._epoch += 1
        self._rounds = 0
        self._states.clear()
        self._wake()

    def _wake(self) -> None:
        self._ready.extend(self._resting)
        self._resting.clear()
        self._changed.notify_all()

    def _admit(self, worker: Worker) -> bool:
        origin = next(self._origins, None)
        if origin is None:
            return False
        cluster = Cluster(self.kernel, self.geometry, origin, worker.context)
        self._ready.appendleft(Turn(cluster, self.kernel, self.limits))
        return True

    def _nothing_moves(self, worker: Worker) -> None:
        """A whole round without an event: admit a cluster, finish asynchronous work, let waits
        time out, or stop."""
        turns = list(self._resting)
        if (len(turns) < self._resident and self._admit(worker)) or self._policy.advance():
            self._event()
            return
        self._rounds += 1
        if self._repeats(turns) or self._rounds > self.limits.spins:
            self._deadlock(turns)
        for turn in turns:
            turn.expire_waits()
        self._wake()

    def _repeats(self, turns: Iterable[Turn]) -> bool:
        """Whether every warp is where it was before. Nothing that it could read has changed since
        the last event, so it will get nowhere; a warp that counts or computes is elsewhere."""
        repeats = True
        for turn in turns:
            for warp in turn.cluster.warps:
                if warp.state.get("status") != Status.EXITED:
                    seen = self._states.setdefault(id(warp), set())
                    state = hash(warp.state.memory.tobytes())
                    repeats &= state in seen
                    seen.add(state)
        return repeats

    # -- ends
    def _check_budget(self) -> None:
        limit = self.limits.instructions
        if limit is None:
            return
        segments = self.kernel.compiled.segments
        done = sum(w.context.statistics.instructions(segments) for w in self.workers)
        if done > limit:
            raise EmulationError(
                "budget",
                f"kernel {self.kernel.name}: {done} warp instructions issued, the budget is "
                f"{limit}; " + self._waiters([*self._ready, *self._resting]),
            )

    def _deadlock(self, turns: Iterable[Turn]) -> None:
        turns = list(turns)
        rule = "deadlock: spinning" if any(turn.spins() for turn in turns) else "deadlock: waiting"
        warps = [(turn, warp) for turn in turns for warp in turn.cluster.warps]
        if any(turn.wants_registers(warp) for turn, warp in warps):
            rule = "setmaxnreg: pool"
        text = f"kernel {self.kernel.name}: nothing can move. {self._waiters(turns)}"
        raise EmulationError("deadlock", text, rule)

    def _waiters(self, turns: Iterable[Turn]) -> str:
        lines = []
        for turn in turns:
            for warp in turn.cluster.warps:
                if warp.state.get("status") != Status.EXITED:
                    where = place_of(self.kernel, warp, warp.state.get("site"))
                    lines.append(f"{where}: {turn.reason(warp)}")
        return "\n".join(["waiting:", *lines])
