"""The shipped model: its files are the ones the card names, made by the scripts, and they load."""

import hashlib
import importlib.util
import json
import lzma
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rubin_moe.formats import spec
from rubin_moe.loader.load import ModelCheckpoint, load_experts
from tests.oracles import quant

ROOT = Path(__file__).resolve().parents[2]
KJV = ROOT / "models" / "kjv"
FORMS = {"nvfp4-ue4m3": spec.NVFP4_UE4M3, "nvfp4-ue5m3": spec.NVFP4_UE5M3, "mxfp4": spec.MXFP4}
SCHEMES = {"nvfp4-ue4m3": "w4a4", "nvfp4-ue5m3": "w4a4-dynamic", "mxfp4": "w4a16"}
# Relative L2 error on normal data: by the formats' plain rules 0.095, 0.100 and 0.116, with scales
# of least squared error 0.081, 0.081 and 0.112, which the experts must show, with a little spread.
WEIGHT_ERROR = {"nvfp4-ue4m3": 0.085, "nvfp4-ue5m3": 0.085, "mxfp4": 0.116}


def script(name: str):
    """A file of ``scripts`` as a module."""
    found = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def master() -> dict[str, torch.Tensor]:
    return load_file(KJV / "bf16" / "model.safetensors")


def test_the_card_names_these_very_files():
    card = (KJV / "MODEL_CARD.md").read_text()
    named = re.findall(r"^\| `(\S+)` \|.*\| (\d+) \| `([0-9a-f]{64})` \|$", card, re.MULTILINE)
    assert [form for form, *_ in named] == ["bf16", *FORMS]
    for form, size, digest in named:
        data = (KJV / form / "model.safetensors").read_bytes()
        assert len(data) == int(size), form
        assert hashlib.sha256(data).hexdigest() == digest, form


def test_everything_together_is_small():
    size = sum(f.stat().st_size for f in (ROOT / "models").rglob("*") if f.is_file())
    assert size < 40 << 20


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_expert_is_the_masters(form, master):
    tensors = load_file(KJV / form / "model.safetensors")
    kept = {name for name in master if ".experts." not in name}
    assert {name for name in tensors if ".experts." not in name} == kept
    for name in kept:
        assert torch.equal(tensors[name], master[name]), name
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (KJV / form / name).read_bytes() == (KJV / "bf16" / name).read_bytes()


@pytest.mark.parametrize("form", FORMS)
def test_config_says_what_is_on_disk(form):
    checkpoint = ModelCheckpoint(str(KJV / form))
    for layer in range(checkpoint.sizes.num_layers):
        found = checkpoint.spec(layer)
        assert (found.fmt, found.scheme, found.notes) == (FORMS[form], SCHEMES[form], ())
    config = json.loads((KJV / form / "config.json").read_text())
    config.pop("quantization_config")
    assert config == json.loads((KJV / "bf16" / "config.json").read_text())


@pytest.mark.parametrize("form", FORMS)
def test_experts_are_the_masters_within_the_format(form, master):
    weights = load_experts(ModelCheckpoint(str(KJV / form)), 3)
    for projection, names in ((weights.w13, ("gate", "up")), (weights.w2, ("down",))):
        for expert in range(weights.num_experts):
            decoded = quant.dequantize(
                projection.qdata[expert].numpy(), projection.sf[expert].numpy(), form
            )
            rows = [
                master[f"model.layers.3.mlp.experts.{expert}.{n}_proj.weight"].double().numpy()
                for n in names
            ]
            halves = decoded.reshape(len(names), -1, decoded.shape[1])
            for half, row, dec in zip(halves, rows, projection.dec[expert], strict=True):
                error = np.linalg.norm(half * float(dec) - row) / np.linalg.norm(row)
                assert 0.07 < error < WEIGHT_ERROR[form], (expert, error)


def test_every_input_scale_was_calibrated():
    checkpoint = ModelCheckpoint(str(KJV / "nvfp4-ue4m3"))
    for layer in range(checkpoint.sizes.num_layers):
        weights = load_experts(checkpoint, layer)
        for projection in (weights.w13, weights.w2):
            largest = projection.input_dec * 6 * 448  # amax seen in calibration
            assert bool(((largest > 0.1) & (largest < 500)).all()), largest


@pytest.mark.parametrize("form", FORMS)
def test_the_script_makes_these_weights(form, master):
    """Equal but for blocks where two scales are equally good; input scales need the calibration."""
    module = script("quantize_demo_model")
    prefix = "model.layers.2.mlp.experts.5"
    expert = {p: master[f"{prefix}.{p}_proj.weight"].float() for p in ("gate", "up", "down")}
    made = module.PACKERS[form](expert, dict.fromkeys(expert, torch.tensor(1.0)))
    shipped = load_file(KJV / form / "model.safetensors")
    stored = {leaf: shipped[f"{prefix}.{leaf}"] for leaf in made}
    for leaf, tensor in made.items():
        assert (stored[leaf].dtype, stored[leaf].shape) == (tensor.dtype, tensor.shape), leaf
    for projection, weight in expert.items():
        old, new = (_codes(tensors, projection) for tensors in (stored, made))
        assert old[2] == new[2]
        same = (old[1] == new[1]).float().mean()
        assert same > 0.99
        torch.testing.assert_close(
            _block_errors(old, form, weight), _block_errors(new, form, weight), rtol=1e-5, atol=0
        )


def _codes(tensors: dict[str, torch.Tensor], projection: str):
    """Element codes, scale codes, global scale."""
    leaf = f"{projection}_proj.weight"
    qdata = tensors.get(f"{leaf}_packed", tensors.get(leaf))
    return qdata, tensors[f"{leaf}_scale"].view(torch.uint8), tensors.get(f"{leaf}_scale_2", 1.0)


def _block_errors(codes, form: str, weight: torch.Tensor) -> torch.Tensor:
    """float64 ``[blocks]``: squared error to the master."""
    qdata, sf, dec = codes
    decoded = torch.from_numpy(quant.dequantize(qdata.numpy(), sf.numpy(), form)) * float(dec)
    return (decoded - weight.double()).square().reshape(-1, FORMS[form].sf_vec_size).sum(-1)


def test_held_out_chapters_are_in_no_training_text():
    train = lzma.decompress((KJV / "corpus" / "train.txt.xz").read_bytes()).decode()
    verses = set(train.splitlines())
    heldout = (KJV / "corpus" / "heldout.txt").read_text().split("\n\n")
    assert len(heldout) == 35
    for chapter in heldout:
        heading, *lines = chapter.strip().splitlines()
        assert heading not in verses
        assert sum(line in verses for line in lines) <= 1, heading  # short verses do repeat


def test_tokenizer_gives_any_text_back():
    tokenizer = AutoTokenizer.from_pretrained(KJV / "nvfp4-ue4m3")
    for text in ("And it came to pass,\n", "Καὶ λόγος — 神 🌳", " \t\n\n x", "<|endoftext|>a"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 2048
    assert len(tokenizer.encode("In the beginning God created the heaven and the earth.")) < 20


def test_training_computes_the_model_that_transformers_does():
    module = script("train_demo_model")
    recipe = module.TINY
    torch.manual_seed(0)
    model = module.build_model(recipe, eos_token_id=0)
    ids = torch.randint(recipe.vocab_size, (2, 16))
    dense = model(input_ids=ids, labels=ids, output_router_logits=True)
    model.set_experts_implementation("eager")
    eager = model(input_ids=ids, labels=ids, output_router_logits=True)
    torch.testing.assert_close(dense.logits, eager.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dense.loss, eager.loss)
    assert dense.aux_loss > 0


def test_a_saved_model_has_the_names_of_published_ones(tmp_path):
    module = script("train_demo_model")
    tokenizer = AutoTokenizer.from_pretrained(KJV / "bf16")
    model = module.build_model(module.TINY, tokenizer.eos_token_id)
    module.save(model, tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_experts"] == module.TINY.experts
    assert "num_local_experts" not in config
    names = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in names
    again = Qwen3MoeForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again.config, Qwen3MoeConfig)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
