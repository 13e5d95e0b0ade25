"""When a layer's kernels are compiled, and for how many tokens."""

from types import SimpleNamespace
from typing import Any

import pytest


class Experts:
    """Notes what it is asked for."""

    name = "warm.experts"

    def __init__(self) -> None:
        self.asked: list[int] = []

    def warm_up(self, num_tokens: int) -> None:
        self.asked.append(num_tokens)


def config(step: int, engines: int = 1, parts: int = 1) -> Any:
    parallel = SimpleNamespace(dp_size=engines, pcp_size=parts)
    return SimpleNamespace(max_num_tokens=step, moe_parallel_config=parallel)


@pytest.mark.parametrize(
    ("moe", "most"),
    [(config(8192), 8192), (config(2048, 4), 8192), (config(512, 2, 3), 3072)],
)
def test_kernels_of_all_tokens_that_may_meet_are_ready(moe: Any, most: int) -> None:
    pytest.importorskip("vllm")
    from rubin_moe.adapters.vllm.warm_up import warm_up

    experts: Any = Experts()
    warm_up(experts, moe)
    assert experts.asked == [most]


def test_it_can_be_left_to_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from rubin_moe.adapters.vllm.warm_up import warm_up

    monkeypatch.setenv("RUBIN_MOE_WARM_UP", "0")
    experts: Any = Experts()
    warm_up(experts, config(8192))
    assert experts.asked == []
