"""From vLLM's weight iterator to `loader.assemble.ExpertAssembler`, for one layer.

vLLM hands a tensor to the ``weight_loader`` of a parameter. Ours holds no weights: a parameter is
a small tally with one byte per tensor expected, which is ticked off when the tensor has been
placed by the assembler. vLLM's reload machinery counts copied elements, and so it sees exactly
when a layer is complete; it also replays tensors after a pass over meta tensors, in which nothing
must be placed.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rubin_moe.errors import CheckpointError
from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.loader.assemble import ExpertAssembler
from rubin_moe.loader.dialect import Ignored, Reading
from rubin_moe.loader.names import ExpertSlot, Projection, parse_slot
from rubin_moe.loader.sharding import Shard
from rubin_moe.loader.spec import ExpertsSpec, InputScales

STACKED = "stacked_"
"""Prefix of parameters that take a tensor of all experts, whole, as the checkpoint has it."""

_SHARDS: dict[str, Projection] = {"w1": "gate", "w3": "up", "w2": "down"}


def parameter_name(slot: ExpertSlot) -> str:
    """Parameter that takes a tensor: by projection and leaf, or a stacked one of its own."""
    leaf = slot.leaf.replace(".", "_")
    if slot.expert is None:
        return f"{STACKED}{slot.projection}_proj_{leaf}"
    return f"{'w2' if slot.projection == 'down' else 'w13'}_{leaf}"


class LayerLoading:
    """What has come for one layer.

    Args:
        spec: what the layer is; name: its module path, for messages.
        shard: this rank's part.
        input_scales: whether the backend reads them.
        on_reloaded: called with the new weights when a later load has brought every tensor of the
            first one again.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        name: str,
        shard: Shard,
        input_scales: InputScales,
        on_reloaded: Callable[[ExpertWeights], None],
    ) -> None:
        self._spec, self._name, self._shard = spec, name, shard
        self._input_scales = input_scales
        self._on_reloaded = on_reloaded
        self._assembler: ExpertAssembler | None = None
        self._came: set[ExpertSlot] = set()
        self._complete: frozenset[ExpertSlot] = frozenset()
        experts = shard.experts(spec.num_experts)
        self._locals = {expert: local for local, expert in enumerate(experts)}

    def register(self, layer: torch.nn.Module) -> None:
        """Give ``layer`` its tallies, and take over its own ``load_weights``."""
        gate_up = "gate_up" if self._spec.gated else "up"
        for leaf in self._spec.dialect.leaves:
            for projection, halves in ((gate_up, len(self._spec.projections) - 1), ("down", 1)):
                if self._spec.dialect.stacking is None:
                    shard = "w2" if projection == "down" else "w13"
                    rows = len(self._counted(leaf))
                    self._add_tally(layer, f"{shard}_{leaf}", (rows, halves), leaf)
                if self._spec.stacking is not None:
                    self._add_tally(layer, f"{STACKED}{projection}_proj_{leaf}", (1, 1), leaf)
        layer.load_weights = self._module_loader(layer)  # type: ignore[assignment]

    def _add_tally(
        self, layer: torch.nn.Module, name: str, shape: tuple[int, int], leaf: str
    ) -> None:
        tally = torch.nn.Parameter(torch.zeros(shape, dtype=torch.uint8), requires_grad=False)
        tally.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        tally.stored_name = name  # type: ignore[attr-defined]
        ignored = isinstance(self._spec.dialect.read(leaf), Ignored)
        if ignored or (
            self._is_input_scale(leaf) and self._input_scales == "ignore"
        ):  # since 0.32: vLLM's reload does not wait for it
            tally.weight_loader_numel = 0  # type: ignore[attr-defined]
        layer.register_parameter(name, tally)

    def _is_input_scale(self, leaf: str) -> bool:
        reading = self._spec.dialect.read(leaf)
        return isinstance(reading, Reading) and reading.part == "input_dec"

    def _counted(self, leaf: str) -> dict[int, int]:
        """Row of the tally of every expert whose ``leaf`` is waited for; input scales are read of
        all experts (`loader.accounting`)."""
        if self._is_input_scale(leaf) and self._input_scales != "ignore":
            return {expert: expert for expert in range(self._spec.num_experts)}
        return self._locals

    def weight_loader(
        self,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str = "",
        shard_id: str | None = None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        """vLLM's ``weight_loader``. Tensors come whole; they are cut to this rank here."""
        slot = self._slot(param.stored_name, shard_id, expert_id)  # type: ignore[attr-defined]
        self._tick(param, slot)
        taken = False if param.is_meta else self._place(slot, loaded_weight)
        return taken if return_success else None

    def _slot(self, name: str, shard_id: str | None, expert_id: int | None) -> ExpertSlot:
        if name.startswith(STACKED):
            slot = parse_slot(name.removeprefix(STACKED))
            assert slot is not None, name
            return slot
        if shard_id not in _SHARDS or expert_id is None:
            raise CheckpointError(
                f"{self._name}: vLLM loads {name} as shard {shard_id!r} of expert {expert_id!r}, "
                f"expected one of {', '.join(_SHARDS)} of a numbered expert"
            )
        # Where there is no gate, vLLM calls the only matrix of w13 by the name of the gate.
        projection = _SHARDS[shard_id] if self._spec.gated or shard_id == "w2" else "up"
        return ExpertSlot(projection, name.split("_", 1)[1], expert_id)

    def _tick(self, tally: Tensor, slot: ExpertSlot) -> None:
        if slot.expert is None:
            tally.data.copy_(torch.ones_like(tally))
            return
        rows = self._counted(slot.leaf)
        if slot.expert in rows:
            half = 1 if slot.projection == "up" and self._spec.gated else 0
            place = tally.data[rows[slot.expert], half]
            place.copy_(torch.ones_like(place))

    def _place(self, slot: ExpertSlot | str, tensor: Tensor) -> bool:
        if self._assembler is None:
            self._assembler = ExpertAssembler(
                self._spec, self._shard, self._name, input_scales=self._input_scales
            )
            self._came = set()
        taken = self._assembler.add(slot, tensor)
        if isinstance(slot, ExpertSlot):
            self._came.add(slot)  # also what is ignored or another rank's: all of it comes again
        if self._complete and self._came == self._complete:
            weights = self.finish()
            assert weights is not None
            self._on_reloaded(weights)
        return taken

    def finish(self) -> ExpertWeights | None:
        """The assembled layer; None if nothing has come since the last time.

        Raises:
            CheckpointError: a slot without its tensor, a tensor without a slot, a bad scale.
        """
        if self._assembler is None:
            if not self._complete:
                raise CheckpointError(f"{self._name}: no tensor of any expert has been loaded")
            return None
        weights = self._assembler.finish()
        self._assembler, self._complete = None, frozenset(self._came)
        return weights

    def _module_loader(
        self, layer: torch.nn.Module
    ) -> Callable[[Iterable[tuple[str, Tensor]]], Iterator[str]]:
        """``load_weights`` for models that pass what is below ``experts.`` to the module."""
        shards = {projection: shard for shard, projection in _SHARDS.items()}

        def load_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
            for name, tensor in weights:
                slot = parse_slot(name.removeprefix("routed_experts.").removeprefix(STACKED))
                param: Any = None if slot is None else getattr(layer, parameter_name(slot), None)
                if slot is None or param is None:
                    # Nobody's tensor: the assembler reports it with all that is wrong.
                    self._place(f"{self._name}.{name}", tensor)
                elif slot.expert is None:
                    param.weight_loader(param, tensor)
                    yield parameter_name(slot)
                elif param.weight_loader(
                    param, tensor, name, shards[slot.projection], slot.expert, return_success=True
                ):
                    yield parameter_name(slot)

        return load_weights
