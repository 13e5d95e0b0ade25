"""Kernels of a layer compiled when it is loaded: serving and capturing graphs then compile none."""

import time
from typing import Any

from vllm.logger import init_logger

from rubin_moe import envs
from rubin_moe.layers.experts import MoEExperts

_logger = init_logger("vllm.rubin_moe")

_WORTH_SAYING_S = 5.0


def warm_up(experts: MoEExperts, moe: Any) -> None:
    """For every number of tokens that the engine may send, unless ``RUBIN_MOE_WARM_UP`` is 0.

    Args:
        moe: vLLM's config of the layer.

    Raises:
        ConfigError: a kernel was never compiled here, and its compiler is not installed.
    """
    if not envs.flag("RUBIN_MOE_WARM_UP", True):
        return
    most, start = most_tokens(moe), time.monotonic()
    experts.warm_up(most)
    seconds = time.monotonic() - start
    if seconds > _WORTH_SAYING_S:
        _logger.info(
            "%s: kernels for up to %d tokens compiled in %.0f s; the next start reads them",
            experts.name, most, seconds,
        )  # fmt: skip


def most_tokens(moe: Any) -> int:
    """Of a call: a step's, of all engines whose tokens may be gathered."""
    parallel = moe.moe_parallel_config
    return int(moe.max_num_tokens) * int(parallel.dp_size) * int(parallel.pcp_size)
