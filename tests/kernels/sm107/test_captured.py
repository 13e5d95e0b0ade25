"""A whole layer's launches again, as a captured graph replays them, with another routing."""

from collections.abc import Sequence

import pytest
import torch

from rubin_moe.kernels.launch import Argument, CompiledKernel, Launcher

from .layers import Case
from .test_emulated import kernel


class Capture:
    """Launches, and keeps what was launched."""

    def __init__(self, inner: Launcher) -> None:
        self.inner = inner
        self.launches: list[tuple[CompiledKernel, int, list[Argument]]] = []

    def launch(self, kernel: CompiledKernel, grid: int, args: Sequence[Argument]) -> None:
        self.launches.append((kernel, grid, list(args)))
        self.inner.launch(kernel, grid, args)

    def replay(self) -> None:
        """All of them, and what the host clears before two of them."""
        cleared = {"sm107_gather_gemm_swiglu": (9, 10), "sm107_gemm_finalize": (8,)}
        for compiled, grid, args in self.launches:
            for index in cleared.get(compiled.name, ()):
                buffer = args[index]
                assert isinstance(buffer, torch.Tensor)
                buffer.zero_()
            self.inner.launch(compiled, grid, args)


@pytest.mark.parametrize(
    "case",
    [
        Case("nvfp4-ue4m3", 23, 4, 64, 96),
        Case("mxfp4", 140, 3, 64, 96, kind="swigluoai"),  # a pair of CTAs
    ],
    ids=str,
)
def test_captured_launches_are_right_for_any_routing(case):
    k = kernel(case)
    prepared, (x, ids, weights) = k.prepare(case.weights()), case.batch()
    capture = Capture(k._launch)
    k._launch = capture
    k.run(prepared, x, ids, weights)
    k._launch = capture.inner
    captured_sum = capture.launches[-1][2][1]
    tokens = torch.arange(case.tokens)[:, None]
    for routing in (
        torch.tensor([[1, 2]]).expand_as(ids),  # two experts get every token
        torch.where(tokens % 3 > 0, ids, -1),
        torch.full_like(ids, -1),
        (ids + tokens) % case.experts,
    ):
        ids.copy_(routing)
        x.copy_(x.roll(1, 0))
        capture.replay()
        assert torch.equal(captured_sum, k.run(prepared, x, ids, weights))
