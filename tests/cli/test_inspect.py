"""``rubin-moe inspect``: what it says of each dialect, and its exit code."""

import json

import pytest
import torch
from typer.testing import CliRunner

from rubin_moe.cli import app
from tests.convert.sources import FP4, write_dense, write_fp4
from tests.loader.checkpoints import Style, expert_tensors, folder, layer


def run(*args):
    return CliRunner().invoke(app, ["inspect", *map(str, args)])


@pytest.mark.parametrize("name", FP4)
def test_every_dialect_loads_and_says_what_it_is(tmp_path, name):
    path, _ = write_fp4(tmp_path / "a", name)
    vec = 32 if FP4[name].fmt == "mxfp4" else 16
    told = json.loads(run(path, "--json", "--scales", "--tp", 32 // vec).output)
    assert told["loads"]
    (only,) = told["layers"]
    assert only["format"] == FP4[name].fmt
    assert (only["experts"], only["hidden"], only["intermediate"]) == (4, 64, 32)
    assert told["tp_sizes"] == list(range(1, 32 // vec + 1))
    assert told["ep_sizes"] == [1, 2, 4]
    (scales,) = told["scales"]
    assert scales["blocks"] == 3 * 4 * 64 * 32 // vec
    assert scales["nan"] == scales["negative"] == 0


def test_bytes_a_rank_count_padding(tmp_path):
    path, _ = write_fp4(tmp_path / "a", "modelopt")
    whole = json.loads(run(path, "--json").output)["rank"]
    assert whole["expert_bytes"] == 3 * 4 * 64 * 32 * 9 // 16
    half = json.loads(run(path, "--json", "--tp", "2", "--ep", "2").output)["rank"]
    assert half["expert_bytes"] == whole["expert_bytes"] // 4


def test_missing_input_scales_and_unlike_globals_are_told(tmp_path):
    source, style = layer("nvfp4-ue4m3"), Style()
    made = folder(source, style)
    del made.tensors["model.layers.0.mlp.experts.2.up_proj.input_scale"]
    told = json.loads(run(made.write(tmp_path / "a"), "--json", "--scales").output)
    assert told["layers"][0]["missing_input_scales"] == {"up": [2]}
    ratio = source.w13.dec[:, 1] / source.w13.dec[:, 0]
    unlike = told["scales"][0]["unlike"]
    assert [unlike[str(e)] for e in range(4)] == pytest.approx(ratio.tolist())


def test_faults_of_headers_give_code_1(tmp_path):
    source, style = layer("nvfp4-ue4m3"), Style()
    made = folder(source, style)
    made.tensors = expert_tensors(source, style)
    del made.tensors["model.layers.0.mlp.experts.1.down_proj.weight_scale_2"]
    found = run(made.write(tmp_path / "a"))
    assert found.exit_code == 1
    assert "down.weight_scale_2 of 1 experts (1)" in found.output
    assert "does not load" in found.output


@pytest.mark.parametrize(("code", "kind"), [(0x7F, "nan"), (0x81, "negative"), (0xFF, "nan")])
def test_bad_scale_codes_are_counted_and_placed(tmp_path, code, kind):
    source = layer("nvfp4-ue4m3")
    source.w2.sf[3, 7, 1] = code
    path = folder(source, Style()).write(tmp_path / "a")
    assert run(path).exit_code == 0  # headers do not show it
    found = run(path, "--scales")
    assert found.exit_code == 1
    assert f"1 {kind}" in found.output
    assert "experts.3.down_proj.weight_scale [7, 1]" in found.output


def test_a_bad_global_scale_is_named(tmp_path):
    made = folder(layer("nvfp4-ue4m3"), Style())
    made.tensors["model.layers.0.mlp.experts.0.up_proj.weight_scale_2"] = torch.tensor(-1.0)
    found = run(made.write(tmp_path / "a"), "--scales")
    assert found.exit_code == 1
    assert "experts.0.up_proj.weight_scale_2 is -1.0" in found.output


def test_unquantized_experts_are_not_loadable_here(tmp_path):
    found = run(write_dense(tmp_path / "a", "bf16"))
    assert found.exit_code == 1
    assert "unquantized" in found.output


def test_exclusions_that_match_nothing_are_told(tmp_path):
    path, _ = write_fp4(tmp_path / "a", "modelopt")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "model.layers.77*"]
    (path / "config.json").write_text(json.dumps(config))
    found = run(path)
    assert "'model.layers.77*' matches no module" in found.output
    assert "1 of 2 exclusions match" in found.output


def test_tp_sizes_are_told_apart_by_padding(tmp_path):
    source = layer("nvfp4-ue4m3", intermediate=96)
    found = run(folder(source, Style()).write(tmp_path / "a"))
    assert "TP sizes: 1, 2, 3, 6; with padding 4-5" in found.output


def test_a_checkpoint_without_fp4_experts_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(write_dense(tmp_path / "a", "bf16"))
    found = run(".")
    assert found.exit_code == 1
    assert found.output.startswith("a: ")
    assert "does not load: no layer has FP4 experts" in found.output
