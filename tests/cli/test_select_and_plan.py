"""``rubin-moe select`` and ``plan`` of published shapes; checkpoints are `test_model_folder`'s."""

import json

import pytest
from typer.testing import CliRunner

from rubin_moe import shapes
from rubin_moe.cli import app, doctor, model, select
from rubin_moe.errors import ConfigError, UnsupportedError
from rubin_moe.kernels import registry, target
from rubin_moe.loader.sharding import Shard


def run(*args: str):
    return CliRunner().invoke(app, list(args))


@pytest.mark.parametrize("name", shapes.model_names())
def test_every_shape_is_a_problem_the_cpu_computes(name):
    problem = shapes.model_shape(name).problem()
    assert registry.select(problem, target.named("cpu")).backend == "cpu"
    assert problem.weight_format.scales_k(problem.hidden) > 0


def test_an_unknown_model_lists_the_known():
    with pytest.raises(ConfigError, match="gpt-oss-120b"):
        shapes.model_shape("gpt-4")


@pytest.mark.parametrize(
    ("text", "capability"),
    [("cpu", None), ("sm_107a", (10, 7)), ("sm_90", (9, 0)), ("12.1", (12, 1)), ("sm_89", (8, 9))],
)
def test_named_targets(text, capability):
    assert target.named(text).capability == capability


def test_a_name_that_is_no_target():
    with pytest.raises(ConfigError, match="expected cpu"):
        target.named("rubin")


def test_select_prints_the_winner_and_the_reasons():
    result = run("select", "qwen3-30b-a3b", "--target", "cpu", "--json")
    said = json.loads(result.stdout)
    assert (said["model"], said["source"]) == ("qwen3-30b-a3b", "the published shape")
    (group,) = said["groups"]
    assert group["backend"] == "cpu"
    assert set(group["reasons"]) == set(registry.backend_names()) - {"cpu"}


@pytest.mark.parametrize(
    ("where", "weights", "activations", "backend"),
    [
        ("cpu", "nvfp4-ue4m3", "16bit", "cpu"),
        ("sm_90a", "nvfp4-ue4m3", "16bit", "sm90"),
        ("sm_107a", "nvfp4-ue5m3", "nvfp4-ue5m3", "sm107"),
    ],
)
def test_plan_is_that_of_the_backend_that_select_names(where, weights, activations, backend):
    """Rubin has no 16-bit x FP4 instruction: there, weights are folded for FP4 activations."""
    said = json.loads(run("select", "qwen3-30b-a3b", "--target", where, "--json").stdout)
    (chosen,) = said["groups"]
    assert (chosen["backend"], chosen["weights"], chosen["activations"]) == (
        backend, weights, activations,
    )  # fmt: skip
    call = ("plan", "qwen3-30b-a3b", "--target", where, "--tokens", "1,300", "--json")
    (told,) = json.loads(run(*call).stdout)["groups"]
    assert {k: told[k] for k in chosen} == chosen
    assert told["count"] == 48
    expert = 3 * 2048 * 768 * 9 // 16  # half a byte a weight and a scale for 16
    assert told["layer"]["bytes"] == 128 * expert
    one, many = told["plans"]
    assert (one["tokens"], one["weight_bytes_at_most"]) == (1, 8 * expert)
    assert (many["tokens"], many["weight_bytes_at_most"]) == (300, 128 * expert)
    row = next(r for r in registry.ROWS if r.name == backend)
    (layers,) = model.find_model("qwen3-30b-a3b").groups
    problem = select.problem(layers, target.named(where), Shard(), "auto")
    for plan in told["plans"]:
        fields = {k: v for k, v in plan.items() if k not in ("tokens", "weight_bytes_at_most")}
        wanted = dict(row.rules().plan(problem, plan["tokens"]).fields)
        wanted.pop("tokens", None)
        assert fields == wanted
    printed = run(*call[:-1]).stdout
    assert all(name in printed for name in fields)


def plans(model: str, *more: str) -> dict:
    call = ("plan", model, "--target", "sm_90a", "--tokens", "1,4096", "--json", *more)
    (group,) = json.loads(run(*call).stdout)["groups"]
    return group


def test_plan_is_that_of_a_server_with_these_variables(monkeypatch):
    assert [p["kernel"] for p in plans("gpt-oss-20b")["plans"]] == ["decode", "prefill"]
    monkeypatch.setenv("RUBIN_MOE_BATCH_INVARIANT", "1")
    assert "prefill" not in [p["kernel"] for p in plans("gpt-oss-20b")["plans"]]
    monkeypatch.setenv("RUBIN_MOE_ACTIVATION_FORMAT", "fp8-e4m3")
    told = plans("gpt-oss-20b")
    assert told["activations"] == "fp8-e4m3"
    assert [p["kernel"] for p in told["plans"]] == ["fp8", "fp8"]
    assert plans("gpt-oss-20b", "--activations", "16bit")["activations"] == "16bit"


def test_select_refuses_the_variables_that_a_server_refuses(monkeypatch):
    monkeypatch.setenv("RUBIN_MOE_BATCH_INVARIENT", "1")
    error = run("select", "gpt-oss-20b", "--target", "sm_90a").exception
    assert isinstance(error, ConfigError)
    assert "RUBIN_MOE_BATCH_INVARIANT is near" in str(error)
    found = {f.what: f for f in doctor.findings()}["variables"]
    assert not found.ok
    assert found.detail == str(error)


def test_select_asks_for_what_a_server_with_these_variables_would(monkeypatch):
    call = ("select", "deepseek-v3", "--target", "sm_107a", "--activations", "nvfp4-ue4m3")
    assert run(*call).exit_code == 0
    monkeypatch.setenv("RUBIN_MOE_INPUT_SCALE", "expert")
    assert "each expert's own input scale" in str(run(*call).exception)


def test_plan_of_a_rank():
    """gpt-oss is 2880 wide, 90 blocks of 32: 12 of them on the first of 8 ranks."""
    told = plans("gpt-oss-20b", "--tp", "8", "--ep", "3")["layer"]
    assert told["fc1_shape"] == [2 * 384, 2880]
    assert told["fc2_shape"] == [2880, 384]
    assert told["experts"] == 11
    assert told["bytes"] == 11 * 3 * 384 * 2880 * 17 // 32
    printed = run("plan", "gpt-oss-20b", "--target", "sm_90a", "--tp", "8").stdout
    assert "a layer on a rank of TP 8, EP 1: 32 experts" in printed


def test_plan_of_a_named_backend_gives_its_reason():
    result = run("plan", "gpt-oss-20b", "--target", "cpu", "--backend", "sm107")
    assert isinstance(result.exception, UnsupportedError)
    assert "sm107: is compiled for sm_107a" in str(result.exception)


@pytest.mark.parametrize("where", ["8.0", "8.9", "9.0", "10.0", "10.3", "10.7", "12.0", "12.1"])
def test_every_capability_is_answered_with_a_backend_or_all_reasons(where):
    """Field report 106."""
    result = run("select", "gpt-oss-20b", "--target", where)
    if result.exit_code == 0:
        names = result.stdout
    else:
        assert isinstance(result.exception, UnsupportedError)
        names = str(result.exception)
    assert all(name in names for name in registry.backend_names())
