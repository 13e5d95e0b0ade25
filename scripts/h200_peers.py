"""Other projects' MoE layers on one GPU, called as vLLM 0.26 calls them; W4A16 from top-k ids.

Each ``setup`` takes a layer in the checkpoint's layout and returns ``make(x, ids, weights)``, which
returns the call to be timed. Nothing but the timed call runs in it; weights, tile choices and
compilation are done before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from h200_layer import Shape, dense, logits_of
from torch import Tensor

from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.layouts.gate_up import GateUpRows

Call = Callable[[], Tensor]
Make = Callable[[Tensor, Tensor, Tensor], Call]


def _rows(shape: Shape, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """Codes and scales of w13; vLLM's gpt-oss activations want gate and up in single turns."""
    w13 = weights.w13
    if shape.activation.kind != "swigluoai":
        return w13.qdata, w13.sf
    turns = GateUpRows(stripe=1)
    return turns.pack(w13.qdata), turns.pack(w13.sf)


def _grown(t: Tensor, n: int, k: int) -> Tensor:
    out = t.new_zeros(t.shape[0], n, k)
    out[:, : t.shape[1], : t.shape[2]] = t
    return out


def setup_marlin(shape: Shape, weights: ExpertWeights) -> Make:
    """vLLM's default for NVFP4; MXFP4 padded as vLLM pads it."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as prepare
    from vllm.scalar_type import scalar_types

    e, h, i = shape.num_experts, shape.hidden, shape.intermediate
    q13, s13 = _rows(shape, weights)
    q2, s2 = weights.w2.qdata, weights.w2.sf
    if shape.fmt == "mxfp4":
        hp, ip = -(-h // 256) * 256, -(-i // 128) * 128
        w1, w2, t1, t2, _, _ = prepare.prepare_moe_mxfp4_layer_for_marlin(
            SimpleNamespace(params_dtype=torch.bfloat16),
            _grown(q13, 2 * ip, hp // 2), _grown(q2, hp, ip // 2),
            _grown(s13, 2 * ip, hp // 32), _grown(s2, hp, ip // 32), None, None,
        )  # fmt: skip
        g1 = g2 = None
        activation = MoEActivation.SWIGLUOAI
    else:
        hp, activation = h, MoEActivation.SILU
        layer = SimpleNamespace(
            num_experts=e, hidden_size=h, intermediate_size_per_partition=i,
            params_dtype=torch.bfloat16,
        )  # fmt: skip
        f8 = torch.float8_e4m3fn
        w1, t1, g1, w2, t2, g2 = prepare.prepare_nvfp4_moe_layer_for_marlin(
            layer, q13, s13.view(f8), weights.w13.dec[:, 0].contiguous(),
            q2, s2.view(f8), weights.w2.dec[:, 0].contiguous(), True,
        )  # fmt: skip

    def summed(rows: Tensor, out: Tensor, ids: Tensor, mapping: Any) -> Tensor:
        ops.moe_sum(rows, out)
        return out

    def make(x: Tensor, ids: Tensor, router: Tensor) -> Call:
        wide = torch.nn.functional.pad(x, (0, hp - h)).contiguous() if hp != h else x
        return lambda: fused_marlin_moe(
            wide, w1, w2, None, None, t1, t2, router, ids,
            quant_type_id=scalar_types.float4_e2m1f.id, global_num_experts=e,
            activation=activation, global_scale1=g1, global_scale2=g2, moe_sum=summed,
        )[:, :h]  # fmt: skip

    return make


def setup_triton_kernels(shape: Shape, weights: ExpertWeights) -> Make:
    """vLLM's default for gpt-oss: from router logits, softmax and top-k included, since its path
    from ids is slower. The logits are such that they give the ids and weights."""
    import vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe as oai
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import _swizzle_mxfp4

    w1, flex1, t1 = _swizzle_mxfp4(*_rows(shape, weights))
    w2, flex2, t2 = _swizzle_mxfp4(weights.w2.qdata, weights.w2.sf)
    config = mxfp4_w4a16_moe_quant_config(
        w1_scale=PrecisionConfig(weight_scale=t1, flex_ctx=FlexCtx(rhs_data=flex1)),
        w2_scale=PrecisionConfig(weight_scale=t2, flex_ctx=FlexCtx(rhs_data=flex2)),
    )

    def make(x: Tensor, ids: Tensor, router: Tensor) -> Call:
        logits = logits_of(shape, ids, router)
        return lambda: oai.triton_kernel_moe_forward(
            x, w1, w2, logits, shape.top_k, True, activation=MoEActivation.SWIGLUOAI,
            quant_config=config, global_num_experts=shape.num_experts,
        )  # fmt: skip

    return make


def setup_triton_bf16(shape: Shape, weights: ExpertWeights) -> Make:
    """Unquantized weights; silu whatever the layer's activation."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    e, h, i = shape.num_experts, shape.hidden, shape.intermediate
    w1 = torch.empty(e, 2 * i, h, dtype=torch.bfloat16, device="cuda")
    w2 = torch.empty(e, h, i, dtype=torch.bfloat16, device="cuda")
    for expert in range(e):
        w1[expert] = dense(weights.w13, expert, weights.fmt)
        w2[expert] = dense(weights.w2, expert, weights.fmt)

    def make(x: Tensor, ids: Tensor, router: Tensor) -> Call:
        return lambda: fused_experts(x, w1, w2, router, ids, activation=MoEActivation.SILU)

    return make


def setup_humming(shape: Shape, weights: ExpertWeights) -> Make:
    """humming-kernels with the tile choices of its own heuristics and vLLM's paddings."""
    import vllm._custom_ops  # noqa: F401  registers silu_and_mul
    from humming.layer import HummingLayer, HummingMethod
    from humming.tune import get_heuristics_config
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

    e, h, i = shape.num_experts, shape.hidden, shape.intermediate
    mx = shape.fmt == "mxfp4"
    form = {
        "dtype": "float4e2m1",
        "group_size": 32,
        "scale_dtype": "float8e8m0",
        "scale_type": "group",
    }
    if not mx:
        form = dict(form, group_size=16, scale_dtype="float8e4m3", scale_type="group_tensor")
    layers = []
    for n, k, proj in ((2 * i, h, weights.w13), (h, i, weights.w2)):
        layer = HummingLayer(
            shape_n=n, shape_k=k, weight_config=dict(form), num_experts=e,
            torch_dtype=torch.bfloat16, pad_n_to_multiple=256, pad_k_to_multiple=128,
        ).cuda()  # fmt: skip
        scale = proj.sf.view(torch.float8_e8m0fnu if mx else torch.float8_e4m3fn)
        tensors = {"weight": proj.qdata.view(torch.int32), "weight_scale": scale}
        if not mx:
            tensors["global_scale"] = proj.dec[:, 0].contiguous()
        layer.load_from_tensors(tensors)
        layer.transform()
        layers.append(layer)
    metas = [layer.humming_metas[""] for layer in layers]
    compute = json.dumps(
        {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"}
    )

    def make(x: Tensor, ids: Tensor, router: Tensor) -> Call:
        m, pairs = x.shape[0], ids.numel()
        found = [get_heuristics_config(meta=t, shape_m=pairs, gemm_type="indexed") for t in metas]
        tunings = [json.dumps([[0, 1 << 30, c]]) for c in found]
        block = found[0]["block_shape"][0]

        def call() -> Tensor:
            rows, experts, padded = moe_align_block_size(
                ids, block, e, None, ignore_invalid_experts=True
            )
            common = {
                "sorted_ids": rows, "expert_ids": experts, "num_tokens_padded": padded,
                "compute_config": compute, "valid_shape_m": pairs,
            }  # fmt: skip
            wide, narrow, out = (x.new_empty(pairs, width) for width in (2 * i, i, h))
            HummingMethod.forward_layer(
                layer=layers[0], inputs=x, outputs=wide, top_k=shape.top_k,
                tuning_config=tunings[0], **common,
            )  # fmt: skip
            torch.ops._C.silu_and_mul(narrow, wide)
            HummingMethod.forward_layer(
                layer=layers[1], inputs=narrow, outputs=out, top_k=1, tuning_config=tunings[1],
                **common,
            )  # fmt: skip
            return moe_fused_mul_sum(out.view(m, shape.top_k, h), router)

        return call

    return make


SETUPS: dict[str, Callable[[Shape, ExpertWeights], Make]] = {
    "marlin": setup_marlin,
    "triton_kernels": setup_triton_kernels,
    "humming": setup_humming,
    "triton_bf16": setup_triton_bf16,
}
OTHER_ACTIVATION = ("humming", "triton_bf16")
"""These compute silu where the layer's activation is another one: same work, other numbers."""


def from_logits(make: Make, shape: Shape, x: Tensor, ids: Tensor, router: Tensor) -> Call:
    """A call as vLLM makes it: its router's kernel, then the experts on what that has written."""
    import vllm._custom_ops as ops

    logits = logits_of(shape, ids, router)
    ids, router, places = torch.empty_like(ids), torch.empty_like(router), torch.empty_like(ids)
    ops.topk_softmax(router, ids, places, logits, True)
    experts = make(x, ids, router)

    def call() -> Tensor:
        ops.topk_softmax(router, ids, places, logits, True)
        return experts()

    return call
