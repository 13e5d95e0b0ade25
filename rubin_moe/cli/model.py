"""What MODEL names on the command line: a published shape, or a checkpoint's layers of experts.

A checkpoint is told by what would load it (`loader.summary`, `layers.activation`,
`layers.router_config`), from headers and configs alone; torch is not imported.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rubin_moe.errors import CheckpointError, ConfigError
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.loader.spec import Scheme
from rubin_moe.shapes import model_names, model_shape

if TYPE_CHECKING:
    from rubin_moe.loader.load import ModelCheckpoint
    from rubin_moe.loader.summary import LayerSummary


@dataclass(frozen=True)
class Layers:
    """Layers that pose one problem.

    Attributes:
        names: ``layers.3``, ``mtp.0``; of a published shape none.
        count: of them.
        stored: dialect, format and scheme, as `inspect` says them.
        scheme: activations they were made for.
        problem: as stored: of the whole model, with 16-bit activations.
        why_not_static: None, or why their input scales cannot be read.
    """

    names: tuple[str, ...]
    count: int
    stored: str
    scheme: Scheme
    problem: MoEProblem
    why_not_static: str | None = None

    def __str__(self) -> str:
        layers = f"{self.count} layers" if self.count > 1 else "1 layer"
        which = f"{layer_ranges(self.names)} ({layers})" if self.names else layers
        return f"{which}: {self.stored}"


@dataclass(frozen=True)
class Model:
    """What a command line's MODEL is.

    Attributes:
        name: as given; source: what was found under it, in words.
        groups: its layers, first ones first; unquantized: layers that are not FP4's business.
    """

    name: str
    source: str
    groups: tuple[Layers, ...]
    unquantized: tuple[str, ...] = ()

    def __str__(self) -> str:
        more = f"; {layer_ranges(self.unquantized)} unquantized" if self.unquantized else ""
        return f"{self.name}: {self.source}{more}"


def find_model(name: str) -> Model:
    """A known name is that shape, even where a folder is called so; written as a path (with a
    separator, or ``.``) it is a checkpoint.

    Raises:
        ConfigError: neither; with the known names. Or a config that does not tell what is computed.
        CheckpointError: what loading the checkpoint would be refused with.
    """
    path = Path(name)
    written_as_path = name in (".", "..") or any(s in name for s in (os.sep, os.altsep) if s)
    if not written_as_path:
        if name in model_names():
            return _published(name)
        if not path.exists():
            raise ConfigError(
                f"unknown model {name!r}; known: {', '.join(model_names())}; and no folder is "
                "called so"
            )
    return _stored(name)


def _published(name: str) -> Model:
    shape = model_shape(name)
    source = "the published shape"
    if Path(name).exists():
        source += f", not the folder of that name (that is ./{name})"
    stored = f"{shape.weight_format} as published"
    layers = Layers((), shape.moe_layers, stored, "w4a4-dynamic", shape.problem())
    return Model(name, source, (layers,))


def _stored(name: str) -> Model:
    from rubin_moe.loader.load import ModelCheckpoint
    from rubin_moe.loader.summary import summarize

    with ModelCheckpoint(name) as opened:
        summary = summarize(opened)
        faults = [f for layer in summary.layers for f in layer.faults]
        if faults:
            raise CheckpointError(faults[0])
        if not summary.loads:  # refused as loading the first layer is
            opened.spec(summary.layers[0].module if summary.layers else 0)
        found: dict[tuple[str, bool, MoEProblem], list[LayerSummary]] = {}
        for layer in summary.layers:
            if layer.spec is not None:
                calibrated = layer.why_not_static() is None
                key = str(layer), calibrated, _problem(opened, layer)
                found.setdefault(key, []).append(layer)
    return Model(
        name,
        f"a checkpoint, its precision declared by {summary.declared_by or 'nothing'}",
        tuple(_group(layers, problem) for (_, _, problem), layers in found.items()),
        tuple(layer.layer for layer in summary.layers if layer.unquantized),
    )


def _problem(checkpoint: "ModelCheckpoint", layer: "LayerSummary") -> MoEProblem:
    """One layer as stored. Raises ConfigError: what the config does not tell of it."""
    from rubin_moe.layers.activation import activation_from_config
    from rubin_moe.layers.router_config import router_weight_on_input, routing_from_config
    from rubin_moe.loader.names import module_layer

    spec, key = layer.spec, module_layer(layer.module)
    assert spec is not None
    assert key is not None
    index = key.index if key.branch == "layers" else None
    return MoEProblem(
        num_experts=spec.num_experts,
        global_num_experts=spec.num_experts,
        top_k=routing_from_config(checkpoint.config).top_k,
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        weight_format=spec.fmt,
        activation=activation_from_config(checkpoint.config, index),
        has_bias=spec.has_bias,
        router_weight_on_input=router_weight_on_input(checkpoint.config),
    )


def _group(layers: "list[LayerSummary]", problem: MoEProblem) -> Layers:
    spec = layers[0].spec
    assert spec is not None
    return Layers(
        names=tuple(layer.layer for layer in layers),
        count=len(layers),
        stored=str(layers[0]),
        scheme=spec.scheme,
        problem=problem,
        why_not_static=layers[0].why_not_static(),
    )


def layer_ranges(names: "tuple[str, ...] | list[str]") -> str:
    """``layers.0-5, 7, mtp.0``."""
    branches: dict[str, list[int]] = {}
    for name in names:
        branch, _, index = name.rpartition(".")
        branches.setdefault(branch, []).append(int(index))
    return ", ".join(f"{branch}.{ranges(found)}" for branch, found in branches.items())


def ranges(numbers: list[int]) -> str:
    """``3, 5-7``."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][-1] + 1:
            found[-1].append(n)
        else:
            found.append([n])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in found)
