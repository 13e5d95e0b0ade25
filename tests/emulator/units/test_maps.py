"""The picture of tensor and shared memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rubin_moe.emulator.maps import Region, draw_maps, draw_report, pack_rows
from rubin_moe.emulator.report import Place, Report


def test_overlapping_regions_get_rows_of_their_own() -> None:
    regions = [Region(0, 256, "D0"), Region(192, 448, "D1"), Region(448, 480, "SFA")]
    rows = pack_rows(regions)
    assert [[r.label for r in row] for row in rows] == [["D0", "SFA"], ["D1"]]
    assert pack_rows([]) == []


def test_picture(tmp_path: Path) -> None:
    path = tmp_path / "maps.png"
    tmem = [Region(0, 256, "D", "mma"), Region(512, 544, "SFA", "cp"), Region(0, 64, "st", "st")]
    smem = [Region(1024, 17408, "A stage 0", "tma")]
    draw_maps(path, tmem, smem, tmem_columns=576, smem_bytes=334848, title="kernel")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    empty = tmp_path / "empty.png"
    draw_maps(empty, [], [], tmem_columns=576, smem_bytes=334848)
    assert path.stat().st_size > empty.stat().st_size > 0


def test_picture_of_a_launch(tmp_path: Path) -> None:
    report = Report(
        kernel="k",
        target="sm_107a",
        grid=(1, 1, 1),
        block=(128, 1, 1),
        cluster=(1, 1, 1),
        shared_bytes=4096,
        instructions={},
        roles={},
        warps={},
        bytes={},
        mma_count=0,
        mma_macs=0,
        useful_macs=None,
        peak_tmem_columns=64,
        smem_map=[Place(1024, 8192, "TMA load")],
        tmem_map=[Place(0, 64, "accumulator")],
    )
    path = tmp_path / "launch.png"
    draw_report(path, report)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_importing_the_module_does_not_import_matplotlib() -> None:
    code = "import sys, rubin_moe.emulator.maps; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
