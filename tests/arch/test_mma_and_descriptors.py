"""Every number that the seeds state about instructions and their descriptors."""

from dataclasses import replace

import pytest

from rubin_moe.arch import SM90A, SM100A, SM103A, SM107A, instr_desc, mma_rules, smem_desc
from rubin_moe.arch.mma_rules import Mma
from rubin_moe.errors import PlanError

NVFP4 = Mma("mxf4nvf4", 128, 128, 128)
MIXED = Mma("mxf8f6f4", 128, 64, 64, a="e2m1", b="e4m3", scale="ue8m0", sf_vec_size=32)


@pytest.mark.parametrize(
    ("arch", "kind", "k"),
    [
        (SM100A, "mxf4", 64),
        (SM103A, "mxf4", 96),
        (SM107A, "mxf4nvf4", 128),
        (SM100A, "mxf8f6f4", 32),
        (SM103A, "mxf8f6f4", 32),
        (SM107A, "mxf8f6f4", 64),
    ],
)
def test_widest_k_of_each_kind(arch, kind, k):
    assert arch.mma_k[kind][0] == k


def test_k_bits_3_and_31():
    fp4 = instr_desc.build(SM107A, NVFP4)
    assert (fp4 >> 3 & 1, fp4 >> 31) == (1, 0)
    fp8 = instr_desc.build(SM107A, MIXED)
    assert (fp8 >> 3 & 1, fp8 >> 31) == (0, 1)
    old = instr_desc.build(SM100A, replace(NVFP4, k=64))
    assert (old >> 3 & 1, old >> 31) == (0, 0)


def test_format_code_5_in_a_mixed_kind_and_1_in_a_pure_one():
    assert instr_desc.build(SM107A, MIXED) >> 7 & 7 == 5
    assert instr_desc.build(SM107A, NVFP4) >> 7 & 7 == 1
    trap = instr_desc.build(SM107A, MIXED) & ~(7 << 7) | 1 << 7
    assert instr_desc.decode(SM107A, "mxf8f6f4", trap).a == "e5m2"  # well formed, and wrong


def test_ue4m3_and_ue5m3_differ_in_the_scale_format_alone():
    other = instr_desc.build(SM107A, replace(NVFP4, scale="ue5m3"))
    assert instr_desc.build(SM107A, NVFP4) ^ other == 2 << 23


@pytest.mark.parametrize("mma", [NVFP4, MIXED, replace(NVFP4, m=256, cta_group=2, n=256)])
def test_decode_inverts_build(mma):
    d = instr_desc.decode(SM107A, mma.kind, instr_desc.build(SM107A, mma))
    assert (d.m, d.n, d.k, d.a, d.b, d.scale) == (mma.m, mma.n, mma.k, mma.a, mma.b, mma.scale)


@pytest.mark.parametrize(
    ("arch", "change", "reason"),
    [
        (SM107A, {"m": 64}, "with K = 64, M must be 128"),
        (SM107A, {"m": 128, "cta_group": 2}, "with K = 64, M must be 128"),
        (SM107A, {"n": 12}, "multiple of 8"),
        (SM107A, {"n": 24, "m": 256, "cta_group": 2}, "multiple of 16"),
        (SM107A, {"n": 0}, "multiple of 8"),
        (SM100A, {}, "K = 64; has 32"),
        (SM107A, {"scale": "ue4m3", "sf_vec_size": 16}, "do not exist in this kind"),
        (SM90A, {}, "no block-scaled instruction"),
    ],
)
def test_instructions_that_do_not_exist(arch, change, reason):
    assert reason in (mma_rules.why_not(arch, replace(MIXED, **change)) or "")


def test_ue5m3_is_rubins_alone_and_comes_with_16_and_32():
    ue5m3 = replace(NVFP4, k=64, scale="ue5m3")
    assert "scale format ue5m3" in (mma_rules.why_not(SM100A, ue5m3) or "")
    assert mma_rules.why_not(SM107A, ue5m3) is None
    assert mma_rules.why_not(SM107A, replace(NVFP4, scale="ue5m3", sf_vec_size=32)) is None
    assert mma_rules.why_not(SM107A, replace(NVFP4, scale="ue4m3", sf_vec_size=32))


def test_undefined_bits_are_refused():
    with pytest.raises(PlanError, match="undefined bits 0x8"):
        instr_desc.decode(SM100A, "mxf4nvf4", instr_desc.build(SM107A, NVFP4))


@pytest.mark.parametrize(("tokens", "n"), [(1, 16), (16, 16), (17, 32), (23, 32), (256, 256)])
def test_runtime_n(tokens, n):
    assert instr_desc.runtime_n(tokens) == n


@pytest.mark.parametrize(("tokens", "n"), [(1, 8), (8, 8), (9, 16), (23, 24), (256, 256)])
def test_runtime_n_of_one_cta(tokens, n):
    assert instr_desc.runtime_n(tokens, cta_group=1) == n


def test_23_tokens_shift_the_second_cta_by_minus_112():
    assert instr_desc.tiled_tma_shift(23, 256) == -112


def test_a_tile_of_zero_tokens_is_refused():
    with pytest.raises(PlanError, match="N = 0 is illegal"):
        instr_desc.runtime_n(0)


@pytest.mark.parametrize("a_id", range(4))
@pytest.mark.parametrize("b_id", range(4))
def test_scale_ids_come_from_address_bits_without_smearing(a_id, b_id):
    base = instr_desc.build(SM107A, replace(NVFP4, n=8)) & ~(63 << 17)
    word = instr_desc.patch_runtime(base, 23, a_id << 30 | 0x200, b_id << 30 | 0x210)
    d = instr_desc.decode(SM107A, "mxf4nvf4", word)
    assert (d.n, d.a_sf_id, d.b_sf_id, d.k, d.m) == (32, a_id, b_id, 128, 128)


def test_compact_sfb_layout():
    assert instr_desc.sfb_chunk_slots(256, 16, 128, 256) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert instr_desc.sfb_chunk_slots(32, 16, 128, 256) == [(0, 0), (2, 1)]


def test_shared_memory_descriptor_reaches_327_kib_on_rubin_only():
    high = 320 * 1024
    word = smem_desc.build(SM107A, high, 16, 1024, "128b")
    fields = smem_desc.decode(SM107A, word)
    assert fields["start_address"] == high
    assert fields["stride_byte_offset"] == 1024
    assert (word >> 61) == 2
    with pytest.raises(PlanError, match="does not fit 14 bits"):
        smem_desc.build(SM100A, high, 16, 1024, "128b")
    with pytest.raises(PlanError, match="multiple of 16"):
        smem_desc.build(SM107A, 8, 16, 1024, "128b")


def test_circular_descriptors_are_sm_103s():
    word = smem_desc.build(SM103A, 0, 0x4000, 1024, "128b", absolute=True)
    assert word >> 52 & 1 == 1
    with pytest.raises(PlanError, match="no field 'leading_mode'"):
        smem_desc.build(SM100A, 0, 0x4000, 1024, "128b", absolute=True)
