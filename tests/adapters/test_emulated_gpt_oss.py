"""vLLM serves a small gpt-oss (MXFP4, biases, clamped SwiGLU) with emulated sm_107a layers."""

from pathlib import Path

import pytest

from . import serving, tiny_models
from .test_greedy import CASES

pytestmark = pytest.mark.serve
NUM_TOKENS = 8


def generate(path: Path, backend: str) -> list[list[int]]:
    """In bfloat16, as gpt-oss is served: torch's default dtype is then none of the kernels'.

    In a function of its own: an engine that is still named outlives the next one's start.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUBIN_MOE_ACTIVATION_FORMAT", "mxfp8")
        patch.setenv("RUBIN_MOE_BACKEND", backend)
        with serving.engine(path, dtype="bfloat16") as llm:
            return serving.greedy(llm, tiny_models.PROMPTS, NUM_TOKENS)


def test_tokens_equal_the_cpu_backends_with_mxfp8_activations(tmp_path):
    arch, fmt, write, config = CASES["gpt-oss-mxfp4"]
    tiny_models.build(tmp_path, arch, fmt, write, config, seed=5)
    expected = generate(tmp_path, "cpu-tcgen05")
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert generate(tmp_path, "sm107-emulated") == expected
