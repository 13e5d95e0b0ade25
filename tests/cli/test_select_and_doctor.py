"""``rubin-moe select`` and ``doctor``, and the shapes they know."""

import json

import pytest
from typer.testing import CliRunner

from rubin_moe import shapes
from rubin_moe.cli import app, doctor
from rubin_moe.errors import ConfigError, UnsupportedError
from rubin_moe.kernels import registry, target


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
    assert said["backend"] == "cpu"
    assert set(said["reasons"]) == set(registry.backend_names()) - {"cpu"}


@pytest.mark.parametrize("where", ["8.0", "8.9", "9.0", "10.0", "10.3", "10.7", "12.0", "12.1"])
def test_every_capability_is_answered_with_a_backend_or_all_reasons(where):
    result = run("select", "gpt-oss-20b", "--target", where)
    if result.exit_code == 0:
        names = result.stdout
    else:
        assert isinstance(result.exception, UnsupportedError)
        names = str(result.exception)
    assert all(name in names for name in registry.backend_names())


def test_doctor_names_the_line_that_mends(monkeypatch):
    monkeypatch.setattr(doctor, "installed_versions", lambda: {"torch": "2.3.0", "vllm": "0.40.0"})
    found = {f.what: f for f in doctor.findings()}
    assert "wants >=2.11,<2.15" in found["torch"].detail
    assert found["nvidia-cutlass-dsl"].mend == "pip install 'rubin-moe[cute]'"
    assert not found["vllm"].ok


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.32.0+cpu", (0, 32, 0)), ("4.8.1", (4, 8, 1)), ("3.6.0.dev1", (3, 6, 0))],
)
def test_release(text, numbers):
    assert doctor.release(text) == numbers


def test_doctor_runs_here():
    result = run("doctor", "--json")
    assert {f["what"] for f in json.loads(result.stdout)} >= {"rubin-moe", "torch", "vLLM plugin"}
