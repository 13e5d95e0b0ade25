"""``rubin-moe doctor``: of this machine, and of a target that it is not."""

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rubin_moe.cli import app, doctor
from rubin_moe.kernels import registry, target

ROOT = Path(__file__).parents[2]
GOOD = {
    "torch": "2.13.0+cu130", "vllm": "0.32.0", "nvidia-cutlass-dsl": "4.8.1", "triton": "3.9.0",
    "llvmlite": "0.47.0",
}  # fmt: skip


def run(*args: str):
    return CliRunner().invoke(app, ["doctor", *args])


def installed(monkeypatch, versions):
    monkeypatch.setattr(target, "installed_versions", lambda: versions)


def told(where: str):
    return {f.what: f for f in doctor.findings(target.named(where))}


def test_doctor_names_the_variables_that_are_set(monkeypatch):
    monkeypatch.setenv("RUBIN_MOE_ACTIVATION_FORMAT", "fp8-e4m3")
    found = doctor.variables_finding()
    assert found.ok
    assert "RUBIN_MOE_ACTIVATION_FORMAT=fp8-e4m3" in found.detail


def test_doctor_names_the_line_that_mends(monkeypatch):
    installed(monkeypatch, {"torch": "2.3.0", "vllm": "0.40.0"})
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
    result = run("--json")
    assert {f["what"] for f in json.loads(result.stdout)} >= {"rubin-moe", "torch", "vLLM plugin"}


def test_ranges_are_those_of_the_extras():
    """What is said here and what pip would install is one statement."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line.replace("[cu13]", "") for found in extras["optional-dependencies"].values()
             for line in found]  # fmt: skip
    for package in doctor.PACKAGES:
        low = ".".join(map(str, package.low))
        found = [line for line in lines if line.startswith(f"{package.name}>=")]
        assert found, package.name
        high = ".".join(map(str, package.high))
        for line in found:
            assert line in (f"{package.name}>={low}", f"{package.name}>={low},<{high}")


@pytest.mark.parametrize(
    ("where", "backends", "packages"),
    [
        ("sm_90a", {"sm90", "triton"}, {"torch", "vllm", "nvidia-cutlass-dsl", "triton"}),
        ("sm_107a", {"sm107"}, {"torch", "vllm", "nvidia-cutlass-dsl"}),
        ("sm_89", {"triton"}, {"torch", "vllm", "triton"}),
    ],
)
def test_a_target_that_this_is_not_needs_its_own_packages(monkeypatch, where, backends, packages):
    installed(monkeypatch, GOOD)
    found = told(where)
    assert {n.removeprefix("backend ") for n in found if n.startswith("backend")} == backends
    assert {p.name for p in doctor.PACKAGES if p.name in found} == packages
    assert all(f.ok for n, f in found.items() if n not in ("vLLM plugin", "variables"))
    assert "driver" not in found  # this machine's says nothing about another


@pytest.mark.parametrize("name", ["torch", "vllm", "nvidia-cutlass-dsl"])
def test_what_another_target_lacks_is_named_with_its_line(monkeypatch, tmp_path, name):
    monkeypatch.setenv("RUBIN_MOE_CACHE_DIR", str(tmp_path))  # no kernels compiled before
    installed(monkeypatch, {k: v for k, v in GOOD.items() if k != name})
    found = told("sm_90a")
    assert not found[name].ok
    assert "pip install 'rubin-moe[" in found[name].mend
    assert found["backend sm90"].ok is (name != "nvidia-cutlass-dsl")
    assert found["backend triton"].ok
    assert run("--target", "sm_90a").exit_code == (name in ("torch", "vllm"))


def test_builds_for_another_device_do_not_serve(monkeypatch):
    installed(monkeypatch, {**GOOD, "torch": "2.13.0+cpu", "vllm": "0.32.0+cpu"})
    found = told("sm_107a")
    for name in ("torch", "vllm"):
        assert found[name].detail.endswith("a CPU build, sm_107 is a GPU")
        assert found[name].mend == doctor.GPU_BUILD
    assert run("--target", "sm_107a").exit_code == 1
    assert told("cpu")["vllm"].ok
    installed(monkeypatch, GOOD)
    found = told("cpu")
    assert found["torch"].ok
    assert found["vllm"].mend == doctor.CPU_BUILD


@pytest.mark.parametrize("where", ["sm_100a", "10.3", "sm_120"])
def test_a_target_without_kernels_is_told(monkeypatch, where):
    installed(monkeypatch, GOOD)
    result = run("--target", where, "--json")
    found = {f["what"]: f for f in json.loads(result.stdout)}
    assert found["backends"]["detail"] == f"none has kernels for {target.named(where)}"
    assert result.exit_code == 1


def test_no_variable_changes_what_a_target_needs(monkeypatch):
    """A wrong one is a finding, not the end."""
    installed(monkeypatch, GOOD)
    before = told("sm_90a")
    monkeypatch.setenv("RUBIN_MOE_ACTIVATION_FORMAT", "mxfp9")
    after = told("sm_90a")
    assert not after["variables"].ok
    assert {n: f for n, f in after.items() if n != "variables"} == {
        n: f for n, f in before.items() if n != "variables"
    }


def test_every_backend_that_a_package_names_exists():
    named = {b for p in doctor.PACKAGES for b in p.backends or ()}
    assert named <= set(registry.backend_names())
