"""ModelOpt NVFP4 with all experts in one tensor: gpt-oss, Llama-4 and transformers' fused form.

Leaves are those of `modelopt`, often joined with an underscore (``gate_up_proj_weight_scale``);
the weight itself may have no suffix. Global scales are one scalar for all experts, one an expert
``[E]``, or one a half ``[E, 2]``. Shapes cannot tell ``[E, K/2, N]`` from ``[E, N, K/2]`` when
both are square, and nothing tells halves from alternating rows: the model family decides.
"""

from collections.abc import Mapping

from rubin_moe.loader.dialect import Stacking

STACKINGS: Mapping[str, Stacking] = {
    "gpt_oss": Stacking(transposed=True, interleaved=True),
    "llama4": Stacking(transposed=True, interleaved=False),
    "llama4_text": Stacking(transposed=True, interleaved=False),
    # transformers' [E, H, 2I] classes
    "qwen3_vl_moe": Stacking(transposed=True, interleaved=False),
    "qwen3_vl_moe_text": Stacking(transposed=True, interleaved=False),
    # transformers' [E, 2I, H] classes
    "qwen3_5_moe": Stacking(transposed=False, interleaved=False),
    "qwen3_5_moe_text": Stacking(transposed=False, interleaved=False),
    "gemma4": Stacking(transposed=False, interleaved=False),
    "gemma4_text": Stacking(transposed=False, interleaved=False),
    "motif3": Stacking(transposed=False, interleaved=False),
}
"""``model_type`` of config.json -> how its stacked expert tensors lie."""
