"""What a conversion is asked to do. Standard library only; recorded in what it writes."""

from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Literal, TypeAlias, get_args

from rubin_moe.errors import ConvertError
from rubin_moe.loader.dialect import Stacking

TargetFormat: TypeAlias = Literal["nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4", "bf16"]
Names: TypeAlias = Literal["auto", "modelopt", "compressed-tensors", "gpt-oss", "rubin"]
Activations: TypeAlias = Literal["none", "dynamic"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "target": get_args(TargetFormat),
    "names": get_args(Names),
    "activations": get_args(Activations),
    "mx_rule": ("floor", "even", "ceil"),
    "fold": ("none", "exact", "full", "full+requantize"),
}


@dataclass(frozen=True)
class Options:
    """One conversion.

    Attributes:
        target: format of the experts that are written.
        names: producer whose tensor names and config are written; ``auto`` keeps the source's
            where it can say the target, else ModelOpt for UE4M3, this project's for UE5M3,
            gpt-oss' for stacked gpt-oss experts and compressed-tensors' for other MXFP4.
        mx_rule: of MXFP4 block scales made from 16 or 8 bits (`formats.quantize.MxRule`).
        search: choose block scales by squared error instead of by the rule alone.
        fold: of NVFP4 sources (`loader.fold`); default ``exact`` where the scale type changes,
            ``none`` where it stays.
        force: write what rounds more than a fold or recode allows, and report it.
        linears: convert attention and dense matrices too; default only for ``bf16``.
        activations: what the config says of 4-bit activations without calibrated scales.
        calibrate: text file that input scales of 16-bit sources come from (`convert.calibrate`).
        exclude: modules left as they are, in the spellings of exclude lists.
        max_shard_bytes: of one output file.
        stacking: of stacked source tensors whose family is not known.

    Raises:
        ConvertError: a value that is none of the choices.
    """

    target: TargetFormat
    names: Names = "auto"
    mx_rule: Literal["floor", "even", "ceil"] = "ceil"
    search: bool = False
    fold: Literal["none", "exact", "full", "full+requantize"] | None = None
    force: bool = False
    linears: bool | None = None
    activations: Activations = "none"
    calibrate: str | None = None
    exclude: tuple[str, ...] = ()
    max_shard_bytes: int = 5_000_000_000
    stacking: Stacking | None = None

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if value not in choices and not (field == "fold" and value is None):
                raise ConvertError(f"{field} {value!r} is unknown; known: {', '.join(choices)}")
        if self.calibrate is not None and self.target != "nvfp4-ue4m3":
            raise ConvertError(
                f"calibrated input scales belong to nvfp4-ue4m3; {self.target} has none (of UE5M3, "
                "activations are quantized without: activations=dynamic)"
            )
        if self.max_shard_bytes < 1:
            raise ConvertError(f"max_shard_bytes = {self.max_shard_bytes} is no size")

    @property
    def with_linears(self) -> bool:
        return self.target == "bf16" if self.linears is None else self.linears

    def record(self) -> dict[str, Any]:
        """Plain data for a config or journal."""
        told = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        if self.calibrate is not None:
            told["calibrate"] = PurePath(self.calibrate).name
        return told
