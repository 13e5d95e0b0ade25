"""The order of accesses: each rule kept and broken by small kernels, whatever the values are."""

from __future__ import annotations

import numpy as np
import pytest

from rubin_moe.emulator import Device, EmulationError, Limits, Report, load_ptx
from tests.emulator.rules.order_kernels import CASES, LEGAL, Case

SEEDS = (None, 1, 2)


def launch(case: Case, legal: bool, seed: int | None, rules: str = "enforce") -> Report:
    """One launch of a case on a fresh device."""
    kernel = load_ptx(case.text(legal), deferred=seed is not None, checked=True)
    storage = np.zeros(4096 + 512 + 128, np.uint8)
    start = -storage.ctypes.data % 128
    a, b = storage[start : start + 512], storage[start + 512 : start + 4608]
    device = Device("sm_107a")
    limits = Limits(spins=50, instructions=1_000_000)
    return device.launch(
        kernel, case.grid, case.block, [a, b], cluster=case.cluster, seed=seed, rules=rules,
        limits=limits,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES + LEGAL, ids=lambda case: case.name)
def test_what_is_ordered_passes(case: Case) -> None:
    for seed in SEEDS:
        report = launch(case, True, seed)
        assert [f for f in report.findings if f.severity == "error"] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_not_ordered_is_named(case: Case) -> None:
    """In the first execution, not in some seed: values may be right."""
    with pytest.raises(EmulationError) as error:
        launch(case, False, None)
    assert error.value.rule in case.rule.split("|")
    finding = error.value.finding
    if error.value.outcome == "trap" and error.value.rule.startswith("order"):
        assert finding is not None
        assert finding.line > 0
        assert finding.other is None or finding.other.line > 0
