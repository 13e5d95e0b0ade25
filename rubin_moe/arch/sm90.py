"""Hopper."""

from rubin_moe.arch.spec import KIB, ArchSpec

SM90A = ArchSpec(
    name="sm_90a",
    capability=(9, 0),
    smem_per_sm=228 * KIB,
    smem_per_block=227 * KIB,
    tmem_columns=0,
    features=frozenset({"wgmma", "tma", "cluster", "setmaxnreg"}),
    source="PTX ISA 9.0, wgmma; CUDA programming guide, compute capabilities",
)
