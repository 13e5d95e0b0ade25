"""Prefill kernels for Hopper: right results, and every order that they need is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from rubin_moe.emulator import EmulationError
from tests.emulator.engine.harness import module, run
from tests.emulator.rules.hopper_kernels import kernel, launch, problem

FORMS = [
    (8, "bf16", "bf16"),
    (72, "f16", "f16"),
    (256, "bf16", "bf16"),
    (40, "e4m3", "e4m3"),
    (136, "e4m3", "e5m2"),
    (256, "e5m2", "e4m3"),
]


@pytest.mark.parametrize(("n", "a", "b"), FORMS)
def test_gathered_tokens_times_registers(n: int, a: str, b: str) -> None:
    p = problem(n, a, b)
    text = kernel(n, a, b)
    for seed in (None, 1, 2):
        p.out.fill(np.nan)
        report = launch(text, p, seed)
        assert report.findings == []
        np.testing.assert_array_equal(p.result(), p.expected())


def _broken(change: dict[str, str], seed: int | None = None) -> EmulationError:
    with pytest.raises(EmulationError) as error:
        launch(kernel(16, "bf16", "bf16", change), problem(16, "bf16", "bf16"), seed)
    return error.value


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"registers": ""}, "wgmma: first fence"),
        ({"announce": "mbarrier.arrive.shared::cta.b64 _, [%full];"}, "order: asynchronous result"),
        ({"older": "wgmma.wait_group.sync.aligned 2;"}, "order: wgmma registers"),
        ({"last": ""}, "order: wgmma registers"),
        ({"last": "mov.f32 %f1, 0f00000000; wgmma.wait_group.sync.aligned 0;"},
         "order: wgmma registers"),
        ({"last": "mov.b32 %a0, 0; wgmma.wait_group.sync.aligned 0;"}, "order: wgmma registers"),
        ({"last": "wgmma.wait_group.sync.aligned 1;"}, "order: wgmma registers"),
    ],
)  # fmt: skip
def test_what_orders_them_is_asked_for(change: dict[str, str], rule: str) -> None:
    """In the first execution and in a seeded one: values may be right."""
    for seed in (None, 1):
        error = _broken(change, seed)
        assert error.rule == rule
        assert error.finding is not None
        assert error.finding.line > 0


def test_a_stage_is_handed_back_after_the_products_that_read_it() -> None:
    """The registers are ordered, the arrival that hands the stage back comes too early."""
    early = "@%first mbarrier.arrive.shared::cta.b64 _, [%free];"
    change = {"older": "add.u32 %free, %r1, 64;" + early + "wgmma.wait_group.sync.aligned 0;",
              "together": "setp.ne.u32 %first, 0, 0;"}  # fmt: skip
    assert _broken(change).rule == "order: overwritten source"


ISA = [
    ({"proxy": ""}, "order: cp.async proxy fence"),
    ({"last": "add.u32 %at, %a0, 1; wgmma.wait_group.sync.aligned 0;"}, "order: wgmma factors"),
    ({"first": "%leads"}, "order: wgmma warps"),
]


@pytest.mark.parametrize(("change", "rule"), ISA)
def test_what_the_letter_asks_is_reported(change: dict[str, str], rule: str) -> None:
    report = launch(kernel(16, "bf16", "bf16", change), problem(16, "bf16", "bf16"))
    assert {(f.rule, f.severity) for f in report.findings} == {(rule, "isa")}


def test_a_warpgroup_that_meets_hands_a_stage_back_once() -> None:
    together = {"first": "%leads", "together": "add.u32 %at, %i3, 1; bar.sync %at, 128;"}
    p = problem(16, "bf16", "bf16")
    assert launch(kernel(16, "bf16", "bf16", together), p).findings == []
    np.testing.assert_array_equal(p.result(), p.expected())


def budget(first: int, others: int, head: str = ".maxntid 384, 1, 1") -> str:
    """Warpgroup 0 gives registers up, the others take some."""
    body = f"""
 mov.u32 %i0, %tid.x; setp.lt.u32 %p1, %i0, 128; @%p1 bra LESS;
 setmaxnreg.inc.sync.aligned.u32 {others}; bra END;
 LESS: setmaxnreg.dec.sync.aligned.u32 {first}; END:"""
    return module(body, target="sm_90a").replace("k()", f"k()\n{head}")


@pytest.mark.parametrize(
    ("less", "more", "head", "threads"),
    [(24, 240, ".maxntid 384, 1, 1", 384), (40, 232, ".maxntid 384, 1, 1", 384),
     (56, 152, ".reqntid 512, 1, 1", 512), (24, 104, ".maxntid 256 .minnctapersm 4", 256)],
)  # fmt: skip
def test_registers_that_the_pool_has(less: int, more: int, head: str, threads: int) -> None:
    for seed in (None, 1):
        run(budget(less, more, head), [], block=threads, seed=seed)


@pytest.mark.parametrize(
    ("less", "more", "head", "rule"),
    [(48, 232, ".maxntid 384, 1, 1", "setmaxnreg: pool"),
     (24, 248, ".maxntid 384, 1, 1", "setmaxnreg: pool"),
     (40, 176, ".maxntid 384, 1, 1 .maxnreg 128", "setmaxnreg: pool"),
     (20, 232, ".maxntid 384, 1, 1", "setmaxnreg: count"),
     (24, 264, ".maxntid 384, 1, 1", "setmaxnreg: count")],
)  # fmt: skip
def test_registers_that_it_has_not(less: int, more: int, head: str, rule: str) -> None:
    """(48, 232) hung on an H200: 168 registers a thread at launch do not go round."""
    with pytest.raises(EmulationError) as error:
        run(budget(less, more, head), [], block=384)
    assert error.value.rule == rule
    if rule == "setmaxnreg: pool":
        assert f"({more} a thread); " in str(error.value)


def test_a_warpgroup_changes_its_registers_together() -> None:
    body = "mov.u32 %i0, %tid.x; setp.lt.u32 %p1, %i0, 32; @%p1 bra END; "
    body += "setmaxnreg.dec.sync.aligned.u32 40; END:"
    with pytest.raises(EmulationError) as error:
        run(module(body, target="sm_90a"), [], block=128)
    assert error.value.rule == "setmaxnreg: warpgroup"
