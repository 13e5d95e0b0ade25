"""``rubin-moe convert`` and its script: dry run, progress, refusals."""

import json
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from rubin_moe.cli import app
from tests.convert.sources import write_dense, write_fp4

SCRIPT = Path(__file__).parents[2] / "scripts" / "convert_checkpoint.py"


def run(*args):
    return CliRunner().invoke(app, ["convert", *map(str, args)])


def test_a_dry_run_writes_nothing_and_needs_no_torch(tmp_path):
    source = write_dense(tmp_path / "a", "bf16")
    code = (
        "import sys; from rubin_moe.cli import main\n"
        f"sys.argv = ['rubin-moe', 'convert', {str(source)!r}, {str(tmp_path / 'b')!r}, '--to', "
        "'nvfp4-ue4m3', '--dry-run']\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code\n"
        "assert 'torch' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "1 layers of experts: bf16 -> nvfp4-ue4m3 (modelopt)" in found.stdout
    assert "model.safetensors: 42 tensors" in found.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_the_plan_is_what_is_written(tmp_path):
    source, _ = write_fp4(tmp_path / "a", "modelopt", shards=2)
    args = (source, tmp_path / "b", "--to", "nvfp4-ue5m3")
    told = run(*args, "--dry-run").output
    assert run(*args).exit_code == 0
    size = (tmp_path / "b" / "model.safetensors").stat().st_size
    assert f"{size:,} bytes" in told


def test_the_script_is_the_command(tmp_path):
    source = write_dense(tmp_path / "a", "bf16")
    args = [sys.executable, str(SCRIPT), str(source), str(tmp_path / "b"), "--to", "mxfp4"]
    found = subprocess.run(args, capture_output=True, text=True, check=True)
    assert "verified" in found.stdout
    again = subprocess.run(args, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert "Traceback" not in again.stderr
    record = json.loads((tmp_path / "b" / "conversion.json").read_text())
    assert record["options"]["mx_rule"] == "ceil"


def test_progress_is_told_in_units_of_its_own():
    from rubin_moe.cli.bars import Bars

    bars = Bars()
    for done in (1, 2):
        bars.report("calibrate", done, 7)
    bars.report("verify", 2_000_000, 5_000_000)
    assert [t.description for t in bars.tasks] == ["calibrate", "verify"]
    assert bars.tasks[0].fields["told"].startswith("3/7 tokens")
    assert bars.tasks[1].fields["told"].startswith("2/5 MB")
