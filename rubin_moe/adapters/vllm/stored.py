"""What a checkpoint holds for each of vLLM's modules, from its headers.

A config's exclude lists, written in the producer's names, decide nothing here: a module is what is
on disk under its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rubin_moe.errors import CheckpointError
from rubin_moe.loader import names
from rubin_moe.loader.dialect import Dialect
from rubin_moe.loader.dialects import NotFp4, identify
from rubin_moe.loader.load import ModelCheckpoint
from rubin_moe.loader.spec import ExpertsSpec

# What vLLM fuses in every model, beside the model's own table.
_FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
_MATRIX_LEAVES = ("weight", "scale", "input_")
_CACHE_LEAVES = ("k_scale", "v_scale", "kv_scale")


@dataclass(frozen=True)
class Matrix:
    """A linear layer's matrices.

    Attributes:
        kind: how they are stored; leaves: names of one matrix's tensors.
    """

    kind: Dialect | NotFp4
    leaves: frozenset[str]


class StoredModel:
    """Headers of one checkpoint, by vLLM's module names.

    Args:
        model: what vLLM was given: a folder, or the name of a repository on the hub.
        revision: of that repository.
        mapper: vLLM's map from the checkpoint's names to its own; None where they are the same.
    """

    def __init__(self, model: str, revision: str | None, mapper: Any) -> None:
        self._checkpoint = ModelCheckpoint(str(_folder(model, revision)))
        self._mapper = mapper
        self._scale_format = (
            "ue4m3" if self._checkpoint.quant is None else self._checkpoint.quant.scale_format
        )

    def experts(self, prefix: str) -> ExpertsSpec | None:
        """The routed experts of vLLM's module ``prefix``; None if they are not quantized.

        Raises:
            CheckpointError: there are none on disk, or they are neither FP4 nor unquantized.
        """
        layer = names.module_layer(prefix)
        if layer is None:
            raise CheckpointError(f"{prefix}: no layer number in the name of this module")
        module = self._checkpoint.module(str(layer))
        kind = self._checkpoint.stored(module)
        if not isinstance(kind, NotFp4):
            return self._checkpoint.spec(module)
        if kind.kind == "unquantized":
            return None
        raise CheckpointError(kind.reason)

    def matrix(self, prefix: str, fused: Mapping[str, list[str]]) -> Matrix | None:
        """The matrices of vLLM's linear layer or head ``prefix``; None if there are none on disk.

        Args:
            fused: last segment of a fused layer -> those of its parts.

        Raises:
            CheckpointError: parts of one fused layer are stored in different ways.
        """
        head, _, last = prefix.rpartition(".")
        parts = {**_FUSED, **fused}.get(last, [])
        wanted = [prefix, *(f"{head}.{part}" if head else part for part in parts)]
        stored = {m: d for name in wanted for m, d in self._modules.get(name, {}).items()}
        found: dict[str, Matrix] = {}
        for module, leaves in stored.items():
            kind = identify(leaves.items(), self._scale_format, module)
            found[module] = Matrix(kind, frozenset(leaves))
        kinds = {_kind_name(m.kind) for m in found.values()}
        if len(kinds) > 1:
            told = ", ".join(f"{m} {_kind_name(f.kind)}" for m, f in found.items())
            raise CheckpointError(f"{prefix}: one layer of vLLM's, stored in several ways: {told}")
        return next(iter(found.values()), None)

    @cached_property
    def has_cache_scales(self) -> bool:
        """Whether any attention layer brings scales of its key-value cache."""
        return any(name.rpartition(".")[2] in _CACHE_LEAVES for name in self._checkpoint.tensors)

    @cached_property
    def _modules(self) -> dict[str, dict[str, dict[str, str]]]:
        """vLLM's module name -> stored module -> leaf -> dtype, without routed experts."""
        table: dict[str, dict[str, dict[str, str]]] = {}
        by_module: dict[str, dict[str, str]] = {}
        for entry in self._checkpoint:
            if names.parse(entry.name) is not None:
                continue
            module, _, leaf = entry.name.rpartition(".")
            if leaf.startswith(_MATRIX_LEAVES):
                by_module.setdefault(module, {})[leaf] = entry.dtype
        for module, leaves in by_module.items():
            table.setdefault(self._vllm_name(module), {})[module] = leaves
        return table

    def _vllm_name(self, module: str) -> str:
        if self._mapper is None:
            return module
        mapped = self._mapper.apply_list([f"{module}.weight"])
        return mapped[0].removesuffix(".weight") if mapped else module


def _kind_name(kind: Dialect | NotFp4) -> str:
    return kind.kind if isinstance(kind, NotFp4) else kind.name


def _folder(model: str, revision: str | None) -> Path:
    """The checkpoint's folder; a hub repository is downloaded, as vLLM is about to do."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(model, revision=revision, allow_patterns=["*.safetensors*", "*.json"])
    )
