"""Pairs in groups by expert, against a plain count."""

import numpy as np
import pytest
import torch

from rubin_moe.formats.spec import NVFP4_UE4M3
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.triton.host import _groups
from rubin_moe.kernels.triton.plan import make_plan
from tests.kernels.triton.layers import QUICK
from tests.oracles import problems


def routed(device: str, num_experts: int, ids: np.ndarray, expert_map: np.ndarray | None):
    """What the kernel writes: each pair's expert, and ``(expert, pairs)`` of each group."""
    from rubin_moe.kernels.triton.route import route

    m, top_k = ids.shape
    num_global = num_experts if expert_map is None else len(expert_map)
    plan = make_plan(MoEProblem(num_experts, num_global, top_k, 64, 64, NVFP4_UE4M3), m)
    local, groups = _groups(plan, ids.size, torch.device(device))
    for tensor in (local, *groups.values()):
        tensor.fill_(0x7F7F7F7F)
    where = None if expert_map is None else torch.from_numpy(expert_map).to(device)
    route[(-(-ids.size // plan.own),)](
        torch.from_numpy(ids).to(device), where, local, **groups, num_pairs=ids.size,
        max_blocks=plan.max_groups, num_global=num_global, num_experts=num_experts,
        HAS_MAP=where is not None, BLOCK=plan.group, EXPERTS=plan.experts, OWN=plan.own,
        CHUNK=plan.chunk, num_warps=plan.route_warps,
    )  # fmt: skip
    counts, experts = groups["block_count"].tolist(), groups["block_expert"].tolist()
    pairs = groups["pairs"].view(plan.max_groups, plan.group).tolist()
    assert all(n == 0 for n, e in zip(counts, experts, strict=True) if e < 0)
    found = [(e, pairs[i][: counts[i]]) for i, e in enumerate(experts) if e >= 0]
    return local.cpu().numpy(), found, plan.group


def expected(local: np.ndarray, num_experts: int, group: int):
    found = []
    for expert in range(num_experts):
        mine = np.flatnonzero(local == expert).tolist()
        found += [(expert, mine[i : i + group]) for i in range(0, len(mine), group)]
    return found


@pytest.mark.parametrize("kind", problems.ROUTINGS)
@pytest.mark.parametrize(
    ("num_experts", "num_tokens", "top_k"), [(8, 1, 2), (5, 70, 3), (300, 40, 8), (1, 65, 1)]
)
@pytest.mark.parametrize("machine", QUICK)
def test_groups_hold_each_experts_pairs_in_order(machine, kind, num_experts, num_tokens, top_k):
    ids, _ = problems.routing(1, kind, num_tokens, num_experts, top_k)
    local, found, group = routed(machine.device, num_experts, ids, None)
    flat = ids.reshape(-1)
    assert np.array_equal(local, np.where(flat < 0, num_experts, flat))
    assert found == expected(local, num_experts, group)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("machine", QUICK)
def test_maps_and_ids_that_are_no_expert(machine, dtype):
    """Ids out of range reach no memory: neither the map's nor an expert's."""
    rng = np.random.default_rng(0)
    ids = rng.integers(-3, 14, (90, 2)).astype(dtype)
    expert_map = np.array([-1, 3, 0, -1, 2, 1, 7, -1, 4, -1, -5], dtype=np.int32)
    known = (ids >= 0) & (ids < 11)
    mapped = np.where(known, expert_map[np.where(known, ids, 0)], -1).reshape(-1)
    wanted = np.where((mapped >= 0) & (mapped < 5), mapped, 5)
    local, found, group = routed(machine.device, 5, ids, expert_map)
    assert np.array_equal(local, wanted)
    assert found == expected(wanted, 5, group)
