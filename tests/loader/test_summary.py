"""What headers alone tell is what loading finds."""

import subprocess
import sys

import pytest
import torch

from rubin_moe.loader.load import ModelCheckpoint, load_experts
from rubin_moe.loader.sharding import Shard
from rubin_moe.loader.summary import summarize

from .checkpoints import Style, expert_tensors, folder, layer
from .families import RELEASES
from .test_families import build

NAME = "model.layers.0.mlp.experts"


def summary(path, made):
    with ModelCheckpoint(made.write(path)) as checkpoint:
        return summarize(checkpoint)


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_loads_exactly_if_its_headers_say_so(tmp_path, name):
    release = RELEASES[name]
    _, made = build(release)
    found = summary(tmp_path, made)
    module = release.style.module.format(L=release.layer)
    ours = next(x for x in found.layers if x.module == module)
    assert ours.faults == ()
    assert ours.spec.scheme == release.scheme
    for where, reason in release.refused.items():
        key = f"layers.{where}" if isinstance(where, int) else where
        for other in (x for x in found.layers if x.layer == key):
            assert other.spec is None
            assert other.unquantized is ("not quantized" in reason)
            if not other.unquantized:
                assert reason in other.faults[0]
    assert found.nbytes == sum(t.nbytes for t in made.tensors.values())


def test_coverage_and_uncalibrated_experts(tmp_path):
    _, made = build(RELEASES["MiniMax-M2.7"])
    found = summary(tmp_path, made)
    assert found.loads
    assert found.layers[0].uncalibrated == {"gate": (2,), "up": (2,), "down": (2,)}
    del made.tensors["model.layers.61.block_sparse_moe.experts.3.w3.weight"]
    made.tensors["model.layers.61.block_sparse_moe.experts.0.w3.extra"] = torch.zeros(1)
    found = summary(tmp_path, made)
    assert not found.loads
    assert "missing: up.weight of 1 experts (3)" in found.layers[0].faults[0]
    assert "left over (1)" in found.layers[0].faults[0]


@pytest.mark.parametrize(
    ("leaf", "change"),
    [
        ("1.up_proj.weight", lambda t: t[:8]),
        ("1.up_proj.weight_scale", lambda t: t.float()),
        ("1.up_proj.weight_scale_2", lambda t: t.expand(3).clone()),
    ],
)
def test_shapes_and_dtypes_are_checked_without_reading(tmp_path, leaf, change):
    made = folder(layer("nvfp4-ue4m3"), Style())
    made.tensors[f"{NAME}.{leaf}"] = change(made.tensors[f"{NAME}.{leaf}"])
    found = summary(tmp_path, made)
    assert len(found.layers[0].faults) == 1
    with pytest.raises(ValueError, match=leaf) as caught:
        load_experts(ModelCheckpoint(tmp_path), 0)
    assert found.layers[0].faults[0] == str(caught.value)


def test_sizes_of_ranks_are_those_of_the_loaded_tensors(tmp_path):
    made = folder(layer("nvfp4-ue4m3", intermediate=80, num_experts=6), Style())
    found = summary(tmp_path, made)
    assert found.tp_sizes() == (1, 2, 3, 4, 5)
    assert found.tp_sizes(pad=False) == (1, 5)
    assert found.ep_sizes() == (1, 2, 3, 6)
    for shard in (Shard(), Shard(tp_rank=1, tp_size=2), Shard(ep_rank=3, ep_size=4)):
        weights = load_experts(ModelCheckpoint(tmp_path), 0, shard)
        held = (weights.w13.qdata, weights.w13.sf, weights.w2.qdata, weights.w2.sf)
        assert found.rank_bytes(shard) == sum(t.nbytes for t in held)


def test_exclusions_and_what_they_match(tmp_path):
    made = folder(layer("nvfp4-ue4m3"), Style())
    made.tensors |= {"lm_head.weight": torch.zeros(2), "model.layers.0.mlp.gate.weight":
                     torch.zeros(2, dtype=torch.bfloat16)}  # fmt: skip
    made.config["quantization_config"]["ignore"] = ["lm_head", "*.mlp.gate", "vision*"]
    found = summary(tmp_path, made)
    assert found.exclusions == {"lm_head": 1, "*.mlp.gate": 1, "vision*": 0}
    assert found.other_bytes == {"F32": 8, "BF16": 4}
    assert found.formats == {"modelopt nvfp4-ue4m3 w4a4": ["layers.0"]}


def test_layers_come_in_order_of_their_numbers(tmp_path):
    source = layer("nvfp4-ue4m3")
    made = folder(source, Style())
    for index in (10, 2):
        made.tensors |= expert_tensors(source, Style(), index)
    assert [x.layer for x in summary(tmp_path, made).layers] == [
        "layers.0",
        "layers.2",
        "layers.10",
    ]


def test_torch_is_not_imported(tmp_path):
    folder(layer("nvfp4-ue4m3"), Style()).write(tmp_path)
    code = (
        "import sys; from rubin_moe.loader.load import ModelCheckpoint;"
        "from rubin_moe.loader.summary import summarize;"
        f"assert summarize(ModelCheckpoint({str(tmp_path)!r})).loads;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
