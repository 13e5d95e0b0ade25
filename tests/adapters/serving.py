"""vLLM in this process, as fast as it starts: one engine after another, eager, float32."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # LLM.apply_model takes a function
}


@contextlib.contextmanager
def engine(path: Path, **options: Any) -> Iterator[Any]:
    """A ``vllm.LLM`` on a checkpoint folder, torn down at the end."""
    os.environ.update(SETTINGS)  # vLLM reads them when it is imported and when it starts
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    defaults = {
        "quantization": "rubin_moe",
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
    }
    llm = LLM(str(path), **{**defaults, **options})
    try:
        yield llm
    finally:
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def greedy(llm: Any, prompts: tuple[list[int], ...], num_tokens: int) -> list[list[int]]:
    """Tokens generated after each prompt, at temperature 0."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]
