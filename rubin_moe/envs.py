"""Every RUBIN_MOE_* environment variable: its name, meaning and default. Read on use."""

import os
from difflib import get_close_matches
from pathlib import Path

from rubin_moe.errors import ConfigError

VARIABLES = {
    "RUBIN_MOE_BACKEND": "name of the one backend to use; refuses to serve if it cannot",
    "RUBIN_MOE_FORBID": "comma-separated backends never to use",
    "RUBIN_MOE_ACTIVATION_FORMAT": "16bit | nvfp4-ue4m3 | nvfp4-ue5m3 | mxfp8 | fp8-e4m3 | int8",
    "RUBIN_MOE_INPUT_SCALE": "layer | expert: FC1's with nvfp4-ue4m3 activations, the layer's "
    "largest or each expert's own (default layer)",
    "RUBIN_MOE_FOLD": "none | exact | full: fold of global scales at load (default: only where "
    "block scales are recoded, exact)",
    "RUBIN_MOE_DETERMINISTIC": "1: bit-equal runs (default 1)",
    "RUBIN_MOE_BATCH_INVARIANT": "1: a token's result depends on nothing else in its batch, decode "
    "or prefill, which costs prefill speed on Hopper (default: vLLM's VLLM_BATCH_INVARIANT)",
    "RUBIN_MOE_WARM_UP": "1: compile at load what the engine's steps can need, 0: at first use "
    "(default 1)",
    "RUBIN_MOE_CACHE_DIR": "compiled kernels and derived files (default: the user cache folder)",
    "RUBIN_MOE_NUM_THREADS": "threads of the CPU backend (default: torch's own setting)",
}


ELSEWHERE = ("RUBIN_MOE_EMULATOR_CACHE", "RUBIN_MOE_DEMO_MODEL", "RUBIN_MOE_VENV")
"""Read by the emulator, which imports nothing of this package, and by scripts."""

_VALUES = {
    "RUBIN_MOE_ACTIVATION_FORMAT": (
        "16bit",
        "nvfp4-ue4m3",
        "nvfp4-ue5m3",
        "mxfp8",
        "fp8-e4m3",
        "int8",
    ),
    "RUBIN_MOE_INPUT_SCALE": ("layer", "expert"),
    "RUBIN_MOE_FOLD": ("none", "exact", "full"),
    "RUBIN_MOE_DETERMINISTIC": ("0", "1"),
    "RUBIN_MOE_BATCH_INVARIANT": ("0", "1"),
    "RUBIN_MOE_WARM_UP": ("0", "1"),
}


_COUNTS = {"RUBIN_MOE_NUM_THREADS": 1024}
"""The most that makes sense: no machine has more cores, and OpenMP dies of a hundred times that."""


def check() -> None:
    """Called when a server starts: a misspelt variable would else do nothing, and a wrong value
    stop the first layer after minutes.

    Raises:
        ConfigError: names the variable, what is near it, or what it may be.
    """
    for name in sorted(n for n in os.environ if n.startswith("RUBIN_MOE_")):
        if name not in VARIABLES and name not in ELSEWHERE:
            near = get_close_matches(name, VARIABLES, n=1)
            hint = f"; {near[0]} is near" if near else f"; known: {', '.join(VARIABLES)}"
            raise ConfigError(f"{name}: there is no such variable{hint}")
    for name, values in _VALUES.items():
        if text(name) not in ("", *values):
            raise ConfigError(f"{name}={text(name)!r}: expected {', '.join(values)}")
    for name in _COUNTS:
        count(name)


def text(name: str, default: str = "") -> str:
    """Value of a variable of the table above; an unknown name is a programming error."""
    if name not in VARIABLES:
        raise KeyError(name)
    return os.environ.get(name, default).strip()


def flag(name: str, default: bool) -> bool:
    """A variable that is 0 or 1."""
    value = text(name)
    if value not in ("", "0", "1"):
        raise ConfigError(f"{name}={value!r}: expected 0 or 1")
    return default if value == "" else value == "1"


def count(name: str) -> int | None:
    """A variable that is a number from 1 on; None where it is not set."""
    value = text(name)
    if not value:
        return None
    if not value.isdecimal() or not 1 <= int(value) <= _COUNTS[name]:
        raise ConfigError(f"{name}={value!r}: expected 1 to {_COUNTS[name]}")
    return int(value)


def choice(name: str, values: tuple[str, ...]) -> str:
    """A variable that is one of ``values``, the first where it is not set."""
    value = text(name) or values[0]
    if value not in values:
        raise ConfigError(f"{name}={value!r}: expected {' or '.join(values)}")
    return value


def names(name: str) -> tuple[str, ...]:
    """A comma-separated variable."""
    return tuple(part.strip() for part in text(name).split(",") if part.strip())


def cache_dir() -> Path:
    """Folder for compiled kernels; not created here."""
    chosen = text("RUBIN_MOE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rubin_moe"
