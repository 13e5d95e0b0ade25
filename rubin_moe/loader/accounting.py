"""Which tensor fills which slot of a layer's experts, and what has come of it.

Decided from names, dtypes and shapes alone, so that the same rules serve loading (`assemble`) and
inspection from headers (`summary`). Every tensor fills a slot, is ignored for a reason, belongs to
another rank, or is left over; every slot is filled once. Input scales are read of all experts,
other ranks' too: what quantizes a token once for all its experts needs the largest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from rubin_moe.errors import CheckpointError
from rubin_moe.loader.dialect import Ignored, Part, Reading, Stacking
from rubin_moe.loader.names import ExpertSlot, nearest_names, parse
from rubin_moe.loader.spec import ExpertsSpec, InputScales

SingleProjection: TypeAlias = Literal["gate", "up", "down"]
SCALARS: tuple[Part, ...] = ("dec", "input_dec")
_PLAIN = Stacking(transposed=False, interleaved=False)
_SHOWN = 8  # of a list in a message


@dataclass(frozen=True)
class Admitted:
    """A tensor that this rank reads.

    Attributes:
        label: its name, for messages; slot and reading: what it is.
    """

    label: str
    slot: ExpertSlot
    reading: Reading

    @property
    def part(self) -> Part:
        return self.reading.part

    @property
    def projections(self) -> tuple[SingleProjection, ...]:
        """What it holds, in order of halves."""
        projection = self.slot.projection
        return ("gate", "up") if projection == "gate_up" else (projection,)


def no_input_scales(where: str, lacking: Mapping[str, Sequence[int]]) -> str:
    """The refusal of a layer whose input scales will be read.

    Args:
        lacking: projection -> global ids of experts without a usable one.
    """
    parts = "; ".join(f"{name} of experts {list(e)}" for name, e in lacking.items() if e)
    return (
        f"{where}: W4A4 needs an input scale that is positive and finite, missing or unusable for "
        f"{parts}; run weight-only (input_scales='ignore') or mend with "
        "ScaleChecks(repair={'input_scales'})"
    )


class Account:
    """The slots of one layer on one rank.

    Args:
        name: of the module, for messages.
        expert_ids: global id of each local expert.
        input_scales: whether they are read.

    A slot is counted by local expert, that of an input scale by global id.
    """

    def __init__(
        self, spec: ExpertsSpec, name: str, expert_ids: Sequence[int], input_scales: InputScales
    ) -> None:
        self.spec, self.name = spec, name
        self.expert_ids = tuple(expert_ids)
        self.input_scales = input_scales
        self.filled: dict[tuple[SingleProjection, Part], set[int]] = {}
        self.ignored: dict[str, str] = {}
        self.left_over: list[str] = []
        self._locals: dict[int, list[int]] = {}
        for local, expert in enumerate(self.expert_ids):
            self._locals.setdefault(expert, []).append(local)

    def admit(self, name: str | ExpertSlot) -> Admitted | None:
        """What a tensor is by its name; None if it is not read, which is then noted."""
        label = name if isinstance(name, str) else f"{self.name}.{name}"
        slot: ExpertSlot | None
        if isinstance(name, ExpertSlot):
            slot = name
        else:
            parsed = parse(name)
            slot = None if parsed is None else parsed.slot
        reading = None if slot is None else self.spec.dialect.read(slot.leaf)
        if slot is None or reading is None or not self._expects(slot, reading):
            self.left_over.append(label)
            return None
        if isinstance(reading, Ignored):
            self.ignored[label] = reading.reason
            return None
        if reading.part == "input_dec" and self.input_scales == "ignore":
            self.ignored[label] = f"{self.spec.scheme} reads no input scale"
            return None
        foreign = slot.expert is not None and slot.expert not in self._locals
        if foreign and reading.part != "input_dec":
            return None
        return Admitted(label, slot, reading)

    def _expects(self, slot: ExpertSlot, reading: Reading | Ignored) -> bool:
        if slot.expert is not None and not 0 <= slot.expert < self.spec.num_experts:
            return False
        if not self.spec.gated and slot.projection in ("gate", "gate_up"):
            return False
        biased = isinstance(reading, Reading) and reading.part == "bias"
        return self.spec.has_bias or not biased

    # -- dtypes and shapes -----------------------------------------------------------------------

    def check(self, admitted: Admitted, dtype: str, shape: Sequence[int]) -> Stacking:
        """How an admitted tensor lies.

        Args:
            dtype: safetensors code; shape: as stored.

        Raises:
            CheckpointError: a dtype or shape that it cannot have, or one that does not tell how the
                tensor lies where the model family is not known.
        """
        if dtype not in admitted.reading.dtypes:
            expected = " or ".join(admitted.reading.dtypes)
            raise CheckpointError(f"{admitted.label}: stored as {dtype}, expected {expected}")
        if admitted.part in SCALARS:
            self._check_scalars(admitted, shape)
            return _PLAIN
        return self._stacking(admitted, self.logical_shape(admitted, shape))

    @staticmethod
    def logical_shape(admitted: Admitted, shape: Sequence[int]) -> tuple[int, ...]:
        """``[1 or E, ...]`` with one axis for a row's bytes, of a matrix or bias as stored."""
        stacked = admitted.slot.expert is None
        found = tuple(shape) if stacked else (1, *shape)
        if admitted.reading.last_axes == 2 and len(found) == 4:
            found = (*found[:2], found[2] * found[3])
        return found

    def _check_scalars(self, admitted: Admitted, shape: Sequence[int]) -> None:
        e = self.spec.num_experts
        shapes: list[list[int]] = [[], [1]]
        if admitted.slot.expert is None:
            shapes += [[e], [e, 1], [e, len(admitted.projections)]]
        if prod(shape) != 1 and list(shape) not in shapes:
            raise CheckpointError(
                f"{admitted.label}: a global scale of shape {list(shape)}, expected one of {shapes}"
            )

    def _stacking(self, admitted: Admitted, shape: tuple[int, ...]) -> Stacking:
        slot, part = admitted.slot, admitted.part
        plain = self._expected(admitted)
        turned = plain if part == "bias" else (plain[0], plain[2], plain[1])
        fused = slot.projection == "gate_up"
        known = self.spec.dialect.stacking or self.spec.stacking
        if known is None and slot.expert is not None and not fused:
            known = _PLAIN
        if known is not None:
            if slot.expert is not None:
                known = Stacking(transposed=False, interleaved=known.interleaved)
            expected = turned if known.transposed else plain
            if shape != expected:
                raise CheckpointError(self._wrong_shape(admitted, shape, [expected]))
            return known
        if shape not in (plain, turned):
            raise CheckpointError(self._wrong_shape(admitted, shape, [plain, turned]))
        if fused or (plain == turned and part != "bias"):
            raise CheckpointError(
                f"{admitted.label}: {list(shape)} does not tell how a stacked tensor lies "
                f"(orientation, row order), and this model's is not known; give `stacking`"
            )
        return Stacking(transposed=shape != plain, interleaved=False)

    def _expected(self, admitted: Admitted) -> tuple[int, ...]:
        """`logical_shape` without transposition."""
        spec, fmt = self.spec, self.spec.fmt
        e = spec.num_experts if admitted.slot.expert is None else 1
        n, k = spec.intermediate, spec.hidden
        if admitted.slot.projection == "down":
            n, k = k, n
        n *= len(admitted.projections)
        if admitted.part == "bias":
            return (e, n)
        return (e, n, fmt.packed_k(k) if admitted.part == "qdata" else fmt.scales_k(k))

    def _wrong_shape(
        self, admitted: Admitted, shape: tuple[int, ...], expected: list[tuple[int, ...]]
    ) -> str:
        spec = self.spec
        drop = 0 if admitted.slot.expert is None else 1
        wanted = " or ".join(str(list(e[drop:])) for e in dict.fromkeys(expected))
        group = f", one block scale for {spec.fmt.sf_vec_size}" if admitted.part == "sf" else ""
        return (
            f"{admitted.label}: shape {list(shape[drop:])}, expected {wanted} for hidden "
            f"{spec.hidden}, expert width {spec.intermediate}, {spec.num_experts} experts, "
            f"{spec.dialect}{group}"
        )

    # -- slots -----------------------------------------------------------------------------------

    def targets(self, admitted: Admitted, rows: int) -> Iterator[tuple[int, int]]:
        """(row of the stored tensor, index) pairs; one stored row serves every expert."""
        expert = admitted.slot.expert
        everyone = admitted.part == "input_dec"
        if expert is not None:
            locals_ = self._locals.get(expert, ())
            yield from ((0, index) for index in ((expert,) if everyone else locals_))
            return
        for index, expert in enumerate(self._experts(admitted.part)):
            yield (0 if rows == 1 else expert), index

    def _experts(self, part: Part) -> Sequence[int]:
        """Global ids of the experts that slots of ``part`` are counted for."""
        return range(self.spec.num_experts) if part == "input_dec" else self.expert_ids

    def mark(self, admitted: Admitted, projection: SingleProjection, index: int) -> None:
        """Notes a slot as filled. Raises CheckpointError if it was."""
        filled = self.filled.setdefault((projection, admitted.part), set())
        if index in filled:
            raise CheckpointError(
                f"{admitted.label}: {projection} {admitted.part} of expert "
                f"{self._experts(admitted.part)[index]} came twice"
            )
        filled.add(index)

    def lacking(self, projection: SingleProjection, part: Part) -> list[int]:
        """Global ids of experts whose slot is empty."""
        filled = self.filled.get((projection, part), set())
        return [e for i, e in enumerate(self._experts(part)) if i not in filled]

    def _required(self) -> Iterator[tuple[SingleProjection, Part]]:
        for projection in self.spec.projections:
            yield projection, "qdata"
            yield projection, "sf"
            if self.spec.dialect.needs_dec:
                yield projection, "dec"
            if self.spec.has_bias:
                yield projection, "bias"

    def missing(self) -> list[str]:
        """Slots that must be filled and are not, one sentence a projection and part."""
        lines = []
        for projection, part in self._required():
            experts = self.lacking(projection, part)
            if experts:
                shown = str(experts[:_SHOWN])[1:-1] + (", ..." if len(experts) > _SHOWN else "")
                leaf = self.spec.dialect.leaf(part)
                lines.append(f"{projection}.{leaf} of {len(experts)} experts ({shown})")
        return lines

    def why_incomplete(self) -> str | None:
        """None if every slot is filled and nothing left over; else all of it, with near names."""
        missing, left_over = self.missing(), self.left_over
        if not missing and not left_over:
            return None
        lines = [f"{self.name}: experts are not complete ({self.spec.dialect})"]
        if missing:
            lines.append("  missing: " + "; ".join(missing))
        if left_over:
            lines.append(f"  left over ({len(left_over)}): " + ", ".join(left_over[:_SHOWN]))
        expected = [
            f"{self.name}.{ExpertSlot(p, self.spec.dialect.leaf(part), 0)}"
            for p, part in self._required()
        ]
        for name in left_over[:3]:
            near = nearest_names(name, expected)
            if near:
                lines.append(f"  nearest to {name}: {', '.join(near)}")
        return "\n".join(lines)
