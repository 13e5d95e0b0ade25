"""Reading a checkpoint one expert or one matrix at a time, by plain reads of byte ranges.

Not through mapped files: a read error is then an exception with a name and not a signal, and what
is held is what was asked for. Rules about names, shapes and scales are the loader's
(`assemble.ExpertAssembler`, `dense.dense`).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rubin_moe.errors import CheckpointError, ConvertError
from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.loader.assemble import ExpertAssembler
from rubin_moe.loader.checkpoint import TensorEntry
from rubin_moe.loader.dense import dense
from rubin_moe.loader.dense_leaves import needed_leaves
from rubin_moe.loader.dialect import Dialect, Stacking
from rubin_moe.loader.load import ModelCheckpoint
from rubin_moe.loader.names import ExpertSlot, slot_of
from rubin_moe.loader.sharding import Shard
from rubin_moe.loader.spec import ExpertsSpec, InputScales

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""Of the tensors that a conversion reads as values; others are only copied."""


@dataclass(frozen=True)
class DenseExpert:
    """One expert's matrices in real numbers.

    Attributes:
        matrices: ``gate``, ``up``, ``down`` -> ``[N, K]``, 16-bit or float32.
        biases: the same -> ``[N]``, as stored.
    """

    matrices: Mapping[str, Tensor]
    biases: Mapping[str, Tensor] = field(default_factory=dict)


class Source:
    """An open checkpoint. Fork-safe: every process opens files of its own."""

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        self.checkpoint = checkpoint
        self._files: dict[tuple[int, Path], int] = {}

    def bytes(self, entry: TensorEntry, start: int, count: int) -> Tensor:
        """uint8 ``[count]`` of a tensor's bytes. Raises ConvertError that names it."""
        found = torch.empty(count, dtype=torch.uint8)
        self.read_into(entry, memoryview(found.numpy()), start)  # type: ignore[arg-type]
        return found

    def read_into(self, entry: TensorEntry, view: memoryview, start: int) -> None:
        """Fills ``view`` with a tensor's bytes from ``start`` on. Raises as `bytes` does."""
        done = 0
        try:
            fd = self._open(entry.file)
            while done < len(view):
                got = os.preadv(fd, [view[done:]], entry.start + start + done)
                if not got:
                    raise ConvertError(f"{entry.file.name}: ends within tensor {entry.name!r}")
                done += got
        except OSError as e:
            raise ConvertError(
                f"{entry.file.name}: tensor {entry.name!r} cannot be read: {e.strerror}"
            ) from e

    def tensor(self, entry: TensorEntry, row: int | None = None) -> Tensor:
        """A tensor as stored, or ``[1, ...]``, one row of its first axis."""
        shape = entry.shape if row is None else (1, *entry.shape[1:])
        count = entry.nbytes if row is None else entry.nbytes // entry.shape[0]
        raw = self.bytes(entry, 0 if row is None else row * count, count)
        if entry.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"{entry.name}: {entry.dtype} is not read as values")
        return raw.view(TORCH_DTYPES[entry.dtype]).view(shape)

    def _open(self, file: Path) -> int:
        key = (os.getpid(), file)
        if key not in self._files:
            self._files[key] = os.open(file, os.O_RDONLY)
        return self._files[key]

    def close(self) -> None:
        """Closes this process' files."""
        for (pid, _), fd in self._files.items():
            if pid == os.getpid():
                os.close(fd)
        self._files.clear()

    # -- one expert ------------------------------------------------------------------------------

    def quantized(
        self,
        spec: ExpertsSpec,
        module: str,
        expert: int,
        entries: Sequence[TensorEntry],
    ) -> ExpertWeights:
        """One expert of an FP4 module; ``entries`` are its own and the stacked ones.

        Raises:
            CheckpointError: see `ExpertAssembler`.
        """
        has_inputs = any(_part(spec, e) == "input_dec" for e in entries)
        inputs: InputScales = "keep" if has_inputs else "ignore"
        if all(slot_of(e.name).expert is not None for e in entries):
            assembler = ExpertAssembler(
                spec, Shard(expert_ids=(expert,)), module, input_scales=inputs
            )
            for entry in entries:
                assembler.add(entry.name, self.tensor(entry))
            return assembler.finish()
        alone = replace(spec, num_experts=1)
        assembler = ExpertAssembler(alone, name=f"{module}[{expert}]", input_scales=inputs)
        for entry in entries:
            slot = slot_of(entry.name)
            whole = len(entry.shape) == 0 or prod(entry.shape) == 1 or slot.expert is not None
            slot = ExpertSlot(slot.projection, slot.leaf, None if slot.expert is None else 0)
            assembler.add(slot, self.tensor(entry, None if whole else expert))
        return replace(assembler.finish(), expert_ids=(expert,), name=module)

    def unquantized(
        self,
        module: str,
        expert: int,
        entries: Sequence[TensorEntry],
        stacking: Stacking | None,
    ) -> DenseExpert:
        """One expert of 16-bit or FP8 matrices."""
        leaves: dict[str, dict[str, Tensor]] = {}
        for entry in entries:
            slot = slot_of(entry.name)
            leaf = slot.leaf
            tensor = self.tensor(entry, expert if slot.expert is None else None)
            if slot.expert is None:
                tensor = tensor.squeeze(0) if tensor.dim() > 1 else tensor
                if stacking is not None and stacking.transposed and tensor.dim() == 2:
                    tensor = tensor.transpose(0, 1)
            leaves.setdefault(slot.projection, {})[leaf] = tensor
        matrices: dict[str, Tensor] = {}
        biases: dict[str, Tensor] = {}
        for projection, stored in leaves.items():
            bias = stored.pop("bias", None)
            matrix = self._dense(stored, f"{module}.{expert}.{projection}")
            if projection != "gate_up":
                matrices[projection] = matrix
                if bias is not None:
                    biases[projection] = bias
                continue
            alternate = stacking is not None and stacking.interleaved
            for half, name in enumerate(("gate", "up")):
                matrices[name] = _half(matrix, half, alternate)
                if bias is not None:
                    biases[name] = _half(bias, half, alternate)
        return DenseExpert(matrices, biases)

    def linear(self, dialect: Dialect | None, entries: Mapping[str, TensorEntry]) -> Tensor:
        """One matrix outside the experts ``[N, K]``; ``dialect`` None: 16-bit or FP8."""
        name = next(iter(entries.values())).name.rpartition(".")[0]
        if dialect is None:
            return self._dense({n: self.tensor(e) for n, e in entries.items() if n != "bias"}, name)
        needed = needed_leaves(dialect, entries, name)
        return dense(dialect, {n: self.tensor(entries[n]) for n in needed}, name)

    @staticmethod
    def _dense(stored: Mapping[str, Tensor], name: str) -> Tensor:
        weight = stored["weight"]
        if weight.dtype.itemsize == 1:
            needed = needed_leaves(None, stored, name)
            return dense(None, {n: t for n, t in stored.items() if n in needed}, name)
        if not bool(torch.isfinite(weight).all()):
            raise CheckpointError(f"{name}: NaN or infinity among its values")
        return weight


def _part(spec: ExpertsSpec, entry: TensorEntry) -> str | None:
    return getattr(spec.dialect.read(slot_of(entry.name).leaf), "part", None)


def _half(matrix: Tensor, half: int, interleaved: bool) -> Tensor:
    if interleaved:
        return matrix[half::2]
    rows = matrix.shape[0] // 2
    return matrix[half * rows : (half + 1) * rows]
