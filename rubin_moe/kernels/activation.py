"""The activation between FC1 and FC2, as data. Standard library only."""

from dataclasses import dataclass
from typing import Literal

from rubin_moe.errors import ConfigError

ActivationKind = Literal["silu", "swigluoai", "relu2", "gelu_tanh"]
GATED: tuple[ActivationKind, ...] = ("silu", "swigluoai", "gelu_tanh")
KINDS: tuple[ActivationKind, ...] = (*GATED, "relu2")


@dataclass(frozen=True)
class Activation:
    """What is computed from the FC1 result, in real units (dequantized, bias added).

    Attributes:
        kind: ``silu``: up * silu(gate); ``gelu_tanh``: up * gelu(gate); ``swigluoai``:
            (up + beta) * gate * sigmoid(alpha * gate); ``relu2``: relu(up)^2, no gate.
        limit: gate clamped from above, up clamped to both sides, before anything else; None: off.
        alpha, beta: of ``swigluoai`` only (gpt-oss: 1.702 and 1).
    """

    kind: ActivationKind = "silu"
    limit: float | None = None
    alpha: float = 1.702
    beta: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"activation {self.kind!r} is unknown; known: {', '.join(KINDS)}")
        if self.limit is not None and not self.limit > 0:
            raise ConfigError(f"activation limit {self.limit} must be positive")
        if self.limit is not None and not self.gated:
            raise ConfigError(f"activation {self.kind!r} has no gate to clamp")

    @property
    def gated(self) -> bool:
        return self.kind in GATED
