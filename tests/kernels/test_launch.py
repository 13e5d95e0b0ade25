"""What the driver's launcher hands to CUDA; no GPU."""

import ctypes

import pytest
import torch

from rubin_moe.kernels import launch
from rubin_moe.kernels.launch import At, CompiledKernel, DriverLauncher

CLUSTER, PROGRAMMATIC = 4, 6  # CU_LAUNCH_ATTRIBUTE_*


class Driver:
    """A driver that keeps the launches' grid and attributes, and the last one's stream and
    arguments, eight bytes each."""

    def __init__(self, name: str) -> None:
        self.launches: list[tuple[tuple[int, ...], dict[int, list[int]]]] = []

    def __getattr__(self, name: str):
        return lambda *args: 0

    def cuLaunchKernelEx(self, config, function, pointers, extra) -> int:  # noqa: N802
        c = config._obj
        given = {c.attributes[i].id: list(c.attributes[i].value) for i in range(c.num_attributes)}
        self.launches.append((tuple(c.grid), given))
        self.stream = c.stream
        self.slots = [ctypes.c_uint64.from_address(p).value for p in pointers]
        return 0


@pytest.fixture
def launcher(monkeypatch) -> DriverLauncher:
    monkeypatch.setattr("ctypes.CDLL", Driver)
    monkeypatch.setattr(launch, "_stream", lambda device: 77)
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


def test_each_launch_has_its_own_arguments(launcher):
    """What the driver reads is kept from launch to launch and filled anew."""
    first, second = torch.zeros(2), torch.zeros(4)
    same = kernel("", 1)
    launcher.launch(same, 8, [first, 3, None])
    assert launcher._cuda.slots == [first.data_ptr(), 3, 0]
    launcher.launch(same, 5, [None, -1, At(second, 8)])
    assert launcher._cuda.slots == [0, 2**64 - 1, second.data_ptr() + 8]
    assert launcher._cuda.stream == 77
    assert [grid for grid, _ in launcher._cuda.launches] == [(8, 1, 1), (5, 1, 1)]


def test_a_failure_of_the_driver_is_an_error(launcher, monkeypatch):
    monkeypatch.setattr(launcher, "_launch", lambda *args: 719)
    with pytest.raises(launch.DriverError, match="cuLaunchKernelEx: unknown error"):
        launcher.launch(kernel("", 1), 8, [3])
