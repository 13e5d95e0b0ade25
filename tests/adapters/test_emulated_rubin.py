"""vLLM serves the shipped model with every MoE layer executed by the emulated sm_107a kernels."""

from pathlib import Path

import pytest

from . import serving

pytestmark = pytest.mark.serve
MODELS = Path(__file__).parents[2] / "models" / "kjv"
PROMPTS = ([317, 500, 333, 12], [283, 449, 71, 90, 1002])
NUM_TOKENS = 6


def generate(form: str, backend: str, input_scale: str = "layer") -> list[list[int]]:
    """In a function of its own: an engine that is still named outlives the next one's start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUBIN_MOE_ACTIVATION_FORMAT", form)
        patch.setenv("RUBIN_MOE_BACKEND", backend)
        patch.setenv("RUBIN_MOE_INPUT_SCALE", input_scale)
        chosen_by_config = form == "nvfp4-ue5m3"
        quantization = None if chosen_by_config else "rubin_moe"
        with serving.engine(MODELS / form, quantization=quantization) as llm:
            return serving.greedy(llm, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("form", ["nvfp4-ue4m3", "nvfp4-ue5m3"])
def test_tokens_equal_the_cpu_backends_with_the_same_numerics(form):
    """UE4M3: the experts' input scales are unequal, and both take the layer's largest."""
    expected = generate(form, "cpu-tcgen05")
    assert expected[0] != expected[1]
    assert generate(form, "sm107-emulated") == expected


def test_each_experts_own_input_scale_is_refused_by_name():
    with pytest.raises(Exception, match="quantizes a token once for all its experts"):
        generate("nvfp4-ue4m3", "sm107-emulated", "expert")
