"""What a conversion lost, summed over experts; plain numbers that add up across a restart."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rubin_moe.convert.source import DenseExpert
    from rubin_moe.formats.experts import ExpertWeights
    from rubin_moe.loader.fold_report import FoldReport


@dataclass
class Tally:
    """Counts over experts.

    Attributes:
        experts: converted; blocks: block scales of theirs; rerounded, flushed, saturated: of
            those, as in `loader.fold_report.FoldEntry`; max_rel_err: largest relative error of a
            recoded scale.
        moved: global scales that come back one unit in the last place off, since their output
            stores reciprocals.
        squared_error, squared_sum: of quantized 16-bit or FP8 weights against the original, and of
            the original: their ratio is the noise to signal ratio.
        non_finite: copied tensors that hold NaN or infinity in the source.
    """

    experts: int = 0
    blocks: int = 0
    rerounded: int = 0
    flushed: int = 0
    saturated: int = 0
    moved: int = 0
    max_rel_err: float = 0.0
    squared_error: float = 0.0
    squared_sum: float = 0.0
    non_finite: tuple[str, ...] = ()

    def folded(self, report: "FoldReport") -> None:
        """Adds one expert as it came out of a fold, a cast or with other names."""
        self.experts += 1
        for field in ("blocks", "rerounded", "flushed", "saturated"):
            setattr(self, field, getattr(self, field) + report.total(field))
        self.max_rel_err = max(self.max_rel_err, report.max_rel_err)

    def quantized(self, dense: "DenseExpert", weights: "ExpertWeights") -> None:
        """Adds one quantized expert; samples its first rows, decoding all would cost a third."""
        from rubin_moe.formats.quantize import dequantize

        self.experts += 1
        names = ("gate", "up") if weights.gated else ("up",)
        for parts, proj in ((names, weights.w13), (("down",), weights.w2)):
            self.blocks += proj.sf.numel()
            rows = proj.qdata.shape[1] // len(parts)
            for half, name in enumerate(parts):
                cut = slice(half * rows, half * rows + min(rows, SAMPLED_ROWS))
                got = dequantize(
                    proj.qdata[0, cut], proj.sf[0, cut], weights.fmt, proj.dec[0, half]
                ).double()
                want = dense.matrices[name][: len(got)].double()
                self.squared_error += float((got - want).square().sum())
                self.squared_sum += float(want.square().sum())

    def add(self, other: "Tally") -> None:
        """Adds another's counts."""
        for field in ("experts", "blocks", "rerounded", "flushed", "saturated", "moved"):
            setattr(self, field, getattr(self, field) + getattr(other, field))
        self.squared_error += other.squared_error
        self.squared_sum += other.squared_sum
        self.max_rel_err = max(self.max_rel_err, other.max_rel_err)
        self.non_finite = tuple(sorted({*self.non_finite, *other.non_finite}))

    def record(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "non_finite": list(self.non_finite)}

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Tally":
        """The inverse of `record`."""
        return cls(**{**raw, "non_finite": tuple(raw["non_finite"])})

    def lines(self) -> list[str]:
        """For people."""
        scales = f", {self.blocks:,} block scales" if self.blocks else " decoded"
        found = [f"{self.experts} experts{scales}"] if self.experts else []
        if self.squared_sum:
            ratio = self.squared_error / self.squared_sum
            found.append(f"noise to signal of the first rows of each: {ratio:.3e}")
        if self.rerounded:
            found.append(
                f"{self.rerounded:,} scales re-rounded, {self.flushed:,} flushed, "
                f"{self.saturated:,} saturated, largest relative error {self.max_rel_err:.3g}"
            )
        elif self.blocks and not self.squared_sum and not self.moved:
            found.append("lossless")
        if self.moved:
            found.append(
                f"{self.moved} global scales have no float32 reciprocal: one unit in the last "
                "place off"
            )
        for name in self.non_finite[:8]:
            found.append(f"copied with NaN or infinity, as the source has it: {name}")
        return found


SAMPLED_ROWS = 8
