"""A safetensors checkpoint as a table of tensors; bytes are mapped, and read when used.

Headers are parsed here, from plain JSON, and checked completely before anything is allocated or
mapped: lengths, dtypes, shapes, offsets, coverage, duplicates. Values come through the safetensors
library as views of the mapped file. Only the files that the index names are opened, only inside
the checkpoint's folder, and nothing is ever unpickled or executed.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import prod
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from rubin_moe.errors import CheckpointError
from rubin_moe.loader.names import parse

if TYPE_CHECKING:
    from torch import Tensor

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
"""Of the safetensors format."""

MAX_HEADER_BYTES = 100 << 20  # the safetensors library's own limit
MAX_JSON_BYTES = 512 << 20
MAX_JSON_DEPTH = 64
MAX_DIMS = 8
_INDEX_SUFFIX = ".safetensors.index.json"
_INDEXES = ("model" + _INDEX_SUFFIX, "consolidated" + _INDEX_SUFFIX)
_SINGLES = ("model.safetensors", "consolidated.safetensors")


class TensorEntry(NamedTuple):
    """One tensor of a file.

    Attributes:
        dtype: safetensors code such as ``U8`` or ``F8_E4M3``.
        file: absolute path; start, stop: byte range in it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError that names the file."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path.name}: more than {MAX_JSON_BYTES >> 20} MiB of JSON")
        return _json_object(path.read_bytes(), path.name)
    except OSError as e:
        raise CheckpointError(f"{path.name}: cannot be read: {e.strerror}") from e


def _json_object(data: bytes, what: str) -> dict[str, Any]:
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
        # Not left to the parser's RecursionError: finalizers that the garbage collector runs at
        # that depth fail half-way, and what they had locked stays locked.
        if _too_deep(text):
            raise CheckpointError(f"no valid JSON: nested deeper than {MAX_JSON_DEPTH} levels")
        found = json.loads(text, object_pairs_hook=_unique)
    except CheckpointError as e:
        raise CheckpointError(f"{what}: {e}") from None
    except ValueError as e:
        raise CheckpointError(f"{what}: no valid JSON: {e}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{what}: a JSON {type(found).__name__}, expected an object")
    return found


_NO_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[^"\[\]{}]++', re.DOTALL)
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


def _too_deep(text: str) -> bool:
    """Whether arrays and objects in JSON text are nested too deep, without a call for each."""
    brackets = _NO_BRACKETS.sub("", text)
    levels = accumulate(map(_STEPS.__getitem__, brackets))
    return any(level > MAX_JSON_DEPTH for level in levels)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [k for k, _ in pairs]
        twice = next(k for k in found if keys.count(k) > 1)
        raise CheckpointError(f"key {twice!r} occurs twice")
    return found


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, from its header alone.

    Raises:
        CheckpointError: names the file, the tensor and what is wrong with it.
    """
    try:
        with path.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            prefix = f.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path.name}: truncated or no safetensors file: {size} bytes, header of "
                    f"{length if len(prefix) == 8 else '?'}"
                )
            raw = f.read(length)
    except OSError as e:
        raise CheckpointError(f"{path.name}: cannot be read: {e.strerror}") from e
    header = _json_object(raw, path.name)
    header.pop("__metadata__", None)
    base = 8 + length
    entries = {n: _entry(n, e, path, base) for n, e in header.items()}
    _check_coverage(path, entries.values(), base, size)
    return entries


def _entry(name: str, raw: object, path: Path, base: int) -> TensorEntry:
    where = f"{path.name}: tensor {name!r}"
    if not isinstance(raw, dict) or not {"dtype", "shape", "data_offsets"} <= raw.keys():
        raise CheckpointError(f"{where}: needs dtype, shape and data_offsets")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}")
    if not _sizes(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{where}: shape {shape!r} is no list of at most {MAX_DIMS} sizes")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {offsets!r} are no byte range")
    bits = prod(shape) * DTYPE_BITS[dtype]
    start, stop = offsets
    if bits != (stop - start) * 8:
        raise CheckpointError(
            f"{where}: {dtype} {shape} takes {bits / 8:g} bytes, its range has {stop - start}"
        )
    return TensorEntry(name, dtype, tuple(shape), path, base + start, base + stop)


def _sizes(values: object) -> bool:
    return type(values) is list and not any(
        type(v) is not int or not 0 <= v < 1 << 63 for v in values
    )


def _check_coverage(path: Path, entries: Iterable[TensorEntry], base: int, size: int) -> None:
    """Every byte after the header belongs to exactly one tensor, as safetensors demands."""
    end = base
    for entry in sorted(entries, key=lambda e: (e.start, e.stop)):
        if entry.start != end:
            kind = "overlaps another" if entry.start < end else "leaves a gap before it"
            raise CheckpointError(f"{path.name}: tensor {entry.name!r} {kind}")
        end = entry.stop
    if end > size:
        raise CheckpointError(f"{path.name}: truncated, {size} bytes of {end}")
    if end < size:
        raise CheckpointError(f"{path.name}: {size - end} bytes after the last tensor")


class Checkpoint:
    """A folder (or one file) of safetensors; use as a context manager or call `close`.

    Attributes:
        folder: where it is.
        tensors: every tensor of the index's files, by name, in file order.
        files: those files.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        if not path.exists():
            raise CheckpointError(f"{path}: does not exist")
        self.folder = path if path.is_dir() else path.parent
        self._open: dict[Path, Any] = {}
        self._experts: dict[str, list[TensorEntry]] | None = None
        index = _find_index(path) if path.is_dir() else None
        weight_map = {} if index is None else _weight_map(index)
        if index is not None:
            names = _index_files(index.name, weight_map)
        else:
            names = _files_without_index(path) if path.is_dir() else [path.name]
        paths = {n: self.folder / n for n in names}
        self.files = list(paths.values())
        self.tensors: dict[str, TensorEntry] = {}
        for file in self.files:
            if not file.is_file():
                why = (
                    "no regular file" if index is None else "named by the index, not in the folder"
                )
                raise CheckpointError(f"{file.name}: {why}")
            for name, entry in read_header(file).items():
                if name in self.tensors:
                    other = self.tensors[name].file.name
                    raise CheckpointError(f"tensor {name!r} is in both {other} and {file.name}")
                self.tensors[name] = entry
        for name, placed in weight_map.items():
            found = self.tensors.get(name)
            if found is None or found.file is not paths[placed]:
                actual = "" if found is None else f" but in {found.file.name}"
                raise CheckpointError(f"index: tensor {name!r} is not in {placed}{actual}")

    def json(self, name: str) -> dict[str, Any] | None:
        """One of the folder's JSON files, None if it is not there."""
        path = self.folder / name
        return read_json(path) if path.is_file() else None

    def tensor(self, name: str) -> "Tensor":
        """A view of the mapped file, whole; slicing it reads no more than the slice. Read-only
        by contract. Needs torch."""
        entry = self.tensors[name]
        handle = self._handle(entry.file)
        if not entry.shape:
            return handle.get_tensor(name)  # type: ignore[no-any-return]
        return handle.get_slice(name)[:]  # type: ignore[no-any-return]

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            from safetensors import SafetensorError, safe_open

            try:
                self._open[file] = safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as e:
                raise CheckpointError(f"{file.name}: {e}") from e
        return self._open[file]

    def experts(self) -> dict[str, list[TensorEntry]]:
        """Tensors of every ``experts`` module, by its path, in file order."""
        if self._experts is None:
            found: dict[str, list[TensorEntry]] = {}
            for name, entry in self.tensors.items():
                parsed = parse(name)
                if parsed is not None:
                    found.setdefault(parsed.module, []).append(entry)
            for entries in found.values():
                entries.sort(key=lambda e: (e.file, e.start))
            self._experts = found
        return self._experts

    def close(self) -> None:
        """Lets the mapped files go; views that were handed out stay valid."""
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[TensorEntry]:
        return iter(self.tensors.values())


def _find_index(folder: Path) -> Path | None:
    for name in _INDEXES:
        if (folder / name).is_file():
            return folder / name
    others = sorted(folder.glob("*" + _INDEX_SUFFIX))
    if len(others) > 1:
        raise CheckpointError(f"several index files: {', '.join(p.name for p in others)}")
    return others[0] if others else None


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(f, str) for f in found.values()):
        raise CheckpointError(f"{index.name}: weight_map is no table of file names")
    return found


def _index_files(index: str, weight_map: dict[str, str]) -> list[str]:
    """Files an index names, each checked to lie in its folder.

    Only the name is checked: caches link a file to a store elsewhere, and that link is the user's.
    """
    files = sorted(set(weight_map.values()))
    for name in files:
        path = PurePosixPath(name)
        outside = path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name
        if outside or path.suffix != ".safetensors":
            raise CheckpointError(f"{index}: refuses file {name!r}, not one of this folder's")
    return files


def _files_without_index(folder: Path) -> list[str]:
    for name in _SINGLES:
        if (folder / name).is_file():
            return [name]
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    if not files:
        pickles = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl")]
        more = f"; {', '.join(sorted(pickles)[:3])} would run code when read" if pickles else ""
        raise CheckpointError(f"{folder.name or folder}: no safetensors files{more}")
    return files
