"""The rules that the other tests enforce see what is taken out of these kernels."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from rubin_moe.emulation import EmulatorLauncher
from rubin_moe.emulator.errors import EmulationError
from rubin_moe.emulator.findings import Mode
from rubin_moe.kernels.launch import Argument, CompiledKernel
from rubin_moe.kernels.sm107.host import Sm107Kernel, make_work

from .layers import Case
from .test_emulated import kernel


class Changed(EmulatorLauncher):
    """Runs kernels whose name contains ``which`` with other PTX."""

    def __init__(self, which: str, change: Callable[[str], str], rules: Mode = "enforce") -> None:
        super().__init__(keep_reports=True, rules=rules)
        self.which, self.change = which, change

    def launch(self, kernel: CompiledKernel, grid: int, args: Sequence[Argument]) -> None:
        if self.which in kernel.name:
            changed = self.change(kernel.ptx)
            assert changed != kernel.ptx
            kernel = replace(kernel, ptx=changed, key=f"{kernel.key} changed")
        super().launch(kernel, grid, args)


def without(pattern: str, number: int | None = None) -> Callable[[str], str]:
    """PTX without the lines that match: all, or the one of that number."""

    def change(ptx: str) -> str:
        found = list(re.finditer(rf"(?m)^\s*{pattern}.*;$", ptx))
        assert found, pattern
        for line in reversed(found if number is None else [found[number]]):
            ptx = ptx[: line.start()] + ptx[line.end() :]
        return ptx

    return change


@pytest.mark.parametrize("number", range(4))
def test_routing_without_one_of_its_barriers(number):
    launcher = Changed("route", without(r"bar\.sync", number))
    ids = torch.randint(0, 40, (300, 4), generator=torch.Generator().manual_seed(1))
    with pytest.raises(EmulationError) as error:
        make_work(launcher, ids, None, 40, 32)
    assert error.value.rule is not None
    assert error.value.rule.startswith(("order:", "poison:"))


def layer(launcher: Changed) -> None:
    case = Case("nvfp4-ue4m3", 7, 2, 256, 64)
    k = Sm107Kernel(kernel(case).problem, launcher, num_ctas=1)
    k.run(k.prepare(case.weights()), *case.batch())


def test_a_gather_that_does_not_wait_for_its_copies():
    with pytest.raises(EmulationError) as error:
        layer(Changed("gather_gemm", without(r"cp\.async\.wait_group")))
    assert error.value.rule is not None
    assert error.value.rule.startswith(("order:", "poison:"))


def test_a_gather_that_does_not_show_its_copies_to_the_tensor_core():
    """The letter of the ISA: kernels that run on silicon leave this fence out."""
    launcher = Changed("gather_gemm", without(r"fence\.proxy\.async"), rules="report")
    layer(launcher)
    found = {finding.rule for report in launcher.reports for finding in report.findings}
    assert found == {"order: cp.async proxy fence"}
