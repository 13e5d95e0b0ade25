"""What others decode from the same bytes, we load: golden vectors from their own code."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rubin_moe.loader.load import ModelCheckpoint, load_experts
from tests.oracles import moe

from .checkpoints import Folder, Style, expert_tensors, folder, layer

NAME = "model.layers.0.mlp.experts"


def dense(part, fmt):
    bias = None if part.bias is None else part.bias.numpy()
    return moe.Projection(part.qdata.numpy(), part.sf.numpy(), part.dec.numpy(), bias).dense(fmt)


@pytest.mark.parametrize(
    ("style", "compressor", "preset"),
    [
        ("compressed_nvfp4", NVFP4PackedCompressor, "NVFP4A16"),
        ("compressed_mxfp4", MXFP4PackedCompressor, "MXFP4A16"),
    ],
)
def test_compressed_tensors_decodes_the_same_weights(tmp_path, style, compressor, preset):
    """Packed by their code, from their quantizer, then loaded by ours."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    block = scheme.weights.group_size
    rng = torch.Generator().manual_seed(0)
    made = folder(layer(Style(style).fmt), Style(style))
    decoded = {}
    for e in range(4):
        for name, shape in (
            ("gate_proj", (32, 64)),
            ("up_proj", (32, 64)),
            ("down_proj", (64, 32)),
        ):
            weight = torch.randn(shape, generator=rng)
            amax = weight.reshape(shape[0], -1, block).abs().amax(-1)
            state = {"weight": weight}
            if style == "compressed_nvfp4":
                state["weight_global_scale"] = (6 * 448 / weight.abs().max()).reshape(1)
                scale = state["weight_global_scale"] * amax / 6
                state["weight_scale"] = scale.to(torch.float8_e4m3fn).float()
            else:
                state["weight_scale"] = torch.exp2(torch.floor(torch.log2(amax)) - 2)
            packed = compressor.compress(state, scheme)
            decoded[name, e] = compressor.decompress(packed, scheme)["weight"].double().numpy()
            if style == "compressed_nvfp4":
                packed["weight_scale"] = packed["weight_scale"].to(torch.float8_e4m3fn)
            for leaf, tensor in packed.items():
                made.tensors[f"{NAME}.{e}.{name}.{leaf}"] = tensor.contiguous()
    with ModelCheckpoint(made.write(tmp_path)) as checkpoint:
        weights = load_experts(checkpoint, 0, input_scales="ignore")
    w13, w2 = dense(weights.w13, weights.fmt.name), dense(weights.w2, weights.fmt.name)
    for e in range(4):
        for name, ours in (
            ("gate_proj", w13[e, :32]),
            ("up_proj", w13[e, 32:]),
            ("down_proj", w2[e]),
        ):
            # theirs has 8 bits of mantissa at least
            np.testing.assert_allclose(ours, decoded[name, e], rtol=2**-7)


def test_transformers_decodes_the_same_gpt_oss_weights(tmp_path):
    source = layer("mxfp4", bias=True)
    made: Folder = folder(source, Style("gpt_oss"), model_type="gpt_oss")
    with ModelCheckpoint(made.write(tmp_path)) as checkpoint:
        weights = load_experts(checkpoint, 0)
    tensors = expert_tensors(source, Style("gpt_oss"))

    def theirs(name):
        blocks, scales = (tensors[f"{NAME}.{name}_{leaf}"] for leaf in ("blocks", "scales"))
        return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).double().numpy()

    gate_up = theirs("gate_up_proj")  # [E, K, 2I]; their forward takes gate from even columns
    w13 = dense(weights.w13, "mxfp4")
    np.testing.assert_array_equal(w13[:, :32], gate_up[..., 0::2].swapaxes(1, 2))
    np.testing.assert_array_equal(w13[:, 32:], gate_up[..., 1::2].swapaxes(1, 2))
    np.testing.assert_array_equal(dense(weights.w2, "mxfp4"), theirs("down_proj").swapaxes(1, 2))
