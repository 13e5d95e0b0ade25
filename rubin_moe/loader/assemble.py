"""Tensors of one layer's experts, in any order -> `formats.experts.ExpertWeights`.

The one home of placing: `load.load_experts` feeds it from files, the vLLM adapter from vLLM's
weight iterator. Every tensor goes straight into its place in the result, which is allocated once;
nothing else is held. `finish` answers for every slot: filled, deliberately ignored, or an error
that lists what is missing, what was left over, and the nearest names.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rubin_moe.errors import CheckpointError
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.loader import validate
from rubin_moe.loader.accounting import SCALARS, Account, Admitted, SingleProjection
from rubin_moe.loader.dialect import Part, Stacking
from rubin_moe.loader.names import ExpertSlot
from rubin_moe.loader.sharding import Shard
from rubin_moe.loader.spec import ExpertsSpec, InputScales
from rubin_moe.loader.validate import Repairs, ScaleChecks

_DTYPE_CODES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


@dataclass(frozen=True)
class _Place:
    """Where one projection lies in the result, on this rank."""

    attr: Literal["w13", "w2"]
    half: int
    row_start: int


class ExpertAssembler:
    """Fills one layer's experts tensor by tensor. One use: `add` ..., `finish`.

    Args:
        spec: what the layer is.
        shard: this rank's part. The result's ``intermediate`` is the rank's, padded (`sharding`).
        name: module name in the checkpoint, for messages.
        input_scales: overrides what ``spec.scheme`` asks for.
        checks: strictness and repairs of scales.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        shard: Shard | None = None,
        name: str = "experts",
        *,
        input_scales: InputScales | None = None,
        checks: ScaleChecks | None = None,
    ) -> None:
        self.spec, self.name = spec, name
        self.shard = shard or Shard()
        self.repairs = Repairs()
        self._checks = checks or ScaleChecks()
        self._input_scales = spec.input_scales if input_scales is None else input_scales
        self._finished = False
        self.expert_ids = self.shard.experts(spec.num_experts)
        self.columns = self.shard.columns(spec.intermediate, spec.fmt.sf_vec_size)
        self._account = Account(spec, name, self.expert_ids, self._input_scales)
        width = self.columns.padded
        self._places: dict[SingleProjection, _Place] = {"down": _Place("w2", 0, 0)}
        for half, projection in enumerate(spec.projections[:-1]):
            self._places[projection] = _Place("w13", half, half * width)
        halves = len(spec.projections) - 1
        self._w13 = self._allocate(halves * width, spec.hidden, halves)
        self._w2 = self._allocate(spec.hidden, width, 1)
        # of all experts of the layer: scalars, and every rank has to choose the same
        self._inputs = {
            n: _reals((spec.num_experts, h), math.nan) for n, h in (("w13", halves), ("w2", 1))
        }

    def _allocate(self, n: int, k: int, halves: int) -> ProjectionWeights:
        e, fmt = len(self.expert_ids), self.spec.fmt
        padded = self.columns.padded != self.columns.width
        return ProjectionWeights(
            qdata=_bytes((e, n, fmt.packed_k(k)), padded),
            sf=_bytes((e, n, fmt.scales_k(k)), padded),
            dec=_reals((e, halves), 1.0),
            bias=_reals((e, n), 0.0) if self.spec.has_bias else None,
        )

    def add(self, name: str | ExpertSlot, tensor: Tensor | Callable[[], Tensor]) -> bool:
        """Places one tensor.

        Args:
            name: the checkpoint's tensor name, or its slot.
            tensor: as the checkpoint has it, whole, or a function that gives it, called only if
                this rank needs it. It is read and not kept.

        Returns:
            Whether values were taken; False for another rank's expert (but its input scales are
            taken), for a deliberately ignored tensor, and for one that no slot takes (an error in
            `finish`).

        Raises:
            CheckpointError: unexpected dtype or shape, a slot filled twice, an implausible global
                scale; names tensor, layer, expert and what was expected.
        """
        if self._finished:
            raise CheckpointError(f"{self.name}: finished, takes no more tensors ({name})")
        admitted = self._account.admit(name)
        if admitted is None:
            return False
        if not isinstance(tensor, Tensor):
            tensor = tensor()
        dtype = _DTYPE_CODES.get(tensor.dtype, str(tensor.dtype))
        stacking = self._account.check(admitted, dtype, tensor.shape)
        if admitted.part in SCALARS:
            self._add_scalars(admitted, tensor)
        else:
            self._add_matrices(admitted, tensor, stacking)
        return True

    def _add_scalars(self, admitted: Admitted, tensor: Tensor) -> None:
        """Global scales: ``[]``, ``[1]``; stacked also ``[E]``, ``[E, 1]``, ``[E, halves]``."""
        label, reading, halves = admitted.label, admitted.reading, len(admitted.projections)
        if tensor.numel() == 1:
            rows = [[tensor.item()] * halves]
        else:
            e = self.spec.num_experts
            rows = tensor.reshape(e, -1).expand(e, halves).tolist()
        for half, projection in enumerate(admitted.projections):
            place = self._places[projection]
            inputs = admitted.part == "input_dec"
            scales = self._inputs[place.attr] if inputs else self._weights(place).dec
            target = scales.numpy()
            for row, index in self._account.targets(admitted, rows=len(rows)):
                self._account.mark(admitted, projection, index)
                value = rows[row][half]
                if admitted.part == "dec":
                    validate.check_stored_global(value, self.spec.dialect, label)
                # Rounds once: a float32's reciprocal in float64 has no double rounding.
                value = 1 / value if reading.reciprocal and value else value
                if admitted.part == "dec":
                    validate.check_global(value, label)
                target[index, place.half] = value

    def _add_matrices(self, admitted: Admitted, tensor: Tensor, stacking: Stacking) -> None:
        """Codes, block scales and biases."""
        if admitted.part in ("qdata", "sf"):
            tensor = tensor.view(torch.uint8)
        tensor = tensor.reshape(self._account.logical_shape(admitted, tensor.shape))
        if stacking.transposed and admitted.part != "bias":
            tensor = tensor.transpose(-1, -2)
        halves = len(admitted.projections)
        for expert, local in self._account.targets(admitted, rows=tensor.shape[0]):
            matrix = tensor[expert]
            for half, projection in enumerate(admitted.projections):
                self._account.mark(admitted, projection, local)
                rows = _half(matrix, half, halves, stacking.interleaved)
                self._write(projection, admitted.part, local, rows)

    def _write(self, projection: SingleProjection, part: Part, local: int, rows: Tensor) -> None:
        """One expert's projection, logical ``[N, C]`` or bias ``[N]``, cut to this rank."""
        place, cols = self._places[projection], self.columns
        target = getattr(self._weights(place), part)[local]
        if projection == "down":
            if part == "bias":
                # Every rank adds its partial sum, one of them adds the bias.
                if self.shard.tp_rank == 0:
                    target.copy_(rows)
                return
            unit = 2 if part == "qdata" else self.spec.fmt.sf_vec_size
            cut = rows[:, cols.start // unit : cols.stop // unit]
            target[:, : cols.width // unit].copy_(cut)
            return
        cut = rows[cols.start : cols.stop]
        target[place.row_start : place.row_start + cols.width].copy_(cut)

    def _weights(self, place: _Place) -> ProjectionWeights:
        return self._w13 if place.attr == "w13" else self._w2

    @property
    def ignored(self) -> dict[str, str]:
        """Tensors that were deliberately not read -> why."""
        return dict(self._account.ignored)

    def finish(self) -> ExpertWeights:
        """The assembled layer.

        Raises:
            CheckpointError: a slot without its tensor, a tensor without a slot, a bad scale.
        """
        incomplete = self._account.why_incomplete()
        if incomplete is not None:
            raise CheckpointError(incomplete)
        self._finished = True
        self._settle_inputs()
        self._check_scales()
        largest = None
        if any(part == "input_dec" for _, part in self._account.filled):
            largest = float(self._inputs["w13"].amax())  # NaN wins
            self._w13, self._w2 = self._with_inputs("w13"), self._with_inputs("w2")
        return ExpertWeights(
            fmt=self.spec.fmt,
            hidden=self.spec.hidden,
            intermediate=self.columns.padded,
            gated=self.spec.gated,
            w13=self._w13,
            w2=self._w2,
            expert_ids=self.expert_ids,
            name=self.name,
            layer_input_dec=largest,
        )

    def _settle_inputs(self) -> None:
        """The check of every expert's input scales that ``require`` asks for."""
        if self._input_scales != "require":
            return
        projections = self.spec.projections
        for attr, halves in (("w13", projections[:-1]), ("w2", projections[-1:])):
            experts = range(self.spec.num_experts)
            validate.settle_input_scales(
                self._inputs[attr], experts, halves, self.name, self._checks, self.repairs
            )

    def _with_inputs(self, attr: Literal["w13", "w2"]) -> ProjectionWeights:
        """A projection with the input scales of its local experts."""
        weights = self._w13 if attr == "w13" else self._w2
        own = self._inputs[attr].numpy()[list(self.expert_ids)]
        return replace(weights, input_dec=torch.from_numpy(own))

    def _check_scales(self) -> None:
        spec, where = self.spec, self._where
        for weights, halves in (
            (self._w13, spec.projections[:-1]),
            (self._w2, spec.projections[-1:]),
        ):
            rows = weights.sf.shape[1] // len(halves)
            for local in range(len(self.expert_ids)):
                for half, projection in enumerate(halves):
                    part = slice(half * rows, (half + 1) * rows)
                    validate.check_block_scales(
                        weights.sf[local, part],
                        weights.qdata[local, part],
                        spec.fmt,
                        where(local, projection),
                        self._checks,
                        self.repairs,
                    )
            labels = [[where(i, p) for p in halves] for i in range(len(self.expert_ids))]
            validate.check_spread(weights.sf, weights.dec, spec.fmt, labels, self._checks)

    def _where(self, local: int, projection: str) -> str:
        return f"{self.name}.{self.expert_ids[local]}.{projection}"


# Servers set a default device and dtype while they load: neither is meant for these.
def _bytes(shape: tuple[int, int, int], padded: bool) -> Tensor:
    """uint8; zeros only where some bytes will not be written."""
    make = torch.zeros if padded else torch.empty
    return make(shape, dtype=torch.uint8, device="cpu")


def _reals(shape: tuple[int, int], value: float) -> Tensor:
    return torch.full(shape, value, dtype=torch.float32, device="cpu")


def _half(matrix: Tensor, half: int, halves: int, interleaved: bool) -> Tensor:
    """Rows of one projection of a tensor that holds ``halves`` of them."""
    if halves == 1:
        return matrix
    if interleaved:
        return matrix[half::2]
    rows = matrix.shape[0] // 2
    return matrix[half * rows : (half + 1) * rows]
