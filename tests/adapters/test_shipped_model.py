"""vLLM with our experts generates what transformers does on the decoded weights, for the shipped
model in each of its formats."""

import pytest
import torch

from tests.models.dequantized import KJV, dequantized

from . import serving

pytestmark = pytest.mark.serve
NUM_TOKENS = 24
TEXTS = ("And the LORD said unto", "The words of the Preacher,", "Now it came to pass")


def by_vllm(form: str, prompts: list[list[int]]) -> list[list[int]]:
    """In a function of its own: an engine that is still named outlives the next one's start."""
    with serving.engine(KJV / form) as llm:
        return serving.greedy(llm, prompts, NUM_TOKENS)


@pytest.mark.parametrize("form", ["nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4"])
def test_greedy_tokens_equal_transformers(form):
    exact = dequantized(form)
    prompts = [exact.tokenizer(text)["input_ids"] for text in TEXTS]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        # as many tokens whatever they are: vLLM is asked to ignore the end of text too
        options = {"do_sample": False, "min_new_tokens": NUM_TOKENS, "eos_token_id": None}
        out = exact.model.generate(ids, max_new_tokens=NUM_TOKENS, **options)
        expected.append(out[0, len(prompt) :].tolist())
    assert by_vllm(form, prompts) == expected
