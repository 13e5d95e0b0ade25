"""Weights that are loaded again, by vLLM's own reload: the bytes and tokens of a fresh load."""

from pathlib import Path
from typing import Any

import pytest
import torch

from . import serving, tiny_models
from .test_greedy import CASES

pytestmark = pytest.mark.serve


def _prepared(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.data for n, p in model.named_parameters() if ".prepared_" in n}


def _experts(llm: Any) -> dict[str, torch.Tensor]:
    """What the backend reads, by parameter name; the storage itself."""
    (found,) = llm.apply_model(_prepared)
    return found


def _fresh(path: Path) -> dict[str, torch.Tensor]:
    with serving.engine(path) as llm:
        return {n: t.clone() for n, t in _experts(llm).items()}


@pytest.mark.parametrize("case", ["qwen3-nvfp4-modelopt", "gpt-oss-mxfp4"])
def test_reload_equals_a_fresh_load(case: str, tmp_path: Path) -> None:
    arch, fmt, write, config = CASES[case]
    old = tiny_models.build(tmp_path / "old", arch, fmt, write, config, seed=21)
    new = tiny_models.build(tmp_path / "new", arch, fmt, write, config, seed=22)
    fresh = _fresh(new.path)
    assert len(fresh) >= 6 * tiny_models.LAYERS
    with serving.engine(old.path) as llm:
        before = _experts(llm)
        storage = {n: t.data_ptr() for n, t in before.items()}
        assert not all(torch.equal(before[n], fresh[n]) for n in fresh)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new.path)})
        after = _experts(llm)
        assert {n: t.data_ptr() for n, t in after.items()} == storage
        for name, tensor in fresh.items():
            assert torch.equal(tensor, after[name]), name
        if arch != "gpt_oss":  # vLLM 0.32 itself leaves gpt-oss' attention sinks as they were
            llm.reset_prefix_cache()
            expected = [new.greedy(p, 24) for p in tiny_models.PROMPTS]
            assert serving.greedy(llm, tiny_models.PROMPTS, 24) == expected
