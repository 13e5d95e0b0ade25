"""A model config's activation fields -> `Activation`. What is unknown is refused, never computed
as silu."""

from collections.abc import Mapping, Sequence
from typing import Any

from rubin_moe.errors import ConfigError
from rubin_moe.kernels.activation import Activation, ActivationKind
from rubin_moe.layers.router_config import is_mistral

# Most specific first: Nemotron-H has its experts' activation beside the one of other layers.
_NAME_KEYS = ("mlp_hidden_act", "hidden_activation", "hidden_act")
_KINDS: dict[str, ActivationKind] = {
    "silu": "silu",
    "swish": "silu",
    "swigluoai": "swigluoai",
    "relu2": "relu2",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# gpt-oss computes swigluoai with these and says "silu" in its config.
_OAI_MODEL_TYPES = ("gpt_oss",)
_OAI_ALPHA, _OAI_BETA, _OAI_LIMIT = 1.702, 1.0, 7.0


def activation_from_config(config: Mapping[str, Any], layer_index: int | None = None) -> Activation:
    """The routed experts' activation.

    Args:
        config: a model's config.json, ``text_config`` where the top level has none; or Mistral's
            params.json.
        layer_index: which entry of ``expert_swiglu_limit_list``, where the model has that list (0
            or null there: no limit). Shared experts have a list of their own and are not asked.

    Raises:
        ConfigError: no activation named, an unknown one, or fields that contradict each other.
    """
    fields = _fields(config)
    name = next((str(fields[k]) for k in _NAME_KEYS if fields.get(k)), None)
    if name is None and is_mistral(fields):
        name = str(fields.get("activation") or "silu")  # as its readers have it
    is_oai = str(fields.get("model_type", "")) in _OAI_MODEL_TYPES
    if name is None and not is_oai:
        raise ConfigError(f"config names no activation; looked for {', '.join(_NAME_KEYS)}")
    kind = "swigluoai" if is_oai and name in (None, "silu", "swigluoai") else _KINDS.get(str(name))
    if kind is None:
        raise ConfigError(f"activation {name!r} is unknown; known: {', '.join(sorted(_KINDS))}")
    limit = _limit(fields, layer_index)
    if kind == "swigluoai":
        return Activation(
            "swigluoai",
            limit=_OAI_LIMIT if limit is None else limit,
            alpha=_number(fields, "swiglu_alpha", _OAI_ALPHA),
            beta=_number(fields, "swiglu_beta", _OAI_BETA),
        )
    for key in ("swiglu_alpha", "swiglu_beta"):
        if fields.get(key) is not None:
            raise ConfigError(
                f"config has {key} = {fields[key]} and activation {name!r}, which has none; "
                "the formula with it is called swigluoai"
            )
    return Activation(kind, limit=limit)  # type: ignore[arg-type]


def _fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    if isinstance(nested, Mapping) and not any(config.get(k) for k in _NAME_KEYS):
        return {**config, **nested}
    return config


def _limit(fields: Mapping[str, Any], layer_index: int | None) -> float | None:
    per_layer = fields.get("expert_swiglu_limit_list")
    if per_layer is None:
        value = fields.get("swiglu_limit")
        return None if value is None else float(value)
    if not isinstance(per_layer, Sequence) or layer_index is None:
        raise ConfigError("config has expert_swiglu_limit_list: a layer index is needed")
    if not 0 <= layer_index < len(per_layer):
        raise ConfigError(
            f"expert_swiglu_limit_list has {len(per_layer)} entries, none for layer {layer_index}"
        )
    return float(per_layer[layer_index]) if per_layer[layer_index] else None


def _number(fields: Mapping[str, Any], key: str, default: float) -> float:
    value = fields.get(key)
    return default if value is None else float(value)
