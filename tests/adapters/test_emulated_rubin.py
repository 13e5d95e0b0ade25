"""vLLM serves the shipped model with every MoE layer executed by the emulated sm_107a kernels."""

from pathlib import Path

import pytest

from . import serving

pytestmark = pytest.mark.serve
MODEL = Path(__file__).parents[2] / "models" / "kjv" / "nvfp4-ue5m3"
PROMPTS = ([317, 500, 333, 12], [283, 449, 71, 90, 1002])
NUM_TOKENS = 6


def generate(backend: str) -> list[list[int]]:
    """In a function of its own: an engine that is still named outlives the next one's start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUBIN_MOE_ACTIVATION_FORMAT", "nvfp4-ue5m3")
        patch.setenv("RUBIN_MOE_BACKEND", backend)
        with serving.engine(MODEL, quantization=None) as llm:
            return serving.greedy(llm, PROMPTS, NUM_TOKENS)


def test_tokens_equal_the_cpu_backends_with_the_same_numerics():
    expected = generate("cpu-tcgen05")
    assert expected[0] != expected[1]
    assert generate("sm107-emulated") == expected
