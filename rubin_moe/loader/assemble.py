"""Tensors of one layer's experts, in any order -> `formats.experts.ExpertWeights`.

The one home of placing: `load.load_experts` feeds it from files, the vLLM adapter from vLLM's
weight iterator. Every tensor goes straight into its place in the result, which is allocated once;
nothing else is held. `finish` answers for every slot: filled, deliberately ignored, or an error
that lists what is missing, what was left over, and the nearest names.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rubin_moe.errors import CheckpointError
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.loader import names, validate
from rubin_moe.loader.dialect import Ignored, Part, Reading, Stacking
from rubin_moe.loader.names import ExpertSlot, Projection
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
_SCALARS: tuple[Part, ...] = ("dec", "input_dec")
_Single = Literal["gate", "up", "down"]


@dataclass(frozen=True)
class _Place:
    """Where one projection lies in the result, on this rank."""

    attr: Literal["w13", "w2"]
    half: int
    rows: int
    row_start: int


@dataclass
class _Account:
    """What came, by projection and part: local expert indices."""

    filled: dict[tuple[_Single, Part], set[int]] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    left_over: list[str] = field(default_factory=list)


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
        self._account = _Account()
        self._finished = False
        self.expert_ids = self.shard.experts(spec.num_experts)
        self.columns = self.shard.columns(spec.intermediate, spec.fmt.sf_vec_size)
        self._locals: dict[int, list[int]] = {}
        for local, expert in enumerate(self.expert_ids):
            self._locals.setdefault(expert, []).append(local)
        width = self.columns.padded
        self._places: dict[_Single, _Place] = {"down": _Place("w2", 0, spec.hidden, 0)}
        for half, projection in enumerate(spec.projections[:-1]):
            self._places[projection] = _Place("w13", half, width, half * width)
        halves = len(spec.projections) - 1
        self._w13 = self._allocate(halves * width, spec.hidden, halves)
        self._w2 = self._allocate(spec.hidden, width, 1)

    def _allocate(self, n: int, k: int, halves: int) -> ProjectionWeights:
        e, fmt = len(self.expert_ids), self.spec.fmt
        # Padding is zeros; without any, every byte will be written and need not be now.
        make = torch.empty if self.columns.padded == self.columns.width else torch.zeros
        nan = torch.full((e, halves), float("nan"), dtype=torch.float32)
        return ProjectionWeights(
            qdata=make((e, n, fmt.packed_k(k)), dtype=torch.uint8),
            sf=make((e, n, fmt.scales_k(k)), dtype=torch.uint8),
            dec=torch.ones((e, halves), dtype=torch.float32),
            bias=torch.zeros((e, n), dtype=torch.float32) if self.spec.has_bias else None,
            input_dec=None if self._input_scales == "ignore" else nan,
        )

    def add(self, name: str | ExpertSlot, tensor: Tensor | Callable[[], Tensor]) -> bool:
        """Places one tensor.

        Args:
            name: the checkpoint's tensor name, or its slot.
            tensor: as the checkpoint has it, whole, or a function that gives it, called only if
                this rank needs it. It is read and not kept.

        Returns:
            Whether values were taken; False for another rank's expert, for a deliberately ignored
            tensor, and for one that no slot takes (an error in `finish`).

        Raises:
            CheckpointError: unexpected dtype or shape, a slot filled twice, an implausible global
                scale; names tensor, layer, expert and what was expected.
        """
        if self._finished:
            raise CheckpointError(f"{self.name}: finished, takes no more tensors ({name})")
        label = name if isinstance(name, str) else f"{self.name}.{name}"
        slot = name if isinstance(name, ExpertSlot) else _slot(name)
        reading = None if slot is None else self.spec.dialect.read(slot.leaf)
        if slot is None or reading is None or not self._is_expected(slot, reading):
            self._account.left_over.append(label)
            return False
        if isinstance(reading, Ignored):
            self._account.ignored[label] = reading.reason
            return False
        if reading.part == "input_dec" and self._input_scales == "ignore":
            self._account.ignored[label] = f"{self.spec.scheme} reads no input scale"
            return False
        if slot.expert is not None and slot.expert not in self._locals:
            return False
        if not isinstance(tensor, Tensor):
            tensor = tensor()
        _check_dtype(label, tensor, reading)
        if reading.part in _SCALARS:
            self._add_scalars(label, slot, reading, tensor)
        else:
            self._add_matrices(label, slot, reading, tensor)
        return True

    def _is_expected(self, slot: ExpertSlot, reading: Reading | Ignored) -> bool:
        if slot.expert is not None and not 0 <= slot.expert < self.spec.num_experts:
            return False
        if not self.spec.gated and slot.projection in ("gate", "gate_up"):
            return False
        biased = isinstance(reading, Reading) and reading.part == "bias"
        return self.spec.has_bias or not biased

    # -- scalars ---------------------------------------------------------------------------------

    def _add_scalars(self, label: str, slot: ExpertSlot, reading: Reading, tensor: Tensor) -> None:
        """Global scales: ``[]``, ``[1]``; stacked also ``[E]``, ``[E, 1]``, ``[E, halves]``."""
        projections = _split(slot.projection)
        part = reading.part
        rows = self._scalar_rows(label, slot, len(projections), tensor)
        for half, projection in enumerate(projections):
            place = self._places[projection]
            target = getattr(self._weights(place), part).numpy()
            for row, local in self._targets(slot, rows=len(rows)):
                self._mark(label, projection, part, local)
                value = rows[row][half]
                if part == "dec":
                    self._check_stored_global(label, value)
                # Rounds once: a float32's reciprocal in float64 has no double rounding.
                value = 1 / value if reading.reciprocal and value else value
                if part == "dec":
                    validate.check_global(value, label)
                target[local, place.half] = value

    def _scalar_rows(
        self, label: str, slot: ExpertSlot, halves: int, tensor: Tensor
    ) -> list[list[float]]:
        """``[rows][halves]`` of whatever shape was stored; rows: 1 or all experts."""
        e = self.spec.num_experts
        if tensor.numel() == 1:
            return [[tensor.item()] * halves]
        shapes: list[list[int]] = [[], [1]]
        if slot.expert is None:
            shapes += [[e], [e, 1], [e, halves]]
            if list(tensor.shape) in shapes:
                return tensor.reshape(e, -1).expand(e, halves).tolist()  # type: ignore[no-any-return]
        raise CheckpointError(
            f"{label}: a global scale of shape {list(tensor.shape)}, expected one of {shapes}"
        )

    def _check_stored_global(self, label: str, stored: float) -> None:
        low, high = self.spec.dialect.global_range
        if stored > 0 and not low <= stored <= high:
            raise CheckpointError(
                f"{label}: {stored:.6g} looks like {self.spec.dialect.looks_like}; "
                f"{self.spec.dialect} stores values within [{low:g}, {high:g}]"
            )

    # -- matrices and biases ---------------------------------------------------------------------

    def _add_matrices(self, label: str, slot: ExpertSlot, reading: Reading, tensor: Tensor) -> None:
        part, projections = reading.part, _split(slot.projection)
        if part in ("qdata", "sf"):
            tensor = tensor.view(torch.uint8)
            if reading.last_axes == 2 and tensor.dim() == (4 if slot.expert is None else 3):
                tensor = tensor.flatten(-2)
        if slot.expert is not None:
            tensor = tensor.unsqueeze(0)
        stacking = self._stacking(label, slot, part, tensor)
        if stacking.transposed and part != "bias":
            tensor = tensor.transpose(-1, -2)
        for expert, local in self._targets(slot, rows=tensor.shape[0]):
            matrix = tensor[expert]
            for half, projection in enumerate(projections):
                self._mark(label, projection, part, local)
                rows = _half(matrix, half, len(projections), stacking.interleaved)
                self._write(projection, part, local, rows)

    def _stacking(self, label: str, slot: ExpertSlot, part: Part, tensor: Tensor) -> Stacking:
        """How this tensor lies, after its shape ``[1 or E, ...]`` was found to be possible."""
        plain = self._expected(slot, part)
        turned = plain if part == "bias" else (plain[0], plain[2], plain[1])
        shape = tuple(tensor.shape)
        fused = slot.projection == "gate_up"
        known = self.spec.stacking or self.spec.dialect.stacking
        if known is None and slot.expert is not None and not fused:
            known = Stacking(transposed=False, interleaved=False)
        if known is not None:
            expected = turned if known.transposed and slot.expert is None else plain
            if shape != expected:
                raise CheckpointError(self._wrong_shape(label, slot, part, shape, (expected,)))
            return known if slot.expert is None else Stacking(False, known.interleaved)
        if shape not in (plain, turned):
            raise CheckpointError(self._wrong_shape(label, slot, part, shape, (plain, turned)))
        if fused or (plain == turned and part != "bias"):
            raise CheckpointError(
                f"{label}: {list(shape)} does not tell how a stacked tensor lies (orientation, row "
                f"order), and this model's is not known; give `stacking`"
            )
        return Stacking(transposed=shape != plain, interleaved=False)

    def _expected(self, slot: ExpertSlot, part: Part) -> tuple[int, ...]:
        """Stored shape without transposition, with a leading expert axis."""
        spec, fmt = self.spec, self.spec.fmt
        e = spec.num_experts if slot.expert is None else 1
        n, k = spec.intermediate, spec.hidden
        if slot.projection == "down":
            n, k = k, n
        n *= len(_split(slot.projection))
        if part == "bias":
            return (e, n)
        return (e, n, fmt.packed_k(k) if part == "qdata" else fmt.scales_k(k))

    def _wrong_shape(
        self,
        label: str,
        slot: ExpertSlot,
        part: Part,
        shape: tuple[int, ...],
        expected: tuple[tuple[int, ...], ...],
    ) -> str:
        spec = self.spec
        drop = 0 if slot.expert is None else 1
        wanted = " or ".join(str(list(e[drop:])) for e in dict.fromkeys(expected))
        group = f", one block scale for {spec.fmt.sf_vec_size}" if part == "sf" else ""
        return (
            f"{label}: shape {list(shape[drop:])}, expected {wanted} for hidden {spec.hidden}, "
            f"expert width {spec.intermediate}, {spec.num_experts} experts, {spec.dialect}{group}"
        )

    def _write(self, projection: _Single, part: Part, local: int, rows: Tensor) -> None:
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

    # -- accounting ------------------------------------------------------------------------------

    def _weights(self, place: _Place) -> ProjectionWeights:
        return self._w13 if place.attr == "w13" else self._w2

    def _targets(self, slot: ExpertSlot, rows: int) -> Iterator[tuple[int, int]]:
        """(row of the stored tensor, local index) pairs; one stored row serves every expert."""
        if slot.expert is not None:
            yield from ((0, local) for local in self._locals.get(slot.expert, ()))
            return
        for local, expert in enumerate(self.expert_ids):
            yield (0 if rows == 1 else expert), local

    def _mark(self, label: str, projection: _Single, part: Part, local: int) -> None:
        filled = self._account.filled.setdefault((projection, part), set())
        if local in filled:
            raise CheckpointError(
                f"{label}: {projection} {part} of expert {self.expert_ids[local]} came twice"
            )
        filled.add(local)

    @property
    def ignored(self) -> dict[str, str]:
        """Tensors that were deliberately not read -> why."""
        return dict(self._account.ignored)

    def _required(self) -> Iterator[tuple[_Single, Part]]:
        for projection in self.spec.projections:
            yield projection, "qdata"
            yield projection, "sf"
            if self.spec.dialect.needs_dec:
                yield projection, "dec"
            if self.spec.has_bias:
                yield projection, "bias"

    def _missing(self) -> list[str]:
        lines = []
        for projection, part in self._required():
            filled = self._account.filled.get((projection, part), set())
            experts = [e for i, e in enumerate(self.expert_ids) if i not in filled]
            if experts:
                leaf = self._leaf(part)
                shown = str(experts[:8])[1:-1] + (", ..." if len(experts) > 8 else "")
                lines.append(f"{projection}.{leaf} of {len(experts)} experts ({shown})")
        return lines

    def _leaf(self, part: Part) -> str:
        for leaf in ("weight", "weight_packed", "blocks", *_LEAVES):
            reading = self.spec.dialect.read(leaf)
            if isinstance(reading, Reading) and reading.part == part:
                return leaf
        return part

    def finish(self) -> ExpertWeights:
        """The assembled layer.

        Raises:
            CheckpointError: a slot without its tensor, a tensor without a slot, a bad scale.
        """
        self._check_complete()
        self._finished = True
        input_scales = self._input_decs()
        self._check_scales()
        if not input_scales:
            self._w13, self._w2 = (_without_inputs(w) for w in (self._w13, self._w2))
        return ExpertWeights(
            fmt=self.spec.fmt,
            hidden=self.spec.hidden,
            intermediate=self.columns.padded,
            gated=self.spec.gated,
            w13=self._w13,
            w2=self._w2,
            expert_ids=self.expert_ids,
            name=self.name,
        )

    def _check_complete(self) -> None:
        missing, left_over = self._missing(), self._account.left_over
        if not missing and not left_over:
            return
        lines = [f"{self.name}: experts are not complete ({self.spec.dialect})"]
        if missing:
            lines.append("  missing: " + "; ".join(missing))
        if left_over:
            lines.append(f"  left over ({len(left_over)}): " + ", ".join(left_over[:8]))
        expected = [
            f"{self.name}.{ExpertSlot(p, self._leaf(part), 0)}" for p, part in self._required()
        ]
        for name in left_over[:3]:
            near = validate.nearest_names(name, expected)
            if near:
                lines.append(f"  nearest to {name}: {', '.join(near)}")
        raise CheckpointError("\n".join(lines))

    def _input_decs(self) -> bool:
        """Whether the result has input scales, after the check that ``require`` asks for."""
        if self._input_scales == "ignore":
            return False
        if self._input_scales == "require":
            for weights, halves in (
                (self._w13, self.spec.projections[:-1]),
                (self._w2, self.spec.projections[-1:]),
            ):
                assert weights.input_dec is not None
                validate.settle_input_scales(
                    weights.input_dec,
                    self.expert_ids,
                    halves,
                    self.name,
                    self._checks,
                    self.repairs,
                )
        return any(part == "input_dec" for _, part in self._account.filled)

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


_LEAVES = ("weight_scale", "weight_scale_2", "weight_global_scale", "scales", "scale", "bias")


def _slot(name: str) -> ExpertSlot | None:
    parsed = names.parse(name)
    return None if parsed is None else parsed.slot


def _split(projection: Projection) -> tuple[_Single, ...]:
    return ("gate", "up") if projection == "gate_up" else (projection,)


def _half(matrix: Tensor, half: int, halves: int, interleaved: bool) -> Tensor:
    """Rows of one projection of a tensor that holds ``halves`` of them."""
    if halves == 1:
        return matrix
    if interleaved:
        return matrix[half::2]
    rows = matrix.shape[0] // 2
    return matrix[half * rows : (half + 1) * rows]


def _check_dtype(label: str, tensor: Tensor, reading: Reading) -> None:
    code = _DTYPE_CODES.get(tensor.dtype, str(tensor.dtype))
    if code not in reading.dtypes:
        expected = " or ".join(reading.dtypes)
        raise CheckpointError(f"{label}: stored as {code}, expected {expected}")


def _without_inputs(w: ProjectionWeights) -> ProjectionWeights:
    return ProjectionWeights(w.qdata, w.sf, w.dec, w.bias, None)
