"""vLLM serves the shipped model with every MoE layer executed by the emulated sm_107a kernels."""

from pathlib import Path

import pytest

from . import serving

pytestmark = pytest.mark.serve
MODEL = Path(__file__).parents[2] / "models" / "kjv" / "nvfp4-ue5m3"
PROMPTS = ([317, 500, 333, 12], [283, 449, 71, 90, 1002])
NUM_TOKENS = 6


def test_tokens_equal_the_cpu_backends_with_the_same_numerics(monkeypatch):
    monkeypatch.setenv("RUBIN_MOE_ACTIVATION_FORMAT", "nvfp4-ue5m3")
    tokens = {}
    for backend in ("cpu-tcgen05", "sm107-emulated"):
        monkeypatch.setenv("RUBIN_MOE_BACKEND", backend)
        with serving.engine(MODEL, quantization=None) as llm:
            tokens[backend] = serving.greedy(llm, PROMPTS, NUM_TOKENS)
    assert tokens["sm107-emulated"] == tokens["cpu-tcgen05"]
    assert len({tuple(t) for t in tokens["cpu-tcgen05"]}) == len(PROMPTS)
