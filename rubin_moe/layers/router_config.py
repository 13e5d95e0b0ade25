"""A model config's router fields -> `Routing`. A family is known or refused: how scores become
weights is code in most models and not in their config, and a wrong guess is wrong silently.
Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rubin_moe.errors import ConfigError

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid", "sqrtsoftplus")

_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_k", "num_experts_per_token")
_SCORING = ("scoring_func", "moe_router_activation_func")
_SCALE = ("routed_scaling_factor", "routed_scale")
_GROUPS = ("n_group", "num_expert_group", "num_expert_groups")
_TOP_GROUPS = ("topk_group", "num_expert_groups_per_tok")


@dataclass(frozen=True)
class Routing:
    """How a model routes.

    Attributes:
        top_k: experts a token.
        scoring: of the logits. ``sqrtsoftplus``: ``sqrt(log(1 + e^x))`` (DeepSeek-V4).
        score_after_topk: choose on the logits and score only the chosen ones (gpt-oss: softmax
            over the k; Llama-4: sigmoid of the one).
        renormalize: divide the chosen scores by their sum (plus ``epsilon``).
        scaling_factor: multiplies the weights, once, after renormalizing.
        num_groups, top_groups: experts are chosen from the best ``top_groups`` of ``num_groups``
            equal groups; the others count as -inf.
        group_score: ``top2``: sum of a group's two best (DeepSeek-V3); ``max``: its best (V2).
    """

    top_k: int
    scoring: Scoring = "softmax"
    score_after_topk: bool = False
    renormalize: bool = False
    scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    epsilon: float = 1e-20

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise ConfigError(f"scoring {self.scoring!r} is unknown; known: {', '.join(SCORINGS)}")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ConfigError(f"top {self.top_groups} of {self.num_groups} expert groups")
        if self.top_k < 1:
            raise ConfigError(f"top-{self.top_k} routing chooses no expert")


@dataclass(frozen=True)
class _Family:
    """What a family's code fixes.

    Attributes:
        scoring: used where the config names none; after: of the chosen logits only.
        renormalize: True or False in the code, or the key that says so.
        on_input: the weight multiplies the input of the experts.
    """

    scoring: Scoring
    renormalize: bool | str = True
    after: bool = False
    on_input: bool = False


_NORM = "norm_topk_prob"
_FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next"), _Family("softmax", _NORM)),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), _Family("softmax", _NORM)),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text", "mixtral"), _Family("softmax")),
    **dict.fromkeys(("gemma4", "gemma4_text", "ernie4_5_moe"), _Family("softmax")),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k2"), _Family("sigmoid", _NORM)),
    **dict.fromkeys(("glm4_moe", "glm_moe_dsa", "nemotron_h"), _Family("sigmoid", _NORM)),
    **dict.fromkeys(("glm5_next", "glm5_next_text"), _Family("sigmoid", _NORM)),
    **dict.fromkeys(("minimax_m2", "minimax_m3", "minimax_m3_vl"), _Family("sigmoid")),
    "kimi_linear": _Family("sigmoid", "moe_renormalize"),
    "deepseek_v4": _Family("sqrtsoftplus"),
    "gpt_oss": _Family("softmax", False, after=True),
    **dict.fromkeys(
        ("llama4", "llama4_text"), _Family("sigmoid", False, after=True, on_input=True)
    ),
}
# Mistral's own file names no family and says nothing of scores: the readers of it set these.
_MISTRAL = _Family("softmax")


def is_mistral(config: Mapping[str, Any]) -> bool:
    """Whether this is a params.json of a mixture of experts and no config.json."""
    return not config.get("model_type") and isinstance(config.get("moe"), Mapping)


def routing_from_config(config: Mapping[str, Any]) -> Routing:
    """How the model of this config.json (or Mistral's params.json) routes; ``text_config`` where it
    has one.

    The selection bias, the additive router bias and per-expert scales are tensors: hand them to
    `rubin_moe.layers.routing.route`.

    Raises:
        ConfigError: an unknown family, a missing ``norm_topk_prob`` where the family leaves it to
            the config (class defaults and releases disagree), no number of experts a token.
    """
    fields, family = _family(config)
    groups = int(_first(fields, _GROUPS) or 1)
    return Routing(
        top_k=_top_k(fields),
        scoring=_scoring(fields, family),
        score_after_topk=family.after,
        renormalize=_renormalize(fields, family),
        scaling_factor=float(_first(fields, _SCALE) or 1.0),
        num_groups=groups,
        top_groups=int(_first(fields, _TOP_GROUPS) or groups),
        group_score=_group_score(fields),
    )


def router_weight_on_input(config: Mapping[str, Any]) -> bool:
    """Whether the weight multiplies the experts' input and not their output (Llama-4)."""
    return _family(config)[1].on_input


def _family(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], _Family]:
    if is_mistral(config):
        own = {**config, **config["moe"]}
        if int(_first(own, _GROUPS) or 1) != 1:
            raise ConfigError("params.json has groups of experts: how it scores them is unknown")
        return own, _MISTRAL
    nested = config.get("text_config")
    fields = {**config, **nested} if isinstance(nested, Mapping) else config
    name = str(fields.get("model_type"))
    if name not in _FAMILIES:
        raise ConfigError(
            f"routing of model_type {name!r} is unknown; known: {', '.join(sorted(_FAMILIES))}"
        )
    return fields, _FAMILIES[name]


def _first(fields: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((fields[k] for k in keys if fields.get(k) is not None), None)


def _top_k(fields: Mapping[str, Any]) -> int:
    value = _first(fields, _TOP_K)
    if value is None:
        raise ConfigError(
            f"config has no number of experts a token; looked for {', '.join(_TOP_K)}"
        )
    return int(value)


def _scoring(fields: Mapping[str, Any], family: _Family) -> Scoring:
    named = _first(fields, _SCORING)
    return family.scoring if named is None else named  # an unknown name: `Routing` refuses it


def _renormalize(fields: Mapping[str, Any], family: _Family) -> bool:
    if isinstance(family.renormalize, bool):
        return family.renormalize
    value = fields.get(family.renormalize)
    if value is None:
        raise ConfigError(
            f"config of {fields.get('model_type')} has no {family.renormalize}: whether weights "
            "are renormalized differs between its releases"
        )
    return bool(value)


def _group_score(fields: Mapping[str, Any]) -> Literal["top2", "max"]:
    return "max" if fields.get("topk_method") == "group_limited_greedy" else "top2"
