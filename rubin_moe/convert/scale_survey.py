"""What the values of a checkpoint's scales are: bad codes, spreads, unlike gate and up, fold loss.

Reads block scales and global scales, a tenth of an NVFP4 checkpoint, one expert at a time, and no
codes.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from rubin_moe.convert.source import Source
from rubin_moe.errors import RubinMoeError
from rubin_moe.formats.minifloat import Minifloat
from rubin_moe.formats.scales import CODECS
from rubin_moe.formats.spec import NVFP4_UE4M3, NVFP4_UE5M3, BlockFormat, is_nvfp4
from rubin_moe.loader.checkpoint import TensorEntry
from rubin_moe.loader.dialect import Reading
from rubin_moe.loader.load import ModelCheckpoint
from rubin_moe.loader.names import ExpertSlot, parse
from rubin_moe.loader.spec import ExpertsSpec

_SHOWN = 8


@dataclass
class LayerScales:
    """One module.

    Attributes:
        blocks: block scales; nan, zero, negative: of them; where: the first bad ones.
        low, high: least and greatest block scale times global, of blocks that are not zero.
        unlike: experts whose gate and up have different global scales -> up's over gate's.
        bad_globals: global or input scales that are not positive and finite.
        fold_loss: ``full ue4m3``, ``full ue5m3`` -> mean relative error of the block scales.
    """

    module: str
    blocks: int = 0
    nan: int = 0
    zero: int = 0
    negative: int = 0
    low: float = float("inf")
    high: float = 0.0
    where: list[str] = field(default_factory=list)
    unlike: dict[int, float] = field(default_factory=dict)
    bad_globals: list[str] = field(default_factory=list)
    fold_loss: dict[str, float] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """No scale that loading would refuse for its code."""
        return not (self.nan or self.negative or self.bad_globals)

    def record(self) -> dict[str, Any]:
        """Plain data for JSON."""
        told = asdict(self)
        told["low"] = None if not self.blocks or self.low == float("inf") else self.low
        return told


def survey_scales(checkpoint: ModelCheckpoint) -> Iterator[LayerScales]:
    """Every FP4 module, in the checkpoint's order.

    Raises:
        CheckpointError: a module whose tensors cannot be told apart.
    """
    source = Source(checkpoint)
    try:
        for module in checkpoint.experts():
            try:
                spec = checkpoint.spec(module)
            except RubinMoeError:
                continue  # unquantized, or told by the summary
            yield _Survey(source, module, spec).run(checkpoint.experts()[module])
    finally:
        source.close()


class _Survey:
    def __init__(self, source: Source, module: str, spec: ExpertsSpec) -> None:
        self.source, self.spec = source, spec
        self.found = LayerScales(module)
        self.table = CODECS[spec.fmt.scale].table
        self.decs: dict[tuple[int | None, str], list[float]] = {}
        self.losses: dict[str, list[tuple[float, int]]] = {}

    def run(self, entries: list[TensorEntry]) -> LayerScales:
        scales = []
        for entry in entries:
            parsed = parse(entry.name)
            if parsed is None or parsed.slot is None:
                continue
            reading = self.spec.dialect.read(parsed.slot.leaf)
            if not isinstance(reading, Reading):
                continue
            if reading.part in ("dec", "input_dec"):
                self._global(entry, parsed.slot, reading)
            elif reading.part == "sf":
                scales.append((entry, parsed.slot))
        for entry, slot in scales:
            rows = range(1) if slot.expert is not None else range(entry.shape[0])
            for row in rows:
                codes = self.source.tensor(entry, None if slot.expert is not None else row)
                expert = row if slot.expert is None else slot.expert
                self._blocks(entry, slot, expert, codes.view(torch.uint8))
        self._compare()
        for kind, parts in self.losses.items():
            blocks = sum(n for _, n in parts)
            self.found.fold_loss[kind] = sum(e * n for e, n in parts) / max(1, blocks)
        return self.found

    def _global(self, entry: TensorEntry, slot: ExpertSlot, reading: Reading) -> None:
        values = self.source.tensor(entry).double().reshape(-1).tolist()
        for value in values:
            if not 2.0**-126 <= value < float("inf"):
                self.found.bad_globals.append(f"{entry.name} is {value}")
        if reading.part != "dec":
            return
        decs = [1 / v if reading.reciprocal and v else v for v in values]
        self.decs[slot.expert, slot.projection] = decs

    def _dec(self, slot: ExpertSlot, expert: int) -> float:
        """The global scale of one expert's projection; 1 where there is none."""
        decs = self.decs.get((slot.expert, slot.projection))
        if not decs:
            return 1.0
        if slot.expert is not None or len(decs) == 1:
            return decs[0]
        return decs[expert * (len(decs) // self.spec.num_experts)]

    def _blocks(self, entry: TensorEntry, slot: ExpertSlot, expert: int, codes: Tensor) -> None:
        found, dec = self.found, self._dec(slot, expert)
        counts = torch.bincount(codes.reshape(-1).int(), minlength=256)
        found.blocks += codes.numel()
        negative = counts[0x80:0xFF].sum() if self.spec.fmt.scale == "ue4m3" else counts[:0].sum()
        bad = int(counts[self.table.isnan()].sum())
        found.negative += int(negative)
        found.nan += bad - int(negative)
        found.zero += int(counts[self.table == 0].sum())
        if bad and len(found.where) < _SHOWN:
            at = self.table.isnan()[codes.int()].nonzero()[0].tolist()
            code = int(codes[tuple(at)])
            found.where.append(f"{entry.name} {at} is {code:#04x} ({bad} of {codes.numel()})")
        alive = (counts > 0) & (self.table > 0)
        if not alive.any():
            return
        values = self.table[alive] * dec
        found.low = min(found.low, float(values.min()))
        found.high = max(found.high, float(values.max()))
        if is_nvfp4(self.spec.fmt):
            self._losses(values, counts[alive])

    def _losses(self, values: Tensor, counts: Tensor) -> None:
        for target in (NVFP4_UE4M3, NVFP4_UE5M3):
            error = _relative_error(values, target)
            mean = float((error * counts).sum() / counts.sum())
            self.losses.setdefault(f"full {target.scale}", []).append((mean, int(counts.sum())))

    def _compare(self) -> None:
        for (expert, projection), decs in self.decs.items():
            if projection == "gate" and expert is not None:
                up = self.decs.get((expert, "up"))
                if up and up[0] != decs[0] and decs[0]:
                    self.found.unlike[expert] = up[0] / decs[0]
            elif projection == "gate_up" and len(decs) == 2 * self.spec.num_experts:
                for e in range(self.spec.num_experts):
                    gate, up_ = decs[2 * e], decs[2 * e + 1]
                    if gate != up_ and gate:
                        self.found.unlike[e] = up_ / gate


def _relative_error(values: Tensor, target: BlockFormat) -> Tensor:
    """Of every value rounded into the target's scale type."""
    codec = CODECS[target.scale]
    assert isinstance(codec, Minifloat)
    return (codec.decode(codec.encode(values), torch.float64) - values).abs() / values
