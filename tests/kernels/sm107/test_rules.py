"""Work lists, plans and refusals of the sm_107a backend; no emulator."""

import pytest

from rubin_moe.arch import SM107A, instr_desc
from rubin_moe.errors import CheckpointError, PlanError, UnsupportedError
from rubin_moe.formats.spec import MXFP4, NVFP4_UE4M3, NVFP4_UE5M3
from rubin_moe.kernels import registry
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import MoEProblem, Target
from rubin_moe.kernels.sm107 import rules
from rubin_moe.kernels.sm107.plan import (
    EPILOGUE_WARPS,
    EXCHANGE_OFFSET,
    LAG,
    OPERANDS,
    TILES_N,
    choose_cta_group,
    choose_tile_n,
    plan_gemm,
)

from .layers import Case
from .test_emulated import kernel

RUBIN = Target("cuda", (10, 7), {"nvidia-cutlass-dsl": "4.8.1"})


@pytest.mark.parametrize("cta_group", [1, 2])
@pytest.mark.parametrize("tile_n", TILES_N)
@pytest.mark.parametrize("fmt", OPERANDS)
def test_plans_keep_the_hardware_rules(fmt, tile_n, cta_group):
    plan = plan_gemm(fmt, tile_n, cta_group)
    assert plan.weight_stages >= plan.token_stages > LAG
    assert plan.weight_stages >= 8
    assert plan.smem_bytes <= SM107A.smem_per_block
    assert plan.tmem.overlap == 0
    tokens = [p for p in plan.smem.placed if p.name in ("sB", "sSFB")]
    assert all(p.offset + p.nbytes <= SM107A.cp_async_limit for p in tokens)
    barriers = 8 * (2 * plan.weight_stages + 3 * plan.token_stages + 4) + 4
    exchange = 2 * 4 * 32 * EPILOGUE_WARPS
    assert barriers <= EXCHANGE_OFFSET
    assert EXCHANGE_OFFSET + exchange <= min(p.offset for p in plan.smem.placed)
    for number, word in enumerate(plan.idesc):
        built = instr_desc.decode(SM107A, plan.operands.kind, word | 1 << 17)
        assert (built.m, built.k) == (128 * cta_group, plan.operands.tile_k // 2)
        assert built.a_sf_id == built.b_sf_id == (2 * number if fmt == "mxfp8" else 0)
        assert word >> 17 & 0x3F == 0


def test_columns_of_the_largest_tile():
    """560 of 576 with one K tile of scales; two would need 608, so the planner takes one."""
    plan = plan_gemm("nvfp4-ue4m3", 256)
    assert (plan.scale_stages, plan.tmem.used, plan.tmem.allocated) == (1, 560, 576)
    assert plan_gemm("nvfp4-ue4m3", 128).scale_stages == 2
    assert plan_gemm("mxfp8", 256).scale_stages == 2


def test_a_ring_of_its_own_only_where_it_gains():
    split = plan_gemm("nvfp4-ue4m3", 128)
    assert split.smem.split
    assert (split.weight_stages, split.token_stages) == (12, 6)  # 9 of both otherwise
    shared = plan_gemm("mxfp8", 32, 2)  # 24 of both are there anyway
    assert not shared.smem.split
    assert shared.weight_stages == shared.token_stages


@pytest.mark.parametrize(
    ("fmt", "groups"),
    [("nvfp4-ue4m3", (1, 1, 1, 2)), ("mxfp8", (1, 1, 2, 2))],
)
def test_pairs_where_tokens_outweigh_weights(fmt, groups):
    assert tuple(choose_cta_group(fmt, n) for n in TILES_N) == groups


def test_a_plan_that_is_not_built():
    with pytest.raises(PlanError, match="built are 32, 64, 128, 256"):
        plan_gemm("mxfp8", 48)
    with pytest.raises(PlanError, match="16bit activations: built are"):
        plan_gemm("16bit", 32)


@pytest.mark.parametrize(
    ("tokens", "tile"), [(1, 32), (512, 32), (1024, 64), (2048, 128), (100_000, 256)]
)
def test_tile_choice(tokens, tile):
    assert choose_tile_n(tokens, 8, 128) == tile


def test_a_rank_expects_the_whole_models_share_of_tokens():
    """512 tokens, 8 choices, 256 experts: 16 each, however many of them a rank holds."""
    for local in (32, 256):
        layer = problem(num_experts=local, global_num_experts=256, top_k=8)
        assert rules.plan(layer, 512).fields["tile_n"] == 32


def problem(**fields):
    base = {"num_experts": 8, "global_num_experts": 8, "top_k": 2, "hidden": 64}
    more = {"weight_format": NVFP4_UE5M3, "activation_format": "nvfp4-ue5m3"}
    return MoEProblem(**{**base, "intermediate": 32, **more, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"has_bias": True, "activation": Activation("swigluoai", limit=7.0)},
        {"weight_format": MXFP4, "activation_format": "mxfp8"},
    ],
    ids=str,
)
def test_rubin_gets_this_backend(fields):
    assert registry.select(problem(**fields), RUBIN).backend == "sm107"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"activation_format": "mxfp8"}, "they take nvfp4-ue5m3"),
        ({"weight_format": MXFP4}, "they take mxfp8"),
        ({"activation_format": "16bit"}, "name an activation format"),
        ({"weight_format": NVFP4_UE4M3}, "they take nvfp4-ue4m3"),
        ({"activation": Activation("gelu_tanh")}, "activation gelu_tanh"),
        ({"activation": Activation("relu2")}, "activation relu2"),
        ({"num_experts": 2048}, "at most 1024 experts"),
        ({"top_k": 17}, "top-16"),
        ({"input_scale": "expert"}, "quantizes a token once"),
    ],
)
def test_what_it_does_not_compute_is_refused_with_a_reason(fields, reason):
    assert reason in (rules.why_not(problem(**fields), RUBIN) or "")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_other_architectures_are_not_rubin(capability):
    assert "compiled for sm_107a" in (rules.why_not(problem(), Target("cuda", capability)) or "")


@pytest.mark.parametrize("versions", [{}, {"nvidia-cutlass-dsl": "4.5.0"}])
def test_an_old_or_missing_dsl_is_named_with_the_line_that_mends_it(versions):
    reason = rules.why_not(problem(), Target("cuda", (10, 7), versions))
    assert "pip install 'nvidia-cutlass-dsl[cu13]>=4.8.1" in (reason or "")


def test_the_emulated_backend_is_opt_in():
    cpu = Target("cpu", None, RUBIN.versions)
    chosen = registry.select(problem(), cpu)
    assert chosen.backend == "cpu-tcgen05"
    assert chosen.reasons["sm107-emulated"].startswith("opt-in")
    assert registry.select(problem(), cpu, "sm107-emulated").backend == "sm107-emulated"
    with pytest.raises(UnsupportedError):
        registry.select(problem(), Target("cuda", (9, 0)), "sm107-emulated")


def test_ue4m3_activations_need_input_scales():
    case = Case("nvfp4-ue4m3", 1, 2, 64, 32)
    weights = case.weights()
    weights.w13.input_dec[1] = float("nan")
    with pytest.raises(CheckpointError, match=r"w13: no usable input scale for experts \[1\]"):
        kernel(case).prepare(weights)
