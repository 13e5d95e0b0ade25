"""Every family with an FP4 release, in the release's own spelling and config, converted."""

import pytest

from rubin_moe.convert.compare import compare
from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert
from rubin_moe.loader.load import ModelCheckpoint
from rubin_moe.loader.summary import summarize
from tests.loader.families import RELEASES
from tests.loader.test_families import build

OTHER_NAMES = {"compressed_nvfp4": "modelopt"}
NVFP4 = [n for n, r in RELEASES.items() if r.style.fmt == "nvfp4-ue4m3"]


def write(path, name, extra):
    """``extra``: with what rides along, but for layers of which there is only a part."""
    release = RELEASES[name]
    _, made = build(release)
    for other in release.extra:
        if not extra or ".experts." in other:
            del made.tensors[other]
    return made.write(path)


def check(before, after):
    """It would load, and holds the same values."""
    first, second = ModelCheckpoint(before), ModelCheckpoint(after)
    summary = summarize(second)
    assert summary.loads, summary.layers
    assert [d.rel_err for d in compare(first, second)] == [0.0] * (4 * (2 + first.sizes.gated))


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_becomes_nvfp4_with_ue5m3_scales_without_loss(tmp_path, name):
    source = write(tmp_path / "a", name, extra=True)
    convert(source, tmp_path / "b", Options("nvfp4-ue5m3"), jobs=1)
    check(source, tmp_path / "b")


@pytest.mark.parametrize("name", NVFP4)
def test_a_release_takes_the_other_producers_names(tmp_path, name):
    source = write(tmp_path / "a", name, extra=False)
    names = OTHER_NAMES.get(RELEASES[name].style.dialect, "compressed-tensors")
    convert(source, tmp_path / "b", Options("nvfp4-ue4m3", names=names), jobs=1)
    check(source, tmp_path / "b")
