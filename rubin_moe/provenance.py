"""Where and with what a figure was measured: the head of every file in ``docs/results``."""

import json
import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import rubin_moe
from rubin_moe.errors import ConfigError


def device_name(device: str = "cpu") -> str:
    """The processor or GPU as its maker calls it. ``cuda`` imports torch."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def provenance(distributions: Iterable[str], device: str = "cpu") -> dict[str, Any]:
    """``device``, ``date`` (UTC) and ``versions`` of those distributions that are installed."""
    versions = {"python": platform.python_version(), "rubin-moe": rubin_moe.__version__}
    for name in distributions:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    date = datetime.now(UTC).date().isoformat()
    return {"device": device_name(device), "date": date, "versions": versions}


def write_result(path: Path, head: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    """``{**head, "rows": rows}`` as JSON, one row a line so that a change of one shows as one."""
    fields = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text("{\n" + ",\n".join([*fields, f' "rows": [\n{lines}\n ]']) + "\n}\n")


def read_result(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Head and rows of such a file. Raises ConfigError if it is none."""
    try:
        head = json.loads(path.read_text())
        return head, head.pop("rows")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path}: no result file: {error!r}") from None
