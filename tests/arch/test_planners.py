"""Every number that the seeds state about memories, stages and barriers."""

import pytest

from rubin_moe.arch import SM100A, SM103A, SM107A, barriers
from rubin_moe.arch.smem_plan import Buffer, plan_smem, stages_in
from rubin_moe.arch.tmem_plan import TmemRequest, plan_tmem, round_allocation, scale_columns
from rubin_moe.errors import PlanError

KIB = 1024
N256 = TmemRequest(tile_n=256, tile_k=256, sf_vec_size=16, sfb_rows=256)


def test_48_and_24_scale_columns():
    for vec, columns in ((16, 48), (32, 24)):
        assert scale_columns(128, 256, vec) + scale_columns(256, 256, vec) == columns


def test_two_disjoint_accumulators_at_n_256():
    plan = plan_tmem(SM107A, N256)
    assert (plan.used, plan.allocated, plan.overlap) == (560, 576, 0)
    assert (plan.start("acc1"), plan.start("sfa")) == (256, 512)


def test_the_same_plan_overlaps_on_blackwell():
    request = TmemRequest(256, 256, 16, sfb_rows=256, overlap_step=16)
    for arch in (SM100A, SM103A):
        plan = plan_tmem(arch, request)
        assert (plan.start("acc1"), plan.overlap, plan.used) == (208, 48, 512)


def test_four_sfa_stages_bring_the_overlap_back():
    plan = plan_tmem(SM107A, TmemRequest(256, 256, 16, sfb_rows=256, sfa_stages=4))
    assert 2 * 256 + 64 + 32 == 608 > SM107A.tmem_columns
    assert (plan.start("acc1"), plan.overlap, plan.start("sfa")) == (192, 64, 448)
    assert (plan.used, plan.allocated) == (544, 544)


def test_b_reuse_fills_tensor_memory_exactly():
    reuse = TmemRequest(256, 256, 16, sfb_rows=256, m_halves=2, acc_stages=1)
    plan = plan_tmem(SM107A, reuse)
    assert (plan.start("sfa"), plan.used, plan.allocated) == (512, 576, 576)
    with pytest.raises(PlanError, match=r"accumulators 1 x 512, SFA 32, SFB 32"):
        plan_tmem(SM100A, reuse)


@pytest.mark.parametrize(
    ("used", "columns"), [(1, 32), (33, 64), (512, 512), (513, 544), (545, 576), (576, 576)]
)
def test_allocation_rounding(used, columns):
    assert round_allocation(SM107A, used) == columns


def test_allocation_over_capacity():
    with pytest.raises(PlanError, match="608 TMEM columns, sm_107a has 576"):
        round_allocation(SM107A, 577)
    with pytest.raises(PlanError, match="sm_100a has 512"):
        round_allocation(SM100A, 513)


@pytest.mark.parametrize(("b_kib", "old", "new"), [(16, 8, 10), (32, 5, 6)])
def test_packed_fp4_buys_stages(b_kib, old, new):
    stages = [
        stages_in(256 * KIB, arch.fp4_bytes_in_mixed_mma(128 * 128) + b_kib * KIB)
        for arch in (SM100A, SM107A)
    ]
    assert stages == [old, new]


def test_memories():
    assert SM107A.smem_per_block == 334_848
    assert SM107A.smem_per_sm == 328 * KIB
    assert SM100A.smem_per_block == 232_448


def weights_and_tokens(tokens_n: int, *, cp_async: bool = False) -> list[Buffer]:
    return [
        Buffer("sA", 128 * 128, "weights"),
        Buffer("sSFA", 2048, "weights"),
        Buffer("sB", tokens_n * 128, "tokens"),
        Buffer("sSFB", 16 * tokens_n, "tokens", cp_async=cp_async),
        Buffer("sC", 8 * KIB, "fixed"),
    ]


def test_a_split_ring_that_pays_and_one_that_does_not():
    shared = plan_smem(SM107A, weights_and_tokens(256))
    split = plan_smem(SM107A, weights_and_tokens(256), token_stages=4)
    assert split.stages["weights"] > shared.stages["weights"] == shared.stages["tokens"]
    assert split.used <= SM107A.smem_per_block
    with pytest.raises(PlanError, match="it gains nothing"):
        plan_smem(SM107A, weights_and_tokens(256), token_stages=shared.stages["tokens"] + 1)


def test_cp_async_targets_stay_below_248_kib():
    plan = plan_smem(SM107A, weights_and_tokens(128, cp_async=True))
    target = next(p for p in plan.placed if p.name == "sSFB")
    assert plan.used > 248 * KIB > target.offset + target.nbytes
    with pytest.raises(PlanError, match="below 0x3e000"):
        plan_smem(SM107A, [Buffer("sA", 32 * KIB, cp_async=True)])


def test_nothing_fits():
    with pytest.raises(PlanError, match="one stage needs"):
        plan_smem(SM100A, [Buffer("sA", 256 * KIB)])


def test_barrier_counts():
    assert barriers.tma_to_mma("ab", 20_480).full_tx == 20_480
    pair = barriers.tma_to_mma("ab", 20_480, cta_group=2, consumers=2)
    assert (pair.full_arrivals, pair.full_tx, pair.empty_arrivals) == (1, 40_960, 2)
    assert barriers.cp_async_to_mma("sfb", 4).full_arrivals == 128
    assert barriers.mma_to_epilogue("acc", 4, cta_group=2).empty_arrivals == 8
    with pytest.raises(PlanError, match="an mbarrier counts"):
        barriers.tma_to_mma("ab", 1 << 20)


def test_mixed_clusters():
    assert barriers.mixed_cluster_grid(150, (4, 1)) == (4, 1, 37)
    assert barriers.fallback_counts(4, 2) == (4, 2)
    assert barriers.fallback_groups(6, 2) == 3
    with pytest.raises(PlanError, match="wait for a partner"):
        barriers.fallback_groups(7, 2)
