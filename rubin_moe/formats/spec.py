"""Block formats as data: the only place with block sizes, element and scale types.

A block-scaled value is ``element(q) * scale(sf) * dec`` where ``dec`` is one float32 per tensor,
expert or half (1 where the format has none). Standard library only.
"""

from dataclasses import dataclass
from typing import Literal

from rubin_moe.errors import FormatError

ElementType = Literal["e2m1", "e4m3", "e5m2"]
ScaleType = Literal["ue4m3", "ue5m3", "ue8m0"]


@dataclass(frozen=True)
class BlockFormat:
    """One block-scaled format.

    Attributes:
        name: ``nvfp4-ue4m3``, ``nvfp4-ue5m3``, ``mxfp4``, ``mxfp8``.
        element: type of one element.
        scale: type of one block scale; always stored as raw ``uint8`` codes.
        sf_vec_size: elements that share a block scale, along K.
        has_global: whether producers store a float32 global scale beside the block scales.
    """

    name: str
    element: ElementType
    scale: ScaleType
    sf_vec_size: int
    has_global: bool

    @property
    def element_bits(self) -> int:
        return 4 if self.element == "e2m1" else 8

    def packed_k(self, k: int) -> int:
        """Bytes of one row of ``k`` elements. Raises FormatError if the blocks do not fit."""
        if k % self.sf_vec_size:
            raise FormatError(f"{self.name}: K = {k} is no multiple of {self.sf_vec_size}")
        return k * self.element_bits // 8

    def scales_k(self, k: int) -> int:
        """Block scales of one row of ``k`` elements."""
        self.packed_k(k)
        return k // self.sf_vec_size

    def __str__(self) -> str:
        return self.name


NVFP4_UE4M3 = BlockFormat("nvfp4-ue4m3", "e2m1", "ue4m3", 16, has_global=True)
NVFP4_UE5M3 = BlockFormat("nvfp4-ue5m3", "e2m1", "ue5m3", 16, has_global=False)
MXFP4 = BlockFormat("mxfp4", "e2m1", "ue8m0", 32, has_global=False)
MXFP8 = BlockFormat("mxfp8", "e4m3", "ue8m0", 32, has_global=False)

WEIGHT_FORMATS = (NVFP4_UE4M3, NVFP4_UE5M3, MXFP4)
FORMATS = {f.name: f for f in (*WEIGHT_FORMATS, MXFP8)}


def is_nvfp4(fmt: BlockFormat) -> bool:
    """NVFP4 stays NVFP4: group 16 with UE4M3 or UE5M3 scales, whatever happens to it."""
    return fmt in (NVFP4_UE4M3, NVFP4_UE5M3)
