"""Published MoE shapes: the only reader of ``configs/models``."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from rubin_moe.errors import ConfigError
from rubin_moe.formats.spec import FORMATS
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import ActivationFormat, MoEProblem

_PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class ModelShape:
    """One model's routed experts, as published; sizes of the whole model, not of one rank."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    moe_layers: int
    weight_format: str
    has_bias: bool
    router_weight_on_input: bool
    activation: Activation

    def problem(self, activation_format: ActivationFormat = "16bit") -> MoEProblem:
        """One layer on one rank."""
        return MoEProblem(
            num_experts=self.num_experts,
            global_num_experts=self.num_experts,
            top_k=self.top_k,
            hidden=self.hidden,
            intermediate=self.intermediate,
            weight_format=FORMATS[self.weight_format],
            activation=self.activation,
            activation_format=activation_format,
            has_bias=self.has_bias,
            router_weight_on_input=self.router_weight_on_input,
        )


def configs_dir() -> Path:
    """``configs``: inside an installed package, beside it in a source tree."""
    for candidate in (_PACKAGE / "configs", _PACKAGE.parent / "configs"):
        if candidate.is_dir():
            return candidate
    raise ConfigError("configs: not found in the package or beside it")


def model_names() -> list[str]:
    return sorted(path.stem for path in (configs_dir() / "models").glob("*.toml"))


def model_shape(name: str) -> ModelShape:
    """The shape of that name. Raises ConfigError with the known names for any other."""
    if name not in model_names():
        raise ConfigError(f"unknown model {name!r}; known: {', '.join(model_names())}")
    data = tomllib.loads((configs_dir() / "models" / f"{name}.toml").read_text())
    activation = Activation(**data.pop("activation"))
    return ModelShape(name=name, activation=activation, **data)
