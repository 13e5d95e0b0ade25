"""A transformers model whose routed experts can be exchanged for ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rubin_moe.errors import ConfigError
from rubin_moe.layers.experts import MoEExperts

_OURS = "rubin_moe"
_ATTRIBUTE = "rubin_moe_layer"


class SwitchableModel:
    """Everything but the experts comes from the reference checkpoint and is computed by
    transformers; the experts are its own (``use_own``) or ours (``use``).

    Attributes:
        model: the transformers model, in eval mode.
        tokenizer: of the same folder.

    Raises:
        ConfigError: transformers is missing, too old, or does not know the model.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: str = "cpu") -> None:
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        except ImportError as error:
            raise ConfigError(f"evaluation needs transformers 5 or later: {error}") from None
        if not (folder / "config.json").is_file():
            raise ConfigError(f"reference {folder}: no config.json there")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model.to(device).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        ALL_EXPERTS_FUNCTIONS.register(_OURS, _run_ours)

    def use_own(self) -> None:
        """The reference's own experts."""
        self.model.set_experts_implementation("eager")

    def use(self, layers: Mapping[str, MoEExperts]) -> None:
        """Ours, by the name of the ``experts`` module.

        Raises:
            ConfigError: a layer that the model does not have, or lacks one of the model's.
        """
        theirs = {n: m for n, m in self.model.named_modules() if n.endswith(".experts")}
        if theirs.keys() != layers.keys():
            odd = sorted(theirs.keys() ^ layers.keys())
            raise ConfigError(
                f"the reference has {len(theirs)} layers of experts, the checkpoint {len(layers)}; "
                f"in one of them only: {', '.join(odd[:4])}"
            )
        for name, module in theirs.items():
            setattr(module, _ATTRIBUTE, layers[name])
        self.model.set_experts_implementation(_OURS)


def _run_ours(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    layer: MoEExperts = getattr(module, _ATTRIBUTE)
    return layer(x.contiguous(), ids, weights.float())
