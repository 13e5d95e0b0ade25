"""``vllm serve`` over HTTP with every MoE layer executed by the emulated sm_107a kernels."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.serve, pytest.mark.long]


@pytest.mark.parametrize("form", ["nvfp4-ue4m3", "nvfp4-ue5m3"])
def test_greedy_answers_equal_the_cpu_backends_with_the_same_numerics(form, monkeypatch):
    found = importlib.util.spec_from_file_location("emulated", ROOT / "scripts/serve_emulated.py")
    script = importlib.util.module_from_spec(found)
    monkeypatch.setitem(__import__("sys").modules, "emulated", script)  # its dataclass looks there
    found.loader.exec_module(script)
    for name in ("RUBIN_MOE_BACKEND", "RUBIN_MOE_ACTIVATION_FORMAT"):
        monkeypatch.setenv(name, "")  # what the script sets is taken back
    row = script.compare(ROOT / "models" / "kjv" / form, num_tokens=4)
    assert row["equal_tokens"]
    assert "sm107-emulated" in row["served_by"]
    assert row["emulator_seconds_per_token"] > 0
