"""Parameter names of what the plugin overrides and calls in vLLM, read from source.

``python -m tests.adapters.signatures VERSION FOLDER`` pins those of another vLLM; FOLDER holds its
``vllm`` package, of which nothing is imported.
"""

import ast
import json
import sys
from functools import cache
from pathlib import Path

PINNED = Path(__file__).with_name("vllm_signatures.json")

_QUANTIZATION = "vllm/model_executor/layers/quantization"
_MOE = "vllm/model_executor/layers/fused_moe"

OVERRIDDEN = {
    f"{_QUANTIZATION}/base_config.py:QuantizationConfig": (
        "rubin_moe/adapters/vllm/config.py:RubinMoeConfig",
        (
            "get_name",
            "get_supported_act_dtypes",
            "get_min_capability",
            "get_config_filenames",
            "from_config",
            "override_quantization_method",
            "get_quant_method",
            "maybe_update_config",
            "apply_vllm_mapper",
        ),
    ),
    f"{_MOE}/fused_moe_method_base.py:FusedMoEMethodBase": (
        "rubin_moe/adapters/vllm/method.py:RubinMoeMethod",
        ("create_weights", "get_fused_moe_quant_config", "apply", "apply_monolithic"),
    ),
    f"{_MOE}/modular_kernel.py:FusedMoEExperts": (
        "rubin_moe/adapters/vllm/experts.py:RubinExperts",
        (
            "activation_format",
            "expects_unquantized_inputs",
            "_supports_current_device",
            "_supports_no_act_and_mul",
            "_supports_quant_scheme",
            "_supports_activation",
            "_supports_parallel_config",
            "_supports_batch_invariance",
        ),
    ),
    f"{_MOE}/modular_kernel.py:FusedMoEExpertsModular": (
        "rubin_moe/adapters/vllm/experts.py:RubinExperts",
        ("moe_problem_size", "workspace_shapes", "finalize_weight_and_reduce_impl", "apply"),
    ),
    f"{_MOE}/routed_experts.py:RoutedExperts": (
        "rubin_moe/adapters/vllm/loading.py:LayerLoading",
        ("weight_loader",),
    ),
    "vllm/model_executor/layers/linear.py:UnquantizedLinearMethod": (
        "rubin_moe/adapters/vllm/linear.py:DecodingLinearMethod",
        ("create_weights", "process_weights_after_loading"),
    ),
}
"""vLLM's class -> ours, and the methods that ours replaces."""

CALLED = {
    f"{_QUANTIZATION}/base_config.py:QuantizationConfig.get_cache_scale_mapper": (),
    f"{_QUANTIZATION}/__init__.py:register_quantization_config": ("quantization",),
    f"{_QUANTIZATION}/kv_cache.py:BaseKVCacheMethod.__init__": ("quant_config",),
    f"{_MOE}/fused_moe_method_base.py:FusedMoEMethodBase.__init__": ("moe",),
    f"{_MOE}/modular_kernel.py:FusedMoEExperts.__init__": ("moe_config", "quant_config"),
    f"{_MOE}/modular_kernel.py:FusedMoEKernel.__init__": ("prepare_finalize", "fused_experts"),
    f"{_MOE}/modular_kernel.py:FusedMoEKernel.apply": (
        "hidden_states",
        "w1",
        "w2",
        "topk_weights",
        "topk_ids",
        "activation",
        "global_num_experts",
        "expert_map",
        "apply_router_weight_on_input",
        "shared_experts",
        "shared_experts_input",
    ),
    f"{_MOE}/all2all_utils.py:maybe_make_prepare_finalize": (
        "moe",
        "quant_config",
        "routing_tables",
        "allow_new_interface",
    ),
    f"{_MOE}/config.py:FusedMoEQuantConfig.make": ("quant_dtype",),
    f"{_MOE}/routed_experts.py:RoutedExperts._expert_routing_tables": (),
    "vllm/model_executor/models/utils.py:WeightsMapper.apply_list": ("values",),
    "vllm/model_executor/models/utils.py:WeightsMapper.__or__": ("other",),
}
"""vLLM's function -> parameters that the plugin passes."""


def wanted() -> list[str]:
    """Every function of vLLM's that is pinned."""
    overridden = [f"{theirs}.{name}" for theirs, (_, names) in OVERRIDDEN.items() for name in names]
    return sorted({*overridden, *CALLED})


def parameters(root: Path, function: str) -> list[str]:
    """Parameter names without ``self`` and ``cls``; ``*`` and ``**`` mark collecting ones.

    Raises:
        LookupError: there is no such function.
    """
    file, _, path = function.partition(":")
    scope: ast.AST = _tree(root / file)
    for part in path.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        found = [n for n in ast.iter_child_nodes(scope) if isinstance(n, kinds) and n.name == part]
        if not found:
            raise LookupError(f"{function}: no {part}")
        scope = found[-1]  # the last one is what overloads stand for
    assert isinstance(scope, ast.FunctionDef)
    a = scope.args
    names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    names += [f"*{a.vararg.arg}"] if a.vararg else []
    names += [f"**{a.kwarg.arg}"] if a.kwarg else []
    return [n for n in names if n not in ("self", "cls")]


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def main() -> None:
    version, folder = sys.argv[1:]
    pinned = json.loads(PINNED.read_text()) if PINNED.exists() else {}
    pinned[version] = {f: parameters(Path(folder), f) for f in wanted()}
    lines = [
        f" {json.dumps(v)}: {{\n"
        + ",\n".join(f"  {json.dumps(f)}: {json.dumps(p)}" for f, p in sorted(table.items()))
        + "\n }"
        for v, table in sorted(pinned.items())
    ]
    PINNED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
