"""Rubin."""

from rubin_moe.arch.spec import KIB, ArchSpec

SM107A = ArchSpec(
    name="sm_107a",
    capability=(10, 7),
    smem_per_sm=328 * KIB,
    smem_per_block=327 * KIB,
    tmem_columns=576,
    mma_k={"mxf4": (128, 64), "mxf4nvf4": (128, 64), "mxf8f6f4": (64, 32)},
    scale_formats=("ue4m3", "ue8m0", "ue5m3"),
    packed_mixed_fp4=True,
    features=frozenset(
        {"tcgen05", "tma", "tma_gather4", "cluster", "collector_b", "cvt_scaled_ue8m0", "cvt_ue5m3"}
    ),
    cp_async_limit=248 * KIB,  # one comment in a peer's source, not in the ISA (seed, section 3.3)
    source="first seed, sections 1-6; CuTe DSL 4.8.1, rubin helpers",
)
