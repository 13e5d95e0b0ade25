"""Input scales measured on a text: what transformers feeds the experts, and who saw nothing."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rubin_moe.convert import calibrate as calibration
from rubin_moe.convert.calibrate import LayerInputs, calibrate
from rubin_moe.convert.options import Options
from rubin_moe.convert.planner import make_plan
from rubin_moe.convert.run import convert
from rubin_moe.errors import ConvertError
from rubin_moe.loader.load import ModelCheckpoint, load_experts

from .sources import write_dense, write_fp4

KJV = Path(__file__).parents[2] / "models" / "kjv"
EXPERTS, LAYERS = 8, 6
LARGEST = 6 * 448  # of E2M1 times UE4M3


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Two windows of the held-out text, the second one short."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((KJV / "corpus" / "heldout.txt").read_text()[:1800])
    return path


def expected(text: Path) -> dict[tuple[int, int], tuple[float, float, int]]:
    """(layer, expert) -> amax of FC1's and FC2's input and tokens, by hooks of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(KJV / "bf16", dtype=torch.bfloat16).eval()
    ids = torch.tensor(AutoTokenizer.from_pretrained(KJV / "bf16").encode(text.read_text()))
    found: dict[tuple[int, int], tuple[float, float, int]] = {}

    def see(layer):
        def hook(module, args):
            x, chosen, _ = args
            for e in range(EXPERTS):
                rows = x[(chosen == e).any(-1)]
                if not len(rows):
                    continue
                gate, up = (rows @ module.gate_up_proj[e].T).chunk(2, -1)
                h = module.act_fn(gate) * up
                old = found.get((layer, e), (0.0, 0.0, 0))
                now = float(rows.abs().max()), float(h.abs().max()), len(rows)
                found[layer, e] = max(old[0], now[0]), max(old[1], now[1]), old[2] + now[2]

        return hook

    for index, block in enumerate(model.model.layers):
        block.mlp.experts.register_forward_pre_hook(see(index))
    with torch.inference_mode():
        for start in range(0, len(ids), calibration.WINDOW):
            model(input_ids=ids[None, start : start + calibration.WINDOW])
    return found


def test_scales_are_those_of_the_largest_inputs(text, tmp_path):
    seen = calibrate(KJV / "bf16", text)
    wanted = expected(text)
    assert seen.layers.keys() == {f"layers.{i}" for i in range(LAYERS)}
    for (index, e), (fc1, fc2, tokens) in wanted.items():
        layer = seen.layers[f"layers.{index}"]
        assert int(layer.tokens[e]) == tokens
        assert float(layer.fc1[e]) == fc1
        assert float(layer.fc2[e]) == pytest.approx(fc2, rel=2**-7)  # bfloat16, other shapes
    options = Options("nvfp4-ue4m3", calibrate=str(text))
    path = convert(KJV / "bf16", tmp_path / "b", options, jobs=1).folder
    with ModelCheckpoint(path) as checkpoint:
        assert checkpoint.spec(0).scheme == "w4a4"
        for index in range(LAYERS):
            weights, layer = load_experts(checkpoint, index), seen.layers[f"layers.{index}"]
            assert weights.w13.input_dec is not None
            for e in range(EXPERTS):
                if int(layer.tokens[e]):
                    stored = load_file(path / "model.safetensors")[
                        f"model.layers.{index}.mlp.experts.{e}.up_proj.input_scale"
                    ]
                    assert float(stored) == pytest.approx(float(layer.fc1[e]) / LARGEST, rel=1e-6)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "NVFP4"
    record = json.loads((path / "conversion.json").read_text())
    assert record["options"]["calibrate"] == "text.txt"


def test_an_expert_without_a_token_takes_the_layers_largest_and_is_listed(tmp_path, monkeypatch):
    source = write_dense(tmp_path / "a", "bf16")
    tokens = torch.tensor([3, 0, 5, 1])
    layer = LayerInputs(torch.tensor([1.0, 0, 7, 2]), torch.tensor([8.0, 0, 4, 2]), tokens)
    made = calibration.Calibration({"layers.0": layer}, 9)
    monkeypatch.setattr(calibration, "calibrate", lambda *_: made)
    options = Options("nvfp4-ue4m3", names="compressed-tensors", calibrate="text")
    outcome = convert(source, tmp_path / "b", options, jobs=1)
    assert outcome.plan.uncalibrated == {"model.layers.0.mlp.experts": (1,)}
    record = json.loads((tmp_path / "b" / "conversion.json").read_text())
    assert record["uncalibrated"] == {"model.layers.0.mlp.experts": [1]}
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    for expert, (fc1, fc2) in enumerate([(1, 8), (7, 8), (7, 4), (2, 2)]):
        path = f"model.layers.0.mlp.experts.{expert}"
        for projection, amax in (("gate", fc1), ("up", fc1), ("down", fc2)):
            divisor = float(tensors[f"{path}.{projection}_proj.input_global_scale"])
            assert divisor == pytest.approx(LARGEST / amax, rel=1e-6)


def test_a_plan_needs_no_text(tmp_path):
    source = write_dense(tmp_path / "a", "bf16")
    options = Options("nvfp4-ue4m3", calibrate="no such file")
    plan = make_plan(ModelCheckpoint(source), options)
    assert sum(n.endswith("input_scale") for n in plan.tensors) == 12
    with pytest.raises(ConvertError, match="calibration text no such file"):
        convert(source, tmp_path / "b", options, jobs=1)


def test_what_cannot_be_calibrated_is_refused(tmp_path):
    source, _ = write_fp4(tmp_path / "a", "modelopt")
    options = Options("nvfp4-ue4m3", fold="exact", calibrate="text")
    with pytest.raises(ConvertError, match="only 16-bit experts are calibrated"):
        convert(source, tmp_path / "b", options, jobs=1)
    with pytest.raises(ConvertError, match="belong to nvfp4-ue4m3"):
        Options("nvfp4-ue5m3", calibrate="text")
    plain = write_dense(tmp_path / "c", "bf16")
    (tmp_path / "text").write_text("In the beginning")
    options = Options("nvfp4-ue4m3", calibrate=str(tmp_path / "text"))
    with pytest.raises(ConvertError, match="transformers cannot load it"):
        convert(plain, tmp_path / "b", options, jobs=1)
