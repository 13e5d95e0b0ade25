"""2,000 damaged checkpoints: a clear error or the right values. ``scripts/fuzz_checkpoints.py``
draws as many more as are wanted."""

import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert
from tests.loader import checkpoints

from .fuzz import (
    DIALECTS,
    TARGETS,
    check_conversion,
    check_reading,
    damaged_configs,
    damaged_headers,
    damaged_scales,
    sound,
    unlike_peers,
)

QUICK = {"deadline": 20_000, "suppress_health_check": list(HealthCheck), "database": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_sound_checkpoints_load(dialect, folder):
    assert check_reading(sound(dialect), folder / "a")


@settings(max_examples=800, **QUICK)
@given(case=damaged_headers())
def test_damaged_headers(case, folder):
    check_reading(case, folder / "a")


@settings(max_examples=600, **QUICK)
@given(case=damaged_configs())
def test_damaged_configs(case, folder):
    check_reading(case, folder / "a")


@settings(max_examples=400, **QUICK)
@given(case=damaged_scales())
def test_damaged_scales(case, folder):
    check_reading(case, folder / "a")


@settings(max_examples=200, **QUICK)
@given(
    case=damaged_headers() | damaged_configs() | damaged_scales(),
    target=st.sampled_from(TARGETS),
)
def test_damaged_sources_of_conversions(case, target, folder):
    for name in ("b", "b.partial"):
        shutil.rmtree(folder / name, ignore_errors=True)
    check_conversion(case, target, folder / "a", folder / "b")


def test_an_expert_unlike_its_peers_is_refused_before_and_after(tmp_path):
    """A conversion holds one expert and cannot see it; loading names it on both sides."""
    source = checkpoints.layer("mxfp4")
    source.w2.sf[0] += 12
    path = checkpoints.folder(source, checkpoints.Style("compressed_mxfp4")).write(tmp_path / "a")
    convert(path, tmp_path / "b", Options("nvfp4-ue4m3"), jobs=1)
    assert all(unlike_peers(tmp_path / name) for name in "ab")
