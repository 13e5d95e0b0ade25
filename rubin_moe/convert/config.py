"""config.json and hf_quant_config.json of a converted checkpoint.

Where the experts' dialect stays, the source's own config stays, word for word; else it is written
anew in the words of the producer whose names are written. Both get a ``rubin_moe`` section that
says what was done, with which version and rule. torch is not imported.
"""

from collections.abc import Mapping
from typing import Any

import rubin_moe
from rubin_moe.convert.plan import LinearGroup, Plan
from rubin_moe.errors import ConvertError
from rubin_moe.formats.spec import BlockFormat
from rubin_moe.loader.compressed_tensors import COMPRESSED_MXFP4, COMPRESSED_NVFP4
from rubin_moe.loader.config import TEXT_CONFIGS
from rubin_moe.loader.dialect import Dialect
from rubin_moe.loader.gpt_oss import GPT_OSS
from rubin_moe.loader.load import ModelCheckpoint
from rubin_moe.loader.modelopt import MODELOPT
from rubin_moe.loader.names import parse

_KEYS = ("quantization_config", "quantization")


def configs(checkpoint: ModelCheckpoint, plan: Plan) -> dict[str, dict[str, Any]]:
    """File name -> content of the configs that change.

    Raises:
        ConvertError: the quantized rest cannot be said in the target's words.
    """
    config = dict(checkpoint.config)
    old_quant = checkpoint.json("hf_quant_config.json")
    section = _section(plan)
    groups = (g for s in plan.shards for g in s.groups if isinstance(g, LinearGroup))
    dialects = {*(j.dialect for j in plan.modules), *(g.target for g in groups)}
    changed = _changed(checkpoint, plan)
    for holder in _holders(config):
        for key in _KEYS:
            kept = holder.pop(key, None)
            if isinstance(kept, Mapping) and not changed:
                holder[key] = {**kept, "rubin_moe": section}
        if changed:
            holder.pop("expert_dtype", None)
    if not changed:
        files = {checkpoint.config_name: config}
        if old_quant is not None:
            files["hf_quant_config.json"] = {**old_quant, "rubin_moe": section}
        return files
    dialect = _only(dialects)
    if dialect is None:
        if plan.rest:
            raise ConvertError(f"bfloat16: {len(plan.rest)} quantized matrices would remain")
        config["dtype" if "torch_dtype" not in config else "torch_dtype"] = "bfloat16"
        config["rubin_moe"] = section
        return {checkpoint.config_name: config}
    quant = {**_quantization(checkpoint, plan, dialect), "rubin_moe": section}
    config["quantization_config"] = quant
    files = {checkpoint.config_name: config}
    if dialect is MODELOPT:
        files["hf_quant_config.json"] = _hf_quant(quant)
    return files


def _holders(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The config and its text configs, copied so that the source's stay."""
    found = [config]
    for key in TEXT_CONFIGS:
        if isinstance(config.get(key), Mapping):
            config[key] = dict(config[key])
            found.append(config[key])
    return found


def _only(dialects: "set[Dialect | None]") -> Dialect | None:
    if len(dialects) > 1:
        raise ConvertError(f"modules in several dialects: {sorted(map(str, dialects))}")
    return next(iter(dialects), None)


def _changed(checkpoint: ModelCheckpoint, plan: Plan) -> bool:
    """Whether any module is stored in another dialect than before."""
    if plan.converted_linears or checkpoint.quant is None or not plan.modules:
        return True
    return any(j.dialect is not checkpoint.stored(j.module) for j in plan.modules)


def _section(plan: Plan) -> dict[str, Any]:
    options = plan.options
    told: dict[str, Any] = {
        "version": rubin_moe.__version__,
        "source": sorted({j.source for j in plan.modules}),
        "target": options.target,
        "layers": len(plan.modules),
    }
    formats = {j.spec.fmt.name if j.spec else "unquantized" for j in plan.modules}
    if "unquantized" in formats and options.target != "bf16":
        told["scale_search"] = options.search
        if options.target == "mxfp4":
            told["mx_rule"] = options.mx_rule
        if options.target == "nvfp4-ue4m3":
            told["shared_gate_up_scale"] = True
    if any(f.startswith("nvfp4") for f in formats) and options.target != "bf16":
        changed = any(f != options.target for f in formats)
        told["fold"] = options.fold or ("exact" if changed else "none")
    if options.force:
        told["forced"] = True
    return told


def _quantization(checkpoint: ModelCheckpoint, plan: Plan, dialect: Dialect) -> dict[str, Any]:
    untouched = _untouched(checkpoint, plan)
    inputs = any(s.inputs for s in _shapes(plan))
    fmt = dialect.fmt
    if plan.rest and dialect in (COMPRESSED_NVFP4, COMPRESSED_MXFP4, GPT_OSS):
        example = next(iter(plan.rest))
        raise ConvertError(
            f"{len(plan.rest)} matrices stay quantized as they are ({example}: "
            f"{plan.rest[example]}), and a {dialect} config has no words for that: convert them "
            "too (linears), or write other names"
        )
    if dialect is GPT_OSS:
        return {"quant_method": "mxfp4", "modules_to_not_convert": untouched}
    if dialect in (COMPRESSED_NVFP4, COMPRESSED_MXFP4):
        form = f"{fmt.name[:5]}-pack-quantized"
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"format": form, **_group(fmt, inputs)}},
            "ignore": untouched,
        }
    if dialect is MODELOPT:
        algo = "NVFP4" if inputs else "W4A16_NVFP4"
        quant = {
            "quant_method": "modelopt",
            "quant_algo": algo,
            "group_size": 16,
            "config_groups": {"group_0": _group(fmt, inputs)},
            "ignore": untouched,
            "producer": {"name": "rubin-moe", "version": rubin_moe.__version__},
        }
        return quant if not plan.rest else _mixed(plan, quant, algo)
    quant = {
        "quant_method": "rubin_moe",
        "format": "nvfp4",
        "scale_format": "ue5m3",
        "group_size": 16,
        "activations": "static" if inputs else plan.options.activations,
        "ignore": untouched,
    }
    return quant if not plan.rest else _mixed(plan, quant, "NVFP4")


def _mixed(plan: Plan, quant: dict[str, Any], algo: str) -> dict[str, Any]:
    """Every quantized module by name."""
    table = {m.module: {"quant_algo": algo, "group_size": 16} for m in plan.modules}
    table |= {m: {"quant_algo": algo, "group_size": 16} for m in plan.converted_linears}
    table |= {m: {"quant_algo": a} for m, a in plan.rest.items()}
    kept = {k: v for k, v in quant.items() if k not in ("config_groups", "group_size")}
    if "quant_algo" in kept:
        kept["quant_algo"] = "MIXED_PRECISION"
    return {**kept, "quantized_layers": table}


def _group(fmt: BlockFormat, inputs: bool) -> dict[str, Any]:
    scheme = {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": fmt.sf_vec_size,
        "symmetric": True, "dynamic": False,
    }  # fmt: skip
    if fmt.has_global:
        scheme["strategy"] = "tensor_group"
        scheme["scale_dtype"] = "torch.float8_e4m3fn"
    else:
        scheme["scale_dtype"] = "torch.uint8"
    activations = {**scheme, "dynamic": "local"} if inputs else None
    return {"targets": ["Linear"], "weights": scheme, "input_activations": activations}


def _hf_quant(quant: Mapping[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = {
        "quant_algo": quant["quant_algo"],
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": quant["ignore"],
    }
    if "quantized_layers" in quant:
        inner["quantized_layers"] = quant["quantized_layers"]
    return {"producer": quant["producer"], "quantization": inner, "rubin_moe": quant["rubin_moe"]}


def _shapes(plan: Plan) -> Any:
    for shard in plan.shards:
        for group in shard.groups:
            yield from getattr(group, "shapes", {}).values()


def _untouched(checkpoint: ModelCheckpoint, plan: Plan) -> list[str]:
    """Linear modules that are not quantized, as exact names: what an ignore list must hold."""
    changed = {*plan.converted_linears, *plan.rest}
    experts = {j.module for j in plan.modules}
    found = ["lm_head"]
    for entry in checkpoint:
        module, _, leaf = entry.name.rpartition(".")
        parsed = parse(entry.name)
        if parsed is not None:
            if parsed.module not in experts:
                found.append(parsed.module)
        elif leaf == "weight" and len(entry.shape) == 2 and module not in changed:
            found.append(module)
    return list(dict.fromkeys(found))
