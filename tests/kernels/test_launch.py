"""What the driver's launcher hands to CUDA; no GPU."""

from types import SimpleNamespace

import pytest
import torch

from rubin_moe.kernels.launch import CompiledKernel, DriverLauncher

CLUSTER, PROGRAMMATIC = 4, 6  # CU_LAUNCH_ATTRIBUTE_*


class Driver:
    """A driver that keeps the launches' grid and attributes."""

    def __init__(self, name: str) -> None:
        self.launches: list[tuple[tuple[int, ...], dict[int, list[int]]]] = []

    def __getattr__(self, name: str):
        return lambda *args: 0

    def cuLaunchKernelEx(self, config, function, pointers, extra) -> int:  # noqa: N802
        c = config._obj
        given = {c.attributes[i].id: list(c.attributes[i].value) for i in range(c.num_attributes)}
        self.launches.append((tuple(c.grid), given))
        return 0


@pytest.fixture
def launcher(monkeypatch) -> DriverLauncher:
    monkeypatch.setattr("ctypes.CDLL", Driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return DriverLauncher()


def kernel(ptx: str, cluster: int) -> CompiledKernel:
    return CompiledKernel("k", "sm_107a", "entry", ptx, b"", 320, 1024, f"{ptx}{cluster}", cluster)


@pytest.mark.parametrize(
    ("ptx", "cluster", "expected"),
    [
        ("", 1, {}),
        ("", 2, {CLUSTER: [2, 1, 1]}),
        ("griddepcontrol.wait;", 1, {PROGRAMMATIC: [1]}),
        ("griddepcontrol.wait;", 2, {CLUSTER: [2, 1, 1], PROGRAMMATIC: [1]}),
    ],
)
def test_clusters_and_overlapping_launches_are_asked_for(launcher, ptx, cluster, expected):
    launcher.launch(kernel(ptx, cluster), 8, [torch.zeros(2), 3, None])
    ((grid, given),) = launcher._cuda.launches
    assert grid == (8, 1, 1)
    assert {key: value[: len(expected[key])] for key, value in given.items()} == expected
