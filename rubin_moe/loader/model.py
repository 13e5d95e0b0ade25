"""The sizes of a model's routed experts, from config.json or Mistral's params.json.

Keys differ by family; a key that a family lacks is never replaced by a guess. Standard library
only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rubin_moe.errors import ConfigError
from rubin_moe.loader.config import TEXT_CONFIGS

# Experts that live in a latent width read that one: Nemotron-3-Super, Kimi-K3.
_HIDDEN = ("moe_latent_size", "routed_expert_hidden_size", "hidden_size", "dim")
_WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "expert_hidden_dim")
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_LAYERS = ("num_hidden_layers", "n_layers")
_ACTIVATIONS = ("mlp_hidden_act", "hidden_act", "hidden_activation", "activation")
_NON_GATED = frozenset({"relu2", "squared_relu", "relu_squared"})
# Only here does the plain MLP width mean the experts'.
_SHARED_WIDTH = ("intermediate_size",)


@dataclass(frozen=True)
class MoESizes:
    """Of the whole model.

    Attributes:
        model_type: of the language model; "" in params.json.
        hidden: width that experts read and write; intermediate: one expert's width.
        num_layers: of the body, without MTP layers.
        gated: whether the activation has a gate.
        activation: as the config spells it.
    """

    model_type: str
    hidden: int
    intermediate: int
    num_experts: int
    num_layers: int
    gated: bool
    activation: str


def moe_sizes(config: Mapping[str, Any]) -> MoESizes:
    """Reads config.json (its text config where there is one) or params.json.

    Raises:
        ConfigError: a size that no known key gives; lists the keys that were looked for.
    """
    text = config
    for key in TEXT_CONFIGS:
        if isinstance(config.get(key), Mapping):
            text = config[key]
            break
    moe = text.get("moe") if isinstance(text.get("moe"), Mapping) else {}
    places: list[Mapping[str, Any]] = [text, moe]  # type: ignore[list-item]
    activation = str(_first(places, _ACTIVATIONS) or "silu")
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    return MoESizes(
        model_type=model_type,
        hidden=_size(places, _HIDDEN, "hidden width", model_type),
        intermediate=_size(places, _WIDTH + _SHARED_WIDTH, "expert width", model_type),
        num_experts=_size(places, _EXPERTS, "number of experts", model_type),
        num_layers=_size(places, _LAYERS, "number of layers", model_type),
        gated=activation not in _NON_GATED,
        activation=activation,
    )


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether a config declares routed experts at all."""
    try:
        return moe_sizes(config).num_experts > 0
    except ConfigError:
        return False


def _first(places: list[Mapping[str, Any]], keys: tuple[str, ...]) -> object:
    for key in keys:
        for place in places:
            if place.get(key) is not None:
                return place[key]
    return None


def _size(
    places: list[Mapping[str, Any]], keys: tuple[str, ...], what: str, model_type: str
) -> int:
    value = _first(places, keys)
    if type(value) is not int or value <= 0:
        name = model_type or "config without model_type"
        found = "" if value is None else f", found {value!r}"
        raise ConfigError(f"{name}: no {what} under any of {', '.join(keys)}{found}")
    return value
