"""What the experts of one layer are, before any of their bytes is read."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rubin_moe.errors import ConfigError
from rubin_moe.formats.spec import BlockFormat
from rubin_moe.loader.dialect import Dialect, Stacking

Scheme: TypeAlias = Literal["w4a4", "w4a4-dynamic", "w4a16"]
"""Static 4-bit activations (calibrated input scales), dynamic ones, or weights only."""

InputScales: TypeAlias = Literal["require", "keep", "ignore"]
"""What becomes of input scales: one an expert or an error; NaN where missing; not read at all."""

MAX_EXPERTS = 1 << 16
MAX_WIDTH = 1 << 20


@dataclass(frozen=True)
class ExpertsSpec:
    """One layer's routed experts.

    Attributes:
        dialect: how the checkpoint spells and stores them; it fixes the format.
        hidden: width the experts read and write (a latent width in some models).
        intermediate, num_experts: of the whole model, not of one rank.
        gated: whether there is a gate projection beside up.
        has_bias: whether every projection brings a bias.
        scheme: activations the checkpoint was made for.
        stacking: of tensors that hold all experts; None if unknown (or there are none).
        notes: what was decided against a part of the config, for the log.

    Raises:
        ConfigError: sizes that are no sizes, or that the format's blocks do not divide.
    """

    dialect: Dialect
    hidden: int
    intermediate: int
    num_experts: int
    gated: bool = True
    has_bias: bool = False
    scheme: Scheme = "w4a16"
    stacking: Stacking | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, size, most in (
            ("hidden", self.hidden, MAX_WIDTH),
            ("intermediate", self.intermediate, MAX_WIDTH),
            ("num_experts", self.num_experts, MAX_EXPERTS),
        ):
            if not 0 < size <= most:
                raise ConfigError(f"{what} = {size} is not within 1..{most}")
        vec = self.fmt.sf_vec_size
        for what, size in (("hidden", self.hidden), ("intermediate", self.intermediate)):
            if size % vec:
                raise ConfigError(
                    f"{what} = {size} is no multiple of the scale block {vec} of {self.fmt}"
                )

    @property
    def fmt(self) -> BlockFormat:
        return self.dialect.fmt

    def nbytes(self, experts: int | None = None, width: int | None = None) -> int:
        """Bytes of codes and block scales; of fewer experts or another width where given."""
        e = self.num_experts if experts is None else experts
        n = self.intermediate if width is None else width
        up = n * (self.fmt.packed_k(self.hidden) + self.fmt.scales_k(self.hidden))
        down = self.hidden * (self.fmt.packed_k(n) + self.fmt.scales_k(n))
        return e * (up * (len(self.projections) - 1) + down)

    @property
    def projections(self) -> tuple[Literal["gate", "up", "down"], ...]:
        """What every expert must bring."""
        return ("gate", "up", "down") if self.gated else ("up", "down")

    @property
    def input_scales(self) -> InputScales:
        """What the scheme needs: W4A4 must have every one, the others must not use any."""
        return "require" if self.scheme == "w4a4" else "ignore"
