"""Which block-scaled ``tcgen05.mma`` shapes exist, as reasons.

Sources: PTX ISA, tcgen05 matrix shapes; first seed, sections 1 and 5.1.
"""

from dataclasses import dataclass

from rubin_moe.arch.spec import ArchSpec
from rubin_moe.errors import PlanError

ELEMENTS = {
    "mxf4": ("e2m1",),
    "mxf4nvf4": ("e2m1",),
    "mxf8f6f4": ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"),
}
SCALES = {"mxf4": {32: ("ue8m0",)}, "mxf8f6f4": {32: ("ue8m0",)}}
NVF4_SCALES = {16: ("ue4m3", "ue5m3"), 32: ("ue8m0", "ue5m3")}


@dataclass(frozen=True)
class Mma:
    """One instruction: ``kind``, shape in elements, operand and scale types."""

    kind: str
    m: int
    n: int
    k: int
    cta_group: int = 1
    a: str = "e2m1"
    b: str = "e2m1"
    scale: str = "ue4m3"
    sf_vec_size: int = 16

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.a} x {self.b} M{self.m} N{self.n} K{self.k} "
            f"cta_group::{self.cta_group} {self.scale}/{self.sf_vec_size}"
        )


def why_not(arch: ArchSpec, mma: Mma) -> str | None:
    """None if ``arch`` has this instruction, else the rule it breaks."""
    for rule in (_kind, _k, _m, _n, _scale):
        reason = rule(arch, mma)
        if reason:
            return f"{mma} on {arch.name}: {reason}"
    return None


def check(arch: ArchSpec, mma: Mma) -> Mma:
    """``mma`` itself; raises PlanError with the broken rule."""
    reason = why_not(arch, mma)
    if reason:
        raise PlanError(reason)
    return mma


def _kind(arch: ArchSpec, mma: Mma) -> str | None:
    if not arch.blocks_scale:
        return "no block-scaled instruction"
    if mma.kind not in arch.mma_k:
        return f"unknown kind; has {', '.join(arch.mma_k)}"
    for operand, element in (("A", mma.a), ("B", mma.b)):
        if element not in ELEMENTS[mma.kind]:
            return f"{operand} of {element}; takes {', '.join(ELEMENTS[mma.kind])}"
    return None


def _k(arch: ArchSpec, mma: Mma) -> str | None:
    allowed = arch.mma_k[mma.kind]
    if mma.k not in allowed:
        return f"K = {mma.k}; has {' and '.join(str(k) for k in allowed)}"
    return None


def _m(arch: ArchSpec, mma: Mma) -> str | None:
    if mma.cta_group not in (1, 2):
        return "cta_group is 1 or 2"
    if mma.kind == "mxf8f6f4" and mma.k == 64 and mma.m != 128 * mma.cta_group:
        return f"with K = 64, M must be 128 (cta_group 1) or 256 (cta_group 2), not {mma.m}"
    # sm_100's FP8 M = 64 is a 1-CTA instruction without block scales' M field (M / 128): a
    # descriptor cannot say it, so the block-scaled table has 128 and 256 alone.
    allowed = (128,) if mma.cta_group == 1 else (128, 256)
    if mma.m not in allowed:
        return f"M = {mma.m}; cta_group {mma.cta_group} takes {' and '.join(map(str, allowed))}"
    return None


def _n(arch: ArchSpec, mma: Mma) -> str | None:
    step = 16 if mma.cta_group == 2 else 8
    if not (step <= mma.n <= 256 and mma.n % step == 0):
        return f"N = {mma.n}; must be a multiple of {step} from {step} to 256"
    return None


def _scale(arch: ArchSpec, mma: Mma) -> str | None:
    if mma.scale not in arch.scale_formats:
        return f"scale format {mma.scale}; has {', '.join(arch.scale_formats)}"
    table = SCALES.get(mma.kind, NVF4_SCALES)
    if mma.scale not in table.get(mma.sf_vec_size, ()):
        return f"{mma.scale} scales every {mma.sf_vec_size} elements do not exist in this kind"
    return None
