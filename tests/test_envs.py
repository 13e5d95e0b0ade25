"""Environment variables: what is misspelt or cannot be is told when a server starts."""

import os
from typing import get_args

import pytest

from rubin_moe import envs
from rubin_moe.errors import ConfigError
from rubin_moe.kernels.base import ActivationFormat


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in [n for n in os.environ if n.startswith("RUBIN_MOE_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RUBIN_MOE_BACKENDS", "cpu", "no such variable; RUBIN_MOE_BACKEND is near"),
        (
            "RUBIN_MOE_QQQQQQQQQQQQQQQQQQQQQQQQQQQ",
            "1",
            "no such variable; known: RUBIN_MOE_BACKEND",
        ),
        ("RUBIN_MOE_FOLD", "fold", "RUBIN_MOE_FOLD='fold': expected none, exact, full"),
        ("RUBIN_MOE_ACTIVATION_FORMAT", "fp4", "'fp4': expected 16bit, nvfp4-ue4m3"),
        ("RUBIN_MOE_DETERMINISTIC", "yes", "expected 0, 1"),
        ("RUBIN_MOE_NUM_THREADS", "many", "RUBIN_MOE_NUM_THREADS='many': expected 1 to 1024"),
    ],
)
def test_what_cannot_be_is_named(monkeypatch, name, value, message):
    envs.check()
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        envs.check()


def test_what_can_be_is_left_alone(monkeypatch):
    monkeypatch.setenv("RUBIN_MOE_EMULATOR_CACHE", "anywhere")
    monkeypatch.setenv("RUBIN_MOE_FOLD", " exact ")
    monkeypatch.setenv("OTHER_RUBIN_MOE_X", "1")
    envs.check()


def test_the_activation_formats_are_those_of_problems():
    for name in get_args(ActivationFormat):
        assert name in envs.VARIABLES["RUBIN_MOE_ACTIVATION_FORMAT"]
    assert envs._VALUES["RUBIN_MOE_ACTIVATION_FORMAT"] == get_args(ActivationFormat)
