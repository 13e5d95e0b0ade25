"""Reads back what was written: sizes, checksums, headers as planned, every value finite.

Values are judged by their bits, a range at a time: an exponent of all ones is NaN or infinity, and
the NaN codes of FP8 and of block scales are codes.
"""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rubin_moe.convert.journal import Finished
from rubin_moe.convert.output import OutTensor
from rubin_moe.convert.plan import CopyGroup, Plan, Shard
from rubin_moe.convert.stream import Progress
from rubin_moe.errors import ConvertError
from rubin_moe.loader.checkpoint import read_header

_EXPONENT: Mapping[str, tuple[type[np.generic], int]] = {
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000),
}
_NAN_CODE = {"F8_E4M3": 0x7F, "F8_E8M0": 0xFF}
_READ = 16 << 20


def verify(
    plan: Plan, folder: Path, finished: Mapping[str, Finished], progress: Progress
) -> dict[str, int]:
    """CRC-32 of every file of a plan, checked.

    Adds copied tensors that are not finite in the source to the tally of their file.

    Raises:
        ConvertError: names the file, the tensor and what is wrong.
    """
    return {
        shard.name: _verify_file(shard, folder / shard.name, finished[shard.name], progress)
        for shard in plan.shards
    }


def _verify_file(shard: Shard, path: Path, done: Finished, progress: Progress) -> int:
    size = path.stat().st_size
    if size != shard.size:
        raise ConvertError(f"{shard.name}: {size} bytes on disk, {shard.size} planned")
    header = read_header(path)
    wanted = {o.name: (o.dtype, o.shape) for o in shard.outputs}
    if {n: (e.dtype, e.shape) for n, e in header.items()} != wanted:
        raise ConvertError(f"{shard.name}: its header is not the planned one")
    owners = _Owners(shard)
    copied = {g.out.name for g in shard.groups if isinstance(g, CopyGroup)}
    end, whole = 0, 0
    with path.open("rb") as f:
        for start, stop, crc in done.pieces:
            if start != end:
                raise ConvertError(f"{shard.name}: bytes {end} to {start} were never written")
            end = stop
            out = owners.at(start)
            found = 0
            for at in range(start, stop, _READ):
                data = os.pread(f.fileno(), min(_READ, stop - at), at)
                found, whole = zlib.crc32(data, found), zlib.crc32(data, whole)
                if out is not None and not _finite(out, data):
                    if out.name not in copied:
                        raise ConvertError(f"{out.name}: NaN or infinity in {shard.name}")
                    done.tally.non_finite = tuple(sorted({*done.tally.non_finite, out.name}))
                progress(len(data))
            if found != crc:
                where = "the header" if out is None else f"tensor {out.name!r}"
                raise ConvertError(f"{shard.name}: {where} reads back with other bytes")
    if end != shard.size:
        raise ConvertError(f"{shard.name}: bytes {end} to {shard.size} were never written")
    return whole


class _Owners:
    """Which tensor a range belongs to; asked in ascending order."""

    def __init__(self, shard: Shard) -> None:
        self._outputs = [o for o in shard.outputs if o.nbytes]
        self._starts = shard.starts
        self._next = 0

    def at(self, start: int) -> OutTensor | None:
        while self._next < len(self._outputs):
            out = self._outputs[self._next]
            begin = self._starts[out.name]
            if begin <= start < begin + out.nbytes:
                return out
            if start < begin:
                return None
            self._next += 1
        return None


def _finite(out: OutTensor, data: bytes) -> bool:
    if out.dtype in _EXPONENT:
        kind, mask = _EXPONENT[out.dtype]
        bits = np.frombuffer(data, kind)
        return not bool(((bits & kind(mask)) == mask).any())  # type: ignore[call-arg]
    if out.dtype in _NAN_CODE:
        mask = 0x7F if out.dtype == "F8_E4M3" else 0xFF
        return not bool(((np.frombuffer(data, np.uint8) & mask) == _NAN_CODE[out.dtype]).any())
    return True
