"""``rubin-moe diff``."""

import json

import pytest
from typer.testing import CliRunner

from rubin_moe.cli import app
from rubin_moe.convert.compare import compare
from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert
from rubin_moe.errors import ConvertError
from rubin_moe.loader.load import ModelCheckpoint
from tests.convert.sources import matrices, write_dense, write_fp4
from tests.loader.checkpoints import Style, folder, layer


def run(*args):
    return CliRunner().invoke(app, ["diff", *map(str, args)])


@pytest.fixture
def quantized(tmp_path):
    source = write_dense(tmp_path / "bf16", "bf16")
    convert(source, tmp_path / "fp4", Options("nvfp4-ue5m3"), jobs=1)
    return source, tmp_path / "fp4"


def test_a_checkpoint_equals_itself_in_another_form(tmp_path):
    source, _ = write_fp4(tmp_path / "a", "gpt_oss")
    convert(source, tmp_path / "b", Options("nvfp4-ue5m3"), jobs=1)
    found = run(source, tmp_path / "b")
    assert found.exit_code == 0
    assert "12 matrices of experts, 12 of equal values" in found.output


def test_errors_are_those_of_the_values_and_the_worst_comes_first(quantized):
    from tests.convert.sources import decoded

    found = json.loads(run(*quantized, "--json").output)
    assert [d["rel_err"] for d in found] == sorted((d["rel_err"] for d in found), reverse=True)
    got, want = decoded(quantized[1]), matrices()
    for d in found:
        key = d["expert"], d["part"]
        original = want[key].double().numpy()
        apart = got[key] - original
        power = float((original**2).sum())
        assert d["rel_err"] == pytest.approx((float((apart**2).sum()) / power) ** 0.5)
        assert d["max_abs"] == pytest.approx(abs(apart).max())
        assert d["codes"] is None


def test_codes_and_scales_that_differ_are_counted(tmp_path):
    a = folder(layer("nvfp4-ue4m3"), Style()).write(tmp_path / "a")
    changed = layer("nvfp4-ue4m3")
    changed.w2.qdata[1, 0, 0] ^= 0x11  # both codes of a byte
    changed.w2.sf[1, 5, 0] ^= 1
    b = folder(changed, Style()).write(tmp_path / "b")
    first = next(compare(ModelCheckpoint(a), ModelCheckpoint(b)))
    assert (first.codes, first.scales, first.rel_err) == (0, 0, 0)
    told = run(a, b).output
    assert "12 matrices of experts, 11 of equal values" in told
    assert told.count("layers.0") == 1
    assert "codes" in told
    worst = json.loads(run(a, b, "--json").output)[0]
    assert f"relative error {worst['rel_err'] / 12:.3e} on average; the worst 1:" in told
    assert (worst["expert"], worst["part"]) == (1, "down")
    assert worst["codes"] == 2 / (64 * 32)
    assert worst["scales"] == 1 / (64 * 2)


def test_columns_that_say_nothing_are_left_out(quantized):
    told = run(*quantized, "--worst", "2").output
    assert "the worst 2:" in told
    assert "codes" not in told  # 16 bits against 4


def test_limit_sets_the_exit_code(quantized):
    assert run(*quantized, "--limit", "0.5").exit_code == 0
    assert run(*quantized, "--limit", "0.01").exit_code == 1


def test_plot(quantized, tmp_path):
    assert run(*quantized, "--plot", tmp_path / "p.png").exit_code == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_other_models_are_refused(tmp_path):
    a = folder(layer("nvfp4-ue4m3"), Style()).write(tmp_path / "a")
    b = folder(layer("nvfp4-ue4m3", num_experts=8), Style()).write(tmp_path / "b")
    with pytest.raises(ConvertError, match="num_experts is 4 and 8"):
        list(compare(ModelCheckpoint(a), ModelCheckpoint(b)))
