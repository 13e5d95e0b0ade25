"""Blackwell and Blackwell Ultra."""

from dataclasses import replace

from rubin_moe.arch.spec import KIB, ArchSpec

SM100A = ArchSpec(
    name="sm_100a",
    capability=(10, 0),
    smem_per_sm=228 * KIB,
    smem_per_block=227 * KIB,
    tmem_columns=512,
    mma_k={"mxf4": (64,), "mxf4nvf4": (64,), "mxf8f6f4": (32,)},
    scale_formats=("ue4m3", "ue8m0"),
    features=frozenset({"tcgen05", "tma", "tma_gather4", "cluster", "clc"}),
    source="PTX ISA 8.7, tcgen05; first seed, section 1",
)

SM103A = replace(
    SM100A,
    name="sm_103a",
    capability=(10, 3),
    mma_k={"mxf4": (96, 64), "mxf4nvf4": (96, 64), "mxf8f6f4": (32,)},
    features=SM100A.features | {"circular_smem_descriptor"},
    source="first seed, section 1.1",
)
