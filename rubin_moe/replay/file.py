"""A saved launch with its expected memory, on disk.

The file is a saved launch of the emulator (a zip of ``launch.json``, ``kernel.cubin``,
``params.bin`` and ``buffer_<i>.bin``, the memory before) with two more kinds of members:
``after_<i>.bin``, the memory after, and ``replay.json``: offset and size of each parameter, and
what the tensors in memory are called.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rubin_moe.errors import ConfigError

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Named:
    """A tensor of a launch: ``buffer`` it lies in and where, shape, and its tile (rows, columns in
    elements) in words of the kernel that writes it."""

    name: str
    buffer: int
    offset: int
    shape: tuple[int, ...]
    element_bytes: int
    tile: tuple[int, int] = (32, 128)

    @property
    def rows(self) -> int:
        """Of the tensor seen as a matrix with its last axis as columns."""
        return int(np.prod(self.shape[:-1], dtype=np.int64))

    @property
    def columns(self) -> int:
        return self.shape[-1] if self.shape else 1


@dataclass(frozen=True)
class ReplayFile:
    """What it takes to run a launch on a GPU and to judge it.

    Attributes:
        addresses: of the buffers when it was saved; before, after: their bytes.
        layout: (offset, size) of each parameter in ``params``.
    """

    name: str
    arch: str
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    dynamic_smem_bytes: int
    cubin: bytes
    params: bytes
    layout: tuple[tuple[int, int], ...]
    addresses: tuple[int, ...]
    before: tuple[Bytes, ...]
    after: tuple[Bytes, ...]
    tensors: tuple[Named, ...]


def load(path: Path) -> ReplayFile:
    """Raises ConfigError for a file without the emulator's result, or something else."""
    try:
        with zipfile.ZipFile(path) as archive:
            facts = json.loads(archive.read("launch.json"))
            if "replay.json" not in archive.namelist():
                raise ConfigError(f"{path}: no expected memory in it: save it with --expect first")
            more = json.loads(archive.read("replay.json"))
            count = len(facts["buffers"])
            return ReplayFile(
                name=path.stem,
                arch=facts["arch"],
                kernel=facts["kernel"],
                grid=tuple(facts["grid"]),
                block=tuple(facts["block"]),
                cluster=tuple(facts["cluster"]),
                dynamic_smem_bytes=facts["dynamic_smem_bytes"],
                cubin=archive.read("kernel.cubin"),
                params=archive.read("params.bin"),
                layout=tuple((offset, size) for offset, size in more["layout"]),
                addresses=tuple(b["address"] for b in facts["buffers"]),
                before=tuple(_bytes(archive, f"buffer_{i}.bin") for i in range(count)),
                after=tuple(_bytes(archive, f"after_{i}.bin") for i in range(count)),
                tensors=tuple(_named(t) for t in more["tensors"]),
            )
    except (zipfile.BadZipFile, KeyError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is no saved launch: {error}") from error


def add_expected(
    path: Path, after: list[Bytes], layout: list[tuple[int, int]], tensors: list[Named]
) -> None:
    """Puts the expected memory into a saved launch; one that has it already is left alone."""
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        if "replay.json" in archive.namelist():
            return
        for index, data in enumerate(after):
            archive.writestr(f"after_{index}.bin", data.tobytes())
        facts = {"layout": layout, "tensors": [asdict(t) for t in tensors]}
        archive.writestr("replay.json", json.dumps(facts, indent=1))


def _bytes(archive: zipfile.ZipFile, name: str) -> Bytes:
    return np.frombuffer(archive.read(name), np.uint8)


def _named(facts: dict[str, Any]) -> Named:
    tile = (facts["tile"][0], facts["tile"][1])
    return Named(**{**facts, "shape": tuple(facts["shape"]), "tile": tile})
