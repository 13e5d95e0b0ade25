"""Launches saved with their expected memory: run at other addresses, compared, named."""

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from rubin_moe.cli import app
from rubin_moe.emulation import EmulatorLauncher
from rubin_moe.emulator.compile import load_ptx
from rubin_moe.emulator.launch import Device
from rubin_moe.errors import ConfigError
from rubin_moe.formats.spec import MXFP4
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.sm107.host import Sm107Kernel
from rubin_moe.layers.experts import problem_of
from rubin_moe.replay import record
from rubin_moe.replay.compare import compare
from rubin_moe.replay.file import Bytes, ReplayFile, load
from rubin_moe.replay.gpu import relocate, replay


class EmulatedMachine:
    """The emulator in the GPU's place, with memory of its own."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            self._ptx = archive.read("kernel.ptx").decode()
        self._held: dict[int, Bytes] = {}

    def allocate(self, data: Bytes) -> int:
        array = data.copy()
        self._held[array.ctypes.data] = array
        return array.ctypes.data

    def launch(self, file: ReplayFile, params: Sequence[bytes]) -> None:
        device = Device(file.arch)
        for array in self._held.values():
            device.register(array)
        device.launch(
            load_ptx(self._ptx).entry(file.kernel),
            file.grid,
            file.block,
            list(params),
            cluster=file.cluster,
            dynamic_smem=file.dynamic_smem_bytes,
        )

    def read(self, address: int, nbytes: int) -> Bytes:
        return self._held[address][:nbytes].copy()

    def free(self, address: int) -> None:
        del self._held[address]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> list[Path]:
    """One gpt-oss layer's launches."""
    weights = record.layer(MXFP4, width=64)
    problem = replace(
        problem_of(weights, 2, Activation("swigluoai", limit=7.0), torch.bfloat16),
        activation_format="mxfp8",
    )
    folder = tmp_path_factory.mktemp("launches")
    launcher = record.RecordingLauncher(folder, EmulatorLauncher())
    kernel = Sm107Kernel(problem, launcher, num_ctas=2)
    x, ids, topk_weights = record.batch(5, width=64)
    kernel.run(kernel.prepare(weights), x, ids, topk_weights)
    return launcher.saved


def named(saved: list[Path], kernel: str) -> Path:
    return next(path for path in saved if kernel in path.name)


def test_every_launch_of_a_layer_is_saved_and_repeats_elsewhere(saved):
    kernels = [path.stem.partition("_")[2] for path in saved]
    assert kernels == [
        "sm107_route_tokens",
        "sm107_quantize_tokens",
        "sm107_gather_gemm_swiglu",
        "sm107_gemm_finalize",
        "sm107_sum_choices",
    ]
    for path in saved:
        outcome = replay(EmulatedMachine(path), load(path))
        assert outcome.equal, outcome
        assert outcome.changed > 0


def test_only_addresses_move(saved):
    file = load(named(saved, "gather"))
    places = [address + (1 << 40) for address in file.addresses]
    moved, old = (
        np.frombuffer(p[: len(p) // 8 * 8], np.uint64)
        for p in (relocate(file, places), file.params)
    )
    assert set((moved - old).tolist()) == {0, 1 << 40}
    assert relocate(file, file.addresses) == file.params


def test_the_first_tile_that_differs_is_named(saved):
    """Two faulty bytes in FC1's codes: row 7's 40th and one of a later tile."""
    file = load(named(saved, "gather"))
    out = next(t for t in file.tensors if t.name == "sorted out_codes")
    got = [data.copy() for data in file.after]
    for row, column in ((7, 40), (8, 70)):
        got[out.buffer][out.offset + row * out.columns + column] ^= 0x80
    outcome = compare(file, got)
    assert (outcome.differing, outcome.tiles) == (2, 2)
    assert outcome.first.startswith("sorted out_codes, tile of rows 0-9, columns 32-63: [7, 40] is")
    work = next(t for t in file.tensors if t.name == "work")
    items = file.after[work.buffer][work.offset :].view(np.int32)[: work.rows * 4].reshape(-1, 4)
    expert = next(e for e, first, count, _ in items if first <= 7 < first + count)
    assert f"(expert {expert}, token " in outcome.first


def test_a_fault_outside_every_tensor_is_found(saved):
    file = load(named(saved, "sum"))
    bare = replace(file, tensors=())
    got = [data.copy() for data in file.after]
    got[1][3] ^= 1
    assert compare(bare, got).first == "buffer 1, byte 3, which no tensor covers"


def test_a_launch_without_expected_memory_is_refused_until_it_has_it(saved, tmp_path):
    path = tmp_path / "bare.launch"
    with zipfile.ZipFile(named(saved, "sum")) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            if not name.startswith(("after_", "replay")):
                target.writestr(name, source.read(name))
    with pytest.raises(ConfigError, match="no expected memory"):
        load(path)
    # in a process of its own, where the launch's addresses are free
    command = "from rubin_moe.cli import main; main()"
    subprocess.run([sys.executable, "-c", command, "replay", "--expect", str(path)], check=True)
    whole = load(named(saved, "sum"))
    for mine, theirs in zip(load(path).after, whole.after, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    (tmp_path / "text.launch").write_text("no zip")
    with pytest.raises(ConfigError, match="is no saved launch"):
        load(tmp_path / "text.launch")


def test_the_command_says_what_is_missing(saved, monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: (_ for _ in ()).throw(OSError("none")))
    result = CliRunner().invoke(app, ["replay", str(saved[0].parent)])
    assert result.exit_code == 2
    assert "no CUDA driver here" in result.output
    assert CliRunner().invoke(app, ["replay"]).exit_code == 2
