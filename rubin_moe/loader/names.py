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
_PROJ = "|".join(_PROJECTIONS)

# ``layers.N`` nearest to the ``experts`` segment; DeepSeek-V4 counts MTP layers as ``mtp.N``.
_MODULE = re.compile(
    r"^(?P<prefix>(?:[^.]+\.)*?)(?P<stack>layers|mtp)\.(?P<layer>\d+)"
    r"(?P<block>(?:\.(?!layers\.|mtp\.)[^.]+)*?)\.experts(?:\.(?P<rest>.*))?$"
)
_INDEX_FIRST = re.compile(rf"^(?P<expert>\d+)\.(?P<proj>{_PROJ})(?:\.(?P<leaf>.+))?$")
_INDEX_LAST = re.compile(rf"^(?P<proj>{_PROJ})\.(?P<expert>\d+)(?:\.(?P<leaf>.+))?$")
_STACKED = re.compile(rf"^(?P<proj>{_PROJ})(?:\.(?P<leaf>.+))?$")
_JOINED = re.compile(r"^(?P<proj>gate_up_proj|gate_proj|up_proj|down_proj|w13|w2)_(?P<leaf>.+)$")


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
    found = _MODULE.match(name)
    if found is None or found["rest"] is None:
        return None
    mtp = found["stack"] == "mtp" or "mtp" in found["prefix"].split(".")
    layer = LayerKey("mtp" if mtp else "layers", int(found["layer"]))
    module = name[: len(name) - len(found["rest"]) - 1]
    return ExpertName(layer, module, parse_slot(found["rest"]))


def parse_slot(rest: str) -> ExpertSlot | None:
    """Reads what follows the ``experts.`` module; None if it names no known projection."""
    for pattern in (_INDEX_FIRST, _INDEX_LAST, _STACKED, _JOINED):
        found = pattern.match(rest)
        if found is not None:
            index = found.groupdict().get("expert")
            # A stacked tensor with no suffix at all (gpt-oss, Llama-4) is the weight itself.
            return ExpertSlot(
                _PROJECTIONS[found["proj"]],
                found["leaf"] or "weight",
                None if index is None else int(index),
            )
    return None


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
    parsed = parse(f"{module}.0.gate.weight")
    return None if parsed is None else parsed.layer


def nearest_names(name: str, among: Iterable[str], count: int = 3) -> list[str]:
    """The most similar names, for messages."""
    return get_close_matches(name, list(among), n=count, cutoff=0.5)
