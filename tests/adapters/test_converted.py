"""What the converter writes generates the tokens of the model it was made from: in vLLM with our
experts, and without this package where stock vLLM knows the format and has a kernel for the CPU."""

from functools import cache
from pathlib import Path

import pytest
import torch

from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert
from tests.models.dequantized import KJV, dequantized

from . import serving

pytestmark = pytest.mark.serve
NUM_TOKENS = 16
PROMPTS = ([3, 141, 59, 26, 53, 58], [97, 93, 23, 84])


def by_vllm(path: Path, quantization: str | None, **options: str) -> list[list[int]]:
    """In a function of its own: an engine that is still named outlives the next one's start."""
    with serving.engine(path, quantization=quantization, **options) as llm:
        return serving.greedy(llm, PROMPTS, NUM_TOKENS)


def by_transformers(model: torch.nn.Module) -> list[list[int]]:
    options = {"do_sample": False, "min_new_tokens": NUM_TOKENS, "eos_token_id": None}
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, **options
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@cache
def of_source(form: str) -> list[list[int]]:
    return by_transformers(dequantized(form).model)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("nvfp4-ue4m3", Options("nvfp4-ue5m3")),
        ("nvfp4-ue4m3", Options("nvfp4-ue4m3", names="compressed-tensors")),
        ("mxfp4", Options("nvfp4-ue4m3", names="modelopt")),
    ],
)
def test_conversions_without_loss_generate_the_sources_tokens(tmp_path, form, options):
    path = convert(KJV / form, tmp_path / "b", options, jobs=1).folder
    assert by_vllm(path, "rubin_moe") == of_source(form)


def test_quantized_to_mxfp4_generates_what_its_values_do(tmp_path):
    """Against transformers on our own decoding of it, which other tests hold to the oracle's."""
    path = convert(KJV / "bf16", tmp_path / "b", Options("mxfp4"), jobs=1).folder
    back = convert(path, tmp_path / "c", Options("bf16"), jobs=1).folder
    assert by_vllm(path, "rubin_moe") == transformers_tokens(back)


def test_stock_vllm_serves_our_bfloat16(tmp_path):
    """Without this package: ``quantization`` None."""
    path = convert(KJV / "nvfp4-ue5m3", tmp_path / "b", Options("bf16"), jobs=1).folder
    assert by_vllm(path, None) == transformers_tokens(path)


def transformers_tokens(path: Path) -> list[list[int]]:
    """Of a 16-bit checkpoint, computed in float32."""
    from transformers import AutoModelForCausalLM

    return by_transformers(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())


@pytest.mark.parametrize("names", ["modelopt", "compressed-tensors"])
def test_stock_vllm_knows_our_nvfp4_and_lacks_only_a_kernel(tmp_path, names):
    """Config, model and quantization method are accepted; what is missing on a CPU is a backend."""
    options = Options("nvfp4-ue4m3", names=names)
    path = convert(KJV / "bf16", tmp_path / "b", options, jobs=1).folder
    with pytest.raises(NotImplementedError, match="No NvFp4 MoE backend supports"):
        by_vllm(path, None, dtype="bfloat16")
