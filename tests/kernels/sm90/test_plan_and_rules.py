"""Plans, scales and refusals of the sm_90a backend; no emulator."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from rubin_moe.arch import SM90A
from rubin_moe.errors import FormatError, PlanError
from rubin_moe.formats.spec import MXFP4, NVFP4_UE4M3, NVFP4_UE5M3
from rubin_moe.kernels import registry, tuning
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import MoEProblem, Target
from rubin_moe.kernels.sm90 import choice, rules
from rubin_moe.kernels.sm90.fp8_choice import choose_fp8
from rubin_moe.kernels.sm90.plan import DecodePlan, LayerSizes, Tiles, blocks_of, check, parts_of
from rubin_moe.kernels.sm90.prefill_plan import PrefillPlan, PrefillTiles
from rubin_moe.kernels.sm90.scales import kernel_scales
from tests.oracles import quant

HOPPER = Target("cuda", (9, 0), {"nvidia-cutlass-dsl": "4.8.1"})
PUBLISHED = {
    "gpt-oss": (128, 4, 2880, 2880, MXFP4),
    "Qwen3-30B-A3B": (128, 8, 2048, 768, NVFP4_UE4M3),
    "DeepSeek-V3 TP8": (256, 8, 7168, 256, NVFP4_UE4M3),
    "Mixtral": (8, 2, 4096, 14336, NVFP4_UE5M3),
}


def problem(sizes=(8, 8, 64, 32, NVFP4_UE4M3), **fields):
    e, top_k, hidden, intermediate, fmt = sizes
    base = {"num_experts": e, "global_num_experts": e, "top_k": top_k, "hidden": hidden}
    more = {"intermediate": intermediate, "weight_format": fmt}
    return MoEProblem(**{**base, **more, **fields})


def test_hopper_gets_this_backend():
    assert registry.select(problem(), HOPPER).backend == "sm90"


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("num_tokens", [1, 16, 256, 5000])
def test_published_shapes_have_a_plan(name, num_tokens):
    plan = choice.choose(problem(PUBLISHED[name], batch_invariant=True), num_tokens)
    assert plan.smem_bytes <= SM90A.smem_per_block
    assert plan.max_pairs >= min(num_tokens * plan.sizes.top_k, 2048 - plan.sizes.top_k)
    assert "pairs=" in str(rules.plan(problem(PUBLISHED[name], batch_invariant=True), num_tokens))


@pytest.mark.parametrize("name", PUBLISHED)
def test_many_tokens_get_the_kernels_for_prefill(name):
    asked = problem(PUBLISHED[name])
    least = choice.prefill_from(asked)
    assert least is not None
    assert not isinstance(choice.choose(asked, least - 1), PrefillPlan)
    for num_tokens in (least, least + 1, 5000, 10**6):
        plan = choice.choose(asked, num_tokens)
        assert isinstance(plan, PrefillPlan)
        assert max(plan.smem13, plan.smem2) <= SM90A.smem_per_block
    assert "kernel=prefill" in str(rules.plan(asked, 5000))
    assert choice.prefill_from(problem(PUBLISHED[name], batch_invariant=True)) is None


def test_prefill_takes_over_at_8_tokens_an_expert_where_nobody_measured():
    asked = problem((64, 4, 1024, 512, NVFP4_UE4M3))
    assert choice.prefill_from(asked) == 64 * 8 // 4
    many_experts = problem((512, 8, 1024, 512, NVFP4_UE4M3))
    assert choice.prefill_from(many_experts) == 2048 // 8 + 1  # else several launches


@pytest.mark.parametrize("ranks", [2, 8, 16])
@pytest.mark.parametrize("num_tokens", [1, 100, 2000, 50_000])
@pytest.mark.parametrize("sizes", [(16, 4, 1024, 512, MXFP4), PUBLISHED["gpt-oss"]])
def test_a_rank_with_some_of_the_experts_meets_fewer_pairs(sizes, num_tokens, ranks):
    """Tiles of ``ranks`` times the tokens are those of a rank that has all of these experts."""
    whole, shared = problem(sizes), problem(sizes, global_num_experts=ranks * sizes[0])
    most = 2048 // sizes[1]
    least, first = choice.prefill_from(whole), choice.prefill_from(shared)
    assert first == min(ranks * least, most + 1)
    if num_tokens >= least:
        plan = choice.choose(shared, ranks * num_tokens)
        assert plan == choice.choose(whole, num_tokens)
    few = choice.choose(shared, min(first - 1, ranks * num_tokens))
    assert few.max_pairs >= min(first - 1, ranks * num_tokens) * sizes[1]  # all may come here
    fp8 = {"weight_format": MXFP4, "activation_format": "fp8-e4m3"}
    alone = choose_fp8(problem(sizes, **fp8), num_tokens)
    assert (
        choose_fp8(problem(sizes, **fp8, global_num_experts=ranks * sizes[0]), ranks * num_tokens)
        == alone
    )


@pytest.mark.parametrize("num_tokens", [1, 200, 4096, 10**6])
def test_fp8_activations_have_a_plan_for_every_number_of_tokens(num_tokens):
    asked = problem(PUBLISHED["gpt-oss"], activation_format="fp8-e4m3")
    assert registry.select(asked, HOPPER).backend == "sm90"
    plan = choose_fp8(asked, num_tokens)
    assert max(plan.smem13, plan.smem2) <= SM90A.smem_per_block
    assert "kernel=fp8" in str(rules.plan(asked, num_tokens))
    assert plan.tiles.promote == choose_fp8(asked, 1).tiles.promote  # else bits would change


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"activation_format": "mxfp8"}, "16-bit and fp8-e4m3 activations, not mxfp8"),
        ({"activation_format": "fp8-e4m3"}, "activations with mxfp4, not with nvfp4-ue4m3"),
        ({"dtype": "float32"}, "bfloat16 and float16 activations; the model's are float32"),
        ({"num_experts": 2048}, "at most 1024 experts"),
        ({"hidden": 8200}, "hidden 8200"),
    ],
)
def test_what_it_does_not_compute_is_refused_with_a_reason(fields, reason):
    assert reason in (rules.why_not(problem(**fields), HOPPER) or "")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (10, 7), (12, 0)])
def test_other_architectures_are_not_hopper(capability):
    assert "compiled for sm_90a" in (rules.why_not(problem(), Target("cuda", capability)) or "")


def test_a_missing_compiler_is_named_unless_kernels_were_compiled_before(tmp_path, monkeypatch):
    monkeypatch.setenv("RUBIN_MOE_CACHE_DIR", str(tmp_path))
    bare = Target("cuda", (9, 0))
    assert "needs nvidia-cutlass-dsl" in (rules.why_not(problem(), bare) or "")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "sm90_decode-0-4.8.1.bin").touch()
    assert rules.why_not(problem(), bare) is None
    old = Target("cuda", (9, 0), {"nvidia-cutlass-dsl": "4.7.0"})
    assert "later nvidia-cutlass-dsl than 4.7.0" in (rules.why_not(problem(), old) or "")


@pytest.mark.parametrize("k_blocks", range(1, 130))
def test_parts_and_blocks_divide(k_blocks):
    parts = parts_of(k_blocks)
    assert k_blocks % parts == 0
    for most in (1, 4, 9):
        blocks = blocks_of(k_blocks, most)
        assert 1 <= blocks <= most
        assert k_blocks // parts % blocks == 0


@pytest.mark.parametrize(
    ("tiles", "reason"),
    [
        (Tiles(31, 4, 9, 9), "bytes of shared memory"),
        (Tiles(5, split=True), "do not share the warps"),
        (Tiles(pass_tokens=12), "passes of 8, 16 or 24"),
        (Tiles(28, slots=1, split=True), "groups of warps"),
    ],
)
def test_tiles_that_cannot_be_built(tiles, reason):
    sizes = LayerSizes(8, 2, 2048, 256, gated=True, exponent_only=False)
    with pytest.raises(PlanError, match=reason):
        check(DecodePlan(sizes, tiles, 512))


@pytest.mark.parametrize(
    ("fmt", "kind", "first", "last"),
    [
        (NVFP4_UE4M3, "bf16", 0, 0x7E),
        (NVFP4_UE4M3, "f16", 0, 0x7E),
        (NVFP4_UE5M3, "bf16", 0, 0xEF),
        (NVFP4_UE5M3, "bf16", 4, 0xFE),
        (NVFP4_UE5M3, "f16", 0x30, 0xDF),
        (MXFP4, "bf16", 0, 125),
        (MXFP4, "bf16", 129, 254),
        (MXFP4, "f16", 110, 134),
    ],
)
def test_every_scale_survives_exactly(fmt, kind, first, last):
    """The kernel's value of a byte, as the hardware reads its 16 bits, times the factor."""
    codes = torch.arange(first, last + 1, dtype=torch.uint8)
    scales = kernel_scales(codes, fmt, kind, "test")
    field = scales.scale_bytes.to(torch.int32)
    if kind == "f16":
        bits = (field << (10 if fmt == MXFP4 else 7)).to(torch.int16)
        value = bits.view(torch.float16).double() * 2.0**-14
    else:
        bits = field << 7 if fmt == MXFP4 else field * 16 + 0x6F80
        value = (bits << 16).view(torch.float32).double() * 2.0**-126
    expected = quant.SCALES[quant.SCALE_TYPE[fmt.name]][codes.numpy()]
    zero = np.zeros(len(codes), bool) if scales.zero is None else scales.zero.numpy()
    assert np.array_equal(zero, expected == 0)
    assert np.array_equal((value * scales.factor).numpy()[~zero], expected[~zero])
    # the smallest unit of a product: half of an element's, an eighth of a scale with mantissa
    least = value[torch.from_numpy(~zero)].min().item() / (2 if fmt == MXFP4 else 16)
    assert least >= (2.0**-24 if kind == "f16" else 2.0**-133)


@pytest.mark.parametrize(
    ("fmt", "kind", "codes", "reason"),
    [
        (NVFP4_UE4M3, "bf16", [0x7F], "NaN"),
        (NVFP4_UE5M3, "bf16", [0xFF], "NaN"),
        (MXFP4, "bf16", [0xFF], "NaN"),
        (NVFP4_UE5M3, "bf16", [1, 0xFE], r"2\^-17 to 2\^16; .* hold 32 exponents"),
        (NVFP4_UE5M3, "f16", [8, 0xFE], "hold 22 exponents"),
        (MXFP4, "bf16", [0, 254], "hold 126 exponents"),
        (MXFP4, "f16", [100, 130], "hold 25 exponents"),
    ],
)
def test_scales_that_do_not_fit_are_named(fmt, kind, codes, reason):
    with pytest.raises(FormatError, match=f"experts.w2 of expert 3: .*{reason}"):
        kernel_scales(torch.tensor(codes, dtype=torch.uint8), fmt, kind, "experts.w2 of expert 3")


def test_measured_tiles_are_nearest_in_log_space(tmp_path, monkeypatch):
    shape = choice.shape_key(choice.sizes_of(problem()))
    rows = [{"num_tokens": m, "tiles": {"warps": m}} for m in (1, 16, 256)]
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / tuning.file_name(shape)).write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(tuning, "folder", lambda: tmp_path)
    tuning._facts.cache_clear()
    found = [tuning.nearest("sm90", shape, m)["warps"] for m in (0, 3, 5, 60, 70, 10**6)]
    assert found == [1, 1, 16, 16, 256, 256]
    assert tuning.nearest("sm90", {**shape, "hidden": 48}, 1) is None
    tuning._facts.cache_clear()


def test_prefill_starts_where_it_was_measured_to_be_faster(tmp_path, monkeypatch):
    shape = choice.shape_key(choice.sizes_of(problem()))
    rows = [
        {"num_tokens": 16, "tiles": asdict(Tiles(4))},
        {"num_tokens": 64, "tiles": asdict(PrefillTiles(16))},
        {"num_tokens": 64, "tiles": asdict(Tiles(8))},
        {"num_tokens": 1024, "tiles": asdict(PrefillTiles(96))},
    ]
    (tmp_path / "sm90").mkdir()
    file = tmp_path / "sm90" / tuning.file_name(shape)
    file.write_text(json.dumps({"prefill_from": 40, "rows": rows}))
    monkeypatch.setattr(tuning, "folder", lambda: tmp_path)
    tuning._facts.cache_clear()
    choice.choose.cache_clear()
    tiles = [choice.choose(problem(), m).tiles for m in (1, 39, 40, 255, 257, 10**6)]
    assert tiles == [Tiles(4), Tiles(8), *2 * [PrefillTiles(16)], *2 * [PrefillTiles(96)]]
    assert choice.choose(problem(batch_invariant=True), 10**6).tiles == Tiles(8)
    tuning._facts.cache_clear()
    choice.choose.cache_clear()


def test_activation_is_part_of_the_kernel():
    assert choice.choose(problem(), 1).sizes.gated
    assert not choice.choose(problem(activation=Activation("relu2")), 1).sizes.gated
