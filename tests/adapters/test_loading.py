"""One layer's loading as vLLM drives it, without vLLM."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rubin_moe.adapters.vllm.loading import LayerLoading
from rubin_moe.errors import CheckpointError
from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.loader.gpt_oss import GPT_OSS
from rubin_moe.loader.modelopt import MODELOPT
from rubin_moe.loader.sharding import Shard
from rubin_moe.loader.spec import ExpertsSpec

from . import stored, tiny_models

EXPERTS, HIDDEN, WIDTH = 4, 64, 32
NAME = "model.layers.0.mlp.experts"
SHARDS = {"gate_proj": ("w1", "w13"), "up_proj": ("w3", "w13"), "down_proj": ("w2", "w2")}


def _spec(dialect: Any = MODELOPT, **fields: Any) -> ExpertsSpec:
    return ExpertsSpec(dialect, HIDDEN, WIDTH, EXPERTS, **fields)


def _tensors(seed: int = 0, gpt_oss: bool = False) -> dict[str, Tensor]:
    """Names below the module, as on disk."""
    rng = np.random.default_rng(seed)
    fmt = "mxfp4" if gpt_oss else "nvfp4-ue4m3"
    w13 = tiny_models.projection(rng, fmt, (EXPERTS, 2 * WIDTH, HIDDEN), 2, gpt_oss)
    w2 = tiny_models.projection(rng, fmt, (EXPERTS, HIDDEN, WIDTH), 1, gpt_oss)
    write = stored.gpt_oss_mxfp4 if gpt_oss else stored.modelopt
    return {n.removeprefix(f"{NAME}."): t for n, t in write(NAME, (w13, w2)).items()}


class Layer(torch.nn.Module):
    """Stands in for vLLM's module: parameters by vLLM's names."""

    def __init__(self, spec: ExpertsSpec, shard: Shard | None = None, **options: Any) -> None:
        super().__init__()
        self.reloaded: list[ExpertWeights] = []
        scales = options.get("input_scales", "ignore")
        self.loading = LayerLoading(spec, NAME, shard or Shard(), scales, self.reloaded.append)
        self.loading.register(self)

    def by_parameter(self, tensors: dict[str, Tensor]) -> dict[str, bool | None]:
        """As models do that look up ``w13_weight_scale`` themselves."""
        taken = {}
        for name, tensor in tensors.items():
            expert, proj, leaf = name.split(".")
            shard, prefix = SHARDS[proj]
            param = getattr(self, f"{prefix}_{leaf}")
            taken[name] = param.weight_loader(
                param, tensor, f"{prefix}_{leaf}", shard, int(expert), return_success=True
            )
        return taken

    def by_module(self, tensors: dict[str, Tensor]) -> list[str]:
        """As models do that pass what is below ``experts.`` to the module."""
        return list(self.load_weights(iter(tensors.items())))


def _all(weights: ExpertWeights) -> Iterator[tuple[str, Tensor]]:
    for projection in ("w13", "w2"):
        for name, tensor in getattr(weights, projection).tensors().items():
            yield f"{projection}.{name}", tensor


def _assert_equal(a: ExpertWeights | None, b: ExpertWeights | None) -> None:
    assert a is not None
    assert b is not None
    left, right = dict(_all(a)), dict(_all(b))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


def test_both_ways_give_the_same_bytes() -> None:
    one, other = Layer(_spec()), Layer(_spec())
    tensors = _tensors()
    one.by_parameter(tensors)
    names = other.by_module(dict(reversed(tensors.items())))
    assert set(names) >= {"w13_weight", "w2_weight_scale_2"}
    _assert_equal(one.loading.finish(), other.loading.finish())


def test_gate_and_up_keep_scales_of_their_own() -> None:
    layer, tensors = Layer(_spec()), _tensors()
    layer.by_parameter(tensors)
    weights = layer.loading.finish()
    assert weights is not None
    for e in range(EXPERTS):
        for half, proj in enumerate(("gate_proj", "up_proj")):
            assert weights.w13.dec[e, half] == tensors[f"{e}.{proj}.weight_scale_2"]


def test_a_servers_default_dtype_changes_nothing() -> None:
    plain, tensors = Layer(_spec()), _tensors()
    plain.by_parameter(tensors)
    torch.set_default_dtype(torch.bfloat16)
    try:
        served = Layer(_spec())
        served.by_parameter(tensors)
        weights = served.loading.finish()
    finally:
        torch.set_default_dtype(torch.float32)
    _assert_equal(plain.loading.finish(), weights)


def test_a_second_load_gives_the_bytes_of_a_fresh_one() -> None:
    layer, fresh = Layer(_spec()), Layer(_spec())
    layer.by_parameter(_tensors(0))
    layer.loading.finish()
    second = list(_tensors(1).items())
    layer.by_parameter(dict(second[:-1]))
    assert layer.reloaded == []  # not before the last tensor
    layer.by_parameter(dict(second[-1:]))
    fresh.by_parameter(_tensors(1))
    _assert_equal(layer.reloaded[0], fresh.loading.finish())
    assert len(layer.reloaded) == 1
    assert layer.loading.finish() is None  # nothing is pending


def test_a_pass_over_meta_tensors_places_nothing_and_counts_everything() -> None:
    layer, tensors = Layer(_spec()), _tensors()
    for name, param in list(layer.named_parameters()):
        meta = torch.nn.Parameter(param.data.to("meta"), requires_grad=False)
        meta.__dict__.update(param.__dict__)
        layer.register_parameter(name, meta)
    assert not any(layer.by_parameter(tensors).values())
    with pytest.raises(CheckpointError, match="no tensor"):
        layer.loading.finish()


def test_every_expected_tensor_ticks_one_element() -> None:
    layer, tensors = Layer(_spec()), _tensors()
    layer.by_parameter(tensors)
    ticked = sum(int(p.sum()) for p in layer.parameters())
    assert ticked == len(tensors)
    waited_for = sum(getattr(p, "weight_loader_numel", p.numel()) for p in layer.parameters())
    read = [n for n in tensors if not n.endswith("input_scale")]
    assert waited_for == len(read) + EXPERTS * 3  # and the biases that this model has not


def test_what_is_missing_and_what_is_unknown_are_named() -> None:
    layer, tensors = Layer(_spec()), _tensors()
    del tensors["2.up_proj.weight"]
    tensors["1.gate_proj.weight_scael"] = torch.zeros(1)
    layer.by_module(tensors)
    with pytest.raises(CheckpointError, match=r"up\.weight") as error:
        layer.loading.finish()
    assert "weight_scael" in str(error.value)
    assert "(2)" in str(error.value)


def test_input_scales_are_asked_for_only_where_they_are_read() -> None:
    tensors = _tensors()
    del tensors["3.down_proj.input_scale"]
    weight_only = Layer(_spec(scheme="w4a4"))
    weight_only.by_parameter(tensors)
    weights = weight_only.loading.finish()
    assert weights is not None
    assert weights.w2.input_dec is None
    quantized = Layer(_spec(scheme="w4a4"), input_scales="require")
    quantized.by_parameter(tensors)
    with pytest.raises(CheckpointError, match="3"):
        quantized.loading.finish()


def test_a_rank_takes_its_own_experts_and_says_so() -> None:
    layer, tensors = Layer(_spec(), Shard(expert_ids=(3, 1))), _tensors()
    taken = layer.by_parameter({n: t for n, t in tensors.items() if "input_scale" not in n})
    assert {n.split(".")[0] for n, ok in taken.items() if ok} == {"1", "3"}
    weights = layer.loading.finish()
    assert weights is not None
    assert weights.expert_ids == (3, 1)
    assert torch.equal(weights.w2.qdata[0], tensors["3.down_proj.weight"])


def test_a_rank_waits_for_the_input_scales_of_all_experts() -> None:
    """FC1's largest is another rank's: vLLM must not take the layer as loaded before it came."""
    layer = Layer(_spec(scheme="w4a4"), Shard(expert_ids=(3, 1)), input_scales="require")
    tensors = _tensors()
    tensors["0.up_proj.input_scale"] = torch.tensor(0.75)
    other = {n: t for n, t in tensors.items() if n[0] in "02" and "input_scale" in n}
    layer.by_parameter({n: t for n, t in tensors.items() if n not in other})
    assert layer.w13_weight.all()
    assert not layer.w13_input_scale.all()
    assert not layer.w2_input_scale.all()
    assert all(layer.by_parameter(other).values())
    assert layer.w13_input_scale.all()
    assert layer.w2_input_scale.all()
    weights = layer.loading.finish()
    assert weights is not None
    assert weights.layer_input_dec == 0.75
    assert weights.w13.input_dec is not None
    assert weights.w13.input_dec.max() < 0.75


def test_stacked_tensors_come_whole_and_are_cut_here() -> None:
    spec = _spec(GPT_OSS, has_bias=True, stacking=GPT_OSS.stacking)
    tensors = _tensors(gpt_oss=True)
    whole = Layer(spec)
    whole.by_module(tensors)
    weights = whole.loading.finish()
    assert weights is not None
    direct = Layer(spec)  # gpt_oss' own loop calls the parameter with two arguments
    for name, tensor in tensors.items():
        param = getattr(direct, f"stacked_{name}")
        param.weight_loader(param, tensor)
    _assert_equal(weights, direct.loading.finish())
    gate = tensors["gate_up_proj_blocks"][:, 0::2].flatten(-2)
    assert torch.equal(weights.w13.qdata[:, :WIDTH], gate)


def test_where_there_is_no_gate_w1_is_the_up_projection() -> None:
    layer, tensors = Layer(_spec(gated=False)), _tensors()
    for e in range(EXPERTS):
        for leaf in ("weight", "weight_scale", "weight_scale_2"):
            for proj, shard, prefix in (("up_proj", "w1", "w13"), ("down_proj", "w2", "w2")):
                param = getattr(layer, f"{prefix}_{leaf}")
                param.weight_loader(param, tensors[f"{e}.{proj}.{leaf}"], "", shard, e)
    weights = layer.loading.finish()
    assert weights is not None
    assert torch.equal(weights.w13.qdata[2], tensors["2.up_proj.weight"])
