"""Names of expert tensors: every producer's spelling -> one slot.

Families spell the path (``model.language_model.layers.3.mlp.experts``,
``backbone.layers.3.mixer.experts``, ``layers.3.ffn.experts``, ``mtp.0.ffn.experts``), the
projection (``gate_proj``, ``w1``), the place of the expert index and the separator of the leaf
(``gate_up_proj_weight_scale``) differently; `parse` reads all of them and `canonical` writes one:
``layers.3.experts.7.gate.weight_scale``. What follows the projection, the leaf, keeps its
producer's name, since only a dialect knows what it means. Standard library only.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Literal, TypeAlias

from rubin_moe.errors import CheckpointError

Projection: TypeAlias = Literal["gate", "up", "down", "gate_up"]
Branch: TypeAlias = Literal["layers", "mtp"]

_PROJECTIONS: dict[str, Projection] = {
    "gate_up_proj": "gate_up",
    "gate_up": "gate_up",
    "w13": "gate_up",
    "gate_proj": "gate",
    "gate": "gate",
    "w1": "gate",
    "up_proj": "up",
    "up": "up",
    "w3": "up",
    "down_proj": "down",
    "down": "down",
    "w2": "down",
}
# What follows a projection directly, without a dot: gpt-oss, Llama-4.
_JOINED = re.compile(r"^(gate_up_proj|gate_proj|up_proj|down_proj|w13|w2)_(.+)$", re.DOTALL)


@dataclass(frozen=True, order=True)
class LayerKey:
    """A layer of the body (``layers``) or of the multi-token-prediction head (``mtp``)."""

    branch: Branch
    index: int

    def __str__(self) -> str:
        return f"{self.branch}.{self.index}"


@dataclass(frozen=True)
class ExpertSlot:
    """One tensor of one layer's routed experts.

    Attributes:
        projection: ``gate_up`` where a producer stores both in one tensor.
        leaf: the producer's own name of the tensor: ``weight``, ``weight_scale_2``, ``blocks``.
        expert: global id; None where one tensor holds all experts.
    """

    projection: Projection
    leaf: str
    expert: int | None = None

    def __str__(self) -> str:
        index = "" if self.expert is None else f"{self.expert}."
        return f"{index}{self.projection}.{self.leaf}"


@dataclass(frozen=True)
class ExpertName:
    """A parsed tensor name.

    Attributes:
        module: path of the ``experts`` module as the checkpoint spells it.
        slot: None where the rest of the name is no known projection.
    """

    layer: LayerKey
    module: str
    slot: ExpertSlot | None


@lru_cache(maxsize=1 << 14)  # a layer's names are asked for several times
def parse(name: str) -> ExpertName | None:
    """Reads a tensor name; None if it is not below a layer's ``experts`` module.

    Shared experts (``shared_experts.``, ``shared_expert.``) are not below it.
    """
    above, dot, rest = name.partition(".experts.")
    layer = _layer(above) if dot else None
    if layer is None:
        return None
    return ExpertName(layer, f"{above}.experts", parse_slot(rest))


@lru_cache(maxsize=1 << 12)
def _layer(path: str) -> LayerKey | None:
    """The ``layers.N`` nearest to the end; DeepSeek-V4 counts MTP layers as ``mtp.N``."""
    parts = path.split(".")
    for i in range(len(parts) - 1, 0, -1):
        if parts[i].isdecimal() and parts[i - 1] in ("layers", "mtp"):
            return LayerKey("mtp" if "mtp" in parts[:i] else "layers", int(parts[i]))
    return None


def parse_slot(rest: str) -> ExpertSlot | None:
    """Reads what follows the ``experts.`` module; None if it names no known projection."""
    match rest.split(".", 2):
        case [index, proj, *leaf] if index.isdecimal() and proj in _PROJECTIONS:
            return ExpertSlot(_PROJECTIONS[proj], _leaf(leaf), int(index))
        case [proj, index, *leaf] if index.isdecimal() and proj in _PROJECTIONS:
            return ExpertSlot(_PROJECTIONS[proj], _leaf(leaf), int(index))
        case [proj, *leaf] if proj in _PROJECTIONS:
            return ExpertSlot(_PROJECTIONS[proj], _leaf(leaf))
    joined = _JOINED.match(rest)
    return None if joined is None else ExpertSlot(_PROJECTIONS[joined[1]], joined[2])


def slot_of(name: str) -> ExpertSlot:
    """The slot of a tensor below an ``experts`` module. Raises CheckpointError if it names none."""
    parsed = parse(name)
    if parsed is None or parsed.slot is None:
        raise CheckpointError(f"{name}: no known projection of an expert")
    return parsed.slot


def _leaf(parts: list[str]) -> str:
    """A stacked tensor with no suffix at all (gpt-oss, Llama-4) is the weight itself."""
    return ".".join(parts) or "weight"


def canonical(name: str) -> str:
    """The one spelling of an expert tensor's name; any other name comes back as it is.

    ``canonical(canonical(n)) == canonical(n)``.
    """
    parsed = parse(name)
    if parsed is None or parsed.slot is None:
        return name
    return f"{parsed.layer}.experts.{parsed.slot}"


def module_layer(module: str) -> LayerKey | None:
    """Layer of a module path such as ``model.layers.3.mlp.experts``; None if it has none."""
    return _layer(module.removesuffix(".experts"))


def nearest_names(name: str, among: Iterable[str], count: int = 3) -> list[str]:
    """The most similar names, for messages."""
    return get_close_matches(name, list(among), n=count, cutoff=0.5)
