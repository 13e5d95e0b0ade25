"""Options and skips of the whole suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hw", action="store_true", help="run what is marked hw, on the GPU that is here"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``hw`` run only where they were asked for and their GPU is."""
    missing = _missing(config)
    for item in items:
        if missing and item.get_closest_marker("hw"):
            item.add_marker(pytest.mark.skip(reason=missing))


def _missing(config: pytest.Config) -> str:
    if not config.getoption("--hw"):
        return "hw: runs with --hw on an NVIDIA GPU of compute capability 9.0"
    import torch

    if not torch.cuda.is_available():
        return "hw: torch sees no CUDA device"
    found = torch.cuda.get_device_capability()
    if found != (9, 0):
        return f"hw: compute capability {found[0]}.{found[1]}, not 9.0"
    return ""
