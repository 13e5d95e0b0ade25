"""`rubin-moe emulate` on a launch that is written by hand: no CuTe DSL, no host code."""

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner, Result

from rubin_moe.cli import app
from rubin_moe.emulator.saved import SavedBuffer, SavedLaunch

_PTX = """
.version 9.4
.target sm_107a
.address_size 64
.visible .entry negate(.param .u64 x)
{
 .reg .b32 %r<4>; .reg .b64 %d<4>;
 mov.u32 %r0, %tid.x; ld.param.u64 %d0, [x]; mul.wide.u32 %d1, %r0, 4; add.s64 %d0, %d0, %d1;
 ld.global.u32 %r1, [%d0]; neg.s32 %r1, %r1; st.global.u32 [%d0], %r1;
 BODY
 ret;
}
"""
_ADDRESS = 0x12_3450_0000


def _save(path: Path, body: str = "") -> None:
    data = np.arange(64, dtype=np.int32).tobytes()
    SavedLaunch(
        "sm_107a",
        _PTX.replace("BODY", body),
        "negate",
        (1, 1, 1),
        (64, 1, 1),
        (1, 1, 1),
        0,
        _ADDRESS.to_bytes(8, "little"),
        (SavedBuffer(_ADDRESS, data),),
    ).save(path)


def _emulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["emulate", *arguments])


def test_report_and_memory(tmp_path: Path) -> None:
    _save(tmp_path / "negate.launch")
    result = _emulate(
        str(tmp_path / "negate.launch"),
        *("--json", "--memory", str(tmp_path / "after"), "--picture", str(tmp_path / "maps.png")),
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["instructions"]["neg.s32"] == 2
    after = np.fromfile(tmp_path / "after/buffer_0.bin", np.int32)
    assert np.array_equal(after, -np.arange(64))
    assert (tmp_path / "maps.png").read_bytes()[1:4] == b"PNG"


def test_trap_exits_with_1_and_names_the_line(tmp_path: Path) -> None:
    _save(tmp_path / "trap.launch", "trap;")
    result = _emulate(str(tmp_path / "trap.launch"))
    assert result.exit_code == 1
    assert "trap" in result.stderr
    assert "line 10" in result.stderr


def test_rules_end_a_race_or_list_it(tmp_path: Path) -> None:
    """Every warp writes the first word."""
    path = str(tmp_path / "race.launch")
    _save(tmp_path / "race.launch", "ld.param.u64 %d0, [x]; st.global.u32 [%d0+256], %r0;")
    assert _emulate(path).exit_code == 1  # outside the buffer
    _save(tmp_path / "race.launch", "ld.param.u64 %d0, [x]; st.global.u32 [%d0], %r0;")
    assert _emulate(path).exit_code == 0
    enforced, listed = _emulate(path, "--rules", "enforce"), _emulate(path, "--rules", "report")
    assert (enforced.exit_code, listed.exit_code) == (1, 0)
    assert "order: " in enforced.stderr
    assert "error: kernel negate" in listed.stdout


def test_refusals_exit_with_2(tmp_path: Path) -> None:
    _save(tmp_path / "odd.launch", "brx.idx %r1, somewhere;")
    unknown = _emulate(str(tmp_path / "odd.launch"))
    (tmp_path / "text.launch").write_text("no launch")
    foreign = _emulate(str(tmp_path / "text.launch"))
    assert (unknown.exit_code, foreign.exit_code) == (2, 2)
    assert "brx.idx" in unknown.stderr
    assert "not a saved launch" in foreign.stderr
