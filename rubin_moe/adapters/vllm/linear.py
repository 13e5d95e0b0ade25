"""Linear layers and heads that vLLM cannot multiply on this platform: decoded at load.

The layer is an unquantized one for vLLM. Of each matrix the stored tensors are held until all are
there, are decoded by `loader.dense`, and then go through the layer's own weight loader, which
fuses and shards as for any other model.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from rubin_moe.errors import CheckpointError
from rubin_moe.loader.dense import dense
from rubin_moe.loader.dense_leaves import needed_leaves
from rubin_moe.loader.dialect import Dialect

_WEIGHT = "weight"


class DecodingLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """Decodes matrices of one dialect when they are loaded.

    Args:
        dialect: None for FP8.
        leaves: stored leaves of one matrix of the layer (``weight_packed``, ``weight_scale``).
        name: module path, for messages.
    """

    def __init__(self, dialect: Dialect | None, leaves: frozenset[str], name: str) -> None:
        super().__init__()
        self._dialect, self._name = dialect, name
        self._leaves = leaves - {"bias"}
        self._needed = needed_leaves(dialect, leaves, name)
        self._held: dict[Any, dict[str, Tensor]] = {}

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """An unquantized ``weight``, and a tally of one byte for each other stored tensor, by which
        vLLM's reload sees that something has come."""
        load = extra_weight_attrs.pop("weight_loader")
        super().create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            weight_loader=self._collecting(layer, _WEIGHT, load)
            if _WEIGHT in self._leaves
            else load,
            **extra_weight_attrs,
        )
        for leaf in self._leaves - {_WEIGHT}:
            tally = torch.nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)
            tally.weight_loader = self._collecting(layer, leaf, load)  # type: ignore[attr-defined]
            layer.register_parameter(leaf, tally)

    def _collecting(
        self, layer: torch.nn.Module, leaf: str, load: Callable[..., Any]
    ) -> Callable[..., Any]:
        def weight_loader(param: Tensor, loaded_weight: Tensor, *shard: Any) -> None:
            # A fused layer's matrices come as an argument, since 0.30 also as an attribute.
            key = shard[0] if shard else getattr(loaded_weight, "shard_id", None)
            if leaf != _WEIGHT:
                param.data.copy_(torch.ones_like(param.data))
            if leaf not in self._needed:
                return
            held = self._held.setdefault(key, {})
            held[leaf] = loaded_weight
            if held.keys() != self._needed:
                return
            del self._held[key]
            decoded = dense(self._dialect, held, self._name)
            if key is not None and not shard:
                decoded.shard_id = key  # type: ignore[attr-defined]
            load(layer.weight, decoded, *shard)

        return weight_loader

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """As for an unquantized layer, after the check that every matrix was complete."""
        self._check_complete(self._held)
        for leaf in self._leaves - {_WEIGHT}:
            delattr(layer, leaf)
        super().process_weights_after_loading(layer)

    def _check_complete(self, held: Mapping[Any, Mapping[str, Tensor]]) -> None:
        for key, leaves in held.items():
            missing = sorted(self._needed - leaves.keys())
            if missing:
                part = "" if key is None else f" ({key})"
                raise CheckpointError(f"{self._name}{part}: missing {', '.join(missing)}")
