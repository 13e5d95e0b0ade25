"""Lanes of a warp that wait for different things: all get on, and a deadlock is a real one.

PTX ISA, Independent Thread Scheduling: a thread that can run does so sooner or later, whatever
other threads of its warp wait for.
"""

from __future__ import annotations

import numpy as np
import pytest

from rubin_moe.emulator import EmulationError, Limits, Report
from tests.emulator.engine.harness import module, run

HEAD = """
 .shared .align 128 .b8 s[1024]; .reg .pred %low; .reg .pred %first;
 mov.u32 %i0, %tid.x; and.b32 %i1, %i0, 31; mov.u32 %r1, s; ld.param.u64 %addr1, [out];
 setp.lt.u32 %low, %i1, 16; setp.eq.u32 %first, %i0, 0; mov.b32 %r2, 0; mov.b32 %r3, 1;
 @%first mbarrier.init.shared.b64 [%r1], 16; @%first mbarrier.init.shared.b64 [%r1+8], 16;
 fence.mbarrier_init.release.cluster; bar.sync 0;
"""
ARRIVE = "mbarrier.arrive.shared.b64 _, [{}];"


def wait(label: str, barrier: str, parity: str = "0") -> str:
    """Loop until the phase completes."""
    test = f"mbarrier.try_wait.parity.shared.b64 %p1, [{barrier}], {parity};"
    return f"{label}: {test} @!%p1 bra {label};"


def work(iterations: int) -> str:
    """A loop that touches registers alone."""
    return (
        "mov.b32 %r9, 0; WORK: add.u32 %r9, %r9, 1; "
        f"setp.lt.u32 %p2, %r9, {iterations}; @%p2 bra WORK;"
    )


BODIES = {
    "work while lanes wait at a lower place": "@%low bra LOW;" + wait("A", "%r1") + "bra END; LOW:"
    + work(100_000) + ARRIVE.format("%r1") + "END:",
    "work while lanes poll memory": "@%low bra LOW; POLL: ld.volatile.global.b32 %r5, [%addr1];"
    "setp.eq.u32 %p3, %r5, 0; @%p3 bra POLL; bra END; LOW:" + work(100_000)
    + "st.volatile.global.b32 [%addr1], %r3; END:",
    "two loops on two mbarriers": "@%low bra LOW;" + wait("A", "%r1") + ARRIVE.format("%r1+8")
    + "bra END; LOW:" + work(50_000) + ARRIVE.format("%r1") + wait("B", "%r1+8") + "END:",
    "one loop on two mbarriers": "@%low " + ARRIVE.format("%r1")
    + "selp.b32 %r6, %r1, 0, %low; add.u32 %r7, %r1, 8; selp.b32 %r6, %r1, %r7, %low;"
    + wait("A", "%r6") + "@%low " + ARRIVE.format("%r1+8") + " bar.warp.sync -1;",
    "one loop on two parities": "selp.b32 %r6, 1, 0, %low;" + wait("A", "%r1", "%r6") + "@%low "
    + ARRIVE.format("%r1") + " bar.warp.sync -1;",
    "halves of a warp hand a stage on and back": "mov.b32 %r10, 0; selp.b32 %r11, 1, 0, %low;"
    "add.u32 %r7, %r1, 8; selp.b32 %r6, %r7, %r1, %low; selp.b32 %r8, %r1, %r7, %low;"
    "LOOP:" + wait("A", "%r6", "%r11") + ARRIVE.format("%r8") + "xor.b32 %r11, %r11, 1;"
    "add.u32 %r10, %r10, 1; setp.lt.u32 %p3, %r10, 50; @%p3 bra LOOP;",
    "a thread polls one mbarrier after another": "@!%first bra END;"
    + "".join(f"mbarrier.init.shared.b64 [%r1+{16 + 8 * i}], 1;" for i in range(8))
    + ARRIVE.format("%r1+72") + "AGAIN:" + "".join(
        f"mbarrier.try_wait.parity.shared.b64 %p1, [%r1+{16 + 8 * i}], 0; @%p1 bra END;"
        for i in range(8)) + "bra AGAIN; END:",
    "lanes leave between collectives": "setp.gt.u32 %p4, %i1, 23; @%p4 bra GO; "
    "setp.gt.u32 %p5, %i1, 15; @%p5 bra GO2; bar.warp.sync -1; add.u32 %r5, %r5, 1;"
    "bar.warp.sync -1; bra END; GO2: " + wait("A", "%r1+8", "1")
    + "exit; GO: " + wait("B", "%r1+8", "1") + "exit; END:",
}  # fmt: skip


def launch(body: str, seed: int | None, rules: str | None, spins: int = 60) -> Report:
    text = module(HEAD + body, ".param .u64 out", target="sm_90a")
    return run(
        text, [np.zeros(64, np.uint32)], block=64, seed=seed, rules=rules,
        limits=Limits(spins=spins, instructions=50_000_000),
    )  # fmt: skip


def one_warp(body: str) -> str:
    """The second warp waits at a barrier for the first."""
    return f"setp.gt.u32 %p15, %i0, 31; @%p15 bra OUT; {body} OUT: bar.sync 1;"


@pytest.mark.parametrize("rules", [None, "enforce"])
@pytest.mark.parametrize("name", BODIES)
def test_every_lane_gets_on(name: str, rules: str | None) -> None:
    for seed in (None, 1):
        launch(one_warp(BODIES[name]) if "exit" not in BODIES[name] else BODIES[name], seed, rules)


STUCK = {
    "two loops": ("@%low bra LOW;" + wait("A", "%r1") + "bra END; LOW:" + wait("B", "%r1+8")
                  + "END:", "deadlock: spinning"),
    "one loop": ("selp.b32 %r6, 8, 0, %low; add.u32 %r6, %r6, %r1;" + wait("A", "%r6"),
                 "deadlock: spinning"),
    "a whole warp": (wait("A", "%r1"), "deadlock: waiting"),
    "lanes at two collectives": ("@%low bra LOW; bar.warp.sync -1; bra END; LOW: bar.warp.sync "
                                 "0x1FFFF; END:", "deadlock: collectives"),
}  # fmt: skip


@pytest.mark.parametrize("name", STUCK)
def test_what_gets_nowhere_is_a_deadlock(name: str) -> None:
    """However long the launch may spin: every warp is where it was before."""
    body, rule = STUCK[name]
    for seed in (None, 1):
        with pytest.raises(EmulationError) as error:
            launch(one_warp(body), seed, None, spins=10**9)
        assert error.value.rule == rule


def test_a_loop_that_counts_ends_with_the_limit() -> None:
    """It never comes back to a state that it was in, so nothing but the limit can tell."""
    body = "POLL: add.u32 %r9, %r9, 1; ld.volatile.global.b32 %r5, [%addr1]; add.u32 %r5, %r5, %r9;"
    body = "mov.b32 %r9, 0;" + body + "setp.ne.u32 %p3, %r5, 0; @%p3 bra POLL;"
    with pytest.raises(EmulationError) as error:
        launch(body, None, None, spins=20)
    assert error.value.rule == "deadlock: spinning"
