"""Two ranks on the CPU generate what one rank does (transformers' tokens, as in `test_greedy`)."""

from pathlib import Path
from typing import Any

import pytest

from . import serving, tiny_models
from .test_greedy import CASES

pytestmark = [pytest.mark.serve, pytest.mark.long]
NUM_TOKENS = 24


@pytest.mark.parametrize("case", ["gpt-oss-mxfp4", "qwen3-nvfp4-modelopt"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tensor_parallel_size": 2}, id="tp2"),
        pytest.param({"tensor_parallel_size": 2, "enable_expert_parallel": True}, id="ep2"),
    ],
)
def test_two_ranks_equal_one(
    case: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    arch, fmt, write, config = CASES[case]
    # An expert width of 96 is three blocks of MXFP4: one rank gets two, the other is padded.
    model = tiny_models.build(tmp_path, arch, fmt, write, config, seed=2, intermediate=96)
    expected = [model.greedy(p, NUM_TOKENS) for p in tiny_models.PROMPTS]
    with serving.engine(model.path, **options) as llm:
        assert serving.greedy(llm, tiny_models.PROMPTS, NUM_TOKENS) == expected


def test_two_expert_ranks_quantize_tokens_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts' calibrated input scales are unequal, and the largest is one rank's alone."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("RUBIN_MOE_ACTIVATION_FORMAT", "nvfp4-ue4m3")
    model = Path(__file__).parents[2] / "models" / "kjv" / "nvfp4-ue4m3"
    prompts = ([317, 500, 333, 12], [283, 449, 71, 90, 1002])

    def generate(**options: Any) -> list[list[int]]:
        with serving.engine(model, **options) as llm:
            return serving.greedy(llm, prompts, NUM_TOKENS)

    one = generate(tensor_parallel_size=1)
    assert generate(tensor_parallel_size=2, enable_expert_parallel=True) == one
