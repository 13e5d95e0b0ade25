"""Arrivals and transaction bytes of the mbarriers between warp roles.

A wrong count hangs or, worse, releases early; so they are derived from facts about the producer and
the consumer. Source: PTX ISA, mbarrier and tcgen05.commit; first seed, sections 3.2 and 7.2.
"""

from dataclasses import dataclass

from rubin_moe.errors import PlanError

WARP = 32


@dataclass(frozen=True)
class Edge:
    """One producer-consumer pair of barriers.

    Attributes:
        full_arrivals, full_tx: what completes the full barrier's phase.
        empty_arrivals: what completes the empty barrier's phase.
    """

    name: str
    full_arrivals: int
    full_tx: int
    empty_arrivals: int


def tma_to_mma(name: str, bytes_per_cta: int, *, cta_group: int = 1, consumers: int = 1) -> Edge:
    """A TMA ring read by the MMA.

    With ``cta_group`` 2 both CTAs' bytes are counted at the leader's barrier, where one thread
    announces them. ``consumers``: CTA pairs (or CTAs) whose MMA must be done before a multicast
    buffer is free; each commits once.
    """
    if cta_group not in (1, 2):
        raise PlanError(f"{name}: cta_group is 1 or 2, not {cta_group}")
    if bytes_per_cta <= 0 or bytes_per_cta * cta_group >= 1 << 20:
        raise PlanError(
            f"{name}: {bytes_per_cta * cta_group} bytes a phase; an mbarrier counts 2^20 - 1"
        )
    return Edge(name, 1, bytes_per_cta * cta_group, consumers)


def cp_async_to_mma(name: str, producer_warps: int, *, cta_group: int = 1) -> Edge:
    """Threads that each announce their own ``cp.async`` copies (``mbarrier.arrive.noinc``)."""
    return Edge(name, producer_warps * WARP, 0, 1 if cta_group == 1 else cta_group)


def threads_to_mma(name: str, producer_warps: int) -> Edge:
    """Warps that write (scales into TMEM, say) and arrive with every thread after a fence."""
    return Edge(name, producer_warps * WARP, 0, 1)


def mma_to_epilogue(name: str, epilogue_warps: int, *, cta_group: int = 1) -> Edge:
    """Accumulators: one commit makes them full, one arrival of every epilogue warp of every CTA in
    the group frees them at the leader."""
    return Edge(name, 1, 0, epilogue_warps * cta_group)


def fallback_counts(cluster_m: int, fallback_m: int, cta_group: int = 1) -> tuple[int, int]:
    """Consumers of a multicast stage in a preferred and in a fallback cluster."""
    if cluster_m % fallback_m:
        raise PlanError(f"a fallback of {fallback_m} CTAs does not divide a cluster of {cluster_m}")
    return cluster_m // cta_group, fallback_m // cta_group


def mixed_cluster_grid(fallback_ctas: int, preferred: tuple[int, int]) -> tuple[int, int, int]:
    """Grid of a launch with a preferred and a fallback cluster shape.

    Floor division: one cluster more than fits would run as a second wave (seed, section 7.1).
    """
    clusters = fallback_ctas // (preferred[0] * preferred[1])
    if clusters < 1:
        raise PlanError(f"{fallback_ctas} CTAs hold no cluster of {preferred}")
    return (*preferred, clusters)


def fallback_groups(fallback_clusters: int, split_factor: int) -> int:
    """Whole groups of fallback clusters that share work ids; one left over would wait for ever.

    Raises PlanError for a number that is no multiple of ``split_factor``.
    """
    if fallback_clusters % split_factor:
        raise PlanError(
            f"{fallback_clusters} fallback clusters are no multiple of {split_factor}: one member "
            f"would wait for a partner that does not exist"
        )
    return fallback_clusters // split_factor
