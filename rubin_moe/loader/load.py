"""One layer's experts from a checkpoint on disk.

Memory held is the result and views of mapped files. torch is imported when bytes are read: what
headers and configs tell is told without it.
"""

import os
from collections.abc import Mapping, Set
from functools import partial
from typing import TYPE_CHECKING, Any

from rubin_moe.errors import CheckpointError, ConfigError
from rubin_moe.loader.checkpoint import Checkpoint
from rubin_moe.loader.config import Declared, QuantConfig, find_config
from rubin_moe.loader.dialect import Dialect, Part, Reading, Stacking
from rubin_moe.loader.dialects import NotFp4, identify
from rubin_moe.loader.model import MoESizes, moe_sizes
from rubin_moe.loader.modelopt_stacked import STACKINGS
from rubin_moe.loader.names import module_layer, nearest_names, parse
from rubin_moe.loader.sharding import Shard
from rubin_moe.loader.spec import ExpertsSpec, InputScales, Scheme

if TYPE_CHECKING:
    from rubin_moe.formats.experts import ExpertWeights
    from rubin_moe.loader.validate import ScaleChecks


class ModelCheckpoint(Checkpoint):
    """A checkpoint with its configs.

    Attributes:
        config: config.json, or params.json where there is none.
        quant: its quantization config (`config.find_config`), None if it has none.
        sizes: of its experts.

    Raises:
        CheckpointError, ConfigError: files or configs that cannot be read or contradict.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        config, params = self.json("config.json"), self.json("params.json")
        if config is None and params is None:
            raise CheckpointError(f"{self.folder.name}: neither config.json nor params.json")
        self.config: Mapping[str, Any] = config if config is not None else params or {}
        self.quant = find_config(config, self.json("hf_quant_config.json"), params)
        self.sizes: MoESizes = moe_sizes(self.config)
        self.config_name = "config.json" if config is not None else "params.json"

    def module(self, layer: int | str) -> str:
        """Path of a layer's ``experts`` module.

        Args:
            layer: index in the body; ``"mtp.0"``; or the path itself.

        Raises:
            CheckpointError: no such experts (with the nearest names), or several.
        """
        modules = self.experts()
        if isinstance(layer, str) and layer in modules:
            return layer
        key = f"layers.{layer}" if isinstance(layer, int) else layer
        found = [m for m in modules if str(module_layer(m)) == key]
        if len(found) == 1:
            return found[0]
        if found:
            raise CheckpointError(f"{key} has experts under {' and '.join(found)}: name one")
        model = next(iter(modules), "model.layers.0.mlp.experts")
        wanted = model.replace(str(module_layer(model)), key, 1)
        near = nearest_names(wanted, {n.rsplit(".", 3)[0] for n in self.tensors if key in n})
        more = f"; nearest: {', '.join(near)}" if near else ""
        raise CheckpointError(
            f"{key}: {self.config_name} declares {self.sizes.num_experts} experts, none on disk"
            + more
        )

    def stored(self, module: str) -> Dialect | NotFp4:
        """How a module's experts are stored, whatever the config says."""
        scale_format = "ue4m3" if self.quant is None else self.quant.scale_format
        return identify(self._leaves(module), scale_format, module)

    def _leaves(self, module: str) -> set[tuple[str, str]]:
        leaves = set()
        for entry in self.experts()[module]:
            parsed = parse(entry.name)
            if parsed is not None and parsed.slot is not None:
                leaves.add((parsed.slot.leaf, entry.dtype))
        return leaves

    def spec(self, layer: int | str, stacking: Stacking | None = None) -> ExpertsSpec:
        """What a layer's experts are, from headers and configs.

        Raises:
            CheckpointError: there are none, or they are not FP4.
            ConfigError: the config says something else of this very layer than what is on disk.
        """
        module = self.module(layer)
        dialect = self.stored(module)
        if isinstance(dialect, NotFp4):
            raise CheckpointError(dialect.reason)
        readings = [dialect.read(leaf) for leaf, _ in self._leaves(module)]
        parts = {r.part for r in readings if isinstance(r, Reading)}
        spec = make_spec(
            dialect,
            self.sizes,
            self.quant,
            module,
            parts,
            stacking,
        )
        stored = sum(e.nbytes for e in self.experts()[module])
        # Before anything of that size is allocated; what is merely missing is told by name later.
        if spec.nbytes() > 4 * stored:
            raise ConfigError(
                f"{module}: {self.config_name} declares {spec.num_experts} experts of {spec.hidden}"
                f" x {spec.intermediate}, {spec.nbytes()} bytes, on disk are {stored}"
            )
        return spec


def make_spec(
    dialect: Dialect,
    sizes: MoESizes,
    quant: QuantConfig | None,
    module: str,
    parts: Set[Part],
    stacking: Stacking | None = None,
) -> ExpertsSpec:
    """The spec of one module; what is on disk wins over a config's general statements.

    Args:
        parts: of which there are tensors on disk.

    Raises:
        ConfigError: the config names this module and gives it another format or group size.
    """
    declared = None if quant is None else quant.declared(module)
    notes = [] if quant is None else _contradictions(dialect, declared, quant, module)
    scheme = resolve_scheme(declared, "input_dec" in parts)
    if declared is not None and declared.activations == "static" and scheme == "w4a16":
        notes.append(f"{declared.by} declares 4-bit activations, no input scale on disk: W4A16")
    if stacking is None and quant is not None and quant.stacking is not None:
        stacking = Stacking(*quant.stacking)
    return ExpertsSpec(
        dialect=dialect,
        hidden=sizes.hidden,
        intermediate=sizes.intermediate,
        num_experts=sizes.num_experts,
        gated=sizes.gated,
        has_bias="bias" in parts,
        scheme=scheme,
        stacking=dialect.stacking or stacking or STACKINGS.get(sizes.model_type),
        notes=tuple(notes),
    )


def _contradictions(
    dialect: Dialect, declared: Declared | None, quant: QuantConfig, module: str
) -> list[str]:
    fmt = dialect.fmt
    family = "mxfp4" if fmt.scale == "ue8m0" else "nvfp4"
    if declared is None:
        entry = quant.excluded(module)
        why = f"excludes it ({entry})" if entry else "does not quantize it"
        return [f"{quant.source} {why}, {dialect} on disk: read as stored"]
    if declared.format != family:
        told = f"{quant.source}: {declared.by} says {declared.algo} of {module}, on disk is {fmt}"
        if declared.named:
            raise ConfigError(told)
        return [f"{told}: read as stored"]
    if declared.group_size not in (None, fmt.sf_vec_size):
        raise ConfigError(
            f"{quant.source}: {declared.by} has group_size {declared.group_size}, "
            f"{fmt} has {fmt.sf_vec_size}"
        )
    return []


def resolve_scheme(declared: Declared | None, has_input_scales: bool) -> Scheme:
    """W4A4 only if the checkpoint says so or carries input scales; see `spec.Scheme`.

    Dynamic activations are never inferred from absence: the config must say them.
    """
    said = "unsaid" if declared is None else declared.activations
    if said == "none":
        return "w4a16"
    if has_input_scales:
        return "w4a4"
    return "w4a4-dynamic" if said == "dynamic" else "w4a16"


def load_experts(
    checkpoint: ModelCheckpoint,
    layer: int | str,
    shard: Shard | None = None,
    *,
    input_scales: InputScales | None = None,
    checks: "ScaleChecks | None" = None,
    stacking: Stacking | None = None,
) -> "ExpertWeights":
    """One layer's routed experts, cut to ``shard``. Pure: the same bytes each time.

    Args:
        layer: see `ModelCheckpoint.module`.
        input_scales: overrides what the checkpoint's scheme asks for; ``"ignore"`` runs a W4A4
            checkpoint weight-only, ``"keep"`` leaves NaN where an expert has none.
        checks: strictness and repairs.
        stacking: of stacked tensors, where the model family is not known.

    Raises:
        CheckpointError, ConfigError: see `ExpertAssembler` and `ModelCheckpoint.spec`.
    """
    from rubin_moe.loader.assemble import ExpertAssembler

    module = checkpoint.module(layer)
    spec = checkpoint.spec(layer, stacking)
    assembler = ExpertAssembler(spec, shard, module, input_scales=input_scales, checks=checks)
    for entry in checkpoint.experts()[module]:
        assembler.add(entry.name, partial(checkpoint.tensor, entry.name))
    return assembler.finish()
