"""Placing and accounting: any order, every tensor once, nothing left over, any rank."""

import numpy as np
import pytest
import torch

from rubin_moe.errors import CheckpointError, ConfigError
from rubin_moe.loader.assemble import ExpertAssembler
from rubin_moe.loader.dialect import Stacking
from rubin_moe.loader.gpt_oss import GPT_OSS
from rubin_moe.loader.load import ModelCheckpoint, load_experts
from rubin_moe.loader.modelopt import MODELOPT
from rubin_moe.loader.names import ExpertSlot
from rubin_moe.loader.sharding import Shard, legal_tp_sizes
from rubin_moe.loader.spec import ExpertsSpec
from rubin_moe.loader.validate import ScaleChecks
from tests.oracles import moe

from .checkpoints import Style, assert_same, expert_tensors, folder, layer

NAME = "model.layers.0.mlp.experts"
SPEC = ExpertsSpec(MODELOPT, 64, 32, 4, scheme="w4a4")


def tensors(source=None, style=None):
    return expert_tensors(source or layer("nvfp4-ue4m3"), style or Style())


def assemble(found, spec=SPEC, shard=None, **options):
    assembler = ExpertAssembler(spec, shard, NAME, **options)
    for name, tensor in found.items():
        assembler.add(name, tensor)
    return assembler.finish()


def test_order_does_not_matter_and_twice_gives_the_same_bytes():
    found = tensors()
    names = list(found)
    np.random.default_rng(0).shuffle(names)
    first, second = assemble(found), assemble({n: found[n] for n in names})
    assert_same(first, layer("nvfp4-ue4m3"))
    for a, b in ((first.w13, second.w13), (first.w2, second.w2)):
        assert all(torch.equal(t, b.tensors()[n]) for n, t in a.tensors().items())


def test_a_servers_default_device_and_dtype_are_not_for_weights():
    found = tensors()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            weights = assemble(found)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(weights, layer("nvfp4-ue4m3"))


def test_the_checkpoints_tensors_are_not_written_to():
    found = tensors()
    before = {n: t.clone() for n, t in found.items()}
    assemble(found).w13.qdata.zero_()
    assert all(torch.equal(before[n].float(), t.float()) for n, t in found.items())


def test_a_missing_tensor_is_named_with_its_experts():
    found = tensors()
    del found[f"{NAME}.3.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"missing: up.weight of 1 experts \(3\)") as caught:
        assemble(found)
    assert NAME in str(caught.value)


def test_an_unknown_tensor_is_named_with_its_nearest():
    found = tensors()
    found[f"{NAME}.0.up_proj.weight_scael"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"left over \(1\): .*0.up_proj.weight_scael") as e:
        assemble(found)
    assert f"{NAME}.0.up.weight_scale" in str(e.value).split("nearest to")[1]


@pytest.mark.parametrize(
    "extra", ["4.up_proj.weight", "0.gate_proj.bias", "0.up_proj.pre_quant_scale", "0.foo.weight"]
)
def test_what_no_slot_takes_is_left_over(extra):
    with pytest.raises(CheckpointError, match="left over"):
        assemble({**tensors(), f"{NAME}.{extra}": torch.zeros(1)})


def test_a_tensor_that_comes_twice_is_an_error():
    found = tensors()
    twice = {**found, "layers.0.experts.2.down.weight": found[f"{NAME}.2.down_proj.weight"]}
    with pytest.raises(CheckpointError, match="down qdata of expert 2 came twice"):
        assemble(twice)


@pytest.mark.parametrize(
    ("leaf", "change", "message"),
    [
        ("0.gate_proj.weight", lambda t: t[:16], r"shape \[16, 32\], expected \[32, 32\]"),
        ("0.gate_proj.weight", lambda t: t.view(torch.int8), "stored as I8, expected U8"),
        ("0.gate_proj.weight", lambda t: t.float(), "stored as F32, expected U8"),
        ("1.down_proj.weight_scale", lambda t: t.view(torch.uint8), "stored as U8"),
        # 64 inputs need 4 scales of 16; 8 columns are padding, not a group size of 8
        ("1.gate_proj.weight_scale", lambda t: torch.cat([t.view(torch.uint8)] * 2, 1).view(
            torch.float8_e4m3fn), r"\[32, 8\], expected \[32, 4\] .*one block scale for 16"),
        ("0.up_proj.weight_scale_2", lambda t: torch.ones(2) * t, r"shape \[2\], expected one of"),
    ],
)  # fmt: skip
def test_wrong_dtypes_and_shapes_say_what_was_expected(leaf, change, message):
    found = tensors()
    found[f"{NAME}.{leaf}"] = change(found[f"{NAME}.{leaf}"])
    with pytest.raises(CheckpointError, match=message) as caught:
        assemble(found)
    assert leaf in str(caught.value)


def test_widths_that_no_block_divides_are_refused_before_allocation():
    with pytest.raises(ConfigError, match="no multiple of the scale block 32"):
        ExpertsSpec(GPT_OSS, 64, 48, 4)
    with pytest.raises(ConfigError, match="num_experts = 1000000000"):
        ExpertsSpec(MODELOPT, 64, 32, 10**9)


def test_non_gated_experts_have_one_half():
    source = layer("nvfp4-ue4m3", kind="relu2", intermediate=48)
    spec = ExpertsSpec(MODELOPT, 64, 48, 4, gated=False)
    weights = assemble(tensors(source), spec)
    assert weights.w13.qdata.shape == (4, 48, 32)
    assert weights.w13.dec.shape == (4, 1)
    assert_same(weights, source)
    with pytest.raises(CheckpointError, match="left over"):
        assemble({**tensors(source), f"{NAME}.0.gate_proj.weight": torch.zeros(1)}, spec)


# -- ranks ---------------------------------------------------------------------------------------


def dense(weights, half=None):
    part = weights.w13 if half is not None else weights.w2
    d = moe.Projection(part.qdata.numpy(), part.sf.numpy(), part.dec.numpy()).dense(
        weights.fmt.name
    )
    return d if half is None else np.split(d, weights.halves, axis=1)[half]


@pytest.mark.parametrize(
    "widths", [[32, 32], [48, 32], [32, 32, 16], [32, 16, 16, 16], [96, 96, 80, 80], [16, 16]]
)
@pytest.mark.parametrize("dialect", ["modelopt", "modelopt_stacked"])
def test_tp_cuts_each_half_and_pads_each_half(dialect, widths):
    width, tp = sum(widths), len(widths)
    source = layer("nvfp4-ue4m3", intermediate=width)
    style = Style(dialect)
    spec = ExpertsSpec(MODELOPT, 64, width, 4, stacking=Stacking(True, True))
    ranks = [
        assemble(tensors(source, style), spec, Shard(tp_rank=r, tp_size=tp)) for r in range(tp)
    ]
    assert {r.intermediate for r in ranks} == {widths[0]}
    gate, up = np.split(source.w13.dense(source.fmt), 2, axis=1)
    down = source.w2.dense(source.fmt)
    start = 0
    for rank, kept in zip(ranks, widths, strict=True):
        stop = start + kept
        for half, whole in ((0, gate), (1, up)):
            got = dense(rank, half)
            np.testing.assert_array_equal(got[:, : stop - start], whole[:, start:stop])
            assert not got[:, stop - start :].any()
        np.testing.assert_array_equal(dense(rank)[..., : stop - start], down[..., start:stop])
        assert not dense(rank)[..., stop - start :].any()
        start = stop


def test_only_one_tp_rank_adds_the_bias():
    source = layer("mxfp4", bias=True, intermediate=64)
    spec = ExpertsSpec(GPT_OSS, 64, 64, 4, has_bias=True)
    found = expert_tensors(source, Style("gpt_oss"))
    ranks = [assemble(found, spec, Shard(tp_rank=r, tp_size=2)) for r in range(2)]
    bias = torch.from_numpy(source.w2.bias).bfloat16().float()
    assert torch.equal(ranks[0].w2.bias, bias)
    assert not ranks[1].w2.bias.any()
    gate = torch.from_numpy(source.w13.bias).bfloat16().float()
    assert torch.equal(ranks[1].w13.bias[:, :32], gate[:, 32:64])


@pytest.mark.parametrize("dialect", ["modelopt", "compressed_nvfp4", "modelopt_stacked"])
def test_ep_gives_whole_experts_unevenly(tmp_path, dialect):
    source = layer("nvfp4-ue4m3", num_experts=10)
    made = folder(source, Style(dialect), model_type="gpt_oss").write(tmp_path)
    counts, seen = [], []
    for rank in range(4):
        with ModelCheckpoint(made) as checkpoint:
            weights = load_experts(checkpoint, 0, Shard(ep_rank=rank, ep_size=4))
        ids = list(weights.expert_ids)
        counts.append(len(ids))
        seen += ids
        assert weights.intermediate == 32
        np.testing.assert_array_equal(weights.w13.qdata.numpy(), source.w13.qdata[ids])
        np.testing.assert_array_equal(weights.w13.dec.numpy(), source.w13.dec[ids])
        np.testing.assert_array_equal(weights.w2.sf.numpy(), source.w2.sf[ids])
    assert counts == [3, 3, 2, 2]
    assert seen == list(range(10))


def test_a_server_may_place_experts_itself_with_copies():
    source = layer("nvfp4-ue4m3")
    weights = assemble(tensors(source), shard=Shard(expert_ids=(3, 1, 3)))
    np.testing.assert_array_equal(weights.w2.qdata.numpy(), source.w2.qdata[[3, 1, 3]])
    assert weights.expert_ids == (3, 1, 3)


@pytest.mark.parametrize(
    ("width", "block", "pad", "sizes"),
    [
        (2880, 16, False, (1, 2, 3, 4, 5, 6, 9, 10, 12, 15, 18, 20, 30, 36, 45, 60)),
        (2880, 32, False, (1, 2, 3, 5, 6, 9, 10, 15, 18, 30, 45)),
        (80, 16, True, (1, 2, 3, 4, 5)),
    ],
)
def test_tp_sizes_that_work_are_listed(width, block, pad, sizes):
    assert legal_tp_sizes(width, block, pad=pad) == sizes
    listed = ", ".join(map(str, sizes))
    with pytest.raises(CheckpointError, match=f"TP sizes that work: {listed}"):
        Shard(tp_size=64, pad=pad).columns(width, block)


def test_gpt_oss_on_eight_ranks():
    """360 columns are no whole blocks: ranks take whole ones and half of them are padded."""
    columns = [Shard(tp_rank=r, tp_size=8).columns(2880, 16) for r in range(8)]
    assert [c.width for c in columns] == [368] * 4 + [352] * 4
    assert {c.padded for c in columns} == {368}


def test_slots_may_be_given_instead_of_names_and_only_what_is_needed_is_read():
    found = tensors()
    assembler = ExpertAssembler(SPEC, Shard(ep_rank=1, ep_size=2), NAME)
    calls = []

    def lazily(name):
        calls.append(name)
        return found[name]

    for e in range(4):
        for projection in ("gate", "up", "down"):
            for leaf in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
                name = f"{NAME}.{e}.{projection}_proj.{leaf}"
                taken = assembler.add(ExpertSlot(projection, leaf, e), lambda n=name: lazily(n))
                assert taken is (e >= 2 or leaf == "input_scale")
    assembler.finish()
    assert len(calls) == 2 * 12 + 2 * 3


@pytest.mark.parametrize(
    "shard", [Shard(), Shard(ep_rank=1, ep_size=2), Shard(expert_ids=(3, 0)), Shard(0, 2)], ids=str
)
def test_every_rank_knows_the_largest_input_scale_of_the_layer(shard):
    """Of FC1, where a token is quantized once; its own experts' come with the weights."""
    found = tensors()
    for number, (e, projection) in enumerate(((2, "up"), (0, "gate"), (1, "down"))):
        found[f"{NAME}.{e}.{projection}_proj.input_scale"] = torch.tensor(0.5 + number)
    weights = assemble(found, shard=shard)
    assert weights.layer_input_dec == 1.5
    for local, e in enumerate(weights.expert_ids):
        gate, up, down = (
            float(found[f"{NAME}.{e}.{p}_proj.input_scale"]) for p in ("gate", "up", "down")
        )
        assert weights.w13.input_dec[local].tolist() == [gate, up]
        assert weights.w2.input_dec[local].tolist() == [down]


def test_input_scales_of_other_ranks_are_checked_and_mended_alike():
    found = tensors()
    del found[f"{NAME}.3.up_proj.input_scale"]
    found[f"{NAME}.0.down_proj.input_scale"] = torch.tensor(9.0)
    found[f"{NAME}.3.down_proj.input_scale"] = torch.tensor(0.0)
    for rank in range(2):
        shard = Shard(ep_rank=rank, ep_size=2)
        with pytest.raises(CheckpointError, match=r"up of experts \[3\]"):
            assemble(found, shard=shard)
        kept = assemble(found, shard=shard, input_scales="keep")
        assert np.isnan(kept.layer_input_dec)
        ignored = assemble(found, shard=shard, input_scales="ignore")
        assert ignored.layer_input_dec is None
        mended = assemble(found, shard=shard, checks=ScaleChecks(repair={"input_scales"}))
        assert mended.layer_input_dec < 1
    assert mended.w2.input_dec[1] == 9.0  # the largest of the layer, which is another rank's


def test_an_input_scale_of_another_rank_that_comes_twice():
    found = tensors()
    assembler = ExpertAssembler(SPEC, Shard(ep_rank=1, ep_size=2), NAME)
    name = f"{NAME}.0.gate_proj.input_scale"
    assembler.add(name, found[name])
    with pytest.raises(CheckpointError, match="input_dec of expert 0 came twice"):
        assembler.add(name, found[name])
