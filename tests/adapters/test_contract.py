"""What the plugin overrides and calls in vLLM is there, in every version it is meant for.

A new vLLM fails here, by name, and not while serving.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from packaging.version import Version

from rubin_moe.adapters.vllm import compat

from . import signatures

ROOT = Path(__file__).parents[2]
PINNED: dict[str, dict[str, list[str]]] = json.loads(signatures.PINNED.read_text())


def _installed() -> tuple[str, Path]:
    """Minor version and source folder of the vLLM here, without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    found = re.search(r"['\"](\d+\.\d+)\.", (folder / "_version.py").read_text())
    assert found is not None
    return found[1], folder.parent


def test_the_installed_vllm_is_pinned_and_unchanged() -> None:
    version, root = _installed()
    assert version in PINNED, f"vLLM {version}: pin it with python -m tests.adapters.signatures"
    found = {function: signatures.parameters(root, function) for function in PINNED[version]}
    assert found == PINNED[version]
    assert sorted(found) == signatures.wanted()


@pytest.mark.parametrize("version", PINNED)
def test_overrides_take_what_vllm_passes(version: str) -> None:
    for theirs, (ours, names) in signatures.OVERRIDDEN.items():
        for name in names:
            passed = PINNED[version][f"{theirs}.{name}"]
            taken = signatures.parameters(ROOT, f"{ours}.{name}")
            if any(p.startswith("**") for p in taken):
                continue
            assert [p for p in passed if p not in taken] == [], f"{ours}.{name}"
            # and in the same order, where they are passed by position
            assert [p for p in taken if p in passed] == passed, f"{ours}.{name}"


@pytest.mark.parametrize("version", PINNED)
def test_calls_pass_what_vllm_takes(version: str) -> None:
    for function, passed in signatures.CALLED.items():
        taken = PINNED[version][function]
        assert [p for p in passed if p not in taken] == [], function


def test_pinned_versions_are_those_the_plugin_accepts() -> None:
    versions = sorted(Version(v) for v in PINNED)
    assert versions[0] == compat.LOWEST
    assert all(compat.why_not(v) is None for v in versions)
    newer = Version(f"{versions[-1].major}.{versions[-1].minor + 1}")
    assert newer == compat.BELOW
    for outside in (Version("0.25.1"), newer, Version("1.0")):
        reason = compat.why_not(outside)
        assert reason is not None
        assert str(outside) in reason
        assert "0.26" in reason


def test_a_patch_release_and_a_development_build_are_accepted() -> None:
    for text in ("0.26.1", "0.32.0+cpu", "0.33.1.dev7+gabcdef"):
        assert compat.why_not(Version(text)) is None


def test_batch_invariance_is_what_vllm_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    for value in ("0", "1"):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        assert compat.batch_invariant() is (value == "1")
