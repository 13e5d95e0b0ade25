"""Work lists, plans and refusals of the sm_107a backend; no emulator."""

import pytest

from rubin_moe.arch import SM107A
from rubin_moe.errors import CheckpointError, PlanError, UnsupportedError
from rubin_moe.formats.spec import MXFP4, NVFP4_UE4M3, NVFP4_UE5M3
from rubin_moe.kernels import registry
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import MoEProblem, Target
from rubin_moe.kernels.sm107 import rules
from rubin_moe.kernels.sm107.plan import TILES_N, choose_tile_n, plan_gemm

from .layers import Case
from .test_emulated import kernel

RUBIN = Target("cuda", (10, 7), {"nvidia-cutlass-dsl": "4.8.1"})


@pytest.mark.parametrize("scale", ["ue4m3", "ue5m3"])
@pytest.mark.parametrize("tile_n", TILES_N)
def test_plans_keep_the_hardware_rules(tile_n, scale):
    plan = plan_gemm(tile_n, scale)
    assert plan.stages >= 8
    assert plan.smem_bytes <= SM107A.smem_per_block
    assert plan.tmem.overlap == 0
    tokens = [p for p in plan.smem.placed if p.name in ("sB", "sSFB")]
    assert all(p.offset + p.nbytes <= SM107A.cp_async_limit for p in tokens)
    assert plan.idesc >> 17 & 0x3F == 0
    assert plan.idesc >> 3 & 1 == 1


def test_a_tile_that_is_not_built():
    with pytest.raises(PlanError, match="built are 32, 64, 128"):
        plan_gemm(48, "ue4m3")


@pytest.mark.parametrize(("tokens", "tile"), [(1, 32), (512, 32), (1024, 64), (100_000, 128)])
def test_tile_choice(tokens, tile):
    assert choose_tile_n(tokens, 8, 128) == tile


def problem(**fields):
    base = {"num_experts": 8, "global_num_experts": 8, "top_k": 2, "hidden": 64}
    more = {"weight_format": NVFP4_UE5M3, "activation_format": "nvfp4-ue5m3"}
    return MoEProblem(**{**base, "intermediate": 32, **more, **fields})


def test_rubin_gets_this_backend():
    assert registry.select(problem(), RUBIN).backend == "sm107"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"weight_format": MXFP4, "activation_format": "mxfp8"}, "multiplies NVFP4"),
        ({"activation_format": "16bit"}, "name an activation format"),
        ({"weight_format": NVFP4_UE4M3}, "one scale type"),
        ({"activation": Activation("swigluoai", limit=7.0)}, "activation swigluoai"),
        ({"activation": Activation(limit=10.0)}, "limit 10.0"),
        ({"has_bias": True}, "adds no bias"),
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
