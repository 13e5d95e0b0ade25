"""The short form of scripts/soak_serve.py: vllm serve under clients that come and go."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.serve


def test_half_a_minute_of_clients():
    found = importlib.util.spec_from_file_location("soak", ROOT / "scripts" / "soak_serve.py")
    soak = importlib.util.module_from_spec(found)
    found.loader.exec_module(soak)
    row = soak.soak(ROOT / "models" / "kjv" / "nvfp4-ue4m3", minutes=0.5, clients=16)
    assert row["failures"] == 0
    assert row["differing"] == 0
    assert row["answered"] >= 16
    assert row["compared_with_single_requests"] > 0
    # The server still warms up in so short a time; an hour is what 2 % is asked of.
    assert row["growth"] < 0.1
