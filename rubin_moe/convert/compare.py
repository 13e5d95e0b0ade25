"""Two checkpoints of one model, expert by expert: codes, scales and decoded weights.

Any two ways to store them: 16-bit, FP8, any FP4 dialect, stacked or not, in files of any number.
Layers are matched by number and experts by id; one expert of each is held at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from rubin_moe.convert.decode import decode_expert
from rubin_moe.convert.output import expert_parts
from rubin_moe.convert.source import DenseExpert, Source
from rubin_moe.errors import CheckpointError, ConvertError
from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.loader.checkpoint import TensorEntry
from rubin_moe.loader.dialect import Dialect
from rubin_moe.loader.load import ModelCheckpoint
from rubin_moe.loader.modelopt_stacked import STACKINGS
from rubin_moe.loader.names import module_layer, slot_of


@dataclass(frozen=True)
class Difference:
    """One projection of one expert.

    Attributes:
        layer: ``layers.3``; part: ``gate``, ``up`` or ``down``.
        codes, scales: share of codes (4 bits) and of scale bytes that differ; None where the two
            are not of one format.
        rel_err: root of the summed squared difference over that of A's values.
        max_abs: largest difference; max_value: largest magnitude of A.
    """

    layer: str
    expert: int
    part: str
    codes: float | None
    scales: float | None
    rel_err: float
    max_abs: float
    max_value: float


class Experts:
    """One checkpoint's experts, read one at a time."""

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        self.checkpoint, self.source = checkpoint, Source(checkpoint)
        self.modules = {str(module_layer(m)): m for m in checkpoint.experts()}
        if len(self.modules) != len(checkpoint.experts()):
            raise CheckpointError(f"{checkpoint.folder.name}: several expert modules in one layer")
        self._entries: dict[str, dict[int | None, list[TensorEntry]]] = {}

    def read(self, layer: str, expert: int) -> ExpertWeights | DenseExpert:
        """One expert as it is stored."""
        module = self.modules[layer]
        by_expert = self._of(module)
        entries = (*by_expert.get(expert, ()), *by_expert.get(None, ()))
        if not entries:
            raise CheckpointError(f"{self.checkpoint.folder.name}: {module} has no expert {expert}")
        stored = self.checkpoint.stored(module)
        if isinstance(stored, Dialect):
            return self.source.quantized(self.checkpoint.spec(module), module, expert, entries)
        if stored.kind not in ("unquantized", "fp8"):
            raise CheckpointError(stored.reason)
        lie = STACKINGS.get(self.checkpoint.sizes.model_type)
        return self.source.unquantized(module, expert, entries, lie)

    def _of(self, module: str) -> dict[int | None, list[TensorEntry]]:
        if module not in self._entries:
            found: dict[int | None, list[TensorEntry]] = {}
            for entry in self.checkpoint.experts()[module]:
                found.setdefault(slot_of(entry.name).expert, []).append(entry)
            self._entries = {module: found}  # layers come in order: one is enough
        return self._entries[module]


def compare(a: ModelCheckpoint, b: ModelCheckpoint) -> Iterator[Difference]:
    """Every expert and projection, in order.

    Raises:
        ConvertError: they are not checkpoints of one model.
        CheckpointError: an expert cannot be read.
    """
    left, right = Experts(a), Experts(b)
    for what in ("num_experts", "hidden", "intermediate", "gated"):
        mine, other = getattr(a.sizes, what), getattr(b.sizes, what)
        if mine != other:
            raise ConvertError(
                f"{a.folder.name} and {b.folder.name} are not of one model: {what} is {mine} and "
                f"{other}"
            )
    if left.modules.keys() != right.modules.keys():
        only = sorted(left.modules.keys() ^ right.modules.keys())
        raise ConvertError(f"only one of the two has experts in {', '.join(only[:8])}")
    try:
        for layer in left.modules:
            for expert in range(a.sizes.num_experts):
                yield from _expert(
                    layer, expert, left.read(layer, expert), right.read(layer, expert)
                )
    finally:
        left.source.close()
        right.source.close()


def _expert(
    layer: str, expert: int, a: ExpertWeights | DenseExpert, b: ExpertWeights | DenseExpert
) -> Iterator[Difference]:
    one, two = _values(a), _values(b)
    for part in one.matrices:
        mine, other = one.matrices[part].double(), two.matrices[part].double()
        if mine.shape != other.shape:
            raise ConvertError(f"{layer} {expert} {part}: {list(mine.shape)}, {list(other.shape)}")
        apart = (other - mine).abs()
        power, noise = float(mine.square().sum()), float(apart.square().sum())
        codes, scales = _stored(a, b, part)
        yield Difference(
            layer=layer,
            expert=expert,
            part=part,
            codes=codes,
            scales=scales,
            rel_err=sqrt(noise / power) if power else float(noise > 0),
            max_abs=float(apart.max()),
            max_value=float(mine.abs().max()),
        )


def _values(expert: ExpertWeights | DenseExpert) -> DenseExpert:
    return expert if isinstance(expert, DenseExpert) else decode_expert(expert, torch.float64)


def _stored(
    a: ExpertWeights | DenseExpert, b: ExpertWeights | DenseExpert, part: str
) -> tuple[float | None, float | None]:
    if isinstance(a, DenseExpert) or isinstance(b, DenseExpert):
        return None, None
    mine, other = expert_parts(a, part), expert_parts(b, part)
    apart = mine["qdata"] ^ other["qdata"]
    nibbles = int(((apart & 15) != 0).sum()) + int((apart >> 4 != 0).sum())
    codes = nibbles / (2 * apart.numel())
    if a.fmt != b.fmt:
        return codes, None
    return codes, _share(mine["sf"], other["sf"])


def _share(a: Tensor, b: Tensor) -> float:
    return int((a != b).sum()) / max(1, a.numel())
