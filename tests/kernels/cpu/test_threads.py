"""The number of threads that a user asks for."""

import pytest

from rubin_moe.errors import ConfigError
from rubin_moe.kernels.cpu.threads import num_threads


@pytest.mark.parametrize("text", ["0", "-1", "abc", "²", "1.5", "1025"])
def test_a_number_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv("RUBIN_MOE_NUM_THREADS", text)
    with pytest.raises(ConfigError, match="expected 1 to 1024"):
        num_threads()


def test_a_number_is_taken(monkeypatch):
    monkeypatch.setenv("RUBIN_MOE_NUM_THREADS", "3")
    assert num_threads() == 3
