"""The number of threads that a user asks for."""

import pytest

from rubin_moe.errors import ConfigError
from rubin_moe.kernels.cpu.threads import MAX_THREADS, num_threads


@pytest.mark.parametrize("text", ["0", "-1", "abc", "²", "1.5", str(MAX_THREADS + 1)])
def test_a_number_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv("RUBIN_MOE_NUM_THREADS", text)
    with pytest.raises(ConfigError, match=f"expected 1 to {MAX_THREADS}"):
        num_threads()


def test_a_number_is_taken(monkeypatch):
    monkeypatch.setenv("RUBIN_MOE_NUM_THREADS", "3")
    assert num_threads() == 3
