"""The names and parameters that others may rely on: a change here is a change for users."""

import importlib
import inspect

import pytest

API = {
    "rubin_moe.formats.quantize:quantize": "x fmt dec mx_rule search",
    "rubin_moe.formats.quantize:dequantize": "qdata sf fmt dec dtype",
    "rubin_moe.formats.experts:ExpertWeights": (
        "fmt hidden intermediate gated w13 w2 expert_ids name layer_input_dec"
    ),
    "rubin_moe.formats.experts:ProjectionWeights": "qdata sf dec bias input_dec",
    "rubin_moe.loader.load:ModelCheckpoint": "path",
    "rubin_moe.loader.load:load_experts": "checkpoint layer shard input_scales checks stacking",
    "rubin_moe.loader.assemble:ExpertAssembler": "spec shard name input_scales checks",
    "rubin_moe.loader.fold:fold": "weights mode target_scale max_mean_error force",
    "rubin_moe.loader.summary:summarize": "checkpoint",
    "rubin_moe.convert.run:convert": "source out options jobs report",
    "rubin_moe.kernels.registry:select": "problem target backend",
    "rubin_moe.kernels.target:detect": "device",
    "rubin_moe.layers.experts:problem_of": (
        "weights top_k activation dtype activation_format global_num_experts "
        "router_weight_on_input deterministic batch_invariant"
    ),
    "rubin_moe.layers.experts:MoEExperts": "weights problem target backend",
    "rubin_moe.arch:arch": "name",
    "rubin_moe.arch.port_check:check_ptx": "text smem cp_async_buffers",
    "rubin_moe.emulator:load_ptx": "text deferred checked",
    "rubin_moe.emulator.dsl:emulated_device": (
        "arch multiprocessors execute seed rules save_to device_options"
    ),
    "rubin_moe.emulation:install": "seed keep_reports rules",
    "rubin_moe.adapters.vllm.plugin:register": "",
}


@pytest.mark.parametrize("name", API)
def test_parameters(name):
    module, attribute = name.split(":")
    target = getattr(importlib.import_module(module), attribute)
    assert " ".join(inspect.signature(target).parameters) == API[name]
