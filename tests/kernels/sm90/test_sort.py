"""The prefill's routing and weighted sum against numpy: on the emulator, and on a GPU (--hw)."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from rubin_moe.emulation import EmulatorLauncher
from rubin_moe.errors import PlanError
from rubin_moe.kernels.launch import Launcher, launcher
from rubin_moe.kernels.sm90.sort_host import sort_kernel, sum_blocks, sum_kernel
from rubin_moe.kernels.sm90.sort_plan import MAX_PAIRS, SortPlan, check
from tests.oracles import problems

from .layers import GPU, MACHINES, Machine

SMALL = SortPlan(num_experts=5, top_k=2, hidden=144, pass_tokens=8, warps=2)
FULL = SortPlan(num_experts=128, top_k=8, hidden=144, pass_tokens=128)
KINDS = (*problems.ROUTINGS, "all_to_one", "nobody")


@dataclass(frozen=True)
class Sorted:
    """What the launch wrote, on the CPU."""

    passes: np.ndarray
    pairs: np.ndarray
    tokens: np.ndarray


def launcher_of(machine: Machine) -> Launcher:
    return launcher("driver") if machine is GPU else EmulatorLauncher(rules="enforce")


def ids_of(plan: SortPlan, kind: str, num_tokens: int, seed: int = 2) -> np.ndarray:
    """int32 ``[M, top_k]``."""
    if kind == "all_to_one":
        ids = np.full((num_tokens, plan.top_k), -1)
        ids[:, -1] = plan.num_experts - 2
    elif kind == "nobody":
        ids = np.full((num_tokens, plan.top_k), -1)
    else:
        ids, _ = problems.routing(seed, kind, num_tokens, plan.num_experts, plan.top_k)
    return ids.astype(np.int32)


def run(
    plan: SortPlan,
    ids: np.ndarray,
    x: torch.Tensor,
    machine: Machine,
    blocks: int,
    expert_map: np.ndarray | None = None,
    counter: torch.Tensor | None = None,
) -> Sorted:
    """One launch; results are filled with 0x7F bytes before."""
    device, (num_tokens, _) = machine.device, ids.shape

    def stale(nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0x7F, dtype=torch.uint8, device=device)

    passes = stale(plan.passes_bytes(ids.size))
    pairs = stale(4 * ids.size)
    tokens = stale(plan.tokens_bytes(num_tokens))
    if counter is None:
        counter = torch.zeros(1, dtype=torch.int32, device=device)
    there = torch.from_numpy(ids).to(device)
    where = None if expert_map is None else torch.from_numpy(expert_map).to(device)
    scratch = stale(plan.counts_bytes(blocks))
    args = [there, where, x.to(device), scratch, passes, pairs, tokens, counter, num_tokens]
    launcher_of(machine).launch(sort_kernel(plan), blocks, args)
    return Sorted(
        passes.view(torch.int32).view(-1, 4).cpu().numpy(),
        pairs.view(torch.int32).cpu().numpy(),
        tokens.view(torch.int16).view(num_tokens, -1).cpu().numpy(),
    )


def check_tables(plan: SortPlan, local: np.ndarray, found: Sorted) -> None:
    """``local``: the experts as the layer numbers them, or -1."""
    flat = local.flatten()
    counts = np.bincount(flat[flat >= 0], minlength=plan.num_experts)
    order = np.argsort(-counts, kind="stable")
    expected = np.concatenate([np.flatnonzero(flat == e) for e in order])
    number, rows, *_ = found.passes[0]
    assert rows == len(expected)
    assert np.array_equal(found.pairs[:rows], expected)
    assert (found.pairs[rows:] == 0x7F7F7F7F).all()
    at, listed = 0, []
    for expert in order:
        count = counts[expert]
        for part in np.array_split(np.arange(count), -(-count // plan.pass_tokens) or 1):
            if len(part):
                listed.append((expert, at, len(part), 0))
                at += len(part)
    assert number == len(listed) <= plan.max_passes(flat.size)
    assert np.array_equal(found.passes[1 : 1 + number], np.array(listed).reshape(-1, 4))


def permuted(x: torch.Tensor) -> np.ndarray:
    """As `kernels.sm90.permute` says: element 16 t + 4 j + 2 e + i at 16 j + 8 e + 2 t + i."""
    m, hidden = x.shape
    wide = np.zeros((m, -(-hidden // 64) * 64), dtype=np.int16)
    wide[:, :hidden] = x.view(torch.int16).numpy()
    t, j, e, i = np.meshgrid(range(4), range(4), range(2), range(2), indexing="ij")
    out = np.empty_like(wide).reshape(m, -1, 64)
    out[..., (16 * j + 8 * e + 2 * t + i).ravel()] = wide.reshape(m, -1, 64)[
        ..., (16 * t + 4 * j + 2 * e + i).ravel()
    ]
    return out.reshape(m, -1)


def hidden_states(plan: SortPlan, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, plan.hidden, generator=generator).bfloat16()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 33, 200])
@pytest.mark.parametrize("machine", MACHINES)
def test_tables_and_tokens(num_tokens, kind, machine):
    """One block sorts, or all three."""
    ids, x = ids_of(SMALL, kind, num_tokens), hidden_states(SMALL, num_tokens)
    found = run(SMALL, ids, x, machine, 3)
    check_tables(SMALL, ids, found)
    assert np.array_equal(found.tokens, permuted(x))


@pytest.mark.parametrize("num_experts", [1, 31, 200, 1024])
@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_of_experts(num_experts, machine):
    """Threads that share an expert, one each, and several experts a thread."""
    plan = replace(SMALL, num_experts=num_experts, top_k=1, warps=4)
    for num_tokens in (150, 600):
        ids, x = ids_of(plan, "power_law", num_tokens), hidden_states(plan, num_tokens)
        check_tables(plan, ids, run(plan, ids, x, machine, 2))


@pytest.mark.parametrize("machine", MACHINES)
def test_global_ids_go_through_the_map(machine):
    ids = ids_of(replace(SMALL, num_experts=11), "some_missing", 40)
    expert_map = np.full(11, -1, dtype=np.int32)
    expert_map[[7, 2, 5, 0, 8]] = np.arange(5)
    local = np.where(ids >= 0, expert_map[ids], -1)
    found = run(SMALL, ids, hidden_states(SMALL, 40), machine, 3, expert_map)
    check_tables(SMALL, local, found)


@pytest.mark.parametrize("machine", MACHINES)
def test_ids_beyond_the_experts_are_nobody(machine):
    ids = ids_of(SMALL, "uniform", 20)
    ids[3:7] = 5
    ids[8, 1] = 2**31 - 1
    ids[9, 0] = -7
    local = np.where((ids >= 0) & (ids < 5), ids, -1)
    check_tables(SMALL, local, run(SMALL, ids, hidden_states(SMALL, 20), machine, 3))


@pytest.mark.parametrize("machine", MACHINES)
def test_one_counter_serves_any_number_of_launches(machine):
    """Whatever the number of blocks that met there before."""
    counter = torch.zeros(1, dtype=torch.int32, device=machine.device)
    for num_tokens, blocks in ((200, 3), (1, 3), (150, 2), (200, 4), (20, 1), (100, 1)):
        ids, x = ids_of(SMALL, "uniform", num_tokens), hidden_states(SMALL, num_tokens)
        check_tables(SMALL, ids, run(SMALL, ids, x, machine, blocks, counter=counter))


@pytest.mark.hw
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 256, 4096, 16384])
@pytest.mark.parametrize("num_experts", [128, 512])
def test_prefill_sizes_on_a_gpu(num_tokens, num_experts, kind):
    plan = replace(FULL, num_experts=num_experts)
    ids, x = ids_of(plan, kind, num_tokens), hidden_states(plan, num_tokens)
    found = run(plan, ids, x, GPU, torch.cuda.get_device_properties(0).multi_processor_count)
    check_tables(plan, ids, found)
    assert np.array_equal(found.tokens, permuted(x))


@pytest.mark.parametrize(("top_k", "dtype"), [(2, torch.bfloat16), (9, torch.float16)])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_sum_in_order(top_k, dtype, mapped, machine):
    """Bit for bit; rows without an expert hold NaN."""
    generator = torch.Generator().manual_seed(5)
    m, hidden = 7, 144
    y = torch.randn(m, top_k, hidden, generator=generator).to(dtype)
    ids = torch.randint(-1, 10, (m, top_k), dtype=torch.int32, generator=generator)
    ids[3] = -1
    expert_map = torch.arange(9, -1, -1, dtype=torch.int32) - 2 if mapped else None
    local = ids if expert_map is None else torch.where(ids < 0, -1, expert_map[ids.long()])
    here = (local >= 0) & (local < 6)
    y[~here] = torch.nan
    expected = torch.zeros(m, hidden)
    for k in range(top_k):
        expected += torch.where(here[:, k, None], y[:, k].float(), 0.0)
    out = torch.full((m, hidden), torch.nan, dtype=dtype, device=machine.device)
    where = None if expert_map is None else expert_map.to(machine.device)
    kernel = sum_kernel(6, top_k, hidden, str(dtype).removeprefix("torch."))
    args = [y.to(machine.device), ids.to(machine.device), where, out, m]
    launcher_of(machine).launch(kernel, sum_blocks(m, hidden, 3), args)
    assert torch.equal(out.cpu(), expected.to(dtype))


def test_plans():
    assert FULL.max_tokens(132) == 16384
    assert FULL.max_tokens(3) == 3 * 2048 // 8
    assert replace(FULL, top_k=1).max_tokens(132) == MAX_PAIRS
    assert check(replace(FULL, num_experts=1024)).smem_bytes < 96 * 1024
    for bad in ({"num_experts": 1025}, {"pass_tokens": 4}):
        with pytest.raises(PlanError, match="1 to 1024 experts, passes of 8 to 256 tokens"):
            check(replace(FULL, **bad))
