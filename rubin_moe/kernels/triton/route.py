"""Pairs (token, choice) in groups by expert, and the sum over the choices. Device code.

`route` needs one launch and no memory that was written before: each program looks at all pairs,
counts every expert's and the ones that come before its own. Pairs of an expert keep their order.
"""

import triton
import triton.language as tl


@triton.jit
def local_experts(ids, expert_map, index, mask, num_global, num_experts, HAS_MAP: tl.constexpr):
    """int32 local expert of the pairs ``index``; ``num_experts`` where there is none."""
    expert = tl.load(ids + index, mask=mask, other=-1).to(tl.int32)
    known = (expert >= 0) & (expert < num_global)
    if HAS_MAP:
        expert = tl.load(expert_map + expert, mask=known, other=-1)
    known = known & (expert >= 0) & (expert < num_experts)
    return tl.where(known, expert, num_experts)


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def route(
    ids,
    expert_map,
    local,
    pairs,
    block_expert,
    block_count,
    num_pairs,
    max_blocks,
    num_global,
    num_experts,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    OWN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Groups of at most BLOCK pairs of one expert.

    Args:
        ids: int32 or int64 ``[num_pairs]``; expert_map: int32 ``[num_global]``.
        local: int32 ``[num_pairs]``, each pair's expert, num_experts where there is none.
        pairs: int32 ``[max_blocks, BLOCK]``, written where there are pairs; block_expert,
            block_count: int32 ``[max_blocks]``, expert (-1: none) and number of pairs.
        EXPERTS: a power of two above num_experts; OWN: pairs, and groups, of a program.
    """
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    mine = local_experts(ids, expert_map, own, own < num_pairs, num_global, num_experts, HAS_MAP)
    tl.store(local + own, mine, mask=own < num_pairs)
    counts = tl.zeros([EXPERTS], tl.int32)
    rank = tl.zeros([OWN], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        index = start + tl.arange(0, CHUNK)
        other = local_experts(
            ids, expert_map, index, index < num_pairs, num_global, num_experts, HAS_MAP
        )
        counts += tl.histogram(other, EXPERTS)
        before = (other[None, :] == mine[:, None]) & (index[None, :] < own[:, None])
        rank += tl.sum(before.to(tl.int32), axis=1)
    expert = tl.arange(0, EXPERTS)
    groups = tl.where(expert < num_experts, (counts + BLOCK - 1) // BLOCK, 0)
    last = tl.cumsum(groups)
    first = last - groups
    place = tl.sum(tl.where(expert[None, :] == mine[:, None], first[None, :], 0), axis=1)
    there = (own < num_pairs) & (mine < num_experts)
    tl.store(pairs + place.to(tl.int64) * BLOCK + rank, own, mask=there)
    # own numbers groups now: the expert whose first group is not after it and whose last is
    inside = (first[None, :] <= own[:, None]) & (own[:, None] < last[None, :])
    count = tl.minimum(counts[None, :] - (own[:, None] - first[None, :]) * BLOCK, BLOCK)
    count = tl.sum(tl.where(inside, count, 0), axis=1)
    owner = tl.sum(tl.where(inside, expert[None, :] + 1, 0), axis=1) - 1
    tl.store(block_expert + own, owner, mask=own < max_blocks)
    tl.store(block_count + own, count, mask=own < max_blocks)


@triton.jit
def sum_choices(
    y, local, weights, out, hidden, num_experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """``out[m] = sum over k of weights[m, k] * y[m * TOP_K + k]`` in float32, k ascending; pairs
    without an expert here count nothing, whatever y and weights hold.

    Args:
        y: float32 ``[M * TOP_K, hidden]``; local: from `route`; weights: float32 ``[M, TOP_K]``;
            out: ``[M, hidden]``.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        if tl.load(local + pair) < num_experts:
            row = tl.load(y + pair * hidden + column, mask=inside, other=0.0)
            total += tl.load(weights + pair) * row
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)
