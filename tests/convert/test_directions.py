"""Every direction of conversion: what is written loads, and to exactly the planned values."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import rubin_moe
from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert
from rubin_moe.errors import ConvertError
from rubin_moe.loader.load import ModelCheckpoint
from rubin_moe.loader.summary import summarize
from tests.oracles import quant

from .sources import FP4, decoded, fp8_values, matrices, of_layer, others, write_dense, write_fp4

NVFP4 = ("modelopt", "modelopt_stacked", "compressed_nvfp4", "rubin_ue5m3")
MXFP4 = ("compressed_mxfp4", "gpt_oss", "deepseek_v4")


def run(source, out, target, **options):
    return convert(source, out, Options(target, **options), jobs=1)


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for key, values in want.items():
        np.testing.assert_array_equal(got[key], values, err_msg=str(key))


def assert_loads(path):
    with ModelCheckpoint(path) as checkpoint:
        summary = summarize(checkpoint)
    assert summary.loads, summary.layers[0].faults
    return summary.layers[0].spec


@pytest.mark.parametrize("target", ["nvfp4-ue4m3", "nvfp4-ue5m3"])
@pytest.mark.parametrize("name", [n for n in FP4 if n != "rubin_ue5m3"])
def test_fp4_becomes_nvfp4_without_loss(tmp_path, name, target):
    """Folds in mode exact and casts of MXFP4 keep every value."""
    source, layer = write_fp4(tmp_path / "a", name, bias=name == "gpt_oss")
    fold = None if name in MXFP4 else "exact"
    outcome = run(source, tmp_path / "b", target, fold=fold)
    assert_equal(decoded(tmp_path / "b"), of_layer(layer))
    assert outcome.tally.rerounded == 0
    spec = assert_loads(tmp_path / "b")
    assert spec.fmt.name == target
    assert spec.has_bias == (name == "gpt_oss")
    assert spec.scheme == ("w4a16" if name in MXFP4 else "w4a4")


@pytest.mark.parametrize("name", FP4)
def test_fp4_becomes_bfloat16(tmp_path, name):
    source, layer = write_fp4(tmp_path / "a", name)
    run(source, tmp_path / "b", "bf16")
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    stacked = name in ("gpt_oss", "modelopt_stacked")  # gpt-oss' class: transposed, alternating
    module = "layers.0.ffn.experts" if name == "deepseek_v4" else "model.layers.0.mlp.experts"
    for (e, p), values in of_layer(layer).items():
        want = torch.from_numpy(values).to(torch.bfloat16)
        if not stacked:
            got = tensors[f"{module}.{e}.{p}_proj.weight"]
        elif p == "down":
            got = tensors[f"{module}.down_proj"][e].T
        else:
            got = tensors[f"{module}.gate_up_proj"][e].T[("gate", "up").index(p) :: 2]
        assert torch.equal(got, want), (e, p)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.parametrize("name", NVFP4)
def test_nvfp4_never_becomes_mxfp4(tmp_path, name):
    source, _ = write_fp4(tmp_path / "a", name)
    with pytest.raises(ConvertError, match="16 would be merged into 32"):
        run(source, tmp_path / "b", "mxfp4", force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32", "stacked", "gpt_oss", "fp8"])
@pytest.mark.parametrize("target", ["nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4"])
def test_real_numbers_become_fp4_as_the_oracle_rounds_them(tmp_path, kind, target):
    source = write_dense(tmp_path / "a", kind)
    run(source, tmp_path / "b", target)
    values = fp8_values() if kind == "fp8" else matrices()
    got = decoded(tmp_path / "b")
    for (e, p), matrix in values.items():
        same = ("gate", "up") if p != "down" else ("down",)
        amax = max(float(values[e, s].abs().max()) for s in same)
        dec = float(np.float32(amax / (6 * 448))) if target == "nvfp4-ue4m3" else 1.0
        want = quant.quantize_dequantize(matrix.double().numpy(), target, dec)
        np.testing.assert_array_equal(got[e, p], want, err_msg=f"{e} {p}")
    spec = assert_loads(tmp_path / "b")
    assert spec.has_bias == (kind == "gpt_oss")
    assert (
        spec.dialect.name
        == {
            "nvfp4-ue4m3": "modelopt",
            "nvfp4-ue5m3": "rubin-ue5m3",
            "mxfp4": "gpt-oss-mxfp4" if kind == "gpt_oss" else "compressed-tensors-mxfp4",
        }[target]
    )


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_the_mxfp4_rule_is_followed_and_recorded(tmp_path, rule):
    source = write_dense(tmp_path / "a", "bf16")
    run(source, tmp_path / "b", "mxfp4", mx_rule=rule)
    got = decoded(tmp_path / "b")
    saturated = 0
    for key, matrix in matrices().items():
        blocks = matrix.numpy().reshape(-1, 32).astype(np.float64)
        amax = np.abs(blocks).max(1)
        floor = 2.0 ** (np.floor(np.log2(amax)) - 2)
        scale = {
            "floor": floor,
            "even": np.where(amax >= 7 * floor, 2 * floor, floor),
            "ceil": np.where(amax > 6 * floor, 2 * floor, floor),
        }[rule]
        codes = quant.encode_e2m1(blocks / scale[:, None])
        want = (quant.E2M1[codes] * scale[:, None]).reshape(matrix.shape)
        np.testing.assert_array_equal(got[key], want)
        saturated += int((amax >= 7 * scale).sum())
    assert (saturated > 0) == (rule == "floor")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    section = config["quantization_config"]["rubin_moe"]
    assert section["mx_rule"] == rule
    assert section["version"] == rubin_moe.__version__


def test_a_search_lowers_the_error(tmp_path):
    source = write_dense(tmp_path / "a", "bf16")
    error = {}
    for search in (False, True):
        out = tmp_path / str(search)
        run(source, out, "nvfp4-ue4m3", search=search)
        got = decoded(out)
        error[search] = sum(
            float(np.square(got[k] - m.numpy()).sum()) for k, m in matrices().items()
        )
    assert error[True] < 0.97 * error[False]


def test_names_there_and_back_are_the_same_bytes(tmp_path):
    """ModelOpt -> compressed-tensors -> ModelOpt, input scales and reciprocals included."""
    source, _ = write_fp4(tmp_path / "a", "modelopt")
    run(source, tmp_path / "b", "nvfp4-ue4m3", names="compressed-tensors")
    assert assert_loads(tmp_path / "b").dialect.name == "compressed-tensors-nvfp4"
    run(tmp_path / "b", tmp_path / "c", "nvfp4-ue4m3", names="modelopt")
    first = load_file(source / "model.safetensors")
    last = load_file(tmp_path / "c" / "model.safetensors")
    assert first.keys() == last.keys()
    for name, tensor in first.items():
        same = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        back = last[name].view(torch.uint8) if tensor.element_size() == 1 else last[name]
        assert torch.equal(same, back), name


def test_everything_else_is_copied_byte_for_byte(tmp_path):
    source, _ = write_fp4(tmp_path / "a", "modelopt", shards=3)
    (source / "tokenizer.json").write_text("{}")
    (source / "modeling.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_text("pickle")
    before = {p.name: p.read_bytes() for p in source.iterdir()}
    run(source, tmp_path / "b", "nvfp4-ue5m3", max_shard_bytes=8000)
    with ModelCheckpoint(tmp_path / "b") as checkpoint:
        assert len(checkpoint.files) > 3
        for name, tensor in others().items():
            assert torch.equal(checkpoint.tensor(name), tensor)
    assert (tmp_path / "b" / "modeling.py").read_text() == "raise SystemExit"
    assert not (tmp_path / "b" / "pytorch_model.bin").exists()
    assert {p.name: p.read_bytes() for p in source.iterdir()} == before


def test_scales_out_of_range_are_listed_and_refused_then_forced(tmp_path):
    from tests.loader.checkpoints import expert_tensors, folder, layer

    style, source = FP4["compressed_mxfp4"], layer("mxfp4")
    source.w13.sf[2, 3, 1], source.w13.sf[2, 4, 0] = 127 - 19, 127
    made = folder(source, style)
    made.tensors = expert_tensors(source, style)
    path = made.write(tmp_path / "a")
    for target in ("nvfp4-ue4m3", "nvfp4-ue5m3"):
        with pytest.raises(ConvertError, match="1 of 4 experts") as caught:
            run(path, tmp_path / target, target)
        assert "expert 2 gate 2^-19" in str(caught.value)
        assert not (tmp_path / f"{target}.partial").exists()
        outcome = run(path, tmp_path / target, target, force=True)
        assert outcome.tally.flushed + outcome.tally.rerounded > 0
        section = json.loads((tmp_path / target / "config.json").read_text())
        assert section["quantization_config"]["rubin_moe"]["forced"]


def test_linears_on_request(tmp_path):
    source = write_dense(tmp_path / "a", "bf16")
    run(source, tmp_path / "b", "nvfp4-ue4m3", linears=True)
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    attention = "model.layers.0.self_attn"
    q, k = (tensors[f"{attention}.{p}_proj.weight_scale_2"] for p in "qk")
    assert torch.equal(q, k)  # multiplied as one matrix
    assert tensors["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.gate" in ignored
    assert f"{attention}.q_proj" not in ignored
    run(tmp_path / "b", tmp_path / "c", "bf16")
    back = load_file(tmp_path / "c" / "model.safetensors")[f"{attention}.q_proj.weight"]
    original = others()[f"{attention}.q_proj.weight"]
    dec = float(q)
    want = quant.quantize_dequantize(original.double().numpy(), "nvfp4-ue4m3", dec)
    np.testing.assert_allclose(back.double().numpy(), want, rtol=2**-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "nvfp4"}, "known: nvfp4-ue4m3"),
        ({"target": "mxfp4", "mx_rule": "up"}, "floor, even, ceil"),
        ({"target": "nvfp4-ue5m3", "names": "compressed-tensors"}, "known: rubin"),
        ({"target": "bf16", "linears": False}, "nothing to convert"),
    ],
)
def test_refusals(tmp_path, options, message):
    source = write_dense(tmp_path / "a", "bf16")
    with pytest.raises(ConvertError, match=message):
        convert(source, tmp_path / "b", Options(**options), jobs=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_a_source_that_is_not_finite_is_named(tmp_path):
    from tests.loader.checkpoints import MODEL_CONFIG, Folder

    source = write_dense(tmp_path / "a", "bf16")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.experts.2.up_proj.weight"][3, 5] = float("nan")
    bad = Folder(tensors, MODEL_CONFIG).write(tmp_path / "bad")
    with pytest.raises(Exception, match=r"experts\.2\.up.*NaN"):
        run(bad, tmp_path / "b", "nvfp4-ue4m3")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("moved", [False, True])
def test_global_scales_that_have_no_reciprocal_are_counted(tmp_path, moved):
    """compressed-tensors stores ``1 / g``: where no float32 has g as its reciprocal, one unit in
    the last place is lost, and "lossless" is not said."""
    source, _ = write_fp4(tmp_path / "a", "modelopt")
    if moved:
        tensors = load_file(source / "model.safetensors")
        name = "model.layers.0.mlp.experts.2.up_proj.weight_scale_2"
        tensors[name] = torch.tensor(_without_reciprocal())
        save_file(tensors, source / "model.safetensors")
    outcome = run(source, tmp_path / "b", "nvfp4-ue4m3", names="compressed-tensors")
    assert outcome.tally.moved == int(moved)
    said = " ".join(outcome.tally.lines())
    assert ("lossless" in said) != moved
    assert ("1 global scales have no float32 reciprocal" in said) == moved


def _without_reciprocal() -> float:
    """A float32 near 0.0145 that is the rounded reciprocal of no float32."""
    values = np.linspace(0.0144, 0.0146, 64, dtype=np.float32)
    for value in values:
        near = np.float32(1 / np.float64(value))
        beside = [np.nextafter(near, np.float32(d)) for d in (0, np.inf)]
        if all(np.float32(1 / np.float64(t)) != value for t in (near, *beside)):
            return float(value)
    raise AssertionError("none among them")
