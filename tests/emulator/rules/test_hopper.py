"""Prefill kernels for Hopper: right results, and every order that they need is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from rubin_moe.emulator import EmulationError
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
