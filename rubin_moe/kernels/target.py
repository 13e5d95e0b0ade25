"""What this machine is, as a `Target`; and targets that a user names. Imports torch only to ask."""

import re
from importlib.metadata import PackageNotFoundError, version

from rubin_moe.errors import ConfigError
from rubin_moe.kernels.base import Target

DISTRIBUTIONS = ("torch", "vllm", "nvidia-cutlass-dsl", "triton", "numba", "llvmlite")
"""What backends and adapters need, by distribution name."""

_ARCH = re.compile(r"^sm_?(\d+)(\d)a?$")


def installed_versions() -> dict[str, str]:
    """Those of `DISTRIBUTIONS` that are installed here."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def detect(device: str | None = None) -> Target:
    """The current device (``cuda`` if torch sees one), or the named one, of this machine.

    Raises ConfigError when ``cuda`` is named and torch sees none.
    """
    versions = installed_versions()
    cuda = "torch" in versions and _capability()
    if device == "cuda" and not cuda:
        raise ConfigError("device cuda: torch sees no CUDA device on this machine")
    if device != "cpu" and cuda:
        return Target("cuda", cuda, versions)
    return Target("cpu", None, versions)


def named(name: str) -> Target:
    """``cpu``, ``sm_107a``, ``sm_90`` or ``10.7``, with this machine's package versions."""
    if name == "cpu":
        return Target("cpu", None, installed_versions())
    match = _ARCH.match(name) or re.match(r"^(\d+)\.(\d)$", name)
    if match is None:
        raise ConfigError(f"target {name!r}: expected cpu, an architecture (sm_107a) or 10.7")
    return Target("cuda", (int(match.group(1)), int(match.group(2))), installed_versions())


def _capability() -> tuple[int, int] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return major, minor
