"""``rubin-moe doctor``: what is installed here, what it lacks, and the line that mends it."""

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

import rubin_moe
from rubin_moe import envs
from rubin_moe.errors import ConfigError
from rubin_moe.kernels.target import detect, installed_versions

app = typer.Typer()


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, whether it serves, and what to do if not."""

    what: str
    ok: bool
    detail: str
    mend: str = ""


def release(text: str) -> tuple[int, ...]:
    """``0.32.0+cpu`` -> (0, 32, 0): as much as is numeric."""
    parts = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def _ranged(
    name: str, use: str, low: tuple[int, ...], high: tuple[int, ...], extra: str
) -> Callable[[Mapping[str, str]], Finding]:
    def check(versions: Mapping[str, str]) -> Finding:
        mend = f"pip install 'rubin-moe[{extra}]'"
        if name not in versions:
            return Finding(name, False, f"not installed: no {use}", mend)
        found = release(versions[name])
        if not low <= found < high:
            wanted = f">={'.'.join(map(str, low))},<{'.'.join(map(str, high))}"
            return Finding(name, False, f"{versions[name]}: {use} wants {wanted}", mend)
        return Finding(name, True, versions[name])

    return check


CHECKS = (
    _ranged("torch", "backend", (2, 11), (2, 15), "cpu"),
    _ranged("llvmlite", "CPU backend and emulator", (0, 43), (1,), "cpu"),
    _ranged("vllm", "serving in vLLM", (0, 26), (0, 34), "vllm"),
    _ranged("nvidia-cutlass-dsl", "sm_90a and sm_107a kernels", (4, 8, 1), (4, 9), "cute"),
    _ranged("triton", "portable GPU kernels", (3, 6), (4,), "triton"),
    _ranged("numba", "emulator", (0, 60), (1,), "emulator"),
)


def plugin_finding() -> Finding:
    """Whether vLLM would find our entry point."""
    names = [e.name for e in entry_points(group="vllm.general_plugins")]
    if "rubin_moe" in names:
        return Finding("vLLM plugin", True, "entry point rubin_moe is registered")
    mend = "pip install rubin-moe (an uninstalled source tree has no entry points)"
    return Finding("vLLM plugin", False, "no entry point rubin_moe in vllm.general_plugins", mend)


def driver_finding() -> Finding:
    """The NVIDIA driver, if one is loaded."""
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return Finding("driver", True, "no NVIDIA driver: CPU backend and emulator only")
    return Finding("driver", True, path.read_text().splitlines()[0])


def variables_finding() -> Finding:
    """Whether a server would start with the environment variables that are set here."""
    try:
        envs.check()
    except ConfigError as error:
        return Finding("variables", False, str(error))
    found = sorted(name for name in envs.VARIABLES if envs.text(name))
    return Finding("variables", True, " ".join(f"{n}={envs.text(n)}" for n in found) or "none set")


def findings() -> list[Finding]:
    """Everything that is looked at, in order."""
    versions = installed_versions()
    machine = f"{rubin_moe.__version__} on {platform.machine()}, Python {platform.python_version()}"
    return [
        Finding("rubin-moe", True, f"{machine}, target {detect()}"),
        *(check(versions) for check in CHECKS),
        plugin_finding(),
        driver_finding(),
        variables_finding(),
    ]


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print what is installed, what each part lacks, and the pip line that mends it.

    Exit code 1 if vLLM is there and cannot see the plugin, or torch is missing.
    """
    found = findings()
    if as_json:
        typer.echo(json.dumps([asdict(f) for f in found], indent=1))
    else:
        for f in found:
            line = f"{'ok  ' if f.ok else 'lack'} {f.what}: {f.detail}"
            typer.echo(f"{line}\n     {f.mend}" if f.mend else line)
    needed = {"torch", "vLLM plugin"}
    raise typer.Exit(int(any(not f.ok and f.what in needed for f in found)))
