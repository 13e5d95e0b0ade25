"""Scales: a bad one is an error that names it, and is mended only when asked."""

import numpy as np
import pytest
import torch

from rubin_moe.errors import CheckpointError
from rubin_moe.formats.spec import FORMATS
from rubin_moe.loader.assemble import ExpertAssembler
from rubin_moe.loader.load import ModelCheckpoint, load_experts
from rubin_moe.loader.modelopt import MODELOPT
from rubin_moe.loader.spec import ExpertsSpec
from rubin_moe.loader.validate import ScaleChecks, largest_scales
from tests.oracles import quant

from .checkpoints import QUANT_CONFIGS, Style, assert_same, expert_tensors, folder, layer

NAME = "model.layers.0.mlp.experts"
STYLES = {
    "modelopt": Style(),
    "compressed_nvfp4": Style("compressed_nvfp4"),
    "deepseek_v4": Style("deepseek_v4"),
    "rubin_ue5m3": Style("rubin_ue5m3"),
}
SF = {"deepseek_v4": "scale"}


def load(path, made, **options):
    with ModelCheckpoint(made.write(path)) as checkpoint:
        return load_experts(checkpoint, 0, **options)


def with_code(style, code, zeros=False):
    """A checkpoint whose expert 2 has ``code`` as block scale [3, 0] of up."""
    made = folder(layer(style.fmt), style)
    path = f"{NAME}.2.up_proj"
    made.tensors[f"{path}.{SF.get(style.dialect, 'weight_scale')}"].view(torch.uint8)[3, 0] = code
    if zeros:
        payload = "weight_packed" if "compressed" in style.dialect else "weight"
        made.tensors[f"{path}.{payload}"].view(torch.uint8)[3, :8] = 0x80
    return made


@pytest.mark.parametrize(
    ("dialect", "code", "message"),
    [
        ("modelopt", 0x7F, "is 0x7f, NaN"),
        ("compressed_nvfp4", 0x7F, "is 0x7f, NaN"),
        ("modelopt", 0xFF, "is 0xff, NaN"),
        ("modelopt", 0x88, "is 0x88, negative"),
        ("modelopt", 0x80, "is 0x80, negative"),
        ("deepseek_v4", 0xFF, "is 0xff, NaN"),
        ("rubin_ue5m3", 0xFF, "is 0xff, NaN"),
    ],
)
def test_bad_block_scales_are_named(tmp_path, dialect, code, message):
    made = with_code(STYLES[dialect], code)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path, made)
    assert f"{NAME}.2.up: block scale [3, 0]" in str(caught.value)


@pytest.mark.parametrize("code", [0x80, 0xFE, 0x7F])
def test_every_byte_but_nan_is_a_ue5m3_scale(tmp_path, code):
    made = with_code(STYLES["rubin_ue5m3"], code)
    weights = load(tmp_path, made, checks=ScaleChecks(max_spread=np.inf, max_scale=np.inf))
    assert weights.w13.sf[2, 32 + 3, 0] == code


def test_nan_scales_are_mended_only_by_name(tmp_path):
    made = with_code(STYLES["modelopt"], 0x7F, zeros=True)
    with pytest.raises(CheckpointError, match=r"on a block of zeros; .*repair={'zero_blocks'}"):
        load(tmp_path, made)
    with pytest.raises(CheckpointError, match="on a block of zeros"):
        load(tmp_path, made, checks=ScaleChecks(repair={"saturate_nan"}))
    weights = load(tmp_path, made, checks=ScaleChecks(repair={"zero_blocks"}))
    assert weights.w13.sf[2, 32 + 3, 0] == 0

    made = with_code(STYLES["modelopt"], 0x7F)
    with pytest.raises(CheckpointError, match="on a block that is not zero"):
        load(tmp_path, made, checks=ScaleChecks(repair={"zero_blocks"}))
    weights = load(tmp_path, made, checks=ScaleChecks(repair={"saturate_nan"}))
    assert weights.w13.sf[2, 32 + 3, 0] == 0x7E
    # the file itself was not mended
    with pytest.raises(CheckpointError, match="NaN"):
        load(tmp_path, made)


def test_repairs_are_counted():
    found = expert_tensors(layer("nvfp4-ue4m3"), Style())
    found[f"{NAME}.1.down_proj.weight_scale"].view(torch.uint8)[:3, 0] = 0x7F
    checks = ScaleChecks(repair={"saturate_nan"})
    spec = ExpertsSpec(MODELOPT, 64, 32, 4, scheme="w4a4")
    assembler = ExpertAssembler(spec, None, NAME, checks=checks)
    for name, tensor in found.items():
        assembler.add(name, tensor)
    assembler.finish()
    assert assembler.repairs.counts == {"saturate_nan": 3}


@pytest.mark.parametrize("value", [0.0, -1e-4, float("nan"), float("inf"), 1e-40])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed_nvfp4"])
def test_bad_global_scales_are_named(tmp_path, dialect, value):
    source = layer("nvfp4-ue4m3")
    made = folder(source, STYLES[dialect])
    leaf = "weight_scale_2" if dialect == "modelopt" else "weight_global_scale"
    name = f"{NAME}.1.gate_proj.{leaf}"
    made.tensors[name] = torch.full_like(made.tensors[name], value)
    with pytest.raises(CheckpointError, match=r"1\.gate_proj\.weight_.*"):
        load(tmp_path, made)


@pytest.mark.parametrize(
    ("dialect", "leaf", "value", "message"),
    [
        ("modelopt", "weight_scale_2", 3584.0, "looks like a divisor, as compressed-tensors"),
        ("compressed_nvfp4", "weight_global_scale", 2.8e-4, "looks like a multiplier, as ModelOpt"),
    ],
)
def test_a_reciprocal_convention_is_recognised(tmp_path, dialect, leaf, value, message):
    made = folder(layer("nvfp4-ue4m3"), STYLES[dialect])
    name = f"{NAME}.0.up_proj.{leaf}"
    made.tensors[name] = torch.full_like(made.tensors[name], value)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path, made)
    assert name in str(caught.value)


def test_a_global_of_exactly_one_is_both_conventions(tmp_path):
    """Weight-only tools write 1 and leave everything to the block scales."""
    source = layer("nvfp4-ue4m3")
    for dialect, leaf in (
        ("modelopt", "weight_scale_2"),
        ("compressed_nvfp4", "weight_global_scale"),
    ):
        made = folder(source, STYLES[dialect])
        for name in made.tensors:
            if name.endswith(leaf):
                made.tensors[name] = torch.ones_like(made.tensors[name])
        assert (load(tmp_path / dialect, made).w13.dec == 1).all()


def test_both_conventions_load_to_the_same_bytes_twice(tmp_path):
    source = layer("nvfp4-ue4m3")
    loaded = [
        load(tmp_path / d, folder(source, STYLES[d]))
        for d in ("modelopt", "compressed_nvfp4", "modelopt", "compressed_nvfp4")
    ]
    for other in loaded[1:]:
        for proj in ("w13", "w2"):
            for name, tensor in getattr(loaded[0], proj).tensors().items():
                assert torch.equal(tensor, getattr(other, proj).tensors()[name]), name


def test_gate_and_up_keep_their_own_globals(tmp_path):
    made = folder(layer("nvfp4-ue4m3"), Style())
    for leaf, value in (("gate_proj", 3.85e-5), ("up_proj", 4.83e-5)):
        made.tensors[f"{NAME}.0.{leaf}.weight_scale_2"] = torch.tensor(value)
    checks = ScaleChecks()
    weights = load(tmp_path, made, checks=checks)
    assert weights.w13.dec[0].tolist() == pytest.approx([3.85e-5, 4.83e-5])


@pytest.mark.parametrize("factor", [2e3, 5e-4])
def test_a_scale_out_of_all_proportion_is_named(tmp_path, factor):
    made = folder(layer("nvfp4-ue4m3"), Style())
    name = f"{NAME}.3.down_proj.weight_scale_2"
    made.tensors[name] = made.tensors[name] * factor
    with pytest.raises(CheckpointError, match=r"times the median .* of the layer's experts") as e:
        load(tmp_path, made)
    assert f"{NAME}.3.down" in str(e.value)
    load(tmp_path, made, checks=ScaleChecks(max_spread=np.inf))


def test_one_wild_mxfp4_block_is_out_of_proportion(tmp_path):
    made = with_code(STYLES["deepseek_v4"], 254)
    with pytest.raises(CheckpointError, match="exceeds 1e"):
        load(tmp_path, made)
    made = with_code(STYLES["deepseek_v4"], 136)
    with pytest.raises(CheckpointError, match=r"2\.up: .*times the median"):
        load(tmp_path, made)


def test_every_ue8m0_byte_keeps_its_place(tmp_path):
    """0 is 2^-127 and not zero; 255 alone is NaN."""
    source = layer("mxfp4", hidden=256)
    source.w2.sf[:, :8, 0] = [0, 1, 103, 112, 127, 200, 253, 254]
    made = folder(source, STYLES["deepseek_v4"])
    assert_same(
        load(tmp_path, made, checks=ScaleChecks(max_spread=np.inf, max_scale=np.inf)), source
    )


@pytest.mark.parametrize("fmt", ["nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4"])
def test_largest_scales_decode_every_code(fmt):
    table = quant.SCALES[quant.SCALE_TYPE[fmt]]
    codes = np.flatnonzero(np.isfinite(table)).astype(np.uint8)
    sf = torch.from_numpy(codes).reshape(-1, 1, 1)
    got = largest_scales(sf, torch.full((codes.size, 1), 0.5), FORMATS[fmt])
    np.testing.assert_array_equal(got[:, 0].numpy(), table[codes] * 0.5)


# -- input scales --------------------------------------------------------------------------------


def without_inputs(made, *experts):
    for name in list(made.tensors):
        if "input_" in name and any(f".experts.{e}." in name for e in experts):
            del made.tensors[name]
    return made


def test_w4a4_names_experts_without_an_input_scale(tmp_path):
    source = layer("nvfp4-ue4m3")
    made = without_inputs(folder(source, Style()), 2)
    with pytest.raises(ValueError, match=r"gate of experts \[2\]; up of experts \[2\]"):
        load(tmp_path, made)
    weights = load(tmp_path, made, input_scales="ignore")
    assert weights.w13.input_dec is None
    assert_same(weights, source)
    kept = load(tmp_path, made, input_scales="keep").w13.input_dec
    assert kept.isnan().nonzero().tolist() == [[2, 0], [2, 1]]
    mended = load(tmp_path, made, checks=ScaleChecks(repair={"input_scales"}))
    assert mended.w13.input_dec[2].tolist() == mended.w13.input_dec[[0, 1, 3]].amax(0).tolist()


@pytest.mark.parametrize("value", [0.0, 1e-40, -1.0, float("nan"), float("inf")])
def test_w4a4_refuses_input_scales_without_a_reciprocal(tmp_path, value):
    made = folder(layer("nvfp4-ue4m3"), Style())
    made.tensors[f"{NAME}.1.down_proj.input_scale"] = torch.tensor(value)
    with pytest.raises(CheckpointError, match=r"unusable for down of experts \[1\]"):
        load(tmp_path, made)
    mended = load(tmp_path, made, checks=ScaleChecks(repair={"input_scales"}))
    assert mended.w2.input_dec.isfinite().all()
    assert mended.w2.input_dec[1] == mended.w2.input_dec.max()


def test_a_checkpoint_without_any_is_weight_only_whatever_it_says(tmp_path):
    source = layer("nvfp4-ue4m3")
    made = without_inputs(folder(source, Style()), 0, 1, 2, 3)
    with ModelCheckpoint(made.write(tmp_path)) as checkpoint:
        spec = checkpoint.spec(0)
        weights = load_experts(checkpoint, 0)
    assert spec.scheme == "w4a16"
    assert "no input scale on disk: W4A16" in spec.notes[0]
    assert weights.w13.input_dec is None
    assert_same(weights, source)


def test_weight_only_checkpoints_ignore_stray_input_scales(tmp_path):
    source = layer("nvfp4-ue4m3")
    made = folder(source, Style())
    made.config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16
    }  # fmt: skip
    weights = load(tmp_path, made)
    assert weights.w2.input_dec is None
    assert_same(weights, source)


def test_dynamic_activations_must_be_said(tmp_path):
    made = without_inputs(folder(layer("nvfp4-ue4m3"), Style()), 0, 1, 2, 3)
    made.config["quantization_config"] = {
        **QUANT_CONFIGS["modelopt"], "activation_scheme": "dynamic"
    }  # fmt: skip
    with ModelCheckpoint(made.write(tmp_path)) as checkpoint:
        assert checkpoint.spec(0).scheme == "w4a4-dynamic"
