"""vLLM's quantization config ``rubin_moe``: which method each layer of a checkpoint gets."""

import re
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper

from rubin_moe import envs
from rubin_moe.adapters.vllm import compat
from rubin_moe.adapters.vllm.linear import DecodingLinearMethod
from rubin_moe.adapters.vllm.loading import parameter_name
from rubin_moe.adapters.vllm.method import RubinMoeMethod
from rubin_moe.adapters.vllm.plugin import NAME
from rubin_moe.adapters.vllm.report import ServingReport
from rubin_moe.adapters.vllm.stored import Matrix, StoredModel
from rubin_moe.errors import ConfigError
from rubin_moe.loader import names
from rubin_moe.loader.config import QuantConfig
from rubin_moe.loader.dialects import NotFp4


class RubinMoeConfig(QuantizationConfig):  # type: ignore[misc]
    """One model's config.

    Routed experts in FP4 get our method. Everything else keeps vLLM's own where this platform has
    one: unquantized layers, embeddings, key-value cache, and on a GPU the quantized linears. On a
    CPU vLLM multiplies neither FP4 nor FP8 matrices: those are decoded when they are loaded.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        self._raw = raw
        self._model: tuple[str, str | None] | None = None
        self._mapper: WeightsMapper | None = None
        self._stored: StoredModel | None = None
        self._own: QuantizationConfig | None = None
        self._ours: set[names.LayerKey] = set()
        self._report = ServingReport()

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Of CUDA devices; what a device lacks is the registry's to say, with reasons."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["hf_quant_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "RubinMoeConfig":
        """From a ``quantization_config`` of any producer. Raises ConfigError if it is malformed, or
        an environment variable is."""
        envs.check()
        QuantConfig.parse(config)
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Ours only where the user asked for it: no checkpoint is taken over silently."""
        return NAME if user_quant == NAME else None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Learns where the checkpoint is."""
        self._model = (model_name, revision)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Learns how vLLM renames the checkpoint's modules; the outermost model comes first."""
        if self._mapper is None:
            self._mapper = hf_to_vllm_mapper

    # -- methods ---------------------------------------------------------------------------------

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of one layer; None leaves it to vLLM's unquantized one."""
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        if isinstance(layer, LinearBase | ParallelLMHead):
            method = self._matrix_method(layer, prefix)
            if method is None and isinstance(layer, LinearBase):
                return UnquantizedLinearMethod()
            return method
        if compat.is_attention(layer) and self._checkpoint.has_cache_scales:
            return BaseKVCacheMethod(self)
        return None

    def _experts_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        spec = self._checkpoint.experts(prefix)
        if spec is None:
            self._report.add_other("layers of unquantized experts on vLLM's own method")
            return None
        key = names.module_layer(prefix)
        assert key is not None
        self._ours.add(key)
        return RubinMoeMethod(layer.moe_config, spec, prefix, self._report)

    def _matrix_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        matrix = self._checkpoint.matrix(prefix, self.packed_modules_mapping)
        if matrix is None or _unquantized(matrix):
            return None
        stored = matrix.kind.kind if isinstance(matrix.kind, NotFp4) else str(matrix.kind.fmt)
        target = compat.target()
        if target.device == "cpu" and stored not in ("int4", "unknown"):
            self._report.add_other(
                f"{stored} linear layers decoded at load (vLLM multiplies none on a CPU)"
            )
            dialect = None if isinstance(matrix.kind, NotFp4) else matrix.kind
            return DecodingLinearMethod(dialect, matrix.leaves, prefix)
        self._report.add_other(f"{stored} linear layers on vLLM's own method")
        return self._vllm_config().get_quant_method(layer, prefix)

    @property
    def _checkpoint(self) -> StoredModel:
        if self._stored is None:
            if self._model is None:
                raise ConfigError("rubin_moe: vLLM did not say which checkpoint it loads")
            self._stored = StoredModel(*self._model, self._mapper)
        return self._stored

    def _vllm_config(self) -> QuantizationConfig:
        """vLLM's own config of this checkpoint."""
        if self._own is None:
            self._own = compat.own_config(self._raw)
            if self._mapper is not None:
                self._own.apply_vllm_mapper(self._mapper)
        self._own.packed_modules_mapping = self.packed_modules_mapping
        return self._own

    # -- names -----------------------------------------------------------------------------------

    def get_cache_scale_mapper(self) -> WeightsMapper:
        """vLLM's own renaming, and ours: a tensor of all experts of one of our layers goes to its
        parameter directly, past the narrowing and transposing of single models."""
        stacked = WeightsMapper(orig_to_new_regex={_BELOW_EXPERTS: self._direct_name})
        return stacked | QuantizationConfig.get_cache_scale_mapper()

    def _direct_name(self, found: re.Match[str]) -> str:
        parsed = names.parse(found.string)
        if parsed is None or parsed.slot is None or parsed.slot.expert is not None:
            return found[0]
        if parsed.layer not in self._ours:
            return found[0]
        return f".experts.routed_experts.{parameter_name(parsed.slot)}"


_BELOW_EXPERTS = re.compile(r"\.experts\..*$")


def _unquantized(matrix: Matrix) -> bool:
    return isinstance(matrix.kind, NotFp4) and matrix.kind.kind == "unquantized"
