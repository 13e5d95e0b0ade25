"""What one architecture has: memories, instruction shapes, named features."""

from collections.abc import Mapping
from dataclasses import dataclass, field

KIB = 1024


@dataclass(frozen=True)
class ArchSpec:
    """One architecture.

    Attributes:
        name: ``sm_107a``; capability: CUDA compute capability.
        smem_per_sm, smem_per_block: bytes; a block may use what the SM has less 1 KiB.
        tmem_columns: 32-bit columns of 128 lanes; 0: no tensor memory.
        mma_k: kind -> instruction K in elements, widest first.
        scale_formats: block scale types of FP4 and FP8 MMAs.
        packed_mixed_fp4: ``mxf8f6f4`` reads FP4 packed from shared memory.
        features: other named abilities.
        cp_async_limit: first shared-memory byte where ``cp.async.cg`` may lose its cache hint, or
            None where shared memory ends below it.
        source: where the numbers come from.
    """

    name: str
    capability: tuple[int, int]
    smem_per_sm: int
    smem_per_block: int
    tmem_columns: int
    mma_k: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    scale_formats: tuple[str, ...] = ()
    packed_mixed_fp4: bool = False
    features: frozenset[str] = frozenset()
    cp_async_limit: int | None = None
    source: str = ""

    @property
    def blocks_scale(self) -> bool:
        """Whether it has block-scaled tensor-core instructions."""
        return bool(self.scale_formats)

    def fp4_bytes_in_mixed_mma(self, elements: int) -> int:
        """Shared-memory bytes of FP4 elements that meet FP8: half a byte each, or a whole one."""
        return elements // 2 if self.packed_mixed_fp4 else elements
