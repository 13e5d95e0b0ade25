"""``rubin-moe select`` and ``plan`` of a checkpoint: what they say is what would be loaded."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rubin_moe.cli import app
from rubin_moe.cli.model import find_model, layer_ranges
from rubin_moe.errors import CheckpointError, ConfigError
from rubin_moe.kernels.activation import Activation
from rubin_moe.loader.load import ModelCheckpoint, load_experts
from tests.convert.sources import FP4, write_dense, write_fp4
from tests.loader.checkpoints import Style, expert_tensors, folder, layer
from tests.loader.families import RELEASES
from tests.loader.test_families import build

NAME = "model.layers.0.mlp.experts"


def run(*args):
    return CliRunner().invoke(app, [*map(str, args)])


def told(*args):
    result = run(*args, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", FP4)
def test_the_problem_is_that_of_the_loaded_weights(tmp_path, name):
    path, _ = write_fp4(tmp_path / "a", name)
    (group,) = find_model(str(path)).groups
    with ModelCheckpoint(path) as checkpoint:
        weights = load_experts(checkpoint, 0)
        assert group.scheme == checkpoint.spec(0).scheme
    problem = group.problem
    assert problem.weight_format == weights.fmt
    assert problem.has_bias == weights.has_bias
    assert problem.activation.gated == weights.gated
    assert (problem.num_experts, problem.hidden, problem.intermediate) == (
        weights.num_experts, weights.hidden, weights.intermediate,
    )  # fmt: skip
    assert problem.top_k == 2
    assert (group.names, group.count) == (("layers.0",), 1)


@pytest.mark.parametrize(
    ("style", "scheme", "activations"),
    [
        (Style(), "w4a4", "nvfp4-ue4m3"),
        (Style(input_scales=False), "w4a16", None),
        (Style("rubin_ue5m3", input_scales=False), "w4a16", None),
        (Style("compressed_mxfp4"), "w4a16", "mxfp8"),
    ],
)
def test_activations_are_those_the_checkpoint_was_made_for(tmp_path, style, scheme, activations):
    """Weight-only NVFP4 has no default on tcgen05: it is refused until the user names a format."""
    path = folder(layer(style.fmt), style).write(tmp_path / "a")
    (group,) = told("select", path, "--target", "cpu")["groups"]
    assert group["stored"].endswith(f"{style.fmt} {scheme}")
    assert (group["backend"], group["activations"]) == ("cpu", "16bit")
    rubin = run("select", path, "--target", "sm_107a", "--json")
    if activations is None:
        assert "name an activation format" in str(rubin.exception)
        named = ("--activations", "nvfp4-ue5m3")
        (group,) = told("select", path, "--target", "sm_107a", *named)["groups"]
        assert group["weights"] == "nvfp4-ue5m3"
    else:
        (group,) = json.loads(rubin.stdout)["groups"]
        assert group["activations"] == activations
    assert rubin.exit_code == (activations is None)


def test_plan_of_a_folder_with_every_option(tmp_path):
    path = folder(layer("nvfp4-ue4m3", intermediate=80, num_experts=6), Style()).write(tmp_path)
    options = ("--target", "sm_107a", "--tokens", "1,300", "--activations", "nvfp4-ue5m3")
    plan = told("plan", path, *options, "--tp", "2", "--ep", "4")
    (group,) = plan["groups"]
    assert (plan["target"], plan["tp"], plan["ep"]) == ("sm_107", 2, 4)
    assert (group["backend"], group["weights"]) == ("sm107", "nvfp4-ue5m3")
    assert group["layer"]["experts"] == 2
    assert group["layer"]["fc1_shape"] == [2 * 48, 64]  # 3 of 5 blocks on the first rank
    assert [p["tokens"] for p in group["plans"]] == [1, 300]
    printed = run("plan", path, *options).stdout
    assert "layers.0 (1 layer): modelopt nvfp4-ue4m3 w4a4\n" in printed
    assert "gather_gemm_swiglu" in printed


def mixed(path):
    """Layer 0 calibrated, 1 and 3 without input scales, 2 left in 16 bits."""
    made = folder(layer("nvfp4-ue4m3"), Style(), num_hidden_layers=4)
    for index in (1, 3):
        made.tensors |= expert_tensors(layer("nvfp4-ue4m3"), Style(input_scales=False), index)
    dense = folder(layer("nvfp4-ue4m3"), Style())
    for name in dense.tensors:
        if name.endswith("proj.weight"):
            tensor = dense.tensors[name].new_zeros(dense.tensors[name].shape).bfloat16()
            made.tensors[name.replace("layers.0", "layers.2")] = tensor
    return made.write(path)


def test_layers_that_differ_are_told_by_group(tmp_path):
    path = mixed(tmp_path / "a")
    said = told("select", path, "--target", "sm_90a")
    assert [(g["layers"], g["stored"]) for g in said["groups"]] == [
        (["layers.0"], "modelopt nvfp4-ue4m3 w4a4"),
        (["layers.1", "layers.3"], "modelopt nvfp4-ue4m3 w4a16"),
    ]
    assert said["unquantized"] == ["layers.2"]
    printed = run("plan", path, "--target", "sm_90a").stdout
    assert "; layers.2 unquantized" in printed.splitlines()[0]
    assert "layers.1, 3 (2 layers): modelopt nvfp4-ue4m3 w4a16" in printed
    error = str(run("select", path, "--target", "sm_107a").exception)
    assert error.startswith("layers.1, 3 (2 layers): modelopt nvfp4-ue4m3 w4a16\nno backend")


def test_limits_by_layer_are_groups(tmp_path):
    """Field report 67."""
    made = folder(layer("nvfp4-ue4m3"), Style(), expert_swiglu_limit_list=[0, 4.0, None])
    for index in (1, 2):
        made.tensors |= expert_tensors(layer("nvfp4-ue4m3"), Style(), index)
    groups = find_model(str(made.write(tmp_path / "a"))).groups
    assert [(g.names, g.problem.activation) for g in groups] == [
        (("layers.0", "layers.2"), Activation("silu")),
        (("layers.1",), Activation("silu", limit=4.0)),
    ]


def test_what_loading_refuses_is_refused_with_the_same_sentence(tmp_path):
    made = folder(layer("nvfp4-ue4m3"), Style())
    del made.tensors[f"{NAME}.1.down_proj.weight_scale_2"]
    dense = write_dense(tmp_path / "dense", "bf16")
    for path in (made.write(tmp_path / "a"), dense):
        with ModelCheckpoint(path) as checkpoint, pytest.raises(CheckpointError) as loading:
            load_experts(checkpoint, 0)
        for command in ("select", "plan"):
            refused = run(command, path, "--target", "sm_90a").exception
            assert isinstance(refused, CheckpointError)
            assert str(refused) == str(loading.value)


@pytest.mark.parametrize("leaf", ["2.up_proj", "3.down_proj"])
def test_static_activations_want_every_input_scale(tmp_path, leaf):
    made = folder(layer("nvfp4-ue4m3"), Style())
    del made.tensors[f"{NAME}.{leaf}.input_scale"]
    path = made.write(tmp_path / "a")
    with ModelCheckpoint(path) as checkpoint, pytest.raises(CheckpointError) as loading:
        load_experts(checkpoint, 0)
    assert str(run("select", path, "--target", "sm_107a").exception) == str(loading.value)
    assert run("select", path, "--target", "sm_90a").exit_code == 0  # reads none of them
    named = ("--activations", "nvfp4-ue5m3")
    assert run("select", path, "--target", "sm_107a", *named).exit_code == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "situ"}, "activation 'situ' is unknown"),
        ({"model_type": "fresh_moe"}, "routing of model_type 'fresh_moe' is unknown"),
        ({"norm_topk_prob": None}, "has no norm_topk_prob"),
        ({"num_experts_per_tok": None}, "no number of experts a token"),
    ],
)
def test_what_the_config_does_not_tell_is_not_guessed(tmp_path, change, reason):
    path = folder(layer("nvfp4-ue4m3"), Style(), **change).write(tmp_path / "a")
    with pytest.raises(ConfigError, match=reason):
        find_model(str(path))


@pytest.mark.parametrize("name", ["Mistral-Small-4", "GLM-5.3-Flash nvidia", "gpt-oss-20b NVFP4"])
def test_releases_by_their_own_configs(tmp_path, name):
    """params.json alone; a text config of a family of its own; biases and a clamp."""
    source, made = build(RELEASES[name])
    if made.config is not None:
        text = made.config.get("text_config", made.config)
        text.update(num_experts_per_tok=4, norm_topk_prob=True)
    (group,) = find_model(str(made.write(tmp_path / "a"))).groups
    oss = name.startswith("gpt-oss")
    assert group.problem.top_k == 4
    assert group.problem.has_bias is oss
    assert group.problem.activation == (
        Activation("swigluoai", limit=7.0) if oss else Activation("silu")
    )
    assert (group.scheme, group.problem.num_experts) == ("w4a4", source.w13.qdata.shape[0])


def test_a_known_name_is_the_shape_unless_written_as_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder(layer("nvfp4-ue4m3"), Style()).write(tmp_path / "glm-4.6")
    folder(layer("nvfp4-ue4m3"), Style()).write(tmp_path / "mine")
    shape = find_model("glm-4.6")
    assert shape.groups[0].problem.num_experts == 160
    assert shape.source == "the published shape, not the folder of that name (that is ./glm-4.6)"
    for path in (
        "./glm-4.6",
        str(tmp_path / "glm-4.6"),
        "glm-4.6/",
        "mine",
        "mine/model.safetensors",
    ):
        found = find_model(path)
        assert found.source.startswith("a checkpoint, its precision declared by config.json")
        assert found.groups[0].problem.num_experts == 4
    monkeypatch.chdir(tmp_path / "glm-4.6")
    assert find_model(".").groups[0].problem.num_experts == 4
    assert find_model("glm-4.6").source == "the published shape"


def test_headers_are_enough(tmp_path):
    """No tensor can be read without torch, and torch is not there."""
    path = folder(layer("nvfp4-ue4m3"), Style()).write(tmp_path / "a")
    code = "import sys; sys.modules['torch'] = None; from rubin_moe.cli import main; main()"
    call = [sys.executable, "-c", code, "plan", str(path), "--target", "sm_107a", "--json"]
    out = subprocess.run(call, capture_output=True, text=True, check=True)
    assert json.loads(out.stdout)["groups"][0]["backend"] == "sm107"


def test_layer_ranges():
    names = ("layers.1", "layers.2", "layers.3", "layers.5", "mtp.0")
    assert layer_ranges(names) == "layers.1-3, 5, mtp.0"
